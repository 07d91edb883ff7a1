"""Frames over a socket: between processes of one machine with descriptors, or over TCP to other nodes.

An address is `unix:<path>` or `tcp:<host>:<port>:<token>`; the sender makes it, and receivers are told it.
"""

import errno
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from pathlib import Path
from typing import Protocol

from ebbtide.errors import WeightSyncError, problem
from ebbtide.weightsync.folder import PrivateFolder, remove_if_abandoned
from ebbtide.weightsync.messages import MAX_FRAME_BYTES, Frame, MalformedFrameError, decode, encode

__all__ = ["Incoming", "Link", "Listener", "TcpListener", "UnixListener", "connect", "tidy_up_after", "token_of"]

Incoming = Frame | MalformedFrameError | None
"""A frame, bytes that are none, or None for the end of the connection."""

_MAX_DESCRIPTORS = 4
_BACKLOG = 64
_EXIT_S = 0.05
_MAX_PATH_BYTES = 107  # of a Unix socket's address, by the kernel


class Link(Protocol):
    """One connection."""

    def fileno(self) -> int:
        """For poll."""
        ...

    def send(self, frame: Frame, descriptors: tuple[int, ...], deadline_s: float) -> bool:
        """Put a frame on the connection; False where the peer is gone, or has not read for the whole deadline."""
        ...

    def receive(self) -> list[Incoming]:
        """What has come, without waiting."""
        ...

    def take_descriptors(self) -> list[int]:
        """The descriptors that came since the last call; the caller owns them."""
        ...

    def is_peer_dead(self) -> bool:
        """Whether the peer's process has ended; False where that cannot be known."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class Listener(Protocol):
    """Where receivers connect."""

    @property
    def address(self) -> str:
        """What receivers are told."""
        ...

    @property
    def token(self) -> str:
        """What they must show in their greeting."""
        ...

    def fileno(self) -> int:
        """For poll."""
        ...

    def accept(self) -> Link | None:
        """The next connection; None where there is none, or its peer is another user."""
        ...

    def close(self) -> None:
        """Stop listening, and remove what was made for it."""
        ...


class UnixListener:
    """A SOCK_SEQPACKET socket in a private folder.

    Args:
        base: where the folder is made; the system's temporary folder where None.

    Raises:
        WeightSyncError: the folder's path is too long for a socket.
    """

    token = ""  # the kernel names the peer's user, which is proof enough

    def __init__(self, base: Path | None = None) -> None:
        self._folder = PrivateFolder(base)
        path = str(self._folder.path / "push.sock")
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            self._folder.close()
            rule = f"a socket's path has at most {_MAX_PATH_BYTES} bytes"
            raise WeightSyncError(problem("weightsync.folder", path, rule, "Choose a shorter folder"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(path)
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self.address = f"unix:{path}"

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def accept(self) -> Link | None:
        """The next connection of this user."""
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        if _peer(accepted)[1] != os.geteuid():
            accepted.close()
            return None
        return _UnixLink(accepted)

    def close(self) -> None:
        """Stop listening and remove the folder."""
        self._socket.close()
        self._folder.close()


class TcpListener:
    """A TCP socket for receivers on other nodes; a secret token in the address stands for the peer's user.

    Args:
        host: the interface to listen on, as receivers reach it.
        port: 0 lets the kernel choose.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = socket.create_server((host, port), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.token = secrets.token_hex(16)
        self.address = f"tcp:{host}:{self._socket.getsockname()[1]}:{self.token}"

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def accept(self) -> Link | None:
        """The next connection."""
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        return _TcpLink(accepted)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def connect(address: str, deadline_s: float) -> Link:
    """A connection to a sender.

    Raises:
        WeightSyncError: the address has no such form, nobody listens there, or another user does.
    """
    kind, _, rest = address.partition(":")
    try:
        if kind == "unix":
            return _connect_unix(rest, deadline_s)
        host, port, _token = rest.rsplit(":", 2)
        if kind == "tcp":
            return _TcpLink(socket.create_connection((host, int(port)), timeout=deadline_s))
    except ValueError:
        pass
    except OSError as error:
        tidy_up_after(address)
        rule = f"no sender listens there: {error}"
        raise WeightSyncError(problem("weightsync.address", _shown(address), rule, "Is the trainer alive?")) from error
    rule = "must be unix:<path> or tcp:<host>:<port>:<token>"
    raise WeightSyncError(problem("weightsync.address", _shown(address), rule, "Use the sender's `address`"))


def token_of(address: str) -> str:
    """The token in an address; empty for a Unix socket."""
    return address.rsplit(":", 1)[1] if address.startswith("tcp:") else ""


def tidy_up_after(address: str) -> None:
    """Remove the folder of a sender that is dead; nothing where it lives."""
    if address.startswith("unix:"):
        remove_if_abandoned(Path(address.removeprefix("unix:")).parent)


def _shown(address: str) -> str:
    """The address without its secret."""
    return address.rsplit(":", 1)[0] if address.startswith("tcp:") else address


def _connect_unix(path: str, deadline_s: float) -> Link:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connected.settimeout(deadline_s)
    try:
        connected.connect(path)
    except OSError:
        connected.close()
        raise
    if (uid := _peer(connected)[1]) != os.geteuid():
        connected.close()
        raise WeightSyncError(problem("weightsync.address", path, f"belongs to user {uid}, not to this one"))
    return _UnixLink(connected)


def _peer(connected: socket.socket) -> tuple[int, int]:
    """The peer's process and user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


class _UnixLink:
    """One message, one frame; the kernel keeps their borders."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setblocking(False)
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: Frame, descriptors: tuple[int, ...], deadline_s: float) -> bool:
        data = encode(frame)
        while True:
            try:
                if descriptors:
                    socket.send_fds(self._socket, [data], descriptors)
                else:
                    self._socket.send(data)
                return True
            except BlockingIOError:
                if not _can_write(self._socket, deadline_s):
                    return False
            except OSError:
                return False

    def receive(self) -> list[Incoming]:
        space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * struct.calcsize("i"))
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(MAX_FRAME_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except ConnectionResetError:  # said once, before what the peer had sent; the end comes after that
            return self.receive()
        except OSError:
            return [None]
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                count = len(payload) // struct.calcsize("i")
                self._descriptors += struct.unpack(f"{count}i", payload[: count * struct.calcsize("i")])
        if not data:
            return [None]
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            return [MalformedFrameError("a frame that is too long")]
        return [_decoded(data)]

    def take_descriptors(self) -> list[int]:
        taken, self._descriptors = self._descriptors, []
        return taken

    def is_peer_dead(self) -> bool:
        pid, _ = _peer(self._socket)
        try:
            fd = os.pidfd_open(pid)
        except OSError as error:
            return error.errno == errno.ESRCH
        try:
            # A process closes its sockets a moment before it counts as ended.
            return bool(select.select([fd], [], [], _EXIT_S)[0])
        finally:
            os.close(fd)

    def close(self) -> None:
        self._socket.close()
        for fd in self.take_descriptors():
            os.close(fd)


class _TcpLink:
    """Frames with their length in front, in a byte stream."""

    _LENGTH = struct.Struct("!I")

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._bytes = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: Frame, descriptors: tuple[int, ...], deadline_s: float) -> bool:
        assert not descriptors, "no descriptor crosses a network"
        data = encode(frame)
        rest = memoryview(self._LENGTH.pack(len(data)) + data)
        limit = time.monotonic() + deadline_s
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                if not _can_write(self._socket, limit - time.monotonic()):
                    return False
            except OSError:
                return False
        return True

    def receive(self) -> list[Incoming]:
        is_over = False
        try:
            data = self._socket.recv(MAX_FRAME_BYTES)
            is_over = not data
            self._bytes += data
        except BlockingIOError:
            pass
        except OSError:
            is_over = True
        frames: deque[Incoming] = deque()
        while len(self._bytes) >= self._LENGTH.size:
            (length,) = self._LENGTH.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES:
                self._bytes.clear()
                frames.append(MalformedFrameError(f"a frame of {length} bytes"))
                break
            stop = self._LENGTH.size + length
            if len(self._bytes) < stop:
                break
            frames.append(_decoded(bytes(self._bytes[self._LENGTH.size : stop])))
            del self._bytes[:stop]
        if is_over:
            if self._bytes:
                frames.append(MalformedFrameError("a frame that breaks off"))
                self._bytes.clear()
            frames.append(None)
        return list(frames)

    def take_descriptors(self) -> list[int]:
        return []

    def is_peer_dead(self) -> bool:
        return False

    def close(self) -> None:
        self._socket.close()


def _decoded(data: bytes) -> Frame | MalformedFrameError:
    try:
        return decode(data)
    except MalformedFrameError as error:
        return error


def _can_write(connected: socket.socket, deadline_s: float) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLOUT)
    return bool(poll.poll(max(0, deadline_s * 1000)))
