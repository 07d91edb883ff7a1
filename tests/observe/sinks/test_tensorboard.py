from pathlib import Path
from typing import Any

import pytest

from ebbtide import config
from ebbtide.observe.sinks.tensorboard import TensorBoardSink

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="the extra tensorboard is not installed"
)


def read(folder: Path) -> Any:
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def make(folder: Path) -> TensorBoardSink:
    settings = config.validate(TensorBoardSink.Config, {"type": "tensorboard"})
    return TensorBoardSink(settings, folder=folder, recipe={"name": "x", "optim": {"lr": 1e-4}})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scalars_and_the_recipe_are_read_back(tmp_path: Path) -> None:
    sink = make(tmp_path)
    sink.write(1, {"reward/mean": 0.5})
    sink.write(2, {"reward/mean": 0.75})
    sink.close()
    events = read(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.75)]
    text = events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| optim.lr | `0.0001` |" in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_resumed_run_hides_the_steps_it_makes_again(tmp_path: Path) -> None:
    for first, value in ((0, 1.0), (2, 2.0)):
        sink = make(tmp_path)
        for step in range(first, first + 4):
            sink.write(step, {"reward/mean": value})
        sink.close()
    found = [(event.step, event.value) for event in read(tmp_path).Scalars("reward/mean")]
    assert found == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0), (5, 2.0)]
