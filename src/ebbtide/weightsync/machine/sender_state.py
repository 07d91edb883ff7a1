"""What the sender knows of a push and of its receivers."""

from collections.abc import Callable, Mapping
from enum import Enum, auto

import msgspec
from msgspec.structs import replace

__all__ = ["NUM_HALVES", "Link", "LinkPhase", "SenderPhase", "SenderState"]

NUM_HALVES = 2
"""Half-buffers: bucket i + 1 is filled while bucket i is loaded."""


class LinkPhase(Enum):
    """Where one receiver stands, as the sender sees it."""

    NEW = auto()  # connected, not yet greeted
    IDLE = auto()  # greeted, outside a push
    READY = auto()  # waits for its plan
    LOADING = auto()  # has its plan
    RELEASED = auto()  # has let go of every view
    LEAVING = auto()  # told of a failure or of the end; it may have a buffer mapped until its link is gone


class Link(msgspec.Struct, frozen=True):
    """One receiver.

    Attributes:
        rank: which receiver; None before its greeting.
        wanted: the version it waits for.
        holds: the version of its weights; None where torn or unknown.
        num_loaded: buckets of this push that it has acknowledged.
        maps: the generation of the buffer that it may have mapped; None for none.
    """

    phase: LinkPhase = LinkPhase.NEW
    rank: int | None = None
    wanted: int = -1
    holds: int | None = None
    num_loaded: int = 0
    maps: int | None = None


class SenderPhase(Enum):
    """Where the push stands."""

    IDLE = auto()
    GATHERING = auto()  # until every receiver waits
    PLANNING = auto()  # the shell chooses what to push
    PUSHING = auto()
    CLOSING = auto()  # the version counts; the buffer is being given back


class SenderState(msgspec.Struct, frozen=True):
    """The sender.

    A struct, like the frames, because a bucket takes several new states and theirs are cheap.

    Attributes:
        run: names the run; a receiver of another is not let in.
        num_receivers: ranks 0 to num_receivers - 1 take part in every push.
        keeps_buffer: the buffer lives on between pushes.
        token: proves that a receiver was told the address.
        pid: of this process, for the greeting.
        phase, version: the push under way.
        links: the receivers, by the shell's number for their connection.
        generation: of the current buffer; a failed push ends it.
        has_buffer: the shell was asked for the current generation and not yet told to free it.
        num_sent, is_filling, is_last_sent: how far the buckets are.
        digest: over the buckets sent so far.
        refusals: why some were not let in, for the error of a push that waited in vain.
        progress: grows with all that brings the push nearer to its end; the deadline counts from its last change.
    """

    run: str
    num_receivers: int
    keeps_buffer: bool = True
    token: str = ""
    pid: int = 0
    phase: SenderPhase = SenderPhase.IDLE
    version: int = -1
    links: Mapping[int, Link] = {}
    generation: int = 0
    has_buffer: bool = False
    num_sent: int = 0
    is_filling: bool = False
    is_last_sent: bool = False
    digest: int | None = None
    refusals: tuple[str, ...] = ()
    progress: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether a push is under way."""
        return self.phase is not SenderPhase.IDLE

    @property
    def num_loaded_by_all(self) -> int:
        """Buckets of this push that no receiver reads any more."""
        in_push = (LinkPhase.LOADING, LinkPhase.RELEASED)
        return min((link.num_loaded for link in self.links.values() if link.phase in in_push), default=0)

    def members(self, phase: LinkPhase) -> list[int]:
        """The links in this phase."""
        return [number for number, link in self.links.items() if link.phase is phase]

    def has_rank(self, rank: int | None) -> bool:
        """Whether a receiver of this rank is here."""
        return any(link.rank == rank and link.phase is not LinkPhase.LEAVING for link in self.links.values())

    def with_link(self, number: int, link: Link) -> "SenderState":
        """The state with one link in another condition."""
        return replace(self, links={**self.links, number: link})

    def without_link(self, number: int) -> "SenderState":
        """The state after a link has ended."""
        return replace(self, links={other: link for other, link in self.links.items() if other != number})

    def awaited(self) -> str:
        """Whom the push is waiting for, for the error at its deadline."""
        by_rank = {link.rank: link for link in self.links.values() if link.phase is not LinkPhase.LEAVING}

        def ranks_where(is_awaited: Callable[[Link], bool]) -> list[int]:
            return [rank for rank in range(self.num_receivers) if is_awaited(by_rank.get(rank, Link()))]

        if self.phase is SenderPhase.GATHERING:
            missing = ranks_where(lambda link: link.phase is not LinkPhase.READY)
            refused = f"; sent off: {'; '.join(self.refusals)}" if self.refusals else ""
            return f"receivers {missing} of {self.num_receivers} have not come{refused}"
        if self.phase is SenderPhase.CLOSING:
            open_still = ranks_where(lambda link: link.phase is LinkPhase.RELEASED)
            return f"receivers {open_still} did not close their mapping"
        num_due = self.num_sent + self.is_last_sent  # after the last bucket a release is due
        late = ranks_where(lambda link: link.phase is LinkPhase.LOADING and link.num_loaded < num_due)
        return f"receivers {late} were silent for the whole deadline, {self.num_sent} buckets sent"
