"""Transports with both halves in one object, one class a medium; receivers elsewhere use `SocketReceiver(address)`."""

from collections.abc import Iterable
from pathlib import Path

from ebbtide.weightsync.base import Load, NamedTensor, PushReport
from ebbtide.weightsync.link import UnixListener
from ebbtide.weightsync.memfd import MemfdBuffer
from ebbtide.weightsync.messages import Adapter
from ebbtide.weightsync.receiver import LoadAdapter, SocketReceiver
from ebbtide.weightsync.sender import SenderOptions, SocketSender

__all__ = ["MemfdTransport", "SocketTransport"]


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
        buffer_bytes = options.bucket_bytes
        super().__init__(SocketSender(UnixListener(folder), lambda _: MemfdBuffer(buffer_bytes), options), options)
