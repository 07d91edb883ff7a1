"""The machines' vocabulary: what can happen to a side, and what it can be told to do."""

from dataclasses import dataclass

from ebbtide.weightsync.messages import Bucket, Frame, Plan

__all__ = [
    "Arrived",
    "Broke",
    "Connected",
    "Died",
    "Drop",
    "Dropped",
    "Expired",
    "Fail",
    "Fill",
    "Filled",
    "Finish",
    "Free",
    "LoadBucket",
    "MakePlan",
    "Malformed",
    "MapBuffer",
    "Mapped",
    "Planned",
    "Quit",
    "Recycle",
    "Send",
    "Start",
    "Strand",
    "Unmap",
    "Unmapped",
]

# Events of both sides. A receiver has one link, number 0.


@dataclass(frozen=True, slots=True)
class Start:
    """`send` or `receive` was called."""

    version: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A frame came in."""

    link: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes came in that are no frame."""

    link: int
    text: str


@dataclass(frozen=True, slots=True)
class Died:
    """The other end of the link is gone; `is_dead` where its process is known to be, and will not come back."""

    link: int
    is_dead: bool = False


@dataclass(frozen=True, slots=True)
class Expired:
    """Nothing has moved for a whole deadline."""


@dataclass(frozen=True, slots=True)
class Broke:
    """This side's own part failed: its weights, its load, its device, or its caller left."""

    kind: str
    text: str


# Events of the sender.


@dataclass(frozen=True, slots=True)
class Connected:
    """A new link was accepted."""

    link: int


@dataclass(frozen=True, slots=True)
class Planned:
    """The shell has chosen what to push; the plan has no handle in it yet."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Filled:
    """The bucket's half-buffer is written."""

    bucket: Bucket


@dataclass(frozen=True, slots=True)
class Quit:
    """`close` was called."""


# Events of the receiver.


@dataclass(frozen=True, slots=True)
class Mapped:
    """The buffer of the plan can be read."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """`load` has returned for the bucket, the device is idle, and no view of the bucket is alive."""

    index: int


@dataclass(frozen=True, slots=True)
class Unmapped:
    """The mapping is closed; not so where views of it are alive still."""

    is_closed: bool


# Actions of both sides.


@dataclass(frozen=True, slots=True)
class Send:
    """Put a frame on a link; a plan that hands the buffer over is given its handle on the way."""

    link: int
    frame: Frame
    hands_over: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the link."""

    link: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The call returns."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The call raises."""

    text: str


# Actions of the sender.


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Every receiver waits: choose what to push; `holds` has the version of each one's weights, by rank."""

    generation: int
    holds: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """Write the next bucket into its half-buffer, which nobody reads."""

    index: int


@dataclass(frozen=True, slots=True)
class Recycle:
    """Nobody reads the half-buffer of this bucket any more."""

    index: int


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody has the buffer of this generation mapped any more."""

    generation: int


# Actions of the receiver.


@dataclass(frozen=True, slots=True)
class MapBuffer:
    """Map the buffer of this plan."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class LoadBucket:
    """Check the bucket, load it, synchronise, drop every view, in this order."""

    bucket: Bucket


@dataclass(frozen=True, slots=True)
class Unmap:
    """Drop every view and close the mapping."""


@dataclass(frozen=True, slots=True)
class Strand:
    """Set mapping and link aside, open: views are alive, and the sender must not take the buffer for free."""
