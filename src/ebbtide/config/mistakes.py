"""Pydantic's findings as house errors: the whole dotted key, the rule in TOML's words, and the nearest real key."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ebbtide.config.sections import Section, description, section_of
from ebbtide.errors import ConfigError, problem

__all__ = ["mistakes", "nearest_key", "one_line"]


def mistakes(section: type[Section], tree: Any, error: ValidationError) -> Iterator[str]:
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
            remedy = nearest_key([above] if above else [], name, known) or f"Known here: {', '.join(known)}"
            yield problem(where, item["input"], "no such key", remedy)
        elif item["type"] == "missing":
            text = description(owner, str(item["loc"][-1])) if owner else None
            yield f"{where}: is required and missing. {one_line(text) or 'Add it to the recipe.'}"
        else:
            alternatives.setdefault((where, repr(item["input"])), []).append(_rule(item))
    for (where, value), rules in alternatives.items():
        yield f"{where or 'recipe'}={value}: {' or '.join(dict.fromkeys(rules))}."


def nearest_key(above: Sequence[str], name: str, known: Sequence[str]) -> str:
    """The part of a remedy that names the nearest key with its whole path; empty if none is near."""
    near = get_close_matches(name, known, n=1)
    return f"Did you mean {'.'.join((*above, near[0]))!r}?" if near else ""


def one_line(text: str | None) -> str:
    """A docstring without its line breaks."""
    return " ".join((text or "").split())


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
            owner, info = section_of(info, value), None
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
