"""What the source never does, wherever it stands."""

import ast
import re
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import pytest

from tests.repo.sources import ROOT, SOURCE, modules, text_files, tree

# Folders that exist on one machine only; /proc, /dev and /sys are interfaces.
ABSOLUTE_PATH = re.compile(r"(?<![\w./}~-])/(?:home|root|work|Users|mnt|opt|usr|var|tmp)/[\w.-]+")
LICENCES = {"LICENSE"}


def test_environment_variables_are_read_in_one_place() -> None:
    _none_in_source(_reads_environment, "use ebbtide.env", exempt={SOURCE / "env.py"})


def test_only_the_command_line_prints() -> None:
    _none_in_source(_calls("print"), "log it, or return it", exempt=set((SOURCE / "cli").rglob("*.py")))


def test_garbage_is_never_collected_by_hand() -> None:
    _none_in_source(_calls("gc.collect"), "drop the reference instead")


def test_pickles_are_never_loaded() -> None:
    """Of a process that this one has forked they may be, with the reason on the line."""
    _none_in_source(
        _calls("pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.loads"), "use msgspec", "S301"
    )
    _none_in_source(_loads_torch_pickle, "pass weights_only=True")


@pytest.mark.parametrize("code", ["os.environ['A']", "os.getenv('A')", "from os import environ"])
def test_the_environment_rule_sees(code: str) -> None:
    assert any(_reads_environment(node) for node in ast.walk(ast.parse(code)))


@pytest.mark.parametrize(
    ("code", "is_seen"),
    [("torch.load(f)", True), ("torch.load(f, weights_only=False)", True), ("torch.load(f, weights_only=True)", False)],
)
def test_the_pickle_rule_sees(code: str, is_seen: bool) -> None:
    assert any(_loads_torch_pickle(node) for node in ast.walk(ast.parse(code))) == is_seen


def test_text_is_ascii() -> None:
    problems = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.isascii():
                odd = sorted({character for character in line if not character.isascii()})
                problems.append(f"{path.relative_to(ROOT)}:{number}: {odd}")
    assert not problems, "\n".join(problems)


def test_no_path_of_one_machine() -> None:
    problems = [
        f"{path.relative_to(ROOT)}:{number}: {found.group()}"
        for path in text_files()
        if path.name not in LICENCES and path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.startswith("#!") and (found := ABSOLUTE_PATH.search(line))
    ]
    assert not problems, "\n".join(problems)


def _none_in_source(
    is_bad: Callable[[ast.AST], bool], remedy: str, waiver: str = "", exempt: Set[Path] = frozenset()
) -> None:
    found = []
    for path in modules():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree(path)):
            if path in exempt or not is_bad(node):
                continue
            line = getattr(node, "lineno", 1)
            if not waiver or not re.search(rf"noqa: {waiver} \w+", lines[line - 1]):
                found.append(f"{path.relative_to(ROOT)}:{line}: {remedy}")
    assert not found, "\n".join(found)


def _calls(*names: str) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, ast.Call) and _dotted(node.func) in names


def _dotted(node: ast.AST) -> str:
    return ".".join(reversed(list(_parts(node))))


def _parts(node: ast.AST) -> Iterator[str]:
    while isinstance(node, ast.Attribute):
        yield node.attr
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in ("environ", "getenv", "putenv") for alias in node.names)
    return _dotted(node) in ("os.environ", "os.getenv", "os.putenv", "os.environb")


def _loads_torch_pickle(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or _dotted(node.func) != "torch.load":
        return False
    safe = (k for k in node.keywords if k.arg == "weights_only" and isinstance(k.value, ast.Constant))
    return not any(k.value.value is True for k in safe if isinstance(k.value, ast.Constant))
