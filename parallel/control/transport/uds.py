"""Unix SOCK_SEQPACKET sockets: frames between a leader and the followers of its node.

Knows: paths and their permissions, peer credentials, packets, partial sends.
Does not know: the contents of a frame beyond its length (frames.py), which rank is the peer, how to wait for several
connections (uds_links.py).

A frame is one packet, or, above PACKET bytes, several consecutive ones: all full but the last. The kernel keeps packet
order and boundaries. Only this user can reach the socket (0700 directory), and both ends check the peer's user id.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from parallel.control.errors import FrameError
from parallel.control.wire.frames import announced_size

PACKET = 64 << 10
MAX_PATH = 107  # sun_path has 108 bytes, the last one is a zero
_SEND_BUFFER = 4 << 20  # asked for; the kernel may give less
_CREDENTIALS = struct.Struct("3i")
_TRUE_SIZE, _NO_SIGNAL = int(socket.MSG_TRUNC), int(socket.MSG_NOSIGNAL)
_OLD_SECONDS = 600.0  # of a socket that may be another job's: one that was just bound does not answer yet
_GONE = (BrokenPipeError, ConnectionResetError, ConnectionAbortedError, ConnectionRefusedError)


class SocketPlaceError(RuntimeError):
    """A socket's directory or path is unsafe or unusable; the message says what to change."""


def socket_path(directory: Path, job: int, epoch: int, name: str) -> Path:
    """The path of this job's socket ``name``. Raises SocketPlaceError when it is too long."""
    path = directory / f"{job:016x}.{epoch}.{name}"
    length = len(os.fsencode(path))
    if length > MAX_PATH:
        raise SocketPlaceError(
            f"control socket path {path} has {length} bytes, a Unix socket allows {MAX_PATH}: "
            "choose a shorter directory for control sockets"
        )
    return path


def private_directory(directory: Path) -> None:
    """Creates ``directory`` with mode 0700, or checks that it is ours, no link, and closed to others."""
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700, parents=True)
        found = directory.lstat()
    except OSError as error:
        raise SocketPlaceError(f"control directory {directory} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise SocketPlaceError(f"control directory {directory} is not a directory (or is a link): remove it")
    if found.st_uid != os.geteuid():
        raise SocketPlaceError(
            f"control directory {directory} belongs to user {found.st_uid}, we are {os.geteuid()}: choose another"
        )
    if found.st_mode & 0o077:
        raise SocketPlaceError(
            f"control directory {directory} has mode {stat.S_IMODE(found.st_mode):04o}, others may enter: "
            f"chmod 700 {directory}"
        )


def listen(path: Path, backlog: int = 64) -> socket.socket:
    """A non-blocking listener at ``path``; removes sockets of dead processes, there and next to it."""
    private_directory(path.parent)
    _clean_stale(path)
    for other in path.parent.iterdir():  # of jobs that were killed before all their ranks were connected
        with contextlib.suppress(OSError, SocketPlaceError):
            if time.time() - other.lstat().st_ctime > _OLD_SECONDS:
                _clean_stale(other)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listener.fileno(), 0o600)  # Linux gives the path the socket's own mode; an umask would be everybody's
        listener.bind(os.fspath(path))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise SocketPlaceError(f"control socket {path} cannot be bound: {error}") from error
    return listener


def accept(listener: socket.socket) -> PacketSocket | None:
    """The next connection of this user, or None; closes connections of other users."""
    try:
        connection, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    if peer_uid(connection) != os.geteuid():
        connection.close()
        return None
    return PacketSocket(connection)


def connect(path: Path, until: float, meanwhile: Callable[[], None] = lambda: None) -> PacketSocket:
    """Connects to ``path``, retrying until the monotonic time ``until``: the leader may start later.

    ``meanwhile`` is called between tries and may raise to give up.
    """
    pause = 0.002
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connection.connect(os.fspath(path))
            break
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            connection.close()
            if time.monotonic() > until:
                raise TimeoutError(f"nobody listens at control socket {path}: {error}") from error
            meanwhile()
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        except OSError as error:
            connection.close()
            raise SocketPlaceError(f"control socket {path} cannot be reached: {error}") from error
    uid = peer_uid(connection)
    if uid != os.geteuid():
        connection.close()
        raise SocketPlaceError(f"control socket {path} belongs to user {uid}, we are {os.geteuid()}: refused")
    return PacketSocket(connection)


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user id of the other end, as the kernel knows them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def peer_uid(connection: socket.socket) -> int:
    return peer_credentials(connection)[1]


def _clean_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketPlaceError(f"control socket {path} exists and is no socket: remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise SocketPlaceError(f"control socket {path} is in use by a live process: is this job running already?")


class PacketSocket:
    """One connection: whole frames in, whole frames out, never blocking.

    ``send`` queues what the kernel does not take, and ``pump`` offers it again, so that a slow reader never blocks the
    writer in the middle of its step. ``queue``: packets that wait, each with its frame's number, the oldest first. A
    broken connection is ``closed`` for sending; ``receive`` still returns what had arrived, then raises EOFError.
    """

    __slots__ = ("_buffer", "_fd", "_parts", "_view", "_wanted", "closed", "queue", "socket")

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self.socket = connection
        self.closed = False
        self._fd = connection.fileno()
        self._buffer = bytearray(PACKET)
        self._view = memoryview(self._buffer)
        self.queue: deque[tuple[int, memoryview]] = deque()
        self._parts: list[bytes] = []
        self._wanted = 0

    def fileno(self) -> int:
        return self._fd

    def send(self, frame: bytes, number: int = 0) -> None:
        """Sends or queues ``frame``; ``number`` is the caller's, ascending; see ``queue``."""
        if not self.queue and len(frame) <= PACKET and not self.closed:
            try:  # _offer inlined: a leader sends to every rank in turn, and the last one waits for all
                self.socket.send(frame, _NO_SIGNAL)
                return
            except BlockingIOError:
                pass
            except _GONE:
                self.closed = True
        if self.closed:
            return
        view = memoryview(frame)
        self.queue.extend((number, view[at : at + PACKET]) for at in range(0, len(frame), PACKET))
        self.pump()

    def pump(self) -> None:
        """Gives the kernel as many queued packets as it takes."""
        while self.queue and self._offer(self.queue[0][1]):
            self.queue.popleft()

    def receive(self, until: float | None = None) -> bytes | None:
        """The next whole frame, or None when there is none yet. Polls until the monotonic time ``until``, and meanwhile
        pumps the queue.

        Raises EOFError when the other end is gone, FrameError when what came cannot be (part of) a frame.
        """
        while True:
            try:
                size = self.socket.recv_into(self._buffer, PACKET, _TRUE_SIZE)
            except BlockingIOError:
                if until is None or time.monotonic() >= until:
                    return None
                if self.queue:
                    self.pump()
                continue
            except _GONE:
                size = self._left_unread()
            if size == 0:
                raise EOFError
            if size > PACKET:
                raise FrameError("size", f"a packet of {size} bytes, the limit is {PACKET}")
            packet = self._view[:size].tobytes()
            if not self._wanted:
                if size < PACKET:
                    return packet
                self._wanted = announced_size(packet)
                if self._wanted < PACKET:
                    self._wanted = 0
                    return packet  # decode will report its wrong length
            if size != min(PACKET, self._wanted):
                self._wanted = 0
                self._parts.clear()
                raise FrameError("size", f"a part of {size} bytes inside a frame of several packets")
            self._parts.append(packet)
            self._wanted -= size
            if not self._wanted:
                frame = b"".join(self._parts)
                self._parts.clear()
                return frame

    def close(self) -> None:
        self.closed = True
        self.queue.clear()
        self.socket.close()

    def _left_unread(self) -> int:
        """The size of the next packet after a reset by the peer, as unread packets survive it; 0 for none."""
        try:
            return self.socket.recv_into(self._buffer, PACKET, _TRUE_SIZE)
        except (*_GONE, BlockingIOError):
            return 0

    def _offer(self, packet: bytes | memoryview) -> bool:
        try:
            self.socket.send(packet, _NO_SIGNAL)
        except BlockingIOError:
            return False
        except _GONE:
            self.closed = True
            self.queue.clear()
            return False
        return True
