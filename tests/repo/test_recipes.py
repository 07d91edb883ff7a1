"""Every recipe that ships can be run: it parses, and the functions that it names exist."""

from pathlib import Path

import pytest

from ebbtide import plugins
from ebbtide.config import dump, flatten, load
from ebbtide.recipe import Recipe
from tests.repo.sources import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in recipes are relative to the working directory, which is the repository."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_run(path: Path, tmp_path: Path) -> None:
    recipe = load(Recipe, path)
    assert recipe.name == path.stem, "a recipe's run folder is found by the recipe's name"
    for key, value in flatten(recipe.model_dump(mode="json")):
        if isinstance(value, str) and ".py:" in value:
            assert callable(plugins.load_function(value)), key
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump(recipe), encoding="utf-8")
    assert load(Recipe, resolved) == recipe, "the resolved configuration says the same"


def test_every_file_of_functions_belongs_to_a_recipe() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in RECIPES)
    unused = [path.name for path in (ROOT / "recipes").glob("*.py") if path.name not in texts]
    assert not unused, unused
