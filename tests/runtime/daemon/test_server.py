"""The daemon's loop over real sockets and pipes, with a scripted engine in a thread."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.client_socket import listen
from runtime.daemon.client import AsyncSlotClient, AsyncSlotSession, SlotClient, SlotError
from runtime.daemon.desk import Desk, Read
from runtime.daemon.frames import Frame, FrameReader, Kind
from runtime.daemon.server import Endpoint, SlotServer
from runtime.daemon.session import Connection, Phase
from runtime.frontend.framing import unpack_ids
from runtime.schedule.plan import StepOutput
from tests.runtime.daemon.listener import Listener
from tests.runtime.daemon.scripted import ScriptedEngine
from tests.runtime.schedule.fake_device import complete_alone

IDS = (1, 2, 3)
PATIENCE_S = 120.0


def alone(engine_id: int, prompt: tuple[int, ...], tokens: int) -> list[int]:
    return list(complete_alone(engine_id, prompt, (), len(prompt) + tokens)[0])


@contextmanager
def served(
    path: Path, engine: ScriptedEngine | None = None, unread: tuple[int, int] = (1 << 18, 1 << 23)
) -> Iterator[SlotServer]:
    """A daemon at ``path`` until the block is left; then all is back."""
    engine = ScriptedEngine() if engine is None else engine
    listener = listen(path, 8)
    server = SlotServer(engine, listener=listener, unread_bytes=unread)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert engine.stopped
        listener.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def test_a_talk_over_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "slots.sock"
    with served(path), SlotClient(path, timeout=PATIENCE_S) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert (client.facts["places"], client.facts["max_model_len"]) == (6, 64)
        chat = client.start(IDS, max_tokens=9, quantum=4, keep=True)
        first = chat.tokens()
        assert first == alone(0, IDS, 9)
        chat.extend([7, 8], max_tokens=5, quantum=2)
        assert chat.tokens() == alone(0, (*IDS, *first, 7, 8), 5)
        fork = chat.fork()
        fork.extend([1], max_tokens=3, quantum=3)
        assert len(fork.tokens()) == 3
        with pytest.raises(SlotError, match="its answer is complete"):
            chat.proceed()
        fork.close()
        stopped = client.start(IDS, max_tokens=9, quantum=4, stop_ids=(alone(2, IDS, 9)[3],))
        assert stopped.tokens() == alone(2, IDS, 4)
        assert [listed["request"] for listed in client.command("LIST_REQUESTS")["requests"]] == [1]
        assert client.command("STATS")["sessions"] == 1


def test_later_sessions_hit_nothing_older_than_a_reset(tmp_path: Path) -> None:
    path, computed = tmp_path / "slots.sock", list[int]()
    with served(path), SlotClient(path, timeout=PATIENCE_S) as client:
        kept = client.start([*range(20)], max_tokens=9, quantum=4, keep=True)
        begun = [token for frame in kept.frames() if frame.kind is Kind.TOKEN for token in frame.tokens]
        for _ in range(3):
            client.start([*range(20)], max_tokens=1, quantum=1).tokens()
            computed.append(client.command("STATS")["prefill_tokens"])
            if len(computed) == 2:
                assert client.command("RESET_PREFIX_CACHE")["verb"] == "RESET_PREFIX_CACHE"
        kept.proceed()
        assert begun + kept.tokens() == alone(0, (*range(20),), 9)
        assert client.command("STATS")["prefill_tokens"] == computed[-1], "a live session keeps what it has"
    assert (computed[1] - computed[0], computed[2] - computed[1]) == (computed[0] - 20, 20)
    assert computed[1] - computed[0] < 20


def test_tokens_of_a_fork_are_those_that_its_parent_s_answer_lacks(tmp_path: Path) -> None:
    """None behind a finished answer, where it waited for ever for frames that nothing sends."""
    path = tmp_path / "slots.sock"

    async def forked() -> tuple[list[int], list[int]]:
        async with AsyncSlotClient(path) as client:
            chat = await client.start(IDS, max_tokens=9, quantum=4, keep=True)
            begun = [token async for frame in chat.frames() if frame.kind is Kind.TOKEN for token in frame.tokens]
            rest = await (await chat.fork()).tokens()
            assert len(begun + await chat.tokens()) == 9
            return rest, await (await chat.fork()).tokens()

    with served(path):
        with SlotClient(path, timeout=PATIENCE_S) as client:
            chat = client.start(IDS, max_tokens=9, quantum=4, keep=True)
            begun = [token for frame in chat.frames() if frame.kind is Kind.TOKEN for token in frame.tokens]
            rest = chat.fork().tokens()
            assert (len(begun), len(rest)) == (4, 5)
            chat.proceed()
            assert begun + chat.tokens() == alone(0, IDS, 9)
            assert chat.tokens() == []
            fork = chat.fork()
            assert fork.tokens() == []
            fork.extend([7], max_tokens=2, quantum=1)
            assert len(fork.tokens()) == 2
        counts = [len(tokens) for tokens in asyncio.run(asyncio.wait_for(forked(), PATIENCE_S))]
    assert counts == [5, 0]


def test_tasks_share_a_connection(tmp_path: Path) -> None:
    path = tmp_path / "slots.sock"

    async def talk(client: AsyncSlotClient, first: int) -> tuple[int, list[int]]:
        session = await client.start([first, 2], max_tokens=12, quantum=3)
        return first, await session.tokens()

    async def all_of_them() -> list[tuple[int, list[int]]]:
        async with AsyncSlotClient(path) as client:
            return list(await asyncio.gather(*(talk(client, first) for first in range(1, 6))))

    with served(path):
        found = asyncio.run(all_of_them())
    assert found == [(first, alone(first - 1, (first, 2), 12)) for first in range(1, 6)]


def test_a_late_answer_is_not_the_next_line_s(tmp_path: Path) -> None:
    """Of tasks that are cancelled and of calls that time out, before and after their answer has come."""
    path = tmp_path / "slots.sock"

    async def cancelled() -> None:
        async with AsyncSlotClient(path) as client:
            for pauses in range(6):
                given_up = asyncio.ensure_future(client.command("LIST_REQUESTS"))
                for _ in range(1 + pauses):
                    await asyncio.sleep(0)
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
                assert (await client.command("LIST_SLOTS"))["verb"] == "LIST_SLOTS"

    with served(path):
        asyncio.run(cancelled())
        with SlotClient(path, timeout=PATIENCE_S) as client:
            read = client.read

            def late() -> list[Frame]:
                raise TimeoutError("timed out")

            for _ in range(3):
                client.read = late  # type: ignore[method-assign]
                with pytest.raises(TimeoutError):
                    client.command("LIST_REQUESTS")
                client.read = read  # type: ignore[method-assign]
                assert client.command("LIST_SLOTS")["verb"] == "LIST_SLOTS"


@pytest.mark.parametrize("line", ["SCHED_DRAIN", "REQ 9 SCHED_BATCH_DRAIN", "SCHED_PROBE"])
def test_a_late_answer_that_comes_out_of_order_is_nobody_s(tmp_path: Path, line: str) -> None:
    """The engine stands still until the lines behind one that was given up are answered."""
    path, engine = tmp_path / "slots.sock", ScriptedEngine()
    go_on, step = threading.Event(), engine.step
    engine.step = lambda: step() if go_on.is_set() else StepOutput(0, [], [], [])  # type: ignore[method-assign]

    async def talk() -> None:
        async with asyncio.timeout(PATIENCE_S), AsyncSlotClient(path) as client:
            go_on.set()
            session = await client.start(IDS, max_tokens=9, quantum=3, keep=True)
            async for _ in session.frames():
                pass
            go_on.clear()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.command(line), 0.1)
            assert (await client.command("LIST_SLOTS"))["verb"] == "LIST_SLOTS"
            with pytest.raises(SlotError, match="no session 5"):
                await client.command("CANCEL 5")
            go_on.set()
            assert (await client.command("SCHED_DRAIN"))["verb"] == "SCHED_DRAIN"
            assert (await client.command("LIST_REQUESTS"))["requests"][0]["phase"] == "complete"

    with served(path, engine):
        asyncio.run(talk())


@pytest.mark.parametrize("pauses", range(5))
def test_a_session_whose_start_is_cancelled_is_closed(tmp_path: Path, pauses: int) -> None:
    """Of START and FORK, before and after the daemon has answered; the connection goes on."""
    path = tmp_path / "slots.sock"

    async def cancel(opening: Coroutine[Any, Any, AsyncSlotSession]) -> None:
        task = asyncio.ensure_future(opening)
        for _ in range(1 + pauses):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:  # it was quicker
            await (await task).close()

    async def talk() -> None:
        async with AsyncSlotClient(path) as client:
            await cancel(client.start(IDS, max_tokens=9, quantum=9, keep=True))
            kept = await client.start(IDS, max_tokens=9, quantum=9, keep=True)
            assert len(await kept.tokens()) == 9
            await cancel(kept.fork())
            found = (await client.command("LIST_REQUESTS"))["requests"]
            assert [listed["request"] for listed in found] == [kept.request]

    with served(path) as server:
        asyncio.run(talk())
        until(lambda: server.desk.daemon.sessions == 0)


def test_a_start_that_is_cancelled_in_line_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "slots.sock"

    async def talk() -> None:
        async with AsyncSlotClient(path) as client:
            first = asyncio.ensure_future(client.command("LIST_SLOTS"))
            second = asyncio.ensure_future(client.start(IDS, max_tokens=9, quantum=9))
            await asyncio.sleep(0)
            second.cancel()
            assert (await first)["verb"] == "LIST_SLOTS"
            assert (await client.command("LIST_REQUESTS"))["requests"] == []

    with served(path):
        asyncio.run(talk())


def test_a_session_whose_start_timed_out_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "slots.sock"
    with served(path), SlotClient(path, timeout=PATIENCE_S) as client:
        read = client.read

        def late() -> list[Frame]:
            raise TimeoutError("timed out")

        client.read = late  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            client.start(IDS, max_tokens=9, quantum=9)
        client.read = read  # type: ignore[method-assign]
        assert client.command("LIST_REQUESTS")["requests"] == []
        assert len(client.start(IDS, max_tokens=9, quantum=9).tokens()) == 9


def test_a_connect_that_is_cancelled_closes_its_connection(tmp_path: Path) -> None:
    listener = listen(tmp_path / "slots.sock", 8)  # nobody answers

    async def connect() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(AsyncSlotClient(tmp_path / "slots.sock").connect(), 0.1)
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(PATIENCE_S)
            assert peer.recv(100) + peer.recv(100) == b"TAGGED 1\n"

    with listener:
        asyncio.run(connect())


def test_a_client_that_is_killed_takes_its_sessions_with_it(tmp_path: Path) -> None:
    path, engine = tmp_path / "slots.sock", ScriptedEngine(max_model_len=4000, blocks=2000)
    with served(path, engine) as server, SlotClient(path, timeout=PATIENCE_S) as other:
        rude = SlotClient(path, timeout=PATIENCE_S)
        for _ in range(3):
            rude.start(IDS, max_tokens=3000, quantum=3000)
        rude.read()
        assert server.desk.daemon.sessions == 3
        rude.close()  # in the middle of its tokens
        until(lambda: server.desk.daemon.sessions == 0)
        assert other.start(IDS, max_tokens=4, quantum=4).tokens() == alone(3, IDS, 4)
        until(lambda: not engine.has_work)
        engine.check_all_is_back()


def test_one_that_reads_nothing_is_lost_and_the_others_go_on(tmp_path: Path) -> None:
    path, engine = tmp_path / "slots.sock", ScriptedEngine(max_model_len=40_000, blocks=20_000)
    with served(path, engine, (1000, 20_000)) as server, SlotClient(path, timeout=PATIENCE_S) as other:
        slow = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(str(path))
        slow.sendall(b"TAGGED 1\nREQ 1 START [1,2] 39000 39000\n")
        until(lambda: server.desk.daemon.sessions == 1)
        assert other.start(IDS, max_tokens=400, quantum=400).tokens() == alone(1, IDS, 400)
        until(lambda: server.desk.daemon.sessions == 0)
        slow.close()


def test_a_line_comes_in_pieces_and_a_half_one_harms_nobody(tmp_path: Path) -> None:
    path = tmp_path / "slots.sock"
    with served(path):
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(PATIENCE_S)
        raw.connect(str(path))
        for piece in (b"TAG", b"GED 1\r\nREQ 1 STA", b"RT [1,2,3] 2 2\n\xff\xfe\nREQ"):
            raw.sendall(piece)
            time.sleep(0.02)
        reader = FrameReader()
        frames: list[Frame] = []
        while not any(frame.kind is Kind.DONE for frame in frames) or len(frames) < 5:
            frames += list(reader.frames(raw.recv(4096)))
        errors = [frame.text for frame in frames if frame.kind is Kind.ERROR]
        assert len(errors) == 1
        assert errors[0].startswith("the line is no UTF-8: ")
        raw.close()


def test_a_long_line_is_read_beside_the_loop_and_answered_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is read, other clients have turns and tokens; lines of its own client wait for it."""
    reads, may_end = Desk.read, threading.Event()

    def slow(desk: Desk, text: str) -> Read:
        if len(text) > 10_000:
            assert threading.current_thread().name.startswith("daemon line")
            assert may_end.wait(PATIENCE_S)
        return reads(desk, text)

    monkeypatch.setattr(Desk, "read", slow)
    path = tmp_path / "slots.sock"
    with served(path) as server, SlotClient(path) as other:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(PATIENCE_S)
        raw.connect(str(path))
        raw.sendall(b"TAGGED 1\nREQ 1 START [%s1,2] 2 2\nREQ 2 START [1,2,3] 2 2\n" % (b" " * 20_000))
        assert other.start(IDS, max_tokens=40, quantum=40).tokens() == alone(0, IDS, 40)
        assert [endpoint.reading is not None for endpoint in server._endpoints].count(True) == 1
        may_end.set()
        reader, frames = FrameReader(), list[Frame]()
        while sum(frame.kind is Kind.DONE for frame in frames) < 2:
            frames += list(reader.frames(raw.recv(4096)))
        acknowledged = [frame.answer.get("tokens") for frame in frames if frame.kind is Kind.ACK]
        assert acknowledged == [None, 2, 3]
        raw.close()


def test_over_descriptors_it_ends_with_its_input() -> None:
    """A parent that writes lines into a pipe and reads ids from another."""
    engine = ScriptedEngine()
    lines_in, lines_out = os.pipe()
    stream_in, stream_out = os.pipe()
    server = SlotServer(engine, only=Endpoint(Connection(), lines_in, stream_out))
    os.write(lines_out, b"START [1,2,3] 5 5\n")
    os.close(lines_out)
    server.run()
    assert unpack_ids(os.read(stream_in, 4096)) == (*alone(0, IDS, 5), -1)
    for descriptor in (lines_in, stream_in, stream_out):
        os.close(descriptor)
    engine.check_all_is_back()


@pytest.mark.parametrize("verdict_follows", [False, True])
def test_an_engine_that_fails_is_told_by_name(tmp_path: Path, verdict_follows: bool) -> None:
    """By what it raised, unless somebody will know the cause: then clients hear that, and nothing before it."""

    class Breaks(ScriptedEngine):
        def step(self) -> StepOutput:
            if self.steps > 3:
                raise RuntimeError("gone")
            return super().step()

    path = tmp_path / "slots.sock"
    listener = listen(path, 8)
    failed: list[BaseException] = []

    def run() -> None:
        server = SlotServer(Breaks(), listener=listener)
        try:
            server.run(verdict_follows=verdict_follows)
        except RuntimeError as error:
            failed.append(error)
            if verdict_follows:
                server.end("rank 1 was lost")

    thread = threading.Thread(target=run)
    thread.start()
    with SlotClient(path, timeout=PATIENCE_S) as client:
        frames = list(client.start(IDS, max_tokens=20, quantum=20).frames())
        assert frames[-1].kind is Kind.CLOSED
        assert frames[-1].text == ("rank 1 was lost" if verdict_follows else "the engine failed: RuntimeError: gone")
    thread.join(PATIENCE_S)
    listener.close()
    assert [str(error) for error in failed] == ["gone"]


def test_another_user_s_client_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "slots.sock"
    with served(path):
        monkeypatch.setattr("runtime.daemon.server.os.getuid", lambda: 4711)
        with pytest.raises((SlotError, OSError)):
            SlotClient(path, timeout=PATIENCE_S)
        monkeypatch.undo()
        SlotClient(path, timeout=PATIENCE_S).close()


def test_input_that_ends_leaves_time_for_what_goes_on_by_itself() -> None:
    """A client that is slow to read parks its sessions: they are not over. And a probe has an answer to come."""
    client = Listener(ScriptedEngine(max_model_len=600, blocks=4000))
    reads, writes = os.pipe()
    endpoint = Endpoint(client.connection, reads, writes)

    def done() -> bool:
        return endpoint.done

    client.connection.soft = 200
    client.ask("MODE auto")
    client.ask("REQ 1 START [1,2,3] 200 4")
    endpoint.ended = True
    while client.engine.has_work:  # until it is behind
        client.desk.grant()
        client.desk.output(client.engine.step())
    client.read()
    (session,) = client.connection.sessions.values()
    assert (session.phase, session.drained) == (Phase.PARKED, True)
    assert not done()
    client.connection.soft = 1 << 18
    client.run_until_idle()
    assert len(client.tokens(1)) == 200
    assert done()
    client.ask("MODE client")
    client.ask("REQ 2 START [1,2,3] 200 4")
    client.run_until_idle()
    client.say("SCHED_PROBE")
    assert not done()
    client.run_until_idle()
    assert done()
    os.close(reads)
    os.close(writes)
