"""The likeliest tokens, from logits that arrive a slice of the vocabulary at a time."""

import torch
from torch import Tensor

__all__ = ["RunningTopK"]


class RunningTopK:
    """Keeps the K largest logits of each token, in falling order.

    Attributes:
        values: [N, K] logits.
        ids: [N, K] int32.
    """

    def __init__(self, num_tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.full((num_tokens, k), -torch.inf, dtype=dtype, device=device)
        self.ids = torch.zeros((num_tokens, k), dtype=torch.int32, device=device)

    def take(self, logits: Tensor, rows: slice, vocab: slice) -> None:
        """Merge a tile; every slice of the vocabulary comes once."""
        k = self.values.shape[1]
        values, local = logits.topk(min(k, logits.shape[1]), dim=1)
        ids = (local + vocab.start).to(torch.int32)
        if vocab.start > 0 or values.shape[1] < k:
            values, place = torch.cat([self.values[rows], values], dim=1).topk(k, dim=1)
            ids = torch.cat([self.ids[rows], ids], dim=1).gather(1, place)
        self.values[rows], self.ids[rows] = values, ids
