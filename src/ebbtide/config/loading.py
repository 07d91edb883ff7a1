"""TOML -> dotted overrides -> sections -> a resolved dump that loads as the same."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from ebbtide.config.mistakes import mistakes
from ebbtide.config.sections import Section
from ebbtide.errors import ConfigError, problem

__all__ = ["differences", "dump", "flatten", "load", "parse_override", "resolve", "validate"]

SectionT = TypeVar("SectionT", bound=Section)


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
        raise ConfigError(list(mistakes(section, tree, error))) from None


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
