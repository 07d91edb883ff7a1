"""Weights from a trainer to its rollouts: a protocol that cannot hang, leak or lie.

Usable alone, by any trainer and any rollout process: the trainer makes a transport and hands its `address` to the
rollout's workers, each of which makes a `SocketReceiver`. In one process `InProcessTransport` is both halves.
"""

from ebbtide.weightsync.base import (
    DEFAULT_DEADLINE_S,
    Addressed,
    Load,
    NamedTensor,
    PushReport,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)
from ebbtide.weightsync.buckets import LoadsSlices
from ebbtide.weightsync.cuda_ipc import DEVICE_BUCKET_BYTES
from ebbtide.weightsync.inprocess import InProcessTransport
from ebbtide.weightsync.load import CopyInto
from ebbtide.weightsync.messages import Adapter
from ebbtide.weightsync.push import TakesWeights, push
from ebbtide.weightsync.receiver import LoadAdapter, SocketReceiver
from ebbtide.weightsync.sender import HOST_BUCKET_BYTES, SenderOptions, SocketSender
from ebbtide.weightsync.transports import CudaIpcTransport, MemfdTransport, ProcessGroupTransport, SocketTransport

__all__ = [
    "DEFAULT_DEADLINE_S",
    "DEVICE_BUCKET_BYTES",
    "HOST_BUCKET_BYTES",
    "Adapter",
    "Addressed",
    "CopyInto",
    "CudaIpcTransport",
    "InProcessTransport",
    "Load",
    "LoadAdapter",
    "LoadsSlices",
    "MemfdTransport",
    "NamedTensor",
    "ProcessGroupTransport",
    "PushReport",
    "SenderOptions",
    "SocketReceiver",
    "SocketSender",
    "SocketTransport",
    "TakesWeights",
    "WeightReceiver",
    "WeightSender",
    "WeightTransport",
    "push",
]
