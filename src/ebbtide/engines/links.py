"""Messages between the stages of a pipeline: a fresh buffer for each, of the size it needs, dead when it is used.

A send does not wait (gloo's would, until the other side asks for it), and keeps its tensor until `settle`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ebbtide.engines.mesh import Ranks
from ebbtide.engines.schedule import Action

__all__ = ["Links", "fresh_buffer"]


@dataclass(slots=True)
class _Sent:
    work: dist.Work
    tensor: Tensor  # stays alive for as long as the work may read it


class Links:
    """This rank's ends of the links to its neighbours."""

    def __init__(self, ranks: Ranks, num_stages: int) -> None:
        assert ranks.mesh is not None, ranks.axes
        self._pp, self._num_stages = ranks.size("pp"), num_stages
        self._device = ranks.device.torch
        # Gloo tells messages apart by tags. Others match them by order alone, so that what can cross on the way
        # between two ranks, the directions and the wrap from the last rank to the first, has a group of its own.
        self._groups = _groups(ranks) if ranks.device.backend != "gloo" else [ranks.mesh.get_group("pp")] * 4
        self._sent: dict[Action, _Sent] = {}
        self._expected: dict[Action, tuple[dist.Work, Tensor]] = {}

    def expect(self, message: Action, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Ask for another stage's message, so that it may come while this rank works; again is no mistake."""
        if message in self._expected:
            return
        buffer = fresh_buffer(shape, dtype, self._device)
        group, tag = self._channel(message)
        work = dist.irecv(buffer, group=group, group_src=message.stage % self._pp, tag=tag)
        assert work is not None, message
        self._expected[message] = (work, buffer)

    def take(self, message: Action) -> Tensor:
        """The message's buffer, which is now the caller's alone."""
        work, buffer = self._expected.pop(message)
        work.wait()
        return buffer

    def send(self, message: Action, tensor: Tensor, to_stage: int) -> None:
        """Start sending the result of an action."""
        tensor = tensor.detach().contiguous()
        group, tag = self._channel(message)
        work = dist.isend(tensor, group=group, group_dst=to_stage % self._pp, tag=tag)
        assert work is not None, message
        self._sent[message] = _Sent(work, tensor)

    def settle(self, message: Action) -> None:
        """Let go of a message that has arrived; does not block, then."""
        self._sent.pop(message).work.wait()

    def finish(self) -> None:
        """Wait until all messages have arrived."""
        while self._sent:
            self.settle(next(iter(self._sent)))
        assert not self._expected, list(self._expected)

    def _channel(self, message: Action) -> tuple[dist.ProcessGroup, int]:
        is_forward = message.kind == "forward"
        is_wrap = message.stage % self._pp == (self._pp - 1 if is_forward else 0)
        tag = 2 * (message.stage + message.microbatch * self._num_stages) + is_forward
        return self._groups[2 * is_forward + is_wrap], tag


def fresh_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where one message is received."""
    return torch.empty(shape, dtype=dtype, device=device)


def _groups(ranks: Ranks) -> list[dist.ProcessGroup]:
    assert ranks.mesh is not None, ranks.axes
    found = []
    for _ in range(4):
        for members in ranks.mesh.mesh.flatten(1).T.tolist():  # every rank takes part in making every group
            group = dist.new_group(members)
            if dist.get_rank() in members:
                found.append(group)
    return found
