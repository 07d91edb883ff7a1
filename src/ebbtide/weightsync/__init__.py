"""Weights from a trainer to its rollouts: a protocol that cannot hang, leak or lie. Usable alone."""

from ebbtide.weightsync.base import (
    DEFAULT_DEADLINE_S,
    Load,
    NamedTensor,
    PushReport,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)
from ebbtide.weightsync.inprocess import InProcessTransport
from ebbtide.weightsync.push import TakesWeights, push

__all__ = [
    "DEFAULT_DEADLINE_S",
    "InProcessTransport",
    "Load",
    "NamedTensor",
    "PushReport",
    "TakesWeights",
    "WeightReceiver",
    "WeightSender",
    "WeightTransport",
    "push",
]
