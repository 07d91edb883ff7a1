"""`__all__` says what a module offers: sorted, complete, and all that other modules take from it."""

import ast
from pathlib import Path

from tests.repo.sources import ROOT, SOURCE, imports, modules, public_names, tree


def test_every_module_has_a_docstring() -> None:
    missing = [str(path.relative_to(ROOT)) for path in modules() if not ast.get_docstring(tree(path))]
    assert not missing, missing


def test_all_is_there_sorted_and_exact() -> None:
    problems = []
    for path in modules():
        where = path.relative_to(ROOT)
        listed, (defined, values) = _all(path), public_names(path)
        if listed is None:
            if defined or values:
                problems.append(f"{where}: no __all__")
            continue
        if listed != sorted(set(listed), key=_sort_key):
            problems.append(f"{where}: __all__ is not sorted, or repeats a name")
        if missing := defined - set(listed):
            problems.append(f"{where}: __all__ lacks {sorted(missing)}; a private helper starts with _")
        if unknown := set(listed) - defined - values - _reexported(path):
            problems.append(f"{where}: __all__ has {sorted(unknown)}, which the module does not define")
    assert not problems, "\n".join(problems)


def test_modules_take_from_each_other_only_what_is_offered() -> None:
    problems = []
    for path in modules():
        for item in imports(path):
            source = _file(item.module)
            if item.name is None or source is None:
                continue
            if item.name not in (_all(source) or []):
                problems.append(f"{item.importer}:{item.line}: {item.module} does not offer {item.name}")
    assert not problems, "\n".join(problems)


def _reexported(path: Path) -> set[str]:
    """A package may offer what its modules define."""
    if path.name != "__init__.py":
        return set()
    return {"__version__"} | {item.name or item.module.rpartition(".")[2] for item in imports(path)}


def _all(path: Path) -> list[str] | None:
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def _file(module: str) -> Path | None:
    path = SOURCE.parent.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _sort_key(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions, as ruff sorts them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)
