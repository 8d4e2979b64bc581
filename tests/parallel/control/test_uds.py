"""Unix sockets: where they may lie, who may connect, whole frames in and out, and a writer that never blocks."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel.control.errors import FrameError
from parallel.control.transport import uds
from parallel.control.transport.uds import (
    MAX_PATH,
    PACKET,
    PacketSocket,
    SocketPlaceError,
    accept,
    connect,
    listen,
    private_directory,
    socket_path,
)
from parallel.control.transport.uds_links import UdsFollowerLink, UdsLeaderLink
from parallel.control.wire.frames import HEADER_SIZE, MAX_PAYLOAD, Codec, Kind
from tests.parallel.control.ranks import PATIENCE_S, short_folder

CODEC = Codec(1, 0, 4)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def pair() -> tuple[PacketSocket, PacketSocket]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return PacketSocket(a), PacketSocket(b)


@pytest.fixture
def ends() -> Iterator[tuple[PacketSocket, PacketSocket]]:
    a, b = pair()
    yield a, b
    a.close()
    b.close()


def record(size: int) -> bytes:
    return CODEC.encode(Kind.RECORD, 1, 7, payload=bytes(range(256)) * (size // 256) + b"!" * (size % 256))


# ---- places ----


def test_the_directory_is_made_private(tmp_path: Path) -> None:
    private_directory(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    private_directory(tmp_path / "a" / "b")


def test_a_directory_that_is_not_private_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_others = tmp_path / "open"
    open_to_others.mkdir()
    open_to_others.chmod(0o755)
    with pytest.raises(SocketPlaceError, match=f"mode 0755, others may enter: chmod 700 {open_to_others}"):
        private_directory(open_to_others)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(SocketPlaceError, match=r"is not a directory .or is a link.: remove it"):
        private_directory(link)
    (tmp_path / "file").touch()
    with pytest.raises(SocketPlaceError, match=r"/file/mine cannot be made: Not a directory"):
        private_directory(tmp_path / "file" / "mine")
    private_directory(tmp_path / "mine")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SocketPlaceError, match=r"belongs to user .*, we are 12345"):
        private_directory(tmp_path / "mine")


def test_a_path_that_is_too_long_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    longest = tmp_path / ("d" * (MAX_PATH - len(os.fsencode(tmp_path)) - 1 - len("/0000000000000001.0.node0")))
    assert len(os.fsencode(socket_path(longest, 1, 0, "node0"))) == MAX_PATH
    listen(socket_path(longest, 1, 0, "node0")).close()
    with pytest.raises(SocketPlaceError, match="has 108 bytes, a Unix socket allows 107: choose a shorter directory"):
        socket_path(longest.with_name(longest.name + "d"), 1, 0, "node0")


def test_the_socket_is_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "private" / "socket"
    with listen(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_dead_socket_is_cleaned_away_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "private" / "socket"
    listen(path).close()
    assert path.exists()
    with listen(path), pytest.raises(SocketPlaceError, match="in use by a live process"):
        listen(path)
    path.unlink()
    path.write_text("not a socket")
    with pytest.raises(SocketPlaceError, match="exists and is no socket: remove it"):
        listen(path)


def test_sockets_of_other_jobs_that_were_killed_are_cleaned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "private"
    with listen(folder / "live"), listen(folder / "mine"):
        listen(folder / "dead").close()
        (folder / "file").write_text("not a socket")
        listen(folder / "another").close()
        assert len(list(folder.iterdir())) == 5, "they may be young: bound, and not listened on yet"
        monkeypatch.setattr(uds, "_OLD_SECONDS", -1.0)
        listen(folder / "dead").close()
        assert {path.name for path in folder.iterdir()} == {"live", "mine", "file", "dead"}


def test_another_user_is_turned_away_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "private" / "socket"
    with listen(path) as listener:
        stranger = connect(path, time.monotonic() + PATIENCE_S)
        assert uds.peer_uid(stranger.socket) == os.geteuid()
        monkeypatch.setattr(uds, "peer_uid", lambda connection: os.geteuid() + 1)
        assert accept(listener) is None
        with pytest.raises(EOFError):
            stranger.receive()
        stranger.close()
        with pytest.raises(SocketPlaceError, match=r"belongs to user .* refused"):
            connect(path, time.monotonic() + PATIENCE_S)


def test_connecting_to_nobody_ends_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"nobody listens at control socket .*/nothing"):
        connect(tmp_path / "nothing", time.monotonic() + 0.02)


# ---- frames ----


@pytest.mark.parametrize(
    "size",
    [0, 1, PACKET - HEADER_SIZE - 1, PACKET - HEADER_SIZE, PACKET - HEADER_SIZE + 1, 3 * PACKET - HEADER_SIZE, 1 << 20],
)
def test_frames_of_any_size_come_back_whole(ends: tuple[PacketSocket, PacketSocket], size: int) -> None:
    a, b = ends
    frame = record(size)
    a.send(frame)
    a.send(frame)
    received: list[bytes] = []
    while len(received) < 2:
        a.pump()
        got = b.receive()
        if got is not None:
            received.append(got)
    assert received == [frame, frame]
    assert b.receive() is None
    assert CODEC.decode(frame).payload == frame[HEADER_SIZE:]


def test_a_slow_reader_never_blocks_the_writer(ends: tuple[PacketSocket, PacketSocket]) -> None:
    a, b = ends
    frames = [record(300_000) for _ in range(100)]
    for number, frame in enumerate(frames):
        a.send(frame, number)
    first = a.queue[0][0]
    assert 0 < first < 100
    received: list[bytes] = []
    while len(received) < 100:
        got = b.receive()
        if got is None:
            a.pump()
        else:
            received.append(got)
    assert received == frames
    assert not a.queue


def test_what_was_sent_before_the_end_still_arrives(ends: tuple[PacketSocket, PacketSocket]) -> None:
    """Also when the end that closed had something unread: the kernel then resets, and the words still lie there."""
    a, b = ends
    b.send(b"unread")
    a.send(b"last words")
    a.close()
    b.send(b"too late")
    assert b.receive() == b"last words"
    with pytest.raises(EOFError):
        b.receive()
    with pytest.raises(EOFError):
        b.receive()
    assert b.closed
    assert not b.queue


def test_a_packet_larger_than_any_is_refused_not_cut(ends: tuple[PacketSocket, PacketSocket]) -> None:
    a, b = ends
    a.socket.send(bytes(PACKET + 1))
    with pytest.raises(FrameError, match=f"a packet of {PACKET + 1} bytes, the limit is {PACKET}"):
        b.receive()


def test_frames_of_several_packets_are_bounded_and_complete(ends: tuple[PacketSocket, PacketSocket]) -> None:
    a, b = ends
    a.socket.send(bytes(PACKET))
    with pytest.raises(FrameError, match="a frame cannot start with"):
        b.receive()
    huge = bytearray(record(PACKET)[:PACKET])
    huge[40:44] = (MAX_PAYLOAD + 1).to_bytes(4, "little")
    a.socket.send(huge)
    with pytest.raises(FrameError, match="refused at length"):
        b.receive()
    frame = record(2 * PACKET)
    a.socket.send(frame[:PACKET])
    a.socket.send(frame[PACKET : 2 * PACKET - 5])
    with pytest.raises(FrameError, match=f"a part of {PACKET - 5} bytes inside a frame"):
        b.receive()
    a.send(b"and then")
    assert b.receive() == b"and then"
    short = bytearray(record(PACKET)[:PACKET])
    short[40:44] = (5).to_bytes(4, "little")
    a.socket.send(short)
    with pytest.raises(FrameError, match="refused at length: 5 said"):
        CODEC.decode(b.receive() or b"")


# ---- links ----


def test_a_follower_waits_spinning_or_sleeping() -> None:
    for spin in (0.0, 0.5):
        a, b = pair()
        link = UdsFollowerLink(b, spin)
        assert link.receive(0.0) is None
        assert link.receive(0.01) is None
        a.send(b"x")
        assert link.receive(5.0) == b"x"
        b.send(b"unread")
        a.send(b"y")
        assert link.receive(0.0) == b"y"
        a.close()
        with pytest.raises(EOFError):
            link.receive(5.0)
        link.close()


@pytest.mark.parametrize("spin", [0.0, 0.02])
def test_a_follower_that_waits_goes_on_sending(spin: float) -> None:
    a, b = pair()
    link = UdsFollowerLink(b, spin)
    frames = [record(300_000) for _ in range(100)]
    for frame in frames:
        link.send(frame)
    received: list[bytes] = []
    waits = 0
    while b.queue and waits < 1000:
        received += iter(a.receive, None)
        assert link.receive(0.02) is None
        waits += 1
    received += iter(a.receive, None)
    assert received == frames
    link.close()
    a.close()


def test_a_leader_hears_everybody_and_misses_nobody_who_is_gone() -> None:
    here, there = {}, {}
    for rank in (1, 2, 3):
        here[rank], there[rank] = pair()
    link = UdsLeaderLink(here)
    assert link.ranks == (1, 2, 3)
    assert link.receive() == []
    assert link.broadcast(b"all") == 1
    link.send(2, b"two")
    assert [there[rank].receive() for rank in (1, 2, 3)] == [b"all"] * 3
    assert [there[rank].receive() for rank in (1, 2, 3)] == [None, b"two", None]
    there[3].send(b"a")
    there[1].send(b"b")
    there[1].send(b"c")
    there[2].close()
    assert sorted(link.receive(1.0), key=repr) == sorted([(1, b"b"), (1, b"c"), (2, None), (3, b"a")], key=repr)
    assert link.receive() == []
    link.send(2, b"nobody")
    there[3].socket.send(bytes(PACKET + 1))
    ((rank, what),) = link.receive(1.0)
    assert rank == 3
    assert isinstance(what, FrameError)
    link.close()
    for end in there.values():
        end.close()


def test_a_rank_that_says_much_is_heard_in_order_and_keeps_nobody_waiting() -> None:
    here, there = {}, {}
    for rank in (1, 2):
        here[rank], there[rank] = pair()
    link = UdsLeaderLink(here)
    much = [number.to_bytes(2, "little") for number in range(1200)]
    for frame in much:
        there[1].send(frame)
    there[2].send(b"one word")
    heard = link.receive()
    assert (2, b"one word") in heard[:2]
    assert len(heard) <= 1026  # how many of them the kernel holds is up to the machine
    there[1].pump()
    while more := link.receive():
        heard += more
        there[1].pump()
    assert [frame for rank, frame in heard if rank == 1] == much
    link.close()
    for end in there.values():
        end.close()


def test_a_leader_does_not_wait_for_the_rest_of_a_frame() -> None:
    """However steadily it comes: the next part is here whenever one was read."""
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    frame = record(5 * PACKET)
    parts = [frame[at : at + PACKET] for at in range(0, len(frame), PACKET)]

    class Trickle(PacketSocket):
        def receive(self, until: float | None = None) -> bytes | None:
            whole = super().receive(until)
            if parts:
                b.send(parts.pop(0))
            return whole

    link = UdsLeaderLink({1: Trickle(a)})
    b.send(parts.pop(0))
    calls = 1
    while not (heard := link.receive(1.0)):
        calls += 1
    assert heard == [(1, frame)]
    assert calls == len(frame) // PACKET + 1
    link.close()
    b.close()


def test_a_leader_knows_who_has_not_been_handed_a_record() -> None:
    here, there = {}, {}
    for rank in (1, 2):
        here[rank], there[rank] = pair()
    link = UdsLeaderLink(here)
    first = link.broadcast(b"small")
    large = link.broadcast(record(20 << 20))
    assert link.behind(first) == ()
    assert link.behind(large) == (1, 2)
    while 1 in link.behind(large):
        there[1].receive()
    assert link.behind(large) == (2,)
    link.close()
    for end in there.values():
        end.close()
