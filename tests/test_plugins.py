import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide import plugins
from ebbtide.config import Component
from ebbtide.errors import ConfigError

ALL = [(kind, name) for kind in plugins.KINDS for name in plugins.names(kind)]


@pytest.mark.parametrize(("kind", "name"), ALL, ids=[f"{kind}.{name}" for kind, name in ALL])
def test_every_plugin_loads_and_is_named_by_its_module(kind: str, name: str) -> None:
    plugin = plugins.load(kind, name)
    assert issubclass(plugin.Config, Component)
    assert plugin.Config.model_fields["type"].default == name
    assert plugin.__doc__


def test_kinds_that_ship_have_plugins() -> None:
    assert "grpo" in plugins.names("algorithms")
    assert {"jsonl", "parquet", "reasoning_gym"} <= set(plugins.names("data.sources"))
    assert "fsdp" in plugins.names("engines")
    assert "inprocess" in plugins.names("rollout")
    assert "base" not in plugins.names("rewards")
    assert "scoring" not in plugins.names("rewards")


def test_an_unknown_name_gives_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        plugins.load("engines", "fdsp")
    assert str(caught.value).startswith("type='fdsp': no such engine; known: ")
    assert str(caught.value).endswith("Did you mean 'fsdp'?")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package of a user's, `their_package`."""
    folder = tmp_path / "their_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "their_package"]:
        del sys.modules[name]
    plugins.load.cache_clear()


PLUGIN = """
from ebbtide.rewards.base import RewardConfig
class Mine:
    class Config(RewardConfig):
        type: str = "mine"
"""


def test_a_users_module_is_a_plugin_by_its_dotted_name(package: Path) -> None:
    (package / "mine.py").write_text(PLUGIN)
    assert plugins.load("rewards", "their_package.mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "exactly one public class with a nested Config, this one has 0"),
        (PLUGIN + PLUGIN.replace("Mine", "Yours"), "this one has 2"),
        ("import surely_not_installed", "cannot be imported: No module named 'surely_not_installed'. Is surely_not_in"),
        ("def broken(:", "cannot be imported: "),
        ("from ebbtide.errors import nothing_of_the_kind", "cannot be imported: cannot import name"),
    ],
)
def test_a_users_module_that_is_no_plugin_says_why(package: Path, text: str, expected: str) -> None:
    (package / "mine.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        plugins.load("rewards", "their_package.mine")
    assert str(caught.value).startswith("type='their_package.mine': ")
    assert expected in str(caught.value)


def test_a_mistake_inside_a_users_module_keeps_its_traceback(package: Path) -> None:
    (package / "mine.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        plugins.load("rewards", "their_package.mine")


@pytest.mark.parametrize("name", ["no_such_package.mine", "their_package.absent", "their_package.", ".mine", "a..b"])
def test_a_module_that_is_not_there_is_named(package: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"no such module|is not the name of a module"):
        plugins.load("rewards", name)


def test_a_function_is_found_in_a_file_and_in_a_module(package: Path) -> None:
    (package / "mine.py").write_text("def score(x):\n    return x + 1\n")
    in_file = plugins.load_function(f"{package / 'mine.py'}:score")
    assert in_file(1) == 2
    assert plugins.load_function(f"{package / 'mine.py'}:score") is in_file
    assert plugins.load_function("their_package.mine:score")(1) == 2
    assert plugins.load_function("math:floor")(1.5) == 1


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("score", "must be 'path/to/file.py:name' or 'package.module:name'"),
        ("mine.py:", "must be 'path/to/file.py:name'"),
        (":score", "must be 'path/to/file.py:name'"),
        ("mine.py:1", "must be 'path/to/file.py:name'"),
        ("absent.py:score", "'absent.py': no such file. Paths are relative to the working directory."),
        ("math:flor", "math has no function 'flor'; it has: acos, "),
        ("math:pi", "math has no function 'pi'"),
    ],
)
def test_a_reference_that_leads_nowhere_says_why(reference: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plugins.load_function(reference)
    assert expected in str(caught.value)


def test_a_file_that_cannot_be_imported_is_named_and_may_be_mended(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import surely_not_installed")
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'surely_not_installed'"):
        plugins.load_function(f"{file}:score")
    file.write_text("def score(x):\n    return x  # of another length than before\n")
    assert plugins.load_function(f"{file}:score")(3) == 3
