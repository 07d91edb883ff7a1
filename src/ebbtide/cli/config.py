"""`ebbtide config`: what a recipe means."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.config import Explanation

__all__ = ["Config"]


class Config:
    """Shows, checks, explains and compares recipes."""

    name = "config"
    help = "show, check, explain or compare recipes"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """See `Command.add_arguments`."""
        actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
        show = actions.add_parser("show", help="the whole resolved recipe, defaults included")
        _add_recipe(show)
        show.set_defaults(action=_show)
        check = actions.add_parser("check", help="every problem of a recipe, one a line")
        _add_recipe(check)
        check.set_defaults(action=_check)
        explain = actions.add_parser("explain", help="type, default and meaning of a key")
        explain.add_argument(
            "key",
            nargs="?",
            help="dotted key such as optim.lr or rewards.exact.weight; all keys at the top if left away",
        )
        explain.add_argument("recipe", nargs="?", type=Path, help="show the key's value in this recipe as well")
        explain.set_defaults(action=_explain)
        diff = actions.add_parser("diff", help="keys whose resolved values differ; exit code 1 where any does")
        diff.add_argument("old", type=Path, help="a recipe")
        diff.add_argument("new", type=Path, help="another one")
        diff.set_defaults(action=_diff)
        for action in (show, check, explain, diff):
            action.add_argument("--json", action="store_true", help="one JSON object on standard output")

    def run(self, arguments: Namespace) -> int:
        """See `Command.run`."""
        code: int = arguments.action(arguments)
        return code


def _add_recipe(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a TOML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the file's")


def _show(arguments: Namespace) -> int:
    from ebbtide import config
    from ebbtide.recipe import Recipe

    recipe = config.load(Recipe, arguments.recipe, arguments.overrides)
    print(json.dumps(recipe.model_dump(mode="json")) if arguments.json else config.dump(recipe).rstrip())
    return 0


def _check(arguments: Namespace) -> int:
    from ebbtide import config
    from ebbtide.errors import ConfigError
    from ebbtide.recipe import Recipe

    problems: tuple[str, ...] = ()
    try:
        config.load(Recipe, arguments.recipe, arguments.overrides)
    except ConfigError as error:
        problems = error.problems
    if arguments.json:
        print(json.dumps({"recipe": str(arguments.recipe), "ok": not problems, "problems": problems}))
    elif problems:
        print("\n".join(problems), file=sys.stderr)
    else:
        print(f"{arguments.recipe} can be run")
    return 2 if problems else 0


def _explain(arguments: Namespace) -> int:
    from ebbtide import config
    from ebbtide.recipe import Recipe

    section = config.load(Recipe, arguments.recipe) if arguments.recipe else Recipe
    keys = [arguments.key] if arguments.key else list(Recipe.model_fields)
    found = [config.explain(section, key) for key in keys]
    if arguments.json:
        rows = [_as_json(item, has_value=arguments.recipe is not None) for item in found]
        print(json.dumps(rows[0] if arguments.key else rows))
        return 0
    if arguments.key:
        _print_explanation(found[0], has_value=arguments.recipe is not None)
    else:
        width = max(map(len, keys))
        for item in found:
            print(f"{item.key:{width}}  {item.text}")
    return 0


def _as_json(item: Explanation, *, has_value: bool) -> dict[str, Any]:
    value = {"value": item.value} if has_value else {}
    return {
        "key": item.key,
        "type": item.type,
        "required": item.is_required,
        "default": item.default,
        **value,
        "text": item.text,
        "known": item.known,
    }


def _print_explanation(item: Explanation, *, has_value: bool) -> None:
    print(f"{item.key}: {item.text}" if item.text else item.key)
    print(f"  type     {item.type}")
    if item.type != "table":
        print(f"  default  {'none: it is required' if item.is_required else _toml(item.default)}")
        if has_value:
            print(f"  here     {_toml(item.value)}")
    if item.known:
        print(f"  {'types' if 'with a type' in item.type else 'keys ':8} {', '.join(item.known)}")


def _diff(arguments: Namespace) -> int:
    from ebbtide import config
    from ebbtide.recipe import Recipe

    old, new = (config.load(Recipe, path) for path in (arguments.old, arguments.new))
    found = config.differences(old, new)
    if arguments.json:
        print(json.dumps({key: {"old": pair[0], "new": pair[1]} for key, pair in found.items()}))
    else:
        for key, (before, after) in found.items():
            print(f"{key}: {_toml(before)} -> {_toml(after)}")
    return 1 if found else 0


def _toml(value: Any) -> str:
    """A value as a recipe would write it."""
    import tomli_w

    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return json.dumps(value)
    text = tomli_w.dumps({"x": list(value) if isinstance(value, tuple) else value}).strip()
    return text.removeprefix("x = ") if text.startswith("x = ") else json.dumps(value)
