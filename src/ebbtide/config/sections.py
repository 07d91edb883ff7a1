"""What the configuration is made of: sections, choices of a plugin, and what their fields say of themselves."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from ebbtide import plugins
from ebbtide.errors import ConfigError, problem

__all__ = [
    "Choice",
    "Component",
    "Section",
    "choice_kind",
    "config_class",
    "description",
    "nested_section",
    "section_of",
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
        return config_class(self.kind, value).model_validate(value)  # its problems get this field's key in front


def config_class(kind: str, value: Any) -> type[Component]:
    """The Config of the plugin that a table chooses.

    Raises:
        ConfigError: it has no `type`, or one that is unknown.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        known = ", ".join(plugins.names(kind))
        raise ConfigError(problem("", value, f"must be a table with a `type`; known types: {known}"))
    return plugins.load(kind, value["type"]).Config  # type: ignore[no-any-return]


def section_of(info: FieldInfo, value: Any) -> type[Section] | None:
    """The class of the table that a field holds, where the value or the default tells."""
    if isinstance(value, Section):
        return type(value)
    kind = choice_kind(info)
    if kind is None:
        return nested_section(info.annotation)
    chosen = value if value is not None else info.default
    if not isinstance(chosen, Mapping) or not isinstance(chosen.get("type"), str):
        return None
    try:
        return config_class(kind, chosen)
    except ConfigError:
        return None


def choice_kind(info: FieldInfo) -> str | None:
    """The kind of plugin that a field chooses, also where it is a list of them."""
    parts = (*info.metadata, *_parts(info.annotation))
    return next((part.kind for part in parts if isinstance(part, Choice)), None)


def nested_section(annotation: Any) -> type[Section] | None:
    """The section that a field holds, also where it is a list of them or may be None."""
    parts = (annotation, *_parts(annotation))
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)


def description(owner: type[Section], name: str) -> str | None:
    """The string under a field, or under the field of a base class that it redefines."""
    bases = (base for base in owner.__mro__ if issubclass(base, Section))
    found = (info.description for base in bases if (info := base.model_fields.get(name)))
    return next((text for text in found if text), None)


def _parts(annotation: Any) -> Iterator[Any]:
    for part in get_args(annotation):
        yield part
        yield from _parts(part)


def _may_be_none(section: type[BaseModel], key: str) -> bool:
    info = section.model_fields.get(key)
    return info is not None and NoneType in get_args(info.annotation)
