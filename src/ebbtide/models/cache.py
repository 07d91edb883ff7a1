"""Keys and values of generation, and the attention plans that fill and read them.

A row of the cache belongs to one running request. A prefill attends within packed prompts and copies each prompt's
keys and values to every row that shares it; a decode step appends one token a row.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ebbtide.models.attention import AttentionCall, PackedAttention, attend_heads

__all__ = ["DecodeAttention", "KeyValueCache", "PrefillAttention"]


class KeyValueCache:
    """Buffers [rows, Hkv, tokens, d] a layer, made when a layer first writes; only the tokens grow."""

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

    def reserve(self, num_tokens: int) -> None:
        """Room for this many tokens a row; what is there stays."""
        if num_tokens <= self.num_tokens:
            return
        self.num_tokens = max(num_tokens, self.num_tokens * 3 // 2)
        for layer, buffers in self._layers.items():
            keys, values = (F.pad(buffer, (0, 0, 0, self.num_tokens - buffer.shape[2])) for buffer in buffers)
            self._layers[layer] = (keys, values)

    def move(self, rows: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over others."""
        if not rows or not self._layers:
            return
        device = next(iter(self._layers.values()))[0].device
        source, target = torch.tensor([rows, targets], device=device)
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer.index_copy_(0, target, buffer.index_select(0, source))


class PrefillAttention:
    """Attention within packed prompts, whose keys and values go to cache rows."""

    def __init__(self, cache: KeyValueCache, lengths: Sequence[int], owners: Sequence[int], first_row: int = 0) -> None:
        """Plan for packed prompts of these lengths; row `first_row + i` takes what prompt `owners[i]` leaves."""
        self.calls = 0
        self._cache = cache
        self._lengths = list(lengths)
        self._owners = list(owners)
        self._rows = slice(first_row, first_row + len(owners))
        self._longest = max(lengths)
        self._packed: PackedAttention | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        """[T, Hq, d]."""
        self.calls += 1
        if self._packed is None:
            self._packed = PackedAttention(torch.tensor([0, *self._lengths], device=call.key.device).cumsum(0).int())
            self._source = self._row_sources().to(call.key.device)
        for buffer, new in zip(self._cache.layer(call), (call.key, call.value), strict=True):
            rows = new.index_select(0, self._source).unflatten(0, (len(self._owners), self._longest))
            buffer[self._rows, :, : self._longest] = rows.transpose(1, 2)
        return self._packed.attend(call)

    def _row_sources(self) -> Tensor:
        """[rows * longest], the packed token of each place; beyond a prompt its last one, which is masked later."""
        lengths, owners = torch.tensor(self._lengths), torch.tensor(self._owners)
        starts = lengths.cumsum(0) - lengths
        within = torch.minimum(torch.arange(self._longest), (lengths - 1)[owners][:, None])
        return (starts[owners][:, None] + within).flatten()


class DecodeAttention:
    """One new token a row, over the row's own past.

    Rows whose pasts and new tokens are equal may be computed once: the call then has one token for each of U distinct
    rows, and what it leaves goes to every row.
    """

    def __init__(self, cache: KeyValueCache, positions: Tensor, twins: tuple[Tensor, Tensor] | None = None) -> None:
        """Plan for rows 0, 1, ... of the cache.

        Args:
            cache: holds what stands before the new tokens.
            positions: [B] int64 on the host, where each row's new token stands.
            twins: [U] int64, a row for each distinct one, and [B] int64, which of them each row equals; on the
                device. None if all rows are computed.
        """
        self.calls = 0
        self._twins = twins
        self._cache = cache
        self._positions = positions
        self._longest = int(positions.max()) + 1
        self._is_level = int(positions.min()) + 1 == self._longest
        self._masks: dict[int | None, Tensor] = {}
        self._moved: tuple[Tensor, Tensor] | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        """[B, Hq, d]."""
        self.calls += 1
        B, longest = len(self._positions), self._longest
        keys, values = (buffer.narrow(0, 0, B) for buffer in self._cache.layer(call))
        new_keys, new_values = self._spread(call.key), self._spread(call.value)
        if self._is_level:
            keys.select(2, longest - 1).copy_(new_keys)
            values.select(2, longest - 1).copy_(new_values)
        else:
            rows, columns = self._places(call.key.device)
            keys[rows, :, columns] = new_keys
            values[rows, :, columns] = new_values
        mask = self._mask(call.window if call.window is not None and call.window < longest else None, call.key.device)
        past_keys, past_values = keys.narrow(2, 0, longest), values.narrow(2, 0, longest)
        if self._twins is not None:
            past_keys, past_values = (part.index_select(0, self._twins[0]) for part in (past_keys, past_values))
            mask = None if mask is None else mask.index_select(0, self._twins[0])
        return attend_heads(call.query[:, :, None], past_keys, past_values, call, mask).squeeze(2)

    def _spread(self, new: Tensor) -> Tensor:
        """[B, Hkv, d], one for each row, from those of the distinct rows."""
        return new if self._twins is None else new.index_select(0, self._twins[1])

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and column of each new token."""
        if self._moved is None:
            self._moved = (torch.arange(len(self._positions), device=device), self._positions.to(device))
        return self._moved

    def _mask(self, window: int | None, device: torch.device) -> Tensor | None:
        if self._is_level and window is None:
            return None
        if window not in self._masks:
            _, positions = self._places(device)
            columns = torch.arange(self._longest, device=device)
            seen = columns <= positions[:, None]
            self._masks[window] = (seen if window is None else seen & (columns > positions[:, None] - window))[
                :, None, None
            ]
        return self._masks[window]
