"""The data that flows through one step: frozen, with a shape and dtype on every field.

Dimension letters, used everywhere in ebbtide:
    B sequences, T packed tokens, C completion tokens, G completions of a group, V vocabulary, D model width,
    K top-k candidates, L layers, P prompt tokens, N tokens whose log-prob is wanted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ebbtide.errors import DataError, problem

__all__ = [
    "BatchCounts",
    "Completion",
    "GenerateRequest",
    "Group",
    "Prompt",
    "Ratio",
    "SamplingParams",
    "StopReason",
    "TrainBatch",
]


class StopReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"  # the model's end-of-sequence token, which is the completion's last token
    STOP = "stop"  # one of the request's stop ids or stop strings
    LENGTH = "length"  # max_tokens, or the model's context
    ABORTED = "aborted"  # the request was cancelled; its tokens are kept


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The neutral value of each field switches it off.

    Attributes:
        max_tokens: new tokens at most, above 0.
        temperature: 0 is greedy; 1 leaves the model's distribution as it is.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest, in [0, 1).
        stop_ids: token ids that end the completion, and are kept as its last token.
        stop: strings that end the completion; a backend must decode to see them.
        ignore_eos: sample on after the end-of-sequence token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "must be finite and not negative (0 is greedy)"),
            ("top_k", self.top_k >= 0, "must not be negative (0 keeps all tokens)"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1 (1 keeps all tokens)"),
            ("min_p", 0 <= self.min_p < 1, "must be at least 0 and below 1 (0 keeps all tokens)"),
        )
        broken = [problem(f"sampling.{name}", getattr(self, name), rule) for name, holds, rule in rules if not holds]
        if broken:
            raise DataError("\n".join(broken))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data, tokenised.

    Attributes:
        index: the row's position in its source, unique there.
        token_ids: [P] int64, with the chat template applied and the generation prompt open.
        row: the row's columns, as rewards read them; `prompt` is the text or the chat messages.
    """

    index: int
    token_ids: Tensor
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request produced.

    Attributes:
        request_id: the id of the request.
        token_ids: [C] int64, the stop token included.
        logprobs: [C] float32, of the distribution really sampled from.
        versions: [C] int32, the policy version that produced each token.
        stop_reason: why it ended.
    """

    request_id: int
    token_ids: Tensor
    logprobs: Tensor
    versions: Tensor
    stop_reason: StopReason

    def __post_init__(self) -> None:
        C = self.token_ids.shape[0]
        if self.logprobs.shape != (C,) or self.versions.shape != (C,):
            shapes = (tuple(self.token_ids.shape), tuple(self.logprobs.shape), tuple(self.versions.shape))
            raise DataError(
                problem("completion", shapes, "token_ids, logprobs and versions must all have one shape [C]")
            )


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion that is wanted.

    Attributes:
        request_id: unique among the requests in flight; the completion carries it.
        prompt_ids: [P] int64. Requests of one group may share the tensor object, and backends then prefill it once.
        sampling: how to draw.
        seed: with the token's position it fixes every draw, whatever else is in the batch.
        prefix: what an interrupted request had produced, to be continued under the current weights.
    """

    request_id: int
    prompt_ids: Tensor
    sampling: SamplingParams
    seed: int
    prefix: Completion | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt.

    Attributes:
        prompt: the prompt.
        completions: G of them, in the order requested.
        rewards: [G] float32, weighted sum over rewards; None before scoring.
        reward_parts: reward name -> [G] float32, unweighted.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: Tensor | None = None
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Counts of the whole global batch, over all ranks; losses divide by these and by nothing local.

    Attributes:
        num_tokens: tokens with loss_mask True.
        num_sequences: sequences with at least one such token.
        max_completion_tokens: the token limit of the run, for losses with a constant normaliser.
    """

    num_tokens: int
    num_sequences: int
    max_completion_tokens: int


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Sequences packed end to end without padding; a microbatch is a TrainBatch too, holding some of the sequences.

    Attributes:
        tokens: [T] int64.
        position_ids: [T] int64, starting at 0 in each sequence.
        cu_seqlens: [B+1] int32, sequence b is tokens[cu_seqlens[b]:cu_seqlens[b+1]].
        loss_mask: [T] bool, True where the token is trained; never True on a sequence's first token.
        rollout_logprobs: [T] float32, 0 where not sampled.
        token_versions: [T] int32, -1 where not sampled.
        advantages: [T] float32.
        group_ids: [B] int32, which group of the batch a sequence belongs to.
        rewards: [B] float32.
        old_logprobs: [T] float32, recomputed under the policy before the update, where the loss wants them.
        ref_logprobs: [T] float32, under the reference policy, likewise.
        values: [T] float32, the critic's, and returns: [T] float32, likewise.
        teacher_topk_ids: [T, K] int32 and teacher_topk_logprobs: [T, K] float32, likewise.

    Example:
        >>> batch = TrainBatch.pack([(torch.tensor([5, 6]), torch.tensor([7]), torch.tensor([-0.5]))])
        >>> batch.tokens.tolist(), batch.loss_mask.tolist(), batch.cu_seqlens.tolist()
        ([5, 6, 7], [False, False, True], [0, 3])
    """

    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    loss_mask: Tensor
    rollout_logprobs: Tensor
    token_versions: Tensor
    advantages: Tensor
    group_ids: Tensor
    rewards: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    teacher_topk_ids: Tensor | None = None
    teacher_topk_logprobs: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Tensor:
        """[B] int64, tokens of each sequence."""
        return self.cu_seqlens.diff().long()

    @property
    def sequence_ids(self) -> Tensor:
        """[T] int64, the sequence that each token belongs to."""
        lengths = self.lengths
        numbers = torch.arange(self.num_sequences, device=lengths.device)
        return torch.repeat_interleave(numbers, lengths, output_size=self.num_tokens)  # the size is given: no sync

    def counts(self, max_completion_tokens: int) -> BatchCounts:
        """The counts of this batch taken as the global one."""
        trained_B = torch.zeros(self.num_sequences, dtype=torch.bool, device=self.tokens.device)
        trained_B[self.sequence_ids[self.loss_mask]] = True
        return BatchCounts(int(self.loss_mask.sum()), int(trained_B.sum()), max_completion_tokens)

    def to(self, device: torch.device) -> "TrainBatch":
        """The batch with its tensors on the device."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        moved: dict[str, Any] = {name: None if value is None else value.to(device) for name, value in values.items()}
        return TrainBatch(**moved)

    def select(self, sequences: Sequence[int]) -> "TrainBatch":
        """The given sequences, in the given order, as a batch that owns its storage."""
        chosen = torch.as_tensor(sequences, dtype=torch.long)
        starts, lengths = self.cu_seqlens[:-1].long()[chosen], self.lengths[chosen]
        cu_seqlens = torch.zeros(len(chosen) + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths.cumsum(0)
        within_T = torch.arange(int(lengths.sum())) - torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
        index_T = torch.repeat_interleave(starts, lengths) + within_T
        values: dict[str, Any] = {"cu_seqlens": cu_seqlens}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "cu_seqlens" or value is None:
                continue
            values[item.name] = value[chosen if item.name in _PER_SEQUENCE else index_T]
        return replace(self, **values)

    @staticmethod
    def pack(
        sequences: Sequence[tuple[Tensor, Tensor, Tensor]],
        *,
        versions: Sequence[Tensor] | None = None,
        advantages: Sequence[Tensor] | None = None,
        group_ids: Sequence[int] | None = None,
        rewards: Sequence[float] | None = None,
    ) -> "TrainBatch":
        """Lay `(prompt_ids [P], completion_ids [C], rollout_logprobs [C])` end to end; completions are trained.

        Args:
            sequences: one triple a sequence.
            versions: [C] int32 each; 0 where not given.
            advantages: [C] float32 each, or a scalar tensor for all tokens of a completion; 0 where not given.
            group_ids: the group of each sequence; its own where not given.
            rewards: one a sequence; 0 where not given.
        """
        B = len(sequences)
        prompts = [len(prompt) for prompt, _, _ in sequences]
        completions = torch.tensor([len(completion) for _, completion, _ in sequences])
        if 0 in prompts:
            where = f"sequences[{prompts.index(0)}].prompt"
            raise DataError(problem(where, 0, "a sequence needs at least one prompt token"))
        halves = torch.stack([torch.tensor(prompts, dtype=torch.long), completions.long()], dim=1)
        lengths = halves.sum(1)
        cu_seqlens = torch.zeros(B + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths.cumsum(0)
        loss_mask = torch.tensor([False, True]).repeat(B).repeat_interleave(halves.flatten())
        T = len(loss_mask)
        token_versions = torch.full((T,), -1, dtype=torch.int32)
        rollout_logprobs, advantages_T = torch.zeros(T), torch.zeros(T)
        rollout_logprobs[loss_mask] = torch.cat([logprobs for _, _, logprobs in sequences]).float()
        token_versions[loss_mask] = 0 if versions is None else torch.cat(list(versions)).int()
        if advantages is not None:
            advantages_T[loss_mask] = _per_token(advantages, completions)
        return TrainBatch(
            tokens=torch.cat([part for prompt, completion, _ in sequences for part in (prompt, completion)]).long(),
            position_ids=torch.arange(T) - torch.repeat_interleave(cu_seqlens[:-1].long(), lengths),
            cu_seqlens=cu_seqlens,
            loss_mask=loss_mask,
            rollout_logprobs=rollout_logprobs,
            token_versions=token_versions,
            advantages=advantages_T,
            group_ids=torch.tensor(range(B) if group_ids is None else group_ids, dtype=torch.int32),
            rewards=torch.zeros(B) if rewards is None else torch.tensor(rewards, dtype=torch.float32),
        )


def _per_token(values: Sequence[Tensor], lengths: Tensor) -> Tensor:
    """[sum of lengths] from a scalar or [C] a sequence."""
    if all(value.dim() == 0 for value in values):
        return torch.stack(list(values)).float().repeat_interleave(lengths)
    return torch.cat([value.float().expand(int(length)) for value, length in zip(values, lengths, strict=True)])


_PER_SEQUENCE = frozenset({"group_ids", "rewards"})


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric as numerator and denominator, so that it sums over microbatches and ranks without error.

    Attributes:
        total: scalar.
        count: scalar; the metric is total / count, and absent where count is 0.
    """

    total: Tensor
    count: Tensor

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float | None:
        """The metric, or None where nothing was counted."""
        count = float(self.count)
        return float(self.total) / count if count else None
