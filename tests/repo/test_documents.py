"""What the documents show can be typed: commands parse, recipes validate, links lead somewhere."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli import main
from ebbtide.config import load, validate
from ebbtide.recipe import Recipe
from tests.repo.sources import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!\w+:|#)([^)#\s]+)")
SHELL = {"", "bash", "console", "sh", "shell"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    language: str
    text: str


def blocks() -> Iterator[Block]:
    """Every fenced block of every document."""
    for document in DOCUMENTS:
        for found in BLOCK.finditer(document.read_text(encoding="utf-8")):
            yield Block(document, found["language"], found["text"])


def commands() -> list[tuple[str, str]]:
    """(document, command line) of every line that a reader would type."""
    found = []
    for block in blocks():
        if block.language in SHELL:
            for line in block.text.replace("\\\n", " ").splitlines():
                command = line.removeprefix("$ ").partition(" #")[0].strip()
                if command.split(" ")[0] in ("make", "ebbtide", "python", "pip"):
                    found.append((block.document.name, command))
    return found


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(("document", "command"), commands())
def test_a_command_can_be_typed(document: str, command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        unknown = [word for word in arguments if "=" not in word and word not in _targets()]
        assert not unknown, f"the Makefile has no {unknown}"
    elif program == "python":
        script = next((word for word in arguments if word.endswith(".py")), None)
        assert script is None or (ROOT / script).is_file(), script
    elif program == "pip":
        asked = {extra for found in re.findall(r"\[([\w,-]+)\]", command) for extra in found.split(",")}
        assert asked <= set(_project()["optional-dependencies"]), asked
    else:
        _check_ebbtide(arguments)


def test_recipes_in_documents_are_recipes() -> None:
    for block in blocks():
        if block.language == "toml":
            tree = tomllib.loads(block.text)
            if {"name", "steps"} <= tree.keys():
                validate(Recipe, tree)


def test_links_lead_somewhere() -> None:
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in DOCUMENTS
        for target in LINK.findall(document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def _check_ebbtide(arguments: list[str]) -> None:
    try:
        given = main._parse(main._parser(), arguments)
    except SystemExit as error:
        if error.code:
            pytest.fail(f"ebbtide {shlex.join(arguments)} does not parse")
        return
    recipe = getattr(given, "recipe", None)
    if isinstance(recipe, Path) and recipe.is_file():
        load(Recipe, recipe, getattr(given, "overrides", ()))


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project
