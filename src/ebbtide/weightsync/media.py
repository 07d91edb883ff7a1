"""From a plan to the mapping of its buffer; a medium's module loads when a sender first offers it."""

import os
from collections.abc import Sequence

from ebbtide.weightsync.medium import Mapping
from ebbtide.weightsync.messages import CudaHandle, GroupHandle, MemfdHandle, Plan

__all__ = ["open_mapping"]


def open_mapping(plan: Plan, rank: int, descriptors: Sequence[int], deadline_s: float) -> Mapping:
    """The receiver's end of the plan's buffer.

    Args:
        plan: with a buffer's handle.
        rank: of the receiver.
        descriptors: that came with the plan; closed here, whatever happens.
        deadline_s: for media whose mapping takes both sides.
    """
    try:
        match plan.buffer:
            case MemfdHandle():
                from ebbtide.weightsync.memfd import MemfdMapping

                return MemfdMapping(plan.buffer, plan.bucket_bytes, descriptors)
            case CudaHandle():
                from ebbtide.weightsync.cuda_ipc import CudaMapping

                return CudaMapping(plan.buffer, plan.bucket_bytes)
            case GroupHandle():
                from ebbtide.weightsync.process_group import GroupMapping

                return GroupMapping(plan.buffer, plan.bucket_bytes, rank, deadline_s)
            case None:
                raise AssertionError("a plan without a buffer is not to be mapped")
    finally:
        for fd in descriptors:
            os.close(fd)
