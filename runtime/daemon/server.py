"""The daemon's loop: lines from sockets or stdin, a turn of the engine, frames back.

Knows: descriptors, who may connect, how much a client may leave unread, how the daemon ends. Does not know: verbs and
sessions (desk.py), how an engine works.

Nothing here waits for a client: what one does not read is kept for it, up to a limit, and its lines are not read
meanwhile. The sessions of a client end with its connection. Long lines are parsed and tokenised in threads, those of
a client in order, so that turns of all ranks continue meanwhile.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Protocol

from runtime.daemon.desk import Desk, Read
from runtime.daemon.frames import Kind
from runtime.daemon.probe import SessionEngine
from runtime.daemon.session import Connection, Phase
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import SamplingParams

MAX_LINE: Final = 1 << 24  # bytes
_LONG_LINE: Final = 1 << 14  # bytes from which a line is read in a thread
_READERS: Final = 2  # such threads
_READ_BYTES: Final = 1 << 16
_IDLE_SECONDS: Final = 0.25  # longest wait for a line before the engine is asked again
_FLUSH_SECONDS: Final = 2.0  # for the last frames
_POLL_SECONDS: Final = 1e-3  # poll() waits for whole milliseconds
_PEER: Final = struct.Struct("3i")  # pid, uid, gid

log = logging.getLogger("lockstride")


class DaemonEngine(SessionEngine, Protocol):
    """An engine whose turns the daemon takes."""

    @property
    def has_work(self) -> bool: ...
    def step(self) -> StepOutput: ...
    def slack(self) -> float: ...
    def wait(self, ready: Callable[[float], bool], timeout: float) -> None: ...
    def stop(self) -> None: ...


class Endpoint:
    """Where one connection reads and writes. ``close`` closes what ``owned`` says."""

    def __init__(self, connection: Connection, reads: int, writes: int, owned: socket.socket | None = None) -> None:
        self.connection = connection
        self.reads, self.writes = reads, writes
        self.ended = False  # no line comes any more
        self.waiting: deque[bytes] = deque()  # lines after the one that is read in a thread
        self.reading: Future[Read] | None = None
        self._owned = owned
        self._held = bytearray()
        os.set_blocking(reads, False)
        os.set_blocking(writes, False)

    def lines(self) -> list[bytes]:
        """The lines that have come. Sets ``lost`` where the client is gone or says too much at once."""
        if not self.takes_lines or self.connection.lost is not None:
            return []
        try:
            data = os.read(self.reads, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            self.connection.lost = f"its connection broke: {error.strerror}"
            return []
        if not data:
            self.ended = True
            rest, self._held = bytes(self._held), bytearray()
            return [rest] if rest else []
        whole, end, rest = data.rpartition(b"\n")
        lines = bytes(self._held + whole).split(b"\n") if end else []
        self._held = bytearray(rest) if end else self._held + rest
        if len(self._held) > MAX_LINE:
            self.connection.lost = f"a line of more than {MAX_LINE} bytes"
        return lines

    @property
    def takes_lines(self) -> bool:
        return not (self.ended or self.reading or self.connection.behind)

    def flush(self) -> None:
        """Write what the client takes now."""
        unread = self.connection.unread
        try:
            while unread:
                del unread[: os.write(self.writes, memoryview(bytes(unread[: 1 << 18])))]
        except BlockingIOError:
            pass
        except OSError as error:
            self.connection.lost = f"its connection broke: {error.strerror}"

    @property
    def done(self) -> bool:
        """Whether its last line was read, and all that follows from it was sent."""
        connection = self.connection
        running = any(session.phase is Phase.RUNNING or session.drained for session in connection.sessions.values())
        busy = running or self.reading or connection.probing or connection.draining
        over = connection.quits or (self.ended and not busy)
        return over and not connection.unread

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()


class SlotServer:
    """``run`` takes the engine's turns until ``stop``, or until ``only`` is done; see the module's docstring.

    ``defaults``: of what START does not say. ``listener``: where clients connect. ``only``: the one connection over
    other descriptors, such as stdin. ``unread_bytes``: ``soft`` and ``hard`` of each connection.
    """

    def __init__(
        self,
        engine: DaemonEngine,
        tokenizer: Tokenizer | None = None,
        defaults: SamplingParams | None = None,
        *,
        listener: socket.socket | None = None,
        only: Endpoint | None = None,
        unread_bytes: tuple[int, int] = (1 << 18, 1 << 23),
    ) -> None:
        self._engine = engine
        self.desk = Desk(engine, tokenizer, defaults)
        self._listener = listener
        self._only = only
        self._unread_bytes = unread_bytes
        self._endpoints: list[Endpoint] = []
        self._stopping = False
        self._readers = ThreadPoolExecutor(_READERS, "daemon line")
        self._was_read = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if listener is not None:
            listener.setblocking(False)
        if only is not None:
            self._add(only)

    def stop(self) -> None:
        """Close every session after this turn, and come back."""
        self._stopping = True

    def run(self, tend: Callable[[], object] = lambda: None, *, verdict_follows: bool = False) -> None:
        """``tend`` is called once a turn and may call ``stop``. What the engine raises is raised, once clients know.

        ``verdict_follows``: the caller calls ``end`` with the cause after this has raised. A lost rank breaks
        collectives of the others, often before they know which rank it was.
        """
        try:
            while True:
                tend()
                self._take_lines()
                self._put_off()
                if self._stopping or (self._only is not None and not self._endpoints):
                    break
                self._turn()
            self.end("the daemon was stopped")
            self._engine.stop()
        except BaseException as error:
            if not verdict_follows:
                self.end(f"the engine failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._readers.shutdown(cancel_futures=True)
            os.close(self._was_read)

    def end(self, why: str) -> None:
        """Send the cause to every client, which has a moment to read it. Does not raise; from any thread."""
        for endpoint in self._endpoints:
            for session in list(endpoint.connection.sessions.values()):
                endpoint.connection.send(Kind.CLOSED, session, why.encode("utf-8", "replace"))
            endpoint.connection.send(Kind.ERROR, None, why.encode("utf-8", "replace"))
            endpoint.connection.end_command()
        until = time.monotonic() + _FLUSH_SECONDS
        while time.monotonic() < until and any(e.connection.unread and not e.connection.lost for e in self._endpoints):
            for endpoint in self._endpoints:
                endpoint.flush()
            time.sleep(0.005)
        for endpoint in self._endpoints:
            endpoint.close()

    # ---- a turn ----

    def _turn(self) -> None:
        self.desk.grant()
        if self._engine.has_work:
            self.desk.output(self._engine.step())
        else:
            self._engine.wait(self._something_came, _IDLE_SECONDS)
        for endpoint in self._endpoints:
            if endpoint.connection.unread:
                endpoint.flush()

    def _put_off(self) -> None:
        """Reads what clients say until the turn must begin (plan_late.py): it is in this turn's plan then."""
        while self._engine.has_work and not self._stopping and (left := self._engine.slack()) > 0:
            if left < _POLL_SECONDS:
                time.sleep(left)
                self._take_lines()
                return
            if self._something_came(left - left % _POLL_SECONDS):
                self._take_lines()

    def _take_lines(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._was_read)
        self._accept()
        for endpoint in list(self._endpoints):
            connection = endpoint.connection
            if connection.unread:
                endpoint.flush()
            endpoint.waiting.extend(endpoint.lines())
            if endpoint.reading is not None and endpoint.reading.done():
                self.desk.carry_out(connection, endpoint.reading.result())
                endpoint.reading = None
            while endpoint.waiting and endpoint.reading is None:
                self._line(endpoint, endpoint.waiting.popleft())
            if endpoint.ended and connection.lost is None and self._hung_up(endpoint):
                connection.lost = "it ended"
            if connection.lost is not None or endpoint.done:
                self._remove(endpoint)

    def _line(self, endpoint: Endpoint, line: bytes) -> None:
        try:
            text = line.rstrip(b"\r").decode()
        except UnicodeDecodeError as error:
            self.desk.refuse(endpoint.connection, f"the line is no UTF-8: {error}")
            return
        if len(line) >= _LONG_LINE:
            endpoint.reading = self._readers.submit(self.desk.read, text)
            endpoint.reading.add_done_callback(lambda _: os.eventfd_write(self._was_read, 1))
        elif text.strip():
            self.desk.line(endpoint.connection, text)

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            if not _is_ours(peer):
                log.warning("a client of another user was refused")
                peer.close()
                continue
            soft, hard = self._unread_bytes
            number = peer.fileno()
            self._add(Endpoint(Connection(soft=soft, hard=hard), number, number, peer))

    def _add(self, endpoint: Endpoint) -> None:
        self._endpoints.append(endpoint)
        self.desk.connect(endpoint.connection)

    def _remove(self, endpoint: Endpoint) -> None:
        connection = endpoint.connection
        if connection.lost is not None and connection.sessions:
            log.warning("a client is lost: %s; %d sessions are closed", connection.lost, len(connection.sessions))
        self._endpoints.remove(endpoint)
        self.desk.disconnect(connection)
        endpoint.close()

    @staticmethod
    def _hung_up(endpoint: Endpoint) -> bool:
        """Whether the client does not read any more, either."""
        poll = select.poll()
        poll.register(endpoint.writes, 0)
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    def _something_came(self, timeout: float) -> bool:
        poll = select.poll()  # select() refuses descriptors from 1024 on
        poll.register(self._was_read, select.POLLIN)
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        for endpoint in self._endpoints:
            if endpoint.takes_lines:
                poll.register(endpoint.reads, select.POLLIN)
            if endpoint.connection.unread and endpoint.writes != endpoint.reads:
                poll.register(endpoint.writes, select.POLLOUT)
            elif endpoint.connection.unread:
                poll.register(endpoint.writes, select.POLLIN | select.POLLOUT)
        return bool(poll.poll(1000 * timeout) or self._stopping)


def _is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end is of this user."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(credentials)[1] == os.getuid())
