"""Transports with both halves in one object, one class a medium; receivers elsewhere use `SocketReceiver(address)`."""

from collections.abc import Iterable
from pathlib import Path

import torch

from ebbtide.weightsync.base import Load, NamedTensor, PushReport
from ebbtide.weightsync.cuda_ipc import CudaBuffer, IpcCalls, TorchCalls
from ebbtide.weightsync.link import TcpListener, UnixListener
from ebbtide.weightsync.memfd import MemfdBuffer
from ebbtide.weightsync.messages import Adapter
from ebbtide.weightsync.process_group import GroupBuffer, GroupStore
from ebbtide.weightsync.receiver import LoadAdapter, SocketReceiver
from ebbtide.weightsync.sender import SenderOptions, SocketSender

__all__ = ["CudaIpcTransport", "MemfdTransport", "ProcessGroupTransport", "SocketTransport"]


class SocketTransport:
    """A sender, and for a rollout in the same process the receiver of rank 0, made when it is first asked for."""

    def __init__(self, sender: SocketSender, options: SenderOptions) -> None:
        self.sender = sender
        self._options = options
        self._receiver: SocketReceiver | None = None

    @property
    def address(self) -> str:
        """What receivers in other processes connect to."""
        return self.sender.address

    async def send(self, weights: Iterable[NamedTensor], version: int) -> PushReport:
        """Push all weights to every receiver."""
        return await self.sender.send(weights, version)

    async def send_adapter(self, weights: Iterable[NamedTensor], version: int, adapter: Adapter) -> PushReport:
        """Push a LoRA adapter's weights alone."""
        return await self.sender.send_adapter(weights, version, adapter)

    async def receive(self, load: Load, version: int, load_adapter: LoadAdapter | None = None) -> None:
        """Take one push in this process, as rank 0."""
        if self._receiver is None:
            options = self._options
            self._receiver = SocketReceiver(self.address, run=options.run, deadline_s=options.deadline_s)
        await self._receiver.receive(load, version, load_adapter)

    async def close(self) -> None:
        """Close both halves, the receiver first."""
        if self._receiver is not None:
            await self._receiver.close()
        await self.sender.close()


class MemfdTransport(SocketTransport):
    """Shared host memory, for processes of one machine.

    Args:
        options: how to push.
        folder: where the socket's private folder is made; the system's temporary folder where None.
    """

    def __init__(self, options: SenderOptions | None = None, folder: Path | None = None) -> None:
        options = options or SenderOptions()
        bucket_bytes = options.bucket_bytes
        super().__init__(SocketSender(UnixListener(folder), lambda _: MemfdBuffer(bucket_bytes), options), options)


class CudaIpcTransport(SocketTransport):
    """Shared device memory, for processes of one machine that see the same device.

    Args:
        options: how to push; `DEVICE_BUCKET_BYTES` is a good size of bucket here.
        device: of the trainer; the current one where None.
        folder: where the socket's private folder is made; the system's temporary folder where None.
        calls: to the driver, where not torch's own.
    """

    def __init__(
        self,
        options: SenderOptions,
        device: torch.device | None = None,
        folder: Path | None = None,
        calls: IpcCalls | None = None,
    ) -> None:
        bucket_bytes, used = options.bucket_bytes, calls or TorchCalls(device)
        super().__init__(SocketSender(UnixListener(folder), lambda _: CudaBuffer(bucket_bytes, used), options), options)


class ProcessGroupTransport(SocketTransport):
    """Broadcast, for rollouts on other nodes.

    Args:
        options: how to push.
        host: of the trainer, as the rollouts' nodes reach it.
        backend: gloo for host memory, nccl for devices.
    """

    def __init__(self, options: SenderOptions | None = None, host: str = "127.0.0.1", backend: str = "gloo") -> None:
        options = options or SenderOptions()
        bucket_bytes, world_size = options.bucket_bytes, options.num_receivers + 1
        store = GroupStore(host, world_size, backend, options.deadline_s)
        sender = SocketSender(
            TcpListener(host), lambda generation: GroupBuffer(bucket_bytes, generation, store), options
        )
        super().__init__(sender, options)
