"""The requests of one `generate` call and what each has so far, on the host; drawing their next tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ebbtide.errors import RolloutError, problem
from ebbtide.rollout.sampling import RowSampling, streams
from ebbtide.types import Completion, GenerateRequest, StopReason

__all__ = ["RequestTable"]

_SPARE_TOKENS = 16  # looked at beside a stop string's own length: a token may be no character at all


class RequestTable:
    """N requests, each known by its place in the call.

    Attributes:
        requests: as they came.
        num_drawn: [N] int64, tokens drawn so far, those of the request's prefix included.
    """

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        context_tokens: int,
        eos_ids: Sequence[int],
        decode: Callable[[list[int]], str] | None,
        device: torch.device,
    ) -> None:
        self.requests = list(requests)
        self.num_drawn = np.zeros(len(requests), dtype=np.int64)
        self._prompt_lengths = np.array([len(request.prompt_ids) for request in requests], dtype=np.int64)
        max_tokens = np.array([request.sampling.max_tokens for request in requests], dtype=np.int64)
        self._limits = np.minimum(max_tokens, context_tokens - self._prompt_lengths)
        shape = (len(requests), int(self._limits.max(initial=0)))
        # The system gives pages of zeros only when they are written to.
        self._tokens = np.zeros(shape, dtype=np.int64)
        self._logprobs = np.zeros(shape, dtype=np.float32)
        self._versions = np.zeros(shape, dtype=np.int32)
        for n, request in enumerate(requests):
            if request.prefix is not None:
                self._continue(n, request.prefix)
        params = [request.sampling for request in requests]
        self._stops = [n for n, item in enumerate(params) if item.stop or item.stop_ids]
        self._decode = decode
        self._device = device
        self._eos = torch.tensor(list(eos_ids), dtype=torch.long, device=device)
        self._ignores_eos = torch.tensor([item.ignore_eos for item in params], dtype=torch.bool, device=device)
        self._streams = streams(torch.tensor([request.seed for request in requests], dtype=torch.long, device=device))
        self._sampling = RowSampling.of(params, device)
        self._drawn_last: tuple[list[int], Tensor, RowSampling] | None = None

    @property
    def most_left(self) -> int:
        """Tokens that some request may still draw."""
        return int((self._limits - self.num_drawn).max())

    def prompt(self, n: int) -> Tensor:
        """What is computed before the next token is drawn: the prompt, and the tokens drawn so far."""
        request, num_drawn = self.requests[n], self.num_drawn[n]
        if not num_drawn:
            return request.prompt_ids
        return torch.cat([request.prompt_ids, torch.from_numpy(self._tokens[n, :num_drawn])])

    def newest(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of each request the token drawn last, and where it stands: [B] int64 both, on the host."""
        index = np.array(numbers)
        num_drawn = self.num_drawn[index]
        positions = self._prompt_lengths[index] + num_drawn - 1
        return torch.from_numpy(self._tokens[index, num_drawn - 1]), torch.from_numpy(positions)

    def draw(self, numbers: list[int], logits_BV: Tensor, version: int) -> dict[int, StopReason]:
        """Append one token to each of B requests; which of them ended, and why.

        Raises:
            RolloutError: logits that are not finite.
        """
        where, sampling = self._columns(numbers)
        index = np.array(numbers)
        num_drawn = self.num_drawn[index]
        drawn_B = torch.from_numpy(num_drawn).to(self._device)
        tokens, logprobs = sampling.draw(logits_BV, self._streams.index_select(0, where), drawn_B)
        is_eos = torch.isin(tokens, self._eos) & ~self._ignores_eos.index_select(0, where)
        host_logprobs = logprobs.cpu().numpy()
        if not np.isfinite(host_logprobs).all():
            rule = f"the logits under the weights of version {version} are not finite"
            raise RolloutError(
                problem("rollout.logits", "nan", rule, "Are the weights finite, and the dtype wide enough?")
            )
        self._tokens[index, num_drawn] = tokens.cpu().numpy()
        self._logprobs[index, num_drawn] = host_logprobs
        self._versions[index, num_drawn] = version
        self.num_drawn[index] += 1
        return self._ended(index, is_eos.cpu().numpy())

    def completions(self, ended: Mapping[int, StopReason]) -> list[Completion]:
        """Of these requests, each with storage of its own."""
        found = []
        for n, reason in ended.items():
            request_id, upto = self.requests[n].request_id, slice(0, self.num_drawn[n])
            tokens, logprobs, versions = (
                torch.from_numpy(part[n, upto].copy()) for part in (self._tokens, self._logprobs, self._versions)
            )
            found.append(Completion(request_id, tokens, logprobs, versions, reason))
        return found

    def _continue(self, n: int, prefix: Completion) -> None:
        """Take over what an interrupted request had produced."""
        num_drawn = len(prefix.token_ids)
        if num_drawn >= self._limits[n]:
            rule = f"the request may draw {self._limits[n]} tokens, and its prefix has all of them"
            name = f"requests[{self.requests[n].request_id}].prefix"
            raise RolloutError(problem(name, num_drawn, rule, "It has ended: take its prefix as the completion"))
        self._tokens[n, :num_drawn] = prefix.token_ids.cpu().numpy()
        self._logprobs[n, :num_drawn] = prefix.logprobs.cpu().numpy()
        self._versions[n, :num_drawn] = prefix.versions.cpu().numpy()
        self.num_drawn[n] = num_drawn

    def _columns(self, numbers: list[int]) -> tuple[Tensor, RowSampling]:
        """The requests' numbers on the device, and their sampling; made anew only when other requests draw."""
        if self._drawn_last is None or self._drawn_last[0] != numbers:
            where = torch.tensor(numbers, device=self._device)
            self._drawn_last = (list(numbers), where, self._sampling.rows(where))
        return self._drawn_last[1:]

    def _ended(self, index: npt.NDArray[Any], is_eos: npt.NDArray[Any]) -> dict[int, StopReason]:
        is_full = self.num_drawn[index] >= self._limits[index]
        ended = dict.fromkeys(index[is_full].tolist(), StopReason.LENGTH)
        if self._stops:
            present = set(index.tolist())
            stopped = [n for n in self._stops if n in present and self._is_stopped(n)]
            ended.update(dict.fromkeys(stopped, StopReason.STOP))
        ended.update(dict.fromkeys(index[is_eos].tolist(), StopReason.EOS))
        return ended

    def _is_stopped(self, n: int) -> bool:
        sampling, num_drawn = self.requests[n].sampling, int(self.num_drawn[n])
        if int(self._tokens[n, num_drawn - 1]) in sampling.stop_ids:
            return True
        if not sampling.stop:
            return False
        assert self._decode is not None, "stop strings need a tokenizer"
        tail = max(len(stop) for stop in sampling.stop) + _SPARE_TOKENS
        text = self._decode(self._tokens[n, max(0, num_drawn - tail) : num_drawn].tolist())
        return any(stop in text for stop in sampling.stop)
