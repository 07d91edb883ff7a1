"""verl's bucketed weight transfer between two processes, for `benchmarks/weightsync.py`; in an environment of its own.

Usage: verl_transfer.py BUCKET_MB. The first line of standard input is a JSON object of names and shapes; each further
line `push` is answered by the seconds of one transfer into the other process's parameters. Shared-memory mode, as verl
uses it where device memory cannot be shared. Without a GPU verl's device module cannot synchronise, so that is left
out, which costs verl nothing.
"""

import asyncio
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
import uuid
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import verl


def main() -> None:
    """Serve transfers until standard input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # libraries print; the pipe is for replies
    torch.set_num_threads(1)
    bucket_mb = int(sys.argv[1])
    shapes = {name: tuple(shape) for name, shape in json.loads(sys.stdin.readline()).items()}
    weights = [(name, torch.ones(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()]
    handle = f"ipc://{tempfile.gettempdir()}/verl-transfer-{uuid.uuid4().hex}.sock"
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(handle, shapes, theirs))
    process.start()
    assert ours.recv() == "ready"
    print("ready", file=replies, flush=True)
    transfer = load_transfer()
    for _ in sys.stdin:
        start = time.monotonic()
        ours.send(True)
        sender = transfer.BucketedWeightSender(handle, bucket_size_mb=bucket_mb, use_shm=True)
        asyncio.run(sender.async_send_weights(iter(weights)))
        seconds = time.monotonic() - start
        assert ours.recv() == math.prod(shapes[weights[-1][0]]), "the last weight did not arrive"
        print(seconds, file=replies, flush=True)
    ours.send(False)
    process.join(60)


def receive(handle: str, shapes: dict[str, tuple[int, ...]], pipe: Connection) -> None:
    """The other process: copies every bucket into parameters of its own, and answers with the sum of the last."""
    torch.set_num_threads(1)
    transfer = load_transfer()
    targets = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}

    def load(weights: list[tuple[str, torch.Tensor]], _is_last: bool) -> None:
        for name, tensor in weights:
            targets[name].copy_(tensor)

    pipe.send("ready")
    while pipe.recv():
        receiver = transfer.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
        receiver.receive_weights(load)
        pipe.send(int(targets[next(reversed(targets))].double().sum()))


def load_transfer() -> ModuleType:
    """The module alone: its package wants vLLM to be installed."""
    path = Path(verl.__file__).parent / "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    idle = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None, ipc_collect=lambda: None)
    module.get_torch_device = lambda: idle
    module.is_support_ipc = lambda: False
    return module


if __name__ == "__main__":
    main()
