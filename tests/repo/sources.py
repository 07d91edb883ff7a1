"""The repository as the tests in this folder see it: files, syntax trees, names."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["ROOT", "SOURCE", "Import", "imports", "modules", "public_names", "text_files", "tree"]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "ebbtide"


@dataclass(frozen=True)
class Import:
    """One import of something of ebbtide, wherever it stands in a module.

    Attributes:
        importer: relative path of the file.
        line: where.
        module: the dotted module that is imported, as far as it is known to be a module.
        name: what is taken from it, or None for the module itself.
    """

    importer: str
    line: int
    module: str
    name: str | None


@cache
def tree(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def modules() -> list[Path]:
    """Every Python file of the package, sorted."""
    return sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)


def text_files() -> list[Path]:
    """Every text file that is, or could be, committed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in listing.split("\0") if name)
    return sorted(path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192])


def imports(path: Path) -> Iterator[Import]:
    """What a file imports of ebbtide, inside functions and under TYPE_CHECKING too."""
    importer = str(path.relative_to(ROOT))
    package = path.relative_to(SOURCE.parent).with_suffix("").parts[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "ebbtide":
                    yield Import(importer, node.lineno, alias.name, None)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            if source.split(".")[0] != "ebbtide":
                continue
            for alias in node.names:
                if _is_module(f"{source}.{alias.name}"):
                    yield Import(importer, node.lineno, f"{source}.{alias.name}", None)
                else:
                    yield Import(importer, node.lineno, source, alias.name)


def public_names(path: Path) -> tuple[set[str], set[str]]:
    """Names that a module defines at its top level without a leading underscore: classes and functions, and values."""
    defined: set[str] = set()
    values: set[str] = set()
    for node in _top_level(tree(path).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values.update(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
    return ({name for name in defined if name[0] != "_"}, {name for name in values if name[0] != "_"})


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level([*node.body, *node.orelse])


def _is_module(dotted: str) -> bool:
    path = SOURCE.parent.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
