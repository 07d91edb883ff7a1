"""The longest files and functions of the package: where to look again. Lists; judges nothing."""

import argparse
import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--top", type=int, default=15, help="rows of each table")
    parser.add_argument("folders", nargs="*", type=Path, default=[ROOT / "src"], help="what to look at")
    options = parser.parse_args()
    files: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    for path in sorted(path for folder in options.folders for path in folder.resolve().rglob("*.py")):
        where = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        text = path.read_text(encoding="utf-8")
        files.append((len(text.splitlines()), where))
        functions.extend((lines, f"{where}:{line} {name}") for lines, line, name in _functions(ast.parse(text)))
    _table("files", files, options.top, "about 200 lines, look again at 400")
    _table("functions", functions, options.top, "about 25 lines, look again at 60")


def _functions(tree: ast.AST, prefix: str = "") -> list[tuple[int, int, str]]:
    """(lines without the docstring, first line, dotted name) of every function, methods and inner ones too."""
    found = []
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}."
            if not isinstance(node, ast.ClassDef):
                found.append((_lines(node), node.lineno, name.rstrip(".")))
        found.extend(_functions(node, name))
    return found


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def _table(title: str, rows: list[tuple[int, str]], top: int, guide: str) -> None:
    if not rows:
        return
    lengths = sorted(lines for lines, _ in rows)
    median, p90 = statistics.median(lengths), lengths[int(0.9 * (len(lengths) - 1))]
    print(f"{len(rows)} {title}: median {median:g}, 90th percentile {p90}, longest {lengths[-1]}; guide: {guide}")
    for lines, where in sorted(rows, reverse=True)[:top]:
        print(f"{lines:5}  {where}")
    print()


if __name__ == "__main__":
    main()
