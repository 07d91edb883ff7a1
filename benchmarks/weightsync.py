"""How fast weights go from one process to another on this machine, against a plain memcpy of the same bytes.

A trainer and a rollout in two processes; the rollout copies every weight into its own parameters, as a model does. The
memcpy is of the same bytes, by one thread of one process, in turns with the pushes: other load on the machine hits
both. `--peer verl` runs the bucketed transfer of the published verl package in shared-memory mode, in turns as well,
from an environment of its own (see benchmarks/peers/verl_transfer.py).

Figures:
    ratio_memcpy        bytes per second of a push at the default bucket, to memcpy's
    ratio_verl_best     the same to verl's at the bucket size that suits it best
    ratio_verl_512mb    the same to verl's at a bucket of 512 MB
    extra_bytes         the larger of both sides' peak above what was resident before the push
    pushes_per_s_1mb    a model of 1 MB, pushed over and over
    gb_per_s_*          of each set and bucket size
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from _record import Run

from ebbtide.device import host_memory, reset_host_peak
from ebbtide.units import MIB
from ebbtide.weightsync.base import NamedTensor
from ebbtide.weightsync.link import UnixListener
from ebbtide.weightsync.load import CopyInto
from ebbtide.weightsync.memfd import MemfdBuffer
from ebbtide.weightsync.receiver import SocketReceiver
from ebbtide.weightsync.sender import SenderOptions, SocketSender

HERE = Path(__file__).resolve().parent
PEER_PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"
DEFAULT_BUCKET = SenderOptions().bucket_bytes
"""What is measured as ours is what users get."""


def flat_set(num_bytes: int) -> dict[str, tuple[int, ...]]:
    """Equal square-ish bfloat16 weights of 8 MiB."""
    return {f"layers.{i}.weight": (2048, 2048) for i in range(num_bytes // (8 * MIB))}


def qwen3_set(num_layers: int = 28) -> dict[str, tuple[int, ...]]:
    """The shapes of Qwen3-0.6B, its head tied to its embedding."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151936, 1024), "model.norm.weight": (1024,)}
    for i in range(num_layers):
        shapes |= {
            f"model.layers.{i}.self_attn.q_proj.weight": (2048, 1024),
            f"model.layers.{i}.self_attn.k_proj.weight": (1024, 1024),
            f"model.layers.{i}.self_attn.v_proj.weight": (1024, 1024),
            f"model.layers.{i}.self_attn.o_proj.weight": (1024, 2048),
            f"model.layers.{i}.self_attn.q_norm.weight": (128,),
            f"model.layers.{i}.self_attn.k_norm.weight": (128,),
            f"model.layers.{i}.mlp.gate_proj.weight": (3072, 1024),
            f"model.layers.{i}.mlp.up_proj.weight": (3072, 1024),
            f"model.layers.{i}.mlp.down_proj.weight": (1024, 3072),
            f"model.layers.{i}.input_layernorm.weight": (1024,),
            f"model.layers.{i}.post_attention_layernorm.weight": (1024,),
        }
    return shapes


def tensors(shapes: dict[str, tuple[int, ...]]) -> list[NamedTensor]:
    """Resident bfloat16 weights of these shapes."""
    return [(name, torch.ones(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()]


def rollout(address: str, shapes: dict[str, tuple[int, ...]], pipe: Connection) -> None:
    """The other process: loads pushes until told to stop, and answers with its peak of resident bytes."""
    torch.set_num_threads(1)
    consumer = CopyInto(dict(tensors(shapes)))
    receiver = SocketReceiver(address, deadline_s=120)
    pipe.send("ready")
    while (version := pipe.recv()) is not None:
        before = host_memory().rss_bytes
        reset_host_peak()
        receiver.receive_blocking(consumer, version)
        pipe.send(host_memory().peak_rss_bytes - before)
    receiver.close_blocking()


@dataclass
class Pair:
    """A sender here and a rollout process; pushes one set of weights."""

    weights: list[NamedTensor]
    sender: SocketSender
    pipe: Connection
    stop: Callable[[], None]
    version: int = 0

    @staticmethod
    def start(weights: list[NamedTensor], bucket_bytes: int, *, has_digest: bool = False, keep: bool = True) -> "Pair":
        """Start both, with everything resident."""
        options = SenderOptions(bucket_bytes=bucket_bytes, deadline_s=120, has_digest=has_digest, keep_buffer=keep)
        sender = SocketSender(UnixListener(), lambda _: MemfdBuffer(bucket_bytes), options)
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        shapes = {name: tuple(tensor.shape) for name, tensor in weights}
        process = context.Process(target=rollout, args=(sender.address, shapes, theirs))
        process.start()

        def stop() -> None:
            ours.send(None)
            process.join(60)
            sender.close_blocking()

        assert ours.recv() == "ready"
        return Pair(weights, sender, ours, stop)

    def push(self) -> tuple[float, int]:
        """Seconds, and the larger peak of extra resident bytes of both sides."""
        self.version += 1
        before = host_memory().rss_bytes
        reset_host_peak()
        self.pipe.send(self.version)
        report = self.sender.send_blocking(self.weights, self.version)
        ours = host_memory().peak_rss_bytes - before
        return report.seconds, max(ours, self.pipe.recv())


def memcpy_seconds(weights: Sequence[NamedTensor], targets: Sequence[NamedTensor]) -> float:
    """One thread copies every weight."""
    start = time.perf_counter()
    for (_, source), (_, target) in zip(weights, targets, strict=True):
        np.copyto(target.view(torch.int16).numpy(), source.view(torch.int16).numpy())
    return time.perf_counter() - start


class Peer:
    """The peer's pair of processes, asked over pipes for one transfer at a time."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], bucket_mb: int) -> None:
        command = [str(PEER_PYTHON), str(HERE / "peers" / "verl_transfer.py"), str(bucket_mb)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask(json.dumps(shapes))

    def seconds(self) -> float:
        """One transfer."""
        return float(self._ask("push"))

    def stop(self) -> None:
        """End both processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


def compare(run: Run, name: str, shapes: dict[str, tuple[int, ...]], buckets_mib: Sequence[int], rounds: int) -> None:
    """Pushes of each bucket size, memcpy and the peer, all in turns."""
    weights, targets = tensors(shapes), tensors(shapes)
    num_bytes = sum(tensor.nbytes for _, tensor in weights)
    default_mib = DEFAULT_BUCKET // MIB
    sizes = sorted({default_mib, *buckets_mib})
    largest = max(tensor.nbytes for _, tensor in weights)
    offered = PEER_QUICK_BUCKETS_MIB if run.args.quick else PEER_BUCKETS_MIB
    peer_sizes = [size for size in offered if size * MIB >= largest] if run.args.peer == "verl" else []
    pairs = {size: Pair.start(weights, size * MIB) for size in sizes}
    peers = {size: Peer(shapes, size) for size in peer_sizes if PEER_PYTHON.exists()}
    seconds: dict[str, list[float]] = {}
    for pair in pairs.values():
        pair.push()  # the first makes the buffer
    for peer in peers.values():
        peer.seconds()
    memcpy_seconds(weights, targets)
    for _ in range(rounds):
        seconds.setdefault("memcpy", []).append(memcpy_seconds(weights, targets))
        for size, pair in pairs.items():
            seconds.setdefault(f"{size}mib", []).append(pair.push()[0])
        for size, peer in peers.items():
            seconds.setdefault(f"verl_{size}mib", []).append(peer.seconds())
    for pair in pairs.values():
        pair.stop()
    for peer in peers.values():
        peer.stop()
    for key, values in seconds.items():
        run.figure(f"gb_per_s_{name}_{key}", [num_bytes / value / 1e9 for value in values])
    ours = seconds[f"{default_mib}mib"]
    run.figure(f"ratio_memcpy{suffix(name)}", ratios(seconds["memcpy"], ours), ">= 0.6")
    if run.args.peer == "verl":
        medians = {size: statistics.median(seconds[f"verl_{size}mib"]) for size in peers}
        best = min(medians, key=lambda size: medians[size]) if medians else None
        run.figure(f"ratio_verl_best{suffix(name)}", ratios(seconds.get(f"verl_{best}mib"), ours), ">= 2.5")
        # The larger the set, the less verl's making of a new segment with each transfer weighs.
        target = ">= 6" if name == "512mib" else None
        run.figure(f"ratio_verl_512mb{suffix(name)}", ratios(seconds.get("verl_512mib"), ours), target)


PEER_BUCKETS_MIB = (8, 16, 32, 64, 128, 512)
PEER_QUICK_BUCKETS_MIB = (8, 512)
"""The best and the default-like of the longer run."""


def suffix(name: str) -> str:
    """The 512 MiB set's figures carry the plain names."""
    return "" if name == "512mib" else f"_{name}"


def ratios(other: Sequence[float] | None, ours: Sequence[float]) -> list[float] | None:
    """How many times faster ours was, round by round."""
    return None if other is None else [theirs / mine for theirs, mine in zip(other, ours, strict=True)]


def small_pushes(run: Run, rounds: int) -> None:
    """Pushes per second of a model of 1 MB."""
    pair = Pair.start(tensors({f"layers.{i}.weight": (50, 1000) for i in range(10)}), DEFAULT_BUCKET)
    pair.push()
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(100):
            pair.push()
        rates.append(100 / (time.perf_counter() - start))
    pair.stop()
    run.figure("pushes_per_s_1mb", rates)


def extra_bytes(run: Run, rounds: int) -> None:
    """Resident bytes that a push adds on either side, buffer and all; the push that warms the code is left out."""
    pair = Pair.start(tensors(flat_set(128 * MIB)), DEFAULT_BUCKET, keep=False)
    pair.push()
    run.figure("extra_bytes", [pair.push()[1] for _ in range(rounds)], f"<= {2 * DEFAULT_BUCKET}")
    pair.stop()


def with_digest(run: Run, rounds: int) -> None:
    """What a checksum on both sides costs."""
    weights = tensors(flat_set(512 * MIB))
    pair = Pair.start(weights, DEFAULT_BUCKET, has_digest=True)
    pair.push()
    run.figure("gb_per_s_512mib_with_digest", [512 * MIB / pair.push()[0] / 1e9 for _ in range(rounds)])
    pair.stop()


def keep_others_off() -> None:
    """Schedule this process and its children before all others, where this user may.

    A push takes two cores, the memcpy it is held against one: on a busy machine their ratio would tell of the load.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        print("this user may not keep other processes off the cores: measure on a quiet machine")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The peer, and the bucket sizes beside the default."""
    parser.add_argument("--peer", choices=["verl"], help="compare with this package, from .venv-peers")
    parser.add_argument(
        "--realtime",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep other processes off the cores while measuring, where this user may (default: yes)",
    )
    parser.add_argument("--buckets", type=int, nargs="*", default=[4, 16, 64, 256], metavar="MIB")


def main() -> int:
    """Measure and report."""
    run = Run("weightsync", __doc__, add_flags)
    torch.set_num_threads(1)
    if run.args.realtime:
        keep_others_off()
    quick = run.args.quick
    rounds = 5 if quick else 15
    compare(run, "512mib", flat_set(512 * MIB), [] if quick else run.args.buckets, rounds)
    if not quick:
        compare(run, "qwen3_0p6b", qwen3_set(), [], rounds)
    small_pushes(run, 3 if quick else 7)
    extra_bytes(run, rounds)
    with_digest(run, rounds)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
