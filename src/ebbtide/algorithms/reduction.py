"""Sums over the trained tokens of a packed microbatch: per sequence, and down to this microbatch's share of a loss.

Every reduction serves all sequences at once, by the index of the sequence that each token belongs to.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ebbtide.types import BatchCounts, Ratio, TrainBatch

__all__ = ["Aggregation", "Packed"]

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(frozen=True, slots=True)
class Packed:
    """Which tokens are trained, and which sequence each belongs to.

    Attributes:
        loss_mask: [T] bool, True where trained.
        sequence_ids: [T] int64.
        num_sequences: B.
    """

    loss_mask: Tensor
    sequence_ids: Tensor
    num_sequences: int

    @staticmethod
    def of(batch: TrainBatch) -> "Packed":
        """The layout of a batch or microbatch."""
        return Packed(batch.loss_mask, batch.sequence_ids, batch.num_sequences)

    def trained(self, values_T: Tensor) -> Tensor:
        """[T], the values with 0 where not trained: what stood there, NaN too, reaches neither loss nor gradient."""
        return torch.where(self.loss_mask, values_T, values_T.new_zeros(()))

    def per_sequence(self, values_T: Tensor) -> Tensor:
        """[B], sums of values that are already 0 where not trained."""
        return values_T.new_zeros(self.num_sequences).index_add(0, self.sequence_ids, values_T)

    def lengths(self, like: Tensor) -> Tensor:
        """[B], trained tokens of each sequence, in the dtype of `like`, at least 1 so that it may divide."""
        return self.per_sequence(self.loss_mask.to(like.dtype)).clamp(min=1)

    def mean_per_sequence(self, values_T: Tensor) -> Tensor:
        """[B], means over trained tokens; 0 for a sequence without any."""
        return self.per_sequence(values_T) / self.lengths(values_T)

    def share_of_loss(self, loss_T: Tensor, counts: BatchCounts, aggregation: Aggregation) -> Tensor:
        """This microbatch's share of the global loss, a scalar; shares sum to the whole over microbatches and ranks.

        Args:
            loss_T: [T], 0 where not trained.
            counts: of the whole global batch.
            aggregation: `token_mean` divides by all trained tokens, so that each token weighs the same (DAPO,
                arXiv:2503.14476, eq. 8); `sequence_mean` averages each sequence first, so that each sequence weighs
                the same (GRPO, arXiv:2402.03300, eq. 3); `sequence_sum` divides by sequences, so that a completion
                is one action (RLOO, arXiv:2402.14740); `constant` divides that by the token limit too, so that
                a sequence's length cannot change the weight of its tokens (Dr. GRPO, arXiv:2503.20783).
        """
        if aggregation == "token_mean":
            return loss_T.sum() / max(counts.num_tokens, 1)
        if aggregation == "sequence_mean":
            return self.mean_per_sequence(loss_T).sum() / max(counts.num_sequences, 1)
        if aggregation == "sequence_sum":
            return loss_T.sum() / max(counts.num_sequences, 1)
        return loss_T.sum() / max(counts.num_sequences * counts.max_completion_tokens, 1)

    def mean(self, values_T: Tensor) -> Ratio:
        """A metric: the mean over trained tokens of values that are 0 elsewhere."""
        return Ratio(values_T.detach().sum(), self.loss_mask.sum())
