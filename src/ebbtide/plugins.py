"""Name -> module -> class: a folder is the registry of its kind, and adding a file adds a plugin.

A plugin's module lies in `ebbtide/<kind>/<name>.py` and has exactly one public class with a nested `Config`, whose
`type` is the module's name by default (`type: str = "<name>"`); that line tells plugins from modules that serve them.
A name with a dot is a user's own module (`my_pkg.mine`); `path/to/file.py:attribute` and `my_pkg.mine:attribute` name
functions.
"""

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ebbtide.errors import ConfigError, did_you_mean, problem

__all__ = ["KINDS", "load", "load_function", "names"]

# Each kind's package, and what one of its plugins is called.
KINDS: dict[str, str] = {
    "algorithms": "algorithm",
    "data.sources": "data source",
    "engines": "engine",
    "observe.sinks": "logger",
    "rewards": "reward",
    "rollout": "rollout backend",
}


def names(kind: str) -> list[str]:
    """The plugins of one kind that ship with ebbtide, sorted. Imports none of them."""
    package = importlib.import_module(f"ebbtide.{kind}")
    folders = [Path(folder) for folder in package.__path__]
    found = (module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg)
    return sorted(name for name in found if any(_declares_type(folder / f"{name}.py", name) for folder in folders))


@cache
def load(kind: str, name: str) -> type[Any]:
    """The class that a `type = "name"` means.

    Raises:
        ConfigError: no such plugin, its module does not import, or it has not exactly one public class with a `Config`.
    """
    is_own = "." not in name
    if is_own and name not in names(kind):
        known = names(kind)
        rule = f"no such {KINDS[kind]}; known: {', '.join(known)}"
        remedy = did_you_mean(name, known) or "A module of your own is named with its package: my_package.my_module"
        raise ConfigError(problem("type", name, rule, remedy))
    module = importlib.import_module(f"ebbtide.{kind}.{name}") if is_own else _import(name)
    classes = [
        item
        for item in (getattr(module, attribute) for attribute in getattr(module, "__all__", dir(module)))
        if inspect.isclass(item) and item.__module__ == module.__name__ and hasattr(item, "Config")
    ]
    if len(classes) != 1:
        rule = f"a module of a plugin has exactly one public class with a nested Config, this one has {len(classes)}"
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


def _declares_type(path: Path, name: str) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:  # an extension module
        return False
    return re.search(rf"^ +type: .*= \"{re.escape(name)}\"$", text, re.MULTILINE) is not None


def _import(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        is_itself = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
        rule = "no such module" if is_itself else f"cannot be imported: {error}"
        remedy = "Is its folder installed, or on PYTHONPATH?" if is_itself else f"Is {error.name} installed?"
        raise ConfigError(problem("type", module_name, rule, remedy)) from error
    except (ImportError, SyntaxError) as error:
        raise ConfigError(problem("type", module_name, f"cannot be imported: {error}")) from error
    except (TypeError, ValueError) as error:
        if module_name.startswith(".") or ".." in module_name or module_name.endswith("."):
            raise ConfigError(problem("type", module_name, "is not the name of a module")) from error
        raise


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(problem("function", str(path), "no such file", "Paths are relative to the working directory"))
    resolved = path.resolve()
    digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:16]  # the same in every process
    name = f"_ebbtide_user_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None, resolved
    assert spec.loader is not None, resolved
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        del sys.modules[name]
        raise ConfigError(problem("function", str(path), f"cannot be imported: {error}")) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module
