"""Both sides of a push as pure functions, event in, actions out: no I/O, no clock, no tensors.

`sender_step` and `receiver_step` decide the order of things, and nothing else does. The shells in `sender.py` and
`receiver.py` carry the actions out in the order given and report what happened as the next event, so that every
interleaving, loss and death can be tried without a socket.
"""

from ebbtide.weightsync.machine.receiver import ReceiverPhase, ReceiverState, receiver_step
from ebbtide.weightsync.machine.sender import sender_step
from ebbtide.weightsync.machine.sender_state import NUM_HALVES, Link, LinkPhase, SenderPhase, SenderState

__all__ = [
    "NUM_HALVES",
    "Link",
    "LinkPhase",
    "ReceiverPhase",
    "ReceiverState",
    "SenderPhase",
    "SenderState",
    "receiver_step",
    "sender_step",
]
