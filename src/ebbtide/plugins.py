"""Name -> module -> class: a folder is the registry of its kind, and adding a file adds a plugin.

A plugin's module lies in `ebbtide/<kind>/<name>.py` and has exactly one public class with a nested `Config`. A name
with a dot is a user's own module (`my_pkg.mine`); `path/to/file.py:attribute` and `my_pkg.mine:attribute` name
functions.
"""

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ebbtide.errors import ConfigError, did_you_mean, problem

__all__ = ["KINDS", "load", "load_function", "names"]

# Modules of a kind's package that serve its plugins but are none themselves.
KINDS: dict[str, frozenset[str]] = {
    "algorithms": frozenset({"correction", "judgement", "penalty", "policy_gradient", "reduction", "surrogate"}),
    "data.sources": frozenset(),
    "engines": frozenset({"attention", "checkpoint", "lora", "mesh", "microbatch", "optim", "policy", "warmup"}),
    "observe.sinks": frozenset(),
    "rewards": frozenset({"extraction", "scoring", "worker"}),
    "rollout": frozenset({"decoding", "sampling"}),
}


def names(kind: str) -> list[str]:
    """The plugins of one kind that ship with ebbtide, sorted."""
    package = importlib.import_module(f"ebbtide.{kind}")
    found = (module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg)
    return sorted(name for name in found if name not in KINDS[kind] | {"base"} and not name.startswith("_"))


@cache
def load(kind: str, name: str) -> type[Any]:
    """The class that a `type = "name"` means.

    Raises:
        ConfigError: no such plugin, its module does not import, or it has not exactly one public class with a `Config`.
    """
    is_own = "." not in name
    if is_own and name not in names(kind):
        known = names(kind)
        rule = f"no such plugin in ebbtide.{kind}; known: {', '.join(known)}"
        raise ConfigError(problem("type", name, rule, did_you_mean(name, known)))
    module = _import(f"ebbtide.{kind}.{name}" if is_own else name)
    classes = [
        item
        for item in (getattr(module, attribute) for attribute in getattr(module, "__all__", dir(module)))
        if inspect.isclass(item) and item.__module__ == module.__name__ and hasattr(item, "Config")
    ]
    if len(classes) != 1:
        rule = f"a plugin module has exactly one public class with a nested Config, this one has {len(classes)}"
        raise ConfigError(problem("type", name, rule, "Name the others with a leading underscore"))
    return classes[0]


def load_function(reference: str) -> Callable[..., Any]:
    """A user's function from `path/to/file.py:name` or `package.module:name`.

    Raises:
        ConfigError: the reference has another form, or the file, module or attribute does not exist.
    """
    where, _, attribute = reference.rpartition(":")
    if not where or not attribute.isidentifier():
        raise ConfigError(problem("function", reference, "must be 'path/to/file.py:name' or 'package.module:name'"))
    module = _import_file(Path(where)) if where.endswith(".py") else _import(where)
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [name for name in dir(module) if not name.startswith("_") and callable(getattr(module, name))]
        rule = f"{where} has no function {attribute!r}; it has: {', '.join(public) or 'none'}"
        raise ConfigError(problem("function", reference, rule, did_you_mean(attribute, public)))
    return function  # type: ignore[no-any-return]


def _import(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not module_name.startswith(error.name):
            raise
        raise ConfigError(
            problem("type", module_name, "no such module", "Is its folder installed, or on PYTHONPATH?")
        ) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(problem("function", str(path), "no such file", "Paths are relative to the working directory"))
    resolved = path.resolve()
    name = f"_ebbtide_user_{abs(hash(resolved)):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None, resolved
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
