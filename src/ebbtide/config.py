"""TOML -> pydantic tree -> dotted overrides -> every problem at once -> resolved dump.

Only the machinery is here; the tree itself is `ebbtide.recipe.Recipe`. A section is a frozen pydantic model whose
fields are described by the string under each. A choice is a table with `type`: the rest of the table is the Config
of the class that the type names. A value must have its field's type: no text is read as a number, no number as a
switch. TOML has no null, so that "none" stands for None where a setting may be None.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from ebbtide import plugins
from ebbtide.errors import ConfigError, problem

__all__ = [
    "Choice",
    "Component",
    "Explanation",
    "Section",
    "differences",
    "dump",
    "explain",
    "flatten",
    "load",
    "parse_override",
    "resolve",
    "validate",
]


def _strict_scalars(schema: Any) -> Any:
    """The schema with numbers, switches and texts taken as they are; lists still become tuples, and ints floats.

    Stands above its callers, because pydantic calls it as it makes their classes.
    """
    if isinstance(schema, dict):
        strict = {"strict": True} if schema.get("type") in ("int", "float", "bool", "str") else {}
        return {key: _strict_scalars(item) for key, item in schema.items()} | strict
    if isinstance(schema, list):
        return [_strict_scalars(item) for item in schema]
    return schema


class Section(BaseModel):
    """Base of every part of the configuration: frozen, unknown keys refused, described by attribute docstrings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _strict_scalars(handler(source))
        return schema

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, tree: object) -> object:
        if not isinstance(tree, Mapping):
            return tree
        return {key: None if value == "none" and _may_be_none(cls, key) else value for key, value in tree.items()}


class Component(Section):
    """Base of a plugin's nested `Config`."""

    type: str
    """Which plugin: the name of its module, or a dotted path to a module of your own."""


SectionT = TypeVar("SectionT", bound=Section)


@dataclass(frozen=True, slots=True)
class Choice:
    """Annotates a field whose value is the Config of a plugin: `Annotated[Component, Choice("rewards")]`.

    Attributes:
        kind: which plugins; one of `ebbtide.plugins.KINDS`.
    """

    kind: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A validator that leaves the table to the Config that its `type` names."""
        del source, handler
        as_json = core_schema.plain_serializer_function_ser_schema(lambda value: value.model_dump(mode="json"))
        return core_schema.no_info_plain_validator_function(self._resolve, serialization=as_json)

    def _resolve(self, value: Any) -> Component:
        if isinstance(value, Component):
            return value
        return _config_class(self.kind, value).model_validate(value)  # its problems get this field's key in front


def load(section: type[SectionT], path: Path, overrides: Sequence[str] = ()) -> SectionT:
    """Read a TOML file, apply `a.b=value` overrides in order, and validate.

    Raises:
        ConfigError: with every problem found, the overrides' included.
    """
    if not path.is_file():
        near = get_close_matches(path.name, [item.name for item in path.parent.glob("*.toml")], n=1)
        remedy = f"Did you mean {str(path.parent / near[0])!r}?" if near else "Recipes lie in recipes/"
        raise ConfigError(problem("recipe", str(path), "no such file", remedy))
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(problem("recipe", str(path), f"is not TOML: {error}")) from error
    return resolve(section, tree, overrides)


def resolve(section: type[SectionT], tree: dict[str, Any], overrides: Sequence[str]) -> SectionT:
    """Apply `a.b=value` overrides to a tree, in place and in order, and validate.

    Raises:
        ConfigError: with every problem found, the overrides' included.
    """
    problems: list[str] = []
    for text in overrides:
        try:
            keys, value = parse_override(text)
            _set(tree, keys, value)
        except ConfigError as error:
            problems.extend(error.problems)
    try:
        checked = validate(section, tree)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return checked


def validate(section: type[SectionT], tree: Mapping[str, Any]) -> SectionT:
    """The tree as a section.

    Raises:
        ConfigError: with every problem found.
    """
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(list(_problems(section, tree, error))) from None


def parse_override(text: str) -> tuple[list[str], Any]:
    """`a.b=value` as keys and a value, read as TOML where it is TOML and as a string where not.

    Example:
        >>> parse_override("optim.lr=1e-6"), parse_override("rollout.type=vllm")
        ((['optim', 'lr'], 1e-06), (['rollout', 'type'], 'vllm'))
    """
    key, equals, value = text.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not equals or not all(keys):
        raise ConfigError(problem("override", text, "must be key.path=value", "For example optim.lr=1e-6"))
    try:
        tree = tomllib.loads(f"value = {value.strip()}")
    except tomllib.TOMLDecodeError:
        return keys, value.strip()
    is_plain = len(tree) == 1 and isinstance(tree["value"], str | int | float | list | dict)  # no date is a setting
    return keys, tree["value"] if is_plain else value.strip()


def dump(section: Section) -> str:
    """The whole resolved tree as TOML; `load` of it gives an equal section.

    None is left out where it is the default, and written "none" where it is not.
    """
    return tomli_w.dumps(_tree(section))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nested mapping under its dotted key; an item of a list of tables gets its number as a key.

    Example:
        >>> list(flatten({"a": {"b": 1}, "c": [{"d": 2}]}))
        [('a.b', 1), ('c.0.d', 2)]
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, Sequence) and value and all(isinstance(item, Mapping) for item in value):
            yield from flatten({str(i): item for i, item in enumerate(value)}, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(old: Section, new: Section) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose resolved values differ -> both values; None stands for a key that one of them has not."""
    old_leaves, new_leaves = (dict(flatten(item.model_dump(mode="json"))) for item in (old, new))
    keys = dict.fromkeys((*old_leaves, *new_leaves))
    pairs = {key: (old_leaves.get(key), new_leaves.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a key of the configuration is.

    Attributes:
        key: the dotted key.
        type: what values it takes, with their bounds, as a phrase.
        is_required: whether a recipe must give it.
        default: what it is where a recipe does not give it.
        value: what it is in the section asked about; None where a class was asked about.
        text: what it means.
        known: the keys below it, or the types that it can be.
    """

    key: str
    type: str
    is_required: bool
    default: Any
    value: Any
    text: str
    known: tuple[str, ...]


def explain(section: Section | type[Section], key: str) -> Explanation:
    """Type, default and meaning of a dotted key; its value too where a section and not a class is given.

    After a choice stands an item's number (`rewards.0.weight`) where a section is given, or the name of any type of
    its kind (`rewards.exact.weight`).

    Raises:
        ConfigError: no such key; the nearest real one is named.
    """
    owner: type[Section] | None = section if isinstance(section, type) else type(section)
    value: Any = None if isinstance(section, type) else section
    info: FieldInfo | None = None
    walked: list[str] = []
    for name in key.split("."):
        if info is not None and (selected := _select(info, value, name)):
            (owner, value), info = selected, None
        else:
            kind = None if info is None else _choice_kind(info)
            owner = owner if info is None else _section_of(info, value)
            known = list(owner.model_fields) if owner else plugins.names(kind) if kind else []
            if owner is None or name not in owner.model_fields:
                where = ".".join((*walked, name))
                rule = f"there is no {where}; known here: {', '.join(known) or 'nothing'}"
                raise ConfigError(problem("key", key, rule, _did_you_mean(walked, name, known)))
            info, value = owner.model_fields[name], getattr(value, name, None)
        walked.append(name)
    assert owner is not None, key
    shown = value.model_dump(mode="json") if isinstance(value, Section) else value
    if info is None:
        return Explanation(key, "table", False, None, shown, _one_line(owner.__doc__), tuple(owner.model_fields))
    kind, nested = _choice_kind(info), _nested_section(info.annotation)
    default = None if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
    return Explanation(
        key=key,
        type=_type_text(info.annotation, info.metadata),
        is_required=info.is_required(),
        default=default.model_dump(mode="json") if isinstance(default, Section) else default,
        value=shown,
        text=_one_line(_description(owner, name) or (nested.__doc__ if nested else "")),
        known=tuple(plugins.names(kind)) if kind else tuple(nested.model_fields) if nested else (),
    )


def _description(owner: type[Section], name: str) -> str | None:
    """The string under a field, or under the field of a base class that it redefines."""
    bases = (base for base in owner.__mro__ if issubclass(base, Section))
    found = (info.description for base in bases if (info := base.model_fields.get(name)))
    return next((text for text in found if text), None)


def _select(info: FieldInfo, value: Any, name: str) -> tuple[type[Section], Any] | None:
    """What an item's number, or a plugin's name, means after this field."""
    if isinstance(value, tuple | list) and name.isdigit() and int(name) < len(value):
        item = value[int(name)]
        return (type(item), item) if isinstance(item, Section) else None
    kind = _choice_kind(info)
    if kind is None or name not in plugins.names(kind):
        return None
    return plugins.load(kind, name).Config, value if getattr(value, "type", None) == name else None


def _set(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    here: Any = tree
    for depth, key in enumerate(keys):
        is_last = depth == len(keys) - 1
        if isinstance(here, list):
            if not key.isdigit() or int(key) >= len(here):
                where = ".".join(keys[:depth])
                raise ConfigError(problem(".".join(keys), value, f"{where} is a list of {len(here)}; give an index"))
            if is_last:
                here[int(key)] = value
            else:
                here = here[int(key)]
        elif not isinstance(here, dict):
            raise ConfigError(problem(".".join(keys), value, f"{'.'.join(keys[:depth])} is a value, not a table"))
        elif is_last:
            here[key] = value
        else:
            here = here.setdefault(key, {})


def _tree(section: Section) -> dict[str, Any]:
    dumped, fields = section.model_dump(mode="json"), type(section).model_fields
    items = ((name, getattr(section, name)) for name in fields)
    given = ((name, value) for name, value in items if value is not None or fields[name].default is not None)
    return {name: "none" if value is None else _plain(value, dumped[name]) for name, value in given}


def _plain(value: Any, dumped: Any) -> Any:
    if isinstance(value, Section):
        return _tree(value)
    if isinstance(value, tuple | list):
        return [_plain(*pair) for pair in zip(value, dumped, strict=True)]
    return dumped


def _problems(section: type[Section], tree: Any, error: ValidationError) -> Iterator[str]:
    """Pydantic's findings as house errors; what a validator of ours raised is one already and gets its key in front."""
    alternatives: dict[tuple[str, str], list[str]] = {}  # of a value that may be of several types, each finds fault
    for item in error.errors():
        if item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]:
            continue  # the items are there, and each that is refused is a finding of its own
        where, owner = _locate(section, tree, item["loc"])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            yield from (_under(where, text) for text in cause.problems)
        elif item["type"] == "extra_forbidden":
            known = list(owner.model_fields) if owner else []
            above, _, name = where.rpartition(".")
            remedy = _did_you_mean([above] if above else [], name, known) or f"Known here: {', '.join(known)}"
            yield problem(where, item["input"], "no such key", remedy)
        elif item["type"] == "missing":
            text = _description(owner, str(item["loc"][-1])) if owner else None
            yield f"{where}: is required and missing. {_one_line(text) or 'Add it to the recipe.'}"
        else:
            alternatives.setdefault((where, repr(item["input"])), []).append(_rule(item))
    for (where, value), rules in alternatives.items():
        yield f"{where or 'recipe'}={value}: {' or '.join(dict.fromkeys(rules))}."


_RULES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a table",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "model_type": "must be a table",
    "string_type": "must be text",
    "tuple_type": "must be a list",
}


def _rule(item: ErrorDetails) -> str:
    """Pydantic's message as a rule in the words of TOML, with a remedy where quotes are what is wrong."""
    rule = _RULES.get(item["type"], item["msg"].removeprefix("Value error, ").replace(" after validation", ""))
    for opening in ("Input", "String", "Tuple", "List", "Dictionary"):
        rule = rule.replace(f"{opening} should", "must")
    if item["type"] in ("int_type", "float_type", "bool_type") and isinstance(item["input"], str):
        return f"{rule}, without quotes"
    if item["type"] == "string_type" and isinstance(item["input"], int | float):
        return f"{rule}, in quotes"
    return rule


def _under(where: str, text: str) -> str:
    if not where:
        return text
    return f"{where}{text}" if text.startswith("=") else f"{where}.{text}"


def _locate(section: type[Section], tree: Any, loc: Sequence[str | int]) -> tuple[str, type[Section] | None]:
    """The dotted key of a finding, and the section that the last part of it belongs to.

    Pydantic's path has the names of a union's members in between, which are no keys.
    """
    owner: type[Section] | None = section
    info: FieldInfo | None = None
    value, path = tree, []
    for key in loc:
        if info is not None and isinstance(key, str):
            owner, info = _section_of(info, value), None
        is_there = key in value if isinstance(value, Mapping) else isinstance(key, int)
        if isinstance(key, str) and owner is not None:
            info = owner.model_fields.get(key)
        elif not is_there:
            continue
        path.append(str(key))
        value = _item(value, key)
    return ".".join(path), owner


def _item(value: Any, key: str | int) -> Any:
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, Section):
        return getattr(value, str(key), None)
    return value[key] if isinstance(value, list | tuple) and isinstance(key, int) and key < len(value) else None


def _section_of(info: FieldInfo, value: Any) -> type[Section] | None:
    """The class of the table that a field holds, where the value or the default tells."""
    if isinstance(value, Section):
        return type(value)
    kind = _choice_kind(info)
    if kind is None:
        return _nested_section(info.annotation)
    chosen = value if value is not None else info.default
    if not isinstance(chosen, Mapping) or not isinstance(chosen.get("type"), str):
        return None
    try:
        return _config_class(kind, chosen)
    except ConfigError:
        return None


def _config_class(kind: str, value: Any) -> type[Component]:
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        known = ", ".join(plugins.names(kind))
        raise ConfigError(problem("", value, f"must be a table with a `type`; known types: {known}"))
    return plugins.load(kind, value["type"]).Config  # type: ignore[no-any-return]


def _choice_kind(info: FieldInfo) -> str | None:
    """The kind of plugin that a field chooses, also where it is a list of them."""
    parts = (*info.metadata, *_parts(info.annotation))
    return next((part.kind for part in parts if isinstance(part, Choice)), None)


def _nested_section(annotation: Any) -> type[Section] | None:
    parts = (annotation, *_parts(annotation))
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)


def _parts(annotation: Any) -> Iterator[Any]:
    for part in get_args(annotation):
        yield part
        yield from _parts(part)


def _may_be_none(section: type[BaseModel], key: str) -> bool:
    info = section.model_fields.get(key)
    return info is not None and NoneType in get_args(info.annotation)


_TYPE_NAMES: dict[Any, str] = {int: "whole number", float: "number", bool: "true or false", str: "text"}
_BOUND_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "at least", "max_length": "at most"}


def _type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """An annotation as a phrase, with the bounds that pydantic keeps beside it."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        nested = (part.metadata if isinstance(part, FieldInfo) else [part] for part in args[1:])
        return _type_text(args[0], [mark for marks in nested for mark in marks])
    if any(isinstance(mark, Choice) for mark in metadata):
        return "table with a type"
    if origin is Literal:
        phrase = "one of " + ", ".join(map(repr, args))
    elif origin in (tuple, list):
        is_open = origin is list or Ellipsis in args
        items = args[:1] if is_open else args
        phrase = "list of " + " and ".join(_type_text(item) for item in items)
    elif origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        phrase = "table"
    elif args:
        phrase = " or ".join(_type_text(item) for item in args if item is not NoneType)
    else:
        phrase = _TYPE_NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))
    bounds = [
        f"{sign} {limit}"
        for mark in metadata
        for name, sign in _BOUND_SIGNS.items()
        if (limit := getattr(mark, name, None)) is not None
    ]
    phrase = ", ".join((phrase, *bounds))
    return f"{phrase}, or none" if NoneType in args else phrase


def _did_you_mean(above: Sequence[str], name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"Did you mean {'.'.join((*above, near[0]))!r}?" if near else ""


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
