"""What the benchmarks of training engines share: ranks in forked processes, a model, packed batches."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ebbtide import plugins
from ebbtide.algorithms.base import LossInputs, Needs
from ebbtide.device import Device
from ebbtide.engines.base import EngineSetting
from ebbtide.engines.mesh_engine import MeshEngine
from ebbtide.recipe import ModelSection, OptimSection
from ebbtide.types import Ratio, TrainBatch

__all__ = ["LikelihoodWithEntropy", "make_engine", "packed", "ranks", "setting"]

T = TypeVar("T")
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


class LikelihoodWithEntropy:
    """Maximum likelihood that asks for an entropy and reports it without learning from it, as many recipes do."""

    needs = Needs.ENTROPY

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Ratio]]:
        assert inputs.entropy is not None
        loss = -(inputs.policy_logprobs * inputs.batch.loss_mask).sum() / inputs.counts.num_tokens
        return loss, {"policy/entropy_nats": Ratio(inputs.entropy.sum(), inputs.batch.loss_mask.sum())}


def setting(hidden: int, layers: int, vocab: int, tokens: int) -> EngineSetting:
    """A Qwen3 of this size with random weights."""
    architecture = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "max_position_embeddings": tokens,
        "vocab_size": vocab,
    }
    return EngineSetting(
        model=ModelSection(architecture=architecture, alphabet=_ALPHABET),
        optim=OptimSection(lr=1e-4),
        device=Device("cpu"),
        seed=0,
        temperature=1.0,
        num_steps=1000,
        max_completion_tokens=tokens,
    )


def make_engine(name: str, how: EngineSetting, max_tokens: int, **options: Any) -> MeshEngine:
    """This rank's engine; prompts are not shared, so that every token is computed."""
    cls = plugins.load("engines", name)
    engine: MeshEngine = cls(cls.Config(max_tokens_per_microbatch=max_tokens, share_prompts=False, **options), how)
    return engine


def packed(num: int, length: int, vocab: int, prompt: int = 8) -> TrainBatch:
    """Sequences of one length, random tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (num, length), generator=generator)
    return TrainBatch.pack([(row[:prompt], row[prompt:], torch.zeros(length - prompt)) for row in tokens])


def ranks(fn: Callable[[int], T], world: int, timeout_s: float = 600.0) -> list[T]:
    """`fn(rank)` in forked processes with a gloo group between them, one thread each; here, where there is one."""
    if world == 1:
        return [fn(0)]
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(world):
            reader, writer = context.Pipe(duplex=False)
            arguments = (fn, rank, world, str(Path(folder) / "store"), timeout_s, writer)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            writer.close()
            started.append((process, reader))
        try:
            return [_result(rank, reader, timeout_s) for rank, (_, reader) in enumerate(started)]
        finally:
            for process, _ in started:
                process.kill()
                process.join()


def _rank(fn: Callable[[int], T], rank: int, world: int, store: str, timeout_s: float, writer: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout
        )
        result: tuple[bool, Any] = (True, fn(rank))
        dist.barrier()
    except BaseException:  # noqa: BLE001 this is the edge of a process
        result = (False, traceback.format_exc())
    writer.send(result)
    writer.close()
    os._exit(0)


def _result(rank: int, reader: Connection, timeout_s: float) -> Any:
    if not reader.poll(timeout_s):
        raise SystemExit(f"rank {rank} has not finished after {timeout_s:g} s")
    succeeded, value = reader.recv()
    if not succeeded:
        raise SystemExit(f"rank {rank} raised\n{value}")
    return value
