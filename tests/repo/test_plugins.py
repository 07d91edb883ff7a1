"""Every plugin is complete by being there: one class with its Config, a source where it is an algorithm, a test."""

import ast
import importlib
from pathlib import Path

import pytest

from ebbtide import plugins
from ebbtide.config import Component
from tests.repo.sources import ROOT, SOURCE, tree

PLUGINS = [(kind, name) for kind in plugins.KINDS for name in plugins.names(kind)]


@pytest.mark.parametrize(("kind", "name"), PLUGINS)
def test_a_plugin_is_complete(kind: str, name: str) -> None:
    cls = plugins.load(kind, name)
    assert issubclass(cls.Config, Component)
    assert cls.Config.model_fields["type"].default == name, "the Config's type is the module's name"
    assert (cls.__doc__ or "").strip(), f"{cls.__name__} has no docstring"
    if kind == "algorithms":
        module = importlib.import_module(cls.__module__)
        assert "Source:" in (cls.__doc__ or "") + (module.__doc__ or ""), "an algorithm names where it comes from"
    folder = Path("tests", *kind.split("."))
    assert _is_tested(ROOT / folder, kind, name), f"{folder / f'test_{name}.py'} is missing"


def test_a_plugin_is_called_as_its_module() -> None:
    """A Config whose `type` is another name than its module's would be found by nobody."""
    lost = [
        f"{kind}.{path.stem} declares type {declared!r}"
        for kind in plugins.KINDS
        for path in sorted(SOURCE.joinpath(*kind.split(".")).glob("*.py"))
        for declared in _declared_types(path)
        if declared != path.stem
    ]
    assert not lost, lost


def test_every_config_field_is_described() -> None:
    bare = [
        f"{kind}.{name}: {field}"
        for kind, name in PLUGINS
        for field, info in plugins.load(kind, name).Config.model_fields.items()
        if field != "type" and not info.description
    ]
    assert not bare, "\n".join(bare)


def _is_tested(folder: Path, kind: str, name: str) -> bool:
    """By a file of its own, or together with its siblings by one that imports it."""
    if (folder / f"test_{name}.py").is_file():
        return True
    module = f"ebbtide.{kind}.{name}"
    return any(module in path.read_text(encoding="utf-8") for path in folder.rglob("test_*.py"))


def _declared_types(path: Path) -> list[str]:
    return [
        str(item.value.value)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and node.name == "Config"
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id == "type"
        if isinstance(item.value, ast.Constant)
    ]
