"""TOML -> pydantic tree -> dotted overrides -> every problem at once -> resolved dump.

Only the machinery is here; the tree itself is `ebbtide.recipe.Recipe`. A section is a frozen pydantic model whose
fields are described by the string under each. A choice is a table with `type`: the rest of the table is the Config
of the class that the type names.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError, WrapSerializer, WrapValidator

from ebbtide import plugins
from ebbtide.errors import ConfigError, did_you_mean, problem

__all__ = ["Component", "Section", "choice", "dump", "explain", "flatten", "load", "parse_override", "validate"]


class Section(BaseModel):
    """Base of every part of the configuration: frozen, unknown keys refused, described by attribute docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class Component(Section):
    """Base of a plugin's nested `Config`."""

    type: str
    """Which plugin: the name of its module, or a dotted path to a module of your own."""


SectionT = TypeVar("SectionT", bound=Section)


def choice(kind: str) -> Any:
    """The annotation of a field whose value is the Config of a plugin of this kind."""

    def resolve(value: Any, _handler: Any) -> Component:
        if isinstance(value, Component):
            return value
        if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
            known = ", ".join(plugins.names(kind))
            raise ConfigError(problem("", value, f"must be a table with a `type`; known types: {known}"))
        config_class: type[Component] = plugins.load(kind, value["type"]).Config
        return validate(config_class, value)

    def dump_as_itself(value: Component, _handler: Any) -> dict[str, Any]:
        return value.model_dump(mode="json")

    return Annotated[Component, WrapValidator(resolve), WrapSerializer(dump_as_itself)]


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
    problems = []
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
        raise ConfigError(list(_problems(section, error))) from None


def parse_override(text: str) -> tuple[list[str], Any]:
    """`a.b=value` as keys and a value, read as TOML where it is TOML and as a string where not.

    Example:
        >>> parse_override("optim.lr=1e-6"), parse_override("rollout.type=vllm")
        ((['optim', 'lr'], 1e-06), (['rollout', 'type'], 'vllm'))
    """
    key, equals, value = text.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(problem("override", text, "must be key.path=value", "For example optim.lr=1e-6"))
    try:
        return keys, tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def dump(section: Section) -> str:
    """The whole resolved tree as TOML; `load` of it gives an equal section. None is left out, TOML having no null."""
    return tomli_w.dumps(_without_none(section.model_dump(mode="json")))


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


def explain(section: Section, key: str) -> tuple[str, Any, str]:
    """Type, value in this section, and description of a dotted key.

    Raises:
        ConfigError: no such key; the nearest real one is named.
    """
    here: Any = section
    kind, text = type(section).__name__, type(section).__doc__ or ""
    for name in key.split("."):
        if isinstance(here, tuple | list) and name.isdigit() and int(name) < len(here):
            here, kind = here[int(name)], "table"
            continue
        known = list(type(here).model_fields) if isinstance(here, Section) else []
        if name not in known:
            raise ConfigError(problem(key, name, f"no such key; known here: {', '.join(known) or 'none'}",
                                      did_you_mean(name, known)))  # fmt: skip
        info = type(here).model_fields[name]
        annotation = info.annotation
        kind, text = getattr(annotation, "__name__", str(annotation)), info.description or ""
        here = getattr(here, name)
        text = text or (type(here).__doc__ or "" if isinstance(here, Section) else "")
    return kind, here, " ".join(text.split())


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


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _problems(section: type[BaseModel], error: ValidationError) -> Iterator[str]:
    """Pydantic's findings as house errors; those of a choice are house errors already and get its key in front."""
    for item in error.errors():
        where = ".".join(map(str, item["loc"]))
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            yield from (_under(where, text) for text in cause.problems)
        elif item["type"] == "extra_forbidden":
            owner = _section_at(section, item["loc"][:-1])
            known = [*owner.model_fields] if owner is not None else []
            yield problem(where, item["input"], "no such key", did_you_mean(str(item["loc"][-1]), known)
                          or f"Known here: {', '.join(known)}")  # fmt: skip
        elif item["type"] == "missing":
            yield f"{where}: is required and missing. Add it to the recipe."
        else:
            yield problem(where or "recipe", item["input"], item["msg"].removeprefix("Value error, "))


def _under(where: str, text: str) -> str:
    if not where:
        return text
    return f"{where}{text}" if text.startswith("=") else f"{where}.{text}"


def _section_at(section: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel] | None:
    here: Any = section
    for key in loc:
        if isinstance(key, int):
            continue
        info = here.model_fields.get(key) if isinstance(here, type) and issubclass(here, BaseModel) else None
        if info is None:
            return None
        here = next((arg for arg in (info.annotation, *_nested_args(info.annotation)) if _is_model(arg)), None)
    return here if _is_model(here) else None


def _nested_args(annotation: Any) -> Iterator[Any]:
    for arg in get_args(annotation):
        yield arg
        yield from _nested_args(arg)


def _is_model(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, BaseModel)
