"""Keys and values of generation, and the attention plans that fill and read them.

A row of the cache belongs to one running request. A prefill attends within packed prompts and copies each prompt's
keys and values to every row that shares it; a decode step appends one token a row.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ebbtide.models.attention import AttentionCall, PackedAttention, attend_dense

__all__ = ["DecodeAttention", "KeyValueCache", "PrefillAttention"]


class KeyValueCache:
    """Buffers [rows, Hkv, tokens, d] a layer, made when a layer first writes."""

    def __init__(self, num_rows: int, num_tokens: int) -> None:
        self.num_rows = num_rows
        self.num_tokens = num_tokens
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """The buffers of the layer that calls."""
        found = self._layers.get(call.layer)
        if found is None:
            keys, values = (
                new.new_zeros(self.num_rows, new.shape[1], self.num_tokens, new.shape[2])
                for new in (call.key, call.value)
            )
            found = self._layers[call.layer] = (keys, values)
        return found

    def kept(self, rows: Tensor) -> "KeyValueCache":
        """A cache of these rows alone, in this order."""
        cache = KeyValueCache(len(rows), self.num_tokens)
        for layer, buffers in self._layers.items():
            keys, values = (buffer.index_select(0, rows) for buffer in buffers)
            cache._layers[layer] = (keys, values)
        return cache

    def joined(self, other: "KeyValueCache") -> "KeyValueCache":
        """A cache of these rows, then the other's."""
        cache = KeyValueCache(self.num_rows + other.num_rows, max(self.num_tokens, other.num_tokens))
        for layer, buffers in self._layers.items():
            keys, values = (
                torch.cat([F.pad(part, (0, 0, 0, cache.num_tokens - part.shape[2])) for part in parts])
                for parts in zip(buffers, other._layers[layer], strict=True)
            )
            cache._layers[layer] = (keys, values)
        return cache


class PrefillAttention:
    """Attention within packed prompts, whose keys and values go to cache rows."""

    def __init__(self, cache: KeyValueCache, cu_seqlens: Tensor, prompts: Sequence[int]) -> None:
        """Row i of the cache takes the keys and values of packed prompt `prompts[i]`."""
        self.calls = 0
        self._packed = PackedAttention(cu_seqlens)
        self._cache = cache
        device = cu_seqlens.device
        starts_P, lengths_P = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        chosen = torch.tensor(prompts, device=device)
        self._longest = int(lengths_P.max())
        within = torch.arange(self._longest, device=device)
        clipped = torch.minimum(within, (lengths_P - 1)[chosen][:, None])  # what lies beyond a prompt is masked later
        self._source = (starts_P[chosen][:, None] + clipped).flatten()
        self._shape = (len(prompts), self._longest)

    def attend(self, call: AttentionCall) -> Tensor:
        """[T, Hq, d]."""
        self.calls += 1
        for buffer, new in zip(self._cache.layer(call), (call.key, call.value), strict=True):
            rows = new.index_select(0, self._source).unflatten(0, self._shape).transpose(1, 2)
            buffer[:, :, : self._longest] = rows
        return self._packed.attend(call)


class DecodeAttention:
    """One new token a row, over the row's own past."""

    def __init__(self, cache: KeyValueCache, positions: Tensor) -> None:
        """positions: [B] int64, where each row's new token stands; the row's tokens before it are in the cache."""
        self.calls = 0
        self._cache = cache
        self._positions = positions
        self._longest = int(positions.max()) + 1
        self._is_level = int(positions.min()) + 1 == self._longest
        self._row_ids = torch.arange(len(positions), device=positions.device)
        columns = torch.arange(self._longest, device=positions.device)
        self._seen_BL = None if self._is_level else columns <= positions[:, None]

    def attend(self, call: AttentionCall) -> Tensor:
        """[B, Hq, d]."""
        self.calls += 1
        B = len(self._positions)
        keys, values = self._cache.layer(call)
        for buffer, new in ((keys, call.key), (values, call.value)):
            if self._is_level:
                buffer[:B, :, self._longest - 1] = new
            else:
                buffer[self._row_ids, :, self._positions] = new
        window = call.window is not None and call.window < self._longest
        mask = self._mask(call.window if window else None)
        past_keys, past_values = (buffer[:B, :, : self._longest].transpose(1, 2) for buffer in (keys, values))
        return attend_dense(call.query[:, None], past_keys, past_values, call, mask)[:, 0]

    def _mask(self, window: int | None) -> Tensor | None:
        if window is None:
            return None if self._seen_BL is None else self._seen_BL[:, None, None]
        columns = torch.arange(self._longest, device=self._positions.device)
        seen = (columns <= self._positions[:, None]) & (columns > self._positions[:, None] - window)
        return seen[:, None, None]
