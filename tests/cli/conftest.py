"""One short run that the commands' tests share."""

import os
from pathlib import Path

import pytest

from ebbtide.cli.main import main

ROOT = Path(__file__).parents[2]
SMALL = [
    "steps=2",
    "warmup=none",
    "eval.prompts=16",
    "eval.every_steps=0",
    "checkpoint.every_steps=1",
    "batch.prompts=4",
    "batch.group_size=4",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.hidden_size=32",
    f"data.prompt={ROOT}/recipes/quickstart_task.py:prompt",
    f"data.demonstration={ROOT}/recipes/quickstart_task.py:demonstrate",
    f"rewards.0.answer={ROOT}/recipes/quickstart_task.py:answer",
]
QUICKSTART = ROOT / "recipes" / "quickstart.toml"


def train_arguments(folder: Path) -> list[str]:
    return ["train", str(QUICKSTART), *SMALL, "--folder", str(folder)]


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run; tests must not write to it."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert main(train_arguments(folder)) == 0
    return folder
