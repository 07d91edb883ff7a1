"""What a key of the configuration is, for a person who asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ebbtide import plugins
from ebbtide.config.mistakes import nearest_key, one_line
from ebbtide.config.sections import Choice, Section, choice_kind, description, nested_section, section_of
from ebbtide.errors import ConfigError, problem

__all__ = ["Explanation", "explain"]


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
            kind = None if info is None else choice_kind(info)
            owner = owner if info is None else section_of(info, value)
            known = list(owner.model_fields) if owner else plugins.names(kind) if kind else []
            if owner is None or name not in owner.model_fields:
                where = ".".join((*walked, name))
                rule = f"there is no {where}; known here: {', '.join(known) or 'nothing'}"
                raise ConfigError(problem("key", key, rule, nearest_key(walked, name, known)))
            info, value = owner.model_fields[name], getattr(value, name, None)
        walked.append(name)
    assert owner is not None, key
    shown = value.model_dump(mode="json") if isinstance(value, Section) else value
    if info is None:
        return Explanation(key, "table", False, None, shown, one_line(owner.__doc__), tuple(owner.model_fields))
    kind, nested = choice_kind(info), nested_section(info.annotation)
    default = None if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
    return Explanation(
        key=key,
        type=_type_text(info.annotation, info.metadata),
        is_required=info.is_required(),
        default=default.model_dump(mode="json") if isinstance(default, Section) else default,
        value=shown,
        text=one_line(description(owner, name) or (nested.__doc__ if nested else "")),
        known=tuple(plugins.names(kind)) if kind else tuple(nested.model_fields) if nested else (),
    )


def _select(info: FieldInfo, value: Any, name: str) -> tuple[type[Section], Any] | None:
    """What an item's number, or a plugin's name, means after this field."""
    if isinstance(value, tuple | list) and name.isdigit() and int(name) < len(value):
        item = value[int(name)]
        return (type(item), item) if isinstance(item, Section) else None
    kind = choice_kind(info)
    if kind is None or name not in plugins.names(kind):
        return None
    return plugins.load(kind, name).Config, value if getattr(value, "type", None) == name else None


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
