"""Every logger in the folder, through the same events."""

import importlib
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ebbtide import config, plugins
from ebbtide.errors import MissingExtraError
from ebbtide.observe.sinks.base import Sink
from tests.observe.sinks.services import services_end

RECIPE: dict[str, Any] = {"name": "contract", "steps": 3, "optim": {"lr": 1e-4}, "rewards": [{"type": "exact"}]}
# What keeps each one on this machine; a new logger that needs nothing is tested by being there.
SETTINGS: dict[str, dict[str, Any]] = {
    "wandb": {"mode": "offline"},
    "mlflow": {"tracking_uri": "file://{folder}/mlruns"},
}

pytestmark = [
    # These packages' own warnings are not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(params=plugins.names("observe.sinks"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _services(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with services_end(monkeypatch):
        yield


def make(name: str, folder: Path) -> Sink:
    settings = {key: value.format(folder=folder) for key, value in SETTINGS.get(name, {}).items()}
    plugin = plugins.load("observe.sinks", name)
    sink: Sink = plugin(config.validate(plugin.Config, {"type": name, **settings}), folder=folder, recipe=RECIPE)
    return sink


def need(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the extra {name} is not installed")


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def absent(module: str) -> ModuleType:
        if module.split(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return real(module)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingExtraError) as caught:
        make(name, tmp_path)
    assert f"pip install 'ebbtide[{name}]'" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_a_run_is_logged_and_closed_twice(name: str, tmp_path: Path) -> None:
    need(name)
    sink = make(name, tmp_path)
    sink.write(0, {"eval/accuracy": 0.25})
    sink.write(1, {"reward/mean": 0.5, "time/update.forward_s": 0.1})
    sink.write(2, {"reward/mean": math.nan, "optim/grad_norm": math.inf})
    sink.write(2, {"eval/accuracy": 0.75})  # a step may come twice
    sink.close()
    sink.close()


@pytest.mark.timeout(120)
def test_a_run_without_a_step_is_closed(name: str, tmp_path: Path) -> None:
    need(name)
    make(name, tmp_path).close()


@pytest.mark.timeout(180)
def test_a_resumed_run_goes_on_in_the_same_folder(name: str, tmp_path: Path) -> None:
    need(name)
    for first in (0, 2):
        sink = make(name, tmp_path)
        for step in range(first, first + 3):
            sink.write(step, {"reward/mean": float(step)})
        sink.close()
