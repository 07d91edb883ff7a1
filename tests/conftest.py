"""What all tests share: no hub, one thread, fixed seeds, tiny checkpoints, and no process left behind."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read once, when the libraries are imported: no hub, and nobody tells its makers that it was used.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_ERROR_REPORTING": "false",
}

from ebbtide import env

env.prepare()

import numpy as np  # noqa: E402 after the environment is set
import pytest  # noqa: E402
import torch  # noqa: E402

ALPHABET = "0123456789<> abcdefghijklmnopqrstuvwxyz"
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """A test ends the processes that it starts; one that does not is cleaned up after, and fails."""
    before = _children()
    yield
    deadline = time.monotonic() + 2.0
    while (left := _children() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"the test left processes running: {sorted(left)}"


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_checkpoint(model_type="qwen3", **fields)`: folder of a tiny model with random weights and its tokenizer.

    The same arguments give the same folder; tests must not write to it.
    """
    made: dict[str, Path] = {}

    def make(model_type: str = "qwen3", **fields: Any) -> Path:
        key = repr((model_type, sorted(fields.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(model_type)
            _save_checkpoint(folder, model_type, fields)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """Folder of a tiny Qwen3; tests must not write to it."""
    return make_checkpoint("qwen3")


def _save_checkpoint(folder: Path, model_type: str, fields: dict[str, Any]) -> None:
    from ebbtide.models.build import build_model, load_tokenizer
    from ebbtide.recipe import ModelSection

    known = {name: value for name, value in TINY.items() if model_type != "qwen2" or name != "head_dim"}
    section = ModelSection(architecture={"model_type": model_type, **known, **fields}, alphabet=ALPHABET)
    build_model(section, dtype=torch.float32, seed=0).save_pretrained(folder)
    load_tokenizer(section).save_pretrained(folder)


def _children() -> set[int]:
    """Direct children that run. Python's own helper, which serves shared memory until this process ends, is none."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(int(pid) for pid in task.read_text().split())
        except OSError:  # the thread has just ended
            continue
    return {pid for pid in found if _is_running(pid)}


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
    return state != "Z" and "multiprocessing.resource_tracker" not in command
