"""The accelerator of the calling process, whatever its kind; nothing happens where none is in use."""

import torch

__all__ = ["current_index", "synchronize", "use"]


def current_index() -> int | None:
    """The device that this thread works on; None where the process has not touched an accelerator."""
    return torch.accelerator.current_device_index() if _is_in_use() else None


def use(index: int | None) -> None:
    """Work on this device in this thread: threads do not inherit it."""
    if index is not None:
        torch.accelerator.set_device_index(index)


def synchronize() -> None:
    """Wait for everything queued on the current device."""
    if _is_in_use():
        torch.accelerator.synchronize()


def _is_in_use() -> bool:
    kind = torch.accelerator.current_accelerator()
    return kind is not None and bool(torch.get_device_module(kind).is_initialized())
