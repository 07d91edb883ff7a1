"""Weights from one process to another through device memory, on one GPU: speed, and that nothing is stranded.

A trainer and a rollout share the device; the rollout copies every weight into its own parameters. In turns with the
pushes, one device-to-device copy of the same bytes.

Figures:
    gb_per_s_*mib          of each bucket size
    ratio_device_copy      bytes per second of a push at the default bucket, to the device copy's
    stranded_bytes         what the sender's allocator holds after pushes that give the buffer back, more than before
    limbo_bytes            reserved by the sender after `empty_cache`, more than before
    extra_bytes            the device's peak above what was allocated before a push, of the sender
    wrong_weights          weights that did not arrive bit for bit
"""

import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from _record import Run

from ebbtide.units import MIB
from ebbtide.weightsync import DEVICE_BUCKET_BYTES, CopyInto, CudaIpcTransport, NamedTensor, SenderOptions
from ebbtide.weightsync.receiver import SocketReceiver
from ebbtide.weightsync.sender import SocketSender


def weights_of(num_bytes: int) -> list[NamedTensor]:
    """Equal bfloat16 weights of 32 MiB, one larger than any bucket here, a small one and an empty one."""
    shapes = [(4096, 4096)] * (num_bytes // (32 * MIB)) + [(600 * MIB // 2,), (17, 3), (0, 5)]
    return [(f"w{i}", torch.randn(shape, device="cuda").bfloat16()) for i, shape in enumerate(shapes)]


def rollout(address: str, shapes: dict[str, tuple[int, ...]], pipe: Connection) -> None:
    """The other process."""
    targets = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in shapes.items()}
    receiver = SocketReceiver(address, deadline_s=120)
    pipe.send("ready")
    while (version := pipe.recv()) is not None:
        receiver.receive_blocking(CopyInto(targets), version)
        pipe.send({name: _checksum(tensor) for name, tensor in targets.items()} if version % 10 == 0 else None)
    receiver.close_blocking()


class Pair:
    """A sender here and a rollout process."""

    def __init__(self, weights: list[NamedTensor], bucket_bytes: int, *, keeps: bool) -> None:
        options = SenderOptions(bucket_bytes=bucket_bytes, keep_buffer=keeps, deadline_s=120)
        self.sender: SocketSender = CudaIpcTransport(options, torch.device("cuda", 0)).sender
        self.weights, self.version = weights, 0
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        shapes = {name: tuple(tensor.shape) for name, tensor in weights}
        self.process = context.Process(target=rollout, args=(self.sender.address, shapes, theirs))
        self.process.start()
        assert self.pipe.recv() == "ready"

    def push(self) -> float:
        """Seconds."""
        self.version += 1
        self.pipe.send(self.version)
        seconds = self.sender.send_blocking(self.weights, self.version).seconds
        self.pipe.recv()
        return seconds

    def num_wrong(self) -> int:
        """Weights that are not the same there as here, after one more push."""
        self.version = -(-self.version // 10) * 10
        self.pipe.send(self.version)
        self.sender.send_blocking(self.weights, self.version)
        there = self.pipe.recv()
        return sum(there[name] != _checksum(tensor) for name, tensor in self.weights)

    def stop(self) -> None:
        """End both."""
        self.pipe.send(None)
        self.process.join(60)
        self.sender.close_blocking()


def _checksum(tensor: torch.Tensor) -> int:
    """Of the bits, with their places."""
    bits = tensor.reshape(-1).view(torch.int16).long()
    return int((bits * torch.arange(1, bits.numel() + 1, device=bits.device).remainder(65521)).sum())


def device_copy_seconds(weights: Sequence[NamedTensor], targets: Sequence[torch.Tensor]) -> float:
    """One copy of every weight."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for (_, source), target in zip(weights, targets, strict=True):
        target.copy_(source)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def stranded(run: Run, weights: list[NamedTensor], num_pushes: int) -> None:
    """Buffers given back with every push, as where rollout and trainer share the device."""
    pair = Pair(weights, 64 * MIB, keeps=False)
    pair.push()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(num_pushes):
        pair.push()
    run.figure("stranded_bytes", torch.cuda.memory_allocated() - allocated, "<= 0")
    run.figure("extra_bytes", torch.cuda.max_memory_allocated() - allocated, f"<= {2 * 64 * MIB}")
    torch.cuda.empty_cache()
    run.figure("limbo_bytes", torch.cuda.memory_reserved() - reserved, "<= 0")
    pair.stop()


def main() -> int:
    """Measure and report."""
    run = Run("gpu_weightsync", __doc__)
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing is measured")
        for name in ("ratio_device_copy", "stranded_bytes", "limbo_bytes", "extra_bytes", "wrong_weights"):
            run.figure(name, None)
        return run.finish()
    rounds = 3 if run.args.quick else 10
    weights = weights_of((512 if run.args.quick else 4096) * MIB)
    num_bytes = sum(tensor.nbytes for _, tensor in weights)
    targets = [torch.empty_like(tensor) for _, tensor in weights]
    copies = [device_copy_seconds(weights, targets) for _ in range(rounds + 1)][1:]
    del targets
    wrong = 0
    for size in (16, 64, 256, 512):
        pair = Pair(weights, size * MIB, keeps=True)
        pair.push()
        seconds = [pair.push() for _ in range(rounds)]
        wrong += pair.num_wrong()
        pair.stop()
        run.figure(f"gb_per_s_{size}mib", [num_bytes / value / 1e9 for value in seconds])
        if size * MIB == DEVICE_BUCKET_BYTES:
            run.figure("ratio_device_copy", [copy / mine for copy, mine in zip(copies, seconds, strict=True)])
    stranded(run, weights, 5 if run.args.quick else 30)
    run.figure("wrong_weights", wrong, "<= 0")
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
