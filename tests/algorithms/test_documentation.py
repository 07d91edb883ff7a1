import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from ebbtide import config, plugins
from ebbtide.recipe import Recipe

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")


def test_every_algorithm_is_in_the_table_and_no_other() -> None:
    table = TEXT.split("## The algorithms")[1].split("###")[0]
    header, *rows = re.findall(r"^\| `(\w+)`", table, flags=re.M)
    assert header == "type"
    assert sorted(rows) == plugins.names("algorithms")


@pytest.mark.parametrize("name", plugins.names("algorithms"))
def test_the_table_has_the_defaults(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` .*$", TEXT, flags=re.M)
    defaults = plugins.load("algorithms", name).Config()
    assert f"| `{defaults.aggregation}` |" in row
    for field, value in re.findall(r"`(clip_\w+) = ([\d.e-]+)`", row):
        assert getattr(defaults, field) == float(value)


def test_the_example_works_as_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, test = re.findall(r"```python\n(.*?)```", TEXT.split("## Add an algorithm")[1], flags=re.S)
    assert len(source.split("\n\n\n")[1].splitlines()) <= 11
    (tmp_path / "own_algorithms").mkdir()
    (tmp_path / "own_algorithms" / "sign_grpo.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = config.load(Recipe, ROOT / "recipes" / "quickstart.toml", ["algorithm.type=own_algorithms.sign_grpo"])
    assert type(recipe.algorithm).__module__ == "own_algorithms.sign_grpo"
    module = sys.modules["own_algorithms.sign_grpo"]
    monkeypatch.setitem(sys.modules, "ebbtide.algorithms.sign_grpo", module)
    path = tmp_path / "test_sign_grpo.py"
    path.write_text(test, encoding="utf-8")
    spec = spec_from_file_location("test_sign_grpo", path)
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    example.test_advantages_by_hand()


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "algorithms").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_of_the_algorithm_it_is_named_after(path: Path) -> None:
    recipe = config.load(Recipe, path)
    assert recipe.algorithm.type == recipe.name == path.stem
