import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ebbtide.weightsync.link as link_module
from ebbtide.errors import WeightSyncError
from ebbtide.weightsync.folder import PrivateFolder, remove_if_abandoned
from ebbtide.weightsync.link import Incoming, Link, Listener, TcpListener, UnixListener, connect, token_of
from ebbtide.weightsync.messages import Failed, Loaded, MalformedFrameError, encode


def connected(listener: Listener) -> tuple[Link, Link]:
    there = connect(listener.address, 5)
    for _ in range(1000):
        if (here := listener.accept()) is not None:
            return here, there
    raise AssertionError("nobody was accepted")


def receive(link: Link, count: int) -> list[Incoming]:
    found: list[Incoming] = []
    for _ in range(100_000):
        found += link.receive()
        if len(found) >= count:
            return found
    raise AssertionError(f"only {found} came")


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Link, Link]]:
    listener: Listener = UnixListener(tmp_path) if request.param == "unix" else TcpListener()
    here, there = connected(listener)
    yield here, there
    here.close()
    there.close()
    listener.close()


def raw(link: Link) -> socket.socket:
    return link._socket  # type: ignore[attr-defined, no-any-return]


def test_frames_arrive_in_order_and_the_end_after_them(ends: tuple[Link, Link]) -> None:
    here, there = ends
    assert here.receive() == []
    for index in range(3):
        assert there.send(Loaded(index), (), 1)
    there.close()
    assert receive(here, 4) == [Loaded(0), Loaded(1), Loaded(2), None]


def test_last_words_are_heard_though_ours_were_never_read(ends: tuple[Link, Link]) -> None:
    """The kernel tells of a connection reset before it hands out what had come before."""
    here, there = ends
    here.send(Loaded(0), (), 1)
    there.send(Failed("load", "boom"), (), 1)
    raw(there).shutdown(socket.SHUT_WR)
    assert receive(here, 2)[0] == Failed("load", "boom")
    assert here.send(Loaded(1), (), 1) in (True, False)


def test_garbage_is_told_from_a_frame(ends: tuple[Link, Link]) -> None:
    here, there = ends
    data = b"\xc1 no frame"
    is_tcp = raw(there).family != socket.AF_UNIX
    raw(there).send(struct.pack("!I", len(data)) + data if is_tcp else data)
    [item] = receive(here, 1)
    assert isinstance(item, MalformedFrameError)


def test_a_peer_that_does_not_read_is_given_up_at_the_deadline(ends: tuple[Link, Link]) -> None:
    here, _ = ends
    frame = Failed("load", "x" * 8000)
    assert not all(here.send(frame, (), 0.05) for _ in range(10_000))


def test_a_frame_that_is_too_long_or_breaks_off_is_malformed() -> None:
    listener = TcpListener()
    for data in (struct.pack("!I", 1 << 30), struct.pack("!I", 10) + b"abc"):
        here, there = connected(listener)
        raw(there).send(data)
        there.close()
        items = receive(here, 2)
        assert isinstance(items[0], MalformedFrameError)
        assert items[-1] is None
        here.close()
    listener.close()


def test_descriptors_travel_and_surplus_ones_do_not_leak(tmp_path: Path) -> None:
    listener = UnixListener(tmp_path)
    here, there = connected(listener)
    before = len(list(Path("/proc/self/fd").iterdir()))
    fd = os.memfd_create("some")
    os.write(fd, b"hello")
    there.send(Loaded(0), (fd,), 1)
    assert receive(here, 1) == [Loaded(0)]
    [copy] = here.take_descriptors()
    assert os.pread(copy, 5, 0) == b"hello"
    os.close(copy)
    socket.send_fds(raw(there), [encode(Loaded(1))], [fd] * 9)
    assert isinstance(receive(here, 1)[0], MalformedFrameError)
    os.close(fd)
    here.close()
    there.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 2
    listener.close()


def test_the_folder_is_private_and_another_user_is_not_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = UnixListener(tmp_path)
    folder = Path(listener.address.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setattr(link_module, "_peer", lambda _: (1, os.geteuid() + 1))
    with pytest.raises(WeightSyncError, match="belongs to user"):
        connect(listener.address, 1)
    assert listener.accept() is None
    listener.close()
    assert not folder.exists()


def test_the_token_is_in_the_address_and_not_in_errors() -> None:
    listener = TcpListener()
    assert token_of(listener.address) == listener.token
    assert len(listener.token) == 32
    listener.close()
    with pytest.raises(WeightSyncError, match="no sender listens there") as caught:
        connect(listener.address, 1)
    assert listener.token not in str(caught.value)


@pytest.mark.parametrize("address", ["", "tcp:", "tcp:host:port:token", "http://host", "unix"])
def test_an_address_of_another_form_is_an_error(address: str) -> None:
    with pytest.raises(WeightSyncError, match=r"weightsync\.address="):
        connect(address, 1)


def test_a_path_too_long_for_a_socket_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(WeightSyncError, match="Choose a shorter folder"):
        UnixListener(deep)
    assert list(deep.iterdir()) == []


# Folders of senders that died.


def abandoned(base: Path, make: Callable[[Path], PrivateFolder] = PrivateFolder) -> Path:
    """A folder whose owner has gone without closing it."""
    folder = make(base)
    (folder.path / "push.sock").touch()
    os.close(folder._fd)
    return folder.path


def test_the_next_sender_removes_what_a_dead_one_left_and_spares_the_living(tmp_path: Path) -> None:
    living, dead = PrivateFolder(tmp_path), abandoned(tmp_path)
    other = tmp_path / "ebbtide-push-not-ours"
    other.mkdir(mode=0o755)
    mine = PrivateFolder(tmp_path)
    assert not dead.exists()
    assert living.path.exists()
    assert other.exists()
    mine.close()
    mine.close()
    living.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ebbtide-push-not-ours"]


def test_a_receiver_that_finds_nobody_removes_the_folder(tmp_path: Path) -> None:
    dead = abandoned(tmp_path)
    with pytest.raises(WeightSyncError, match="no sender listens there"):
        connect(f"unix:{dead}/push.sock", 1)
    assert not dead.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert not remove_if_abandoned(tmp_path / "link")
    assert (tmp_path / "target").exists()
