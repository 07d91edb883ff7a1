"""Small groups and batches that the tests of algorithms build on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ebbtide.algorithms.base import LossInputs
from ebbtide.types import BatchCounts, Completion, Group, Prompt, StopReason, TrainBatch

__all__ = ["batch_of", "group_of", "inputs_of", "logprobs_of"]


def group_of(rewards: Sequence[float], lengths: Sequence[int] | None = None, index: int = 0) -> Group:
    """A scored group; its completions have one token each unless told."""
    lengths = [1] * len(rewards) if lengths is None else lengths
    completions = tuple(
        Completion(
            request_id=i,
            token_ids=torch.arange(length) + 5,
            logprobs=torch.full((length,), -1.0),
            versions=torch.zeros(length, dtype=torch.int32),
            stop_reason=StopReason.EOS,
        )
        for i, length in enumerate(lengths)
    )
    prompt = Prompt(index=index, token_ids=torch.tensor([1, 2]), row={"prompt": "1+1="})
    return Group(prompt, completions, rewards=torch.tensor(rewards, dtype=torch.float32))


def batch_of(
    rollout_logprobs: Sequence[Sequence[float]],
    advantages: Sequence[float] | None = None,
    group_ids: Sequence[int] | None = None,
    rewards: Sequence[float] | None = None,
) -> TrainBatch:
    """A batch of sequences with a prompt of two tokens and the completions' rollout log-probs as given."""
    sequences = [
        (torch.tensor([1, 2]), torch.arange(len(logprobs)) + 5, torch.tensor(logprobs)) for logprobs in rollout_logprobs
    ]
    scalars = None if advantages is None else [torch.tensor(advantage) for advantage in advantages]
    return TrainBatch.pack(sequences, advantages=scalars, group_ids=group_ids, rewards=rewards)


def logprobs_of(batch: TrainBatch, trained: Sequence[float]) -> Tensor:
    """[T] with gradient: the values on the trained tokens in order, 0 elsewhere."""
    values_T = torch.zeros(batch.num_tokens)
    values_T[batch.loss_mask] = torch.tensor(trained)
    return values_T.requires_grad_()


def inputs_of(batch: TrainBatch, policy_logprobs: Tensor, max_tokens: int = 4) -> LossInputs:
    """The batch as one microbatch that is the whole global batch."""
    counts: BatchCounts = batch.counts(max_tokens)
    return LossInputs(batch, counts, policy_logprobs)
