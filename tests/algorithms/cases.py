"""Small groups and batches that the tests of algorithms build on."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ebbtide.algorithms.base import Algorithm, LossInputs
from ebbtide.algorithms.reduction import Packed
from ebbtide.types import BatchCounts, Completion, Group, Prompt, StopReason, TrainBatch
from tests.reference.algorithms import Sample, aggregate

__all__ = [
    "MAX_TOKENS",
    "assert_matches",
    "batch_of",
    "group_of",
    "inputs_of",
    "logprobs_of",
    "packed_of",
    "random_batch",
    "samples_of",
]

MAX_TOKENS = 8


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
        (torch.tensor([1, 2]), torch.arange(len(logprobs)) + 5, torch.tensor(logprobs, dtype=torch.float32))
        for logprobs in rollout_logprobs
    ]
    scalars = None if advantages is None else [torch.tensor(advantage) for advantage in advantages]
    return TrainBatch.pack(sequences, advantages=scalars, group_ids=group_ids, rewards=rewards)


def packed_of(lengths: Sequence[int]) -> Packed:
    """The layout of completions of these lengths, each after a prompt of two tokens."""
    return Packed.of(batch_of([[0.0] * length for length in lengths]))


def logprobs_of(batch: TrainBatch, trained: Sequence[float]) -> Tensor:
    """[T] with gradient: the values on the trained tokens in order, 0 elsewhere."""
    values_T = torch.zeros(batch.num_tokens)
    values_T[batch.loss_mask] = torch.tensor(trained)
    return values_T.requires_grad_()


def inputs_of(batch: TrainBatch, policy_logprobs: Tensor, max_tokens: int = 4) -> LossInputs:
    """The batch as one microbatch that is the whole global batch."""
    counts: BatchCounts = batch.counts(max_tokens)
    return LossInputs(batch, counts, policy_logprobs)


def random_batch(
    seed: int = 0, lengths: Sequence[int] = (3, 1, 6, 2, 5, 4, 1, 3, 7, 2, 4, 5), group_size: int = 3
) -> tuple[TrainBatch, Tensor]:
    """A batch in float64 with every optional field, and the policy's log-probs [T] with gradient.

    NaN stands wherever a token is not trained. The longest completion has a token in its middle that is not trained,
    as a tool's answer would be.
    """
    generator = torch.Generator().manual_seed(seed)
    B = len(lengths)
    sequences = [
        (torch.arange(1 + b % 3) + 1, torch.arange(length) + 5, torch.zeros(length)) for b, length in enumerate(lengths)
    ]
    rewards = torch.randint(0, 4, (B,), generator=generator).float()
    batch = TrainBatch.pack(
        sequences, group_ids=[b // group_size for b in range(B)], rewards=[float(reward) for reward in rewards]
    )
    longest = max(range(B), key=lambda b: lengths[b])
    mask_T = batch.loss_mask.clone()
    if lengths[longest] > 2:
        mask_T[int(batch.cu_seqlens[longest + 1]) - 2] = False

    def field(mean: float, spread: float) -> Tensor:
        values_T = mean + spread * torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
        return torch.where(mask_T, values_T, torch.nan)

    advantages_B = torch.randn(B, generator=generator, dtype=torch.float64)
    old_T = field(-2.0, 0.5)
    batch = replace(
        batch,
        loss_mask=mask_T,
        advantages=torch.where(mask_T, advantages_B[batch.sequence_ids], torch.nan),
        rollout_logprobs=old_T + field(0.0, 0.2),
        old_logprobs=old_T,
        ref_logprobs=old_T + field(0.0, 0.5),
        values=field(0.5, 0.5),
        returns=field(0.5, 0.5),
    )
    policy_T = old_T + field(0.0, 0.3)
    return batch, policy_T.requires_grad_()


def samples_of(batch: TrainBatch, policy: Tensor, values: Tensor, old: Tensor) -> list[Sample]:
    """The trained tokens of each sequence; gradients flow back to `policy` and `values`."""
    assert batch.ref_logprobs is not None
    assert batch.values is not None
    assert batch.returns is not None
    samples = []
    for b in range(batch.num_sequences):
        here = slice(int(batch.cu_seqlens[b]), int(batch.cu_seqlens[b + 1]))
        fields = (policy, old, batch.ref_logprobs, batch.advantages, values, batch.values, batch.returns)
        samples.append(Sample(*(field_T[here][batch.loss_mask[here]] for field_T in fields)))
    return samples


def assert_matches(
    algorithm: Algorithm, one_sample: Callable[[Sample], Tensor], aggregation: str, *, old: str = "rollout_logprobs"
) -> None:
    """The algorithm's loss and gradient on random batches equal the reference's, to 1e-12."""
    for seed in range(5):
        batch, policy = random_batch(seed)
        loss, _ = algorithm.loss(inputs_of(batch, policy, MAX_TOKENS))
        (gradient,) = torch.autograd.grad(loss, policy)
        reference_policy = policy.detach().clone().requires_grad_()
        samples = samples_of(batch, reference_policy, torch.zeros_like(policy), getattr(batch, old))
        expected = aggregate([one_sample(sample) for sample in samples], aggregation, MAX_TOKENS)
        (expected_gradient,) = torch.autograd.grad(expected, reference_policy)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
