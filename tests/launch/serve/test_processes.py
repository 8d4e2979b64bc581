"""API processes that die or hang: when the next one is started, and what a killed rank 0 leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch.serve import processes
from launch.serve.processes import ApiProcesses
from launch.serve.settings import ServerSettings
from runtime.frontend.api_links import ApiLink, Beats
from runtime.frontend.engine_server import EngineServer
from runtime.frontend.framing import FrameReader
from runtime.frontend.remote_engine import RemoteEngine
from runtime.frontend.serve_messages import MAX_FRAME, Alive, Drop, framed, from_api
from runtime.schedule.request import FinishReason
from tests.launch.serve.rig import ServedFake

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 180.0


@pytest.fixture
def dying() -> ApiProcesses:
    return ApiProcesses(ServerSettings(model="none", names=("m",)), [])


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def written_at(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def is_gone(pid: str) -> bool:
    """Or only its exit code is left, for whoever became its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def lost(heard: bool = True) -> ApiLink:
    mine, theirs = socket.socketpair()
    theirs.close()
    link = ApiLink(mine)
    link.heard = heard
    return link


@pytest.mark.parametrize("heard", [False, True])
def test_processes_that_die_often_are_started_again_at_a_lower_rate(dying: ApiProcesses, heard: bool) -> None:
    """And for ever, unless none has ever come up: a GPU job does not end because of what surrounds it."""
    dying._served = heard
    with mock.patch("time.monotonic", return_value=100.0):
        assert [dying._pause() for _ in range(9)] == [0, 0, 0, 1, 2, 4, 8, 10, 10]
    assert dying.given_up.is_set() == (not heard)
    with mock.patch("time.monotonic", return_value=161.0):
        assert dying._pause() == 0


def test_a_start_that_fails_is_tried_again(dying: ApiProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no process, no memory or no file for a while."""
    one, again, came = lost(), lost(), list[ApiLink]()
    dying._children[one] = processes._Child(0, mock.Mock(), one)
    starts = iter([OSError("no process"), OSError("no file"), mock.Mock(link=again)])

    def start(index: int) -> Any:
        made = next(starts)
        if isinstance(made, OSError):
            raise made
        return made

    monkeypatch.setattr(dying, "_start", start)
    dying._replace(one, came.append)
    assert came == [again]
    for link in (one, again):
        link.close()


def test_no_process_is_started_behind_the_end(dying: ApiProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lost()
    dying._children[one] = processes._Child(0, mock.Mock(), one)
    monkeypatch.setattr(dying, "_pause", lambda: PATIENCE)
    thread = threading.Thread(target=dying._replace, args=(one, mock.Mock(side_effect=AssertionError)))
    thread.start()
    dying.close()
    thread.join(PATIENCE)
    one.close()
    assert not thread.is_alive()


@pytest.mark.parametrize(("heard", "most"), [(False, 120), (True, 20)])
def test_a_process_that_says_nothing_is_lost(heard: bool, most: int) -> None:
    """A stopped one keeps its connection open, and its clients would wait for ever."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        link = ApiLink(mine)
        if heard:
            theirs.sendall(framed(Alive()))
        for _ in range(most + heard):
            assert link.receive(1.0) == []
            assert link.lost is None
        link.receive(1.0)
        assert link.lost == f"it has said nothing for {most + 1} s"


def test_a_word_every_second_keeps_a_process() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        engine = RemoteEngine(lambda data: None, lambda why: None)
        engine.connection_made(mock.Mock(write=theirs.sendall))
        link = ApiLink(mine)
        for _ in range(100):
            engine.say_alive()
            link.receive(1.0)
        assert link.heard
        assert link.lost is None


def test_time_in_which_rank_0_was_stopped_too_is_no_silence() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        link = ApiLink(mine)
        server = EngineServer(
            ServedFake(), [link], Beats(), max_queued=1, replace=mock.Mock(side_effect=AssertionError)
        )
        for _ in range(60):
            server._looked_at -= 3600.0
            server._take_orders()
        assert link.lost is None


def test_orders_of_one_process_are_read_a_mebibyte_a_turn() -> None:
    """Thousands that came at once would keep the engine's thread from its next turn."""
    mine, theirs = socket.socketpair()
    frame = framed(Drop(tuple(range(60_000)), FinishReason.CANCELLED))
    with mine, theirs:
        link, sent = ApiLink(mine), threading.Thread(target=theirs.sendall, args=(frame * 20,))
        sent.start()
        orders: list[Any] = []
        reader = FrameReader(MAX_FRAME)
        most = len(list(map(from_api, reader.bodies(frame * 20)))) * (1 << 20) // (20 * len(frame)) + 1
        while len(orders) < 20:
            came = link.receive()
            assert len(came) <= most
            orders += came
        sent.join()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_rank_0_leaves_no_file_and_its_socket_is_taken_over(tmp_path: Path) -> None:
    temporary, place, file = tmp_path / "tmp", tmp_path / "s", tmp_path / "address"
    temporary.mkdir()
    words = [sys.executable, "-m", "tests.launch.serve.fake_main", "serve", "--model", "models/demo", "--device", "cpu"]
    words += ["--uds", str(place), "--address-file", str(file)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    written = [0]

    def hang_up_as_usual() -> None:  # a run of the tests under nohup ignores SIGHUP, and so would the server
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    for number in (signal.SIGKILL, signal.SIGHUP):
        with subprocess.Popen(words, cwd=ROOT, env=environ, preexec_fn=hang_up_as_usual) as server:
            try:
                wait_until(lambda: written_at(file) not in written)
                written.append(written_at(file))
                assert server.poll() is None
                (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
                server.send_signal(number)
                assert server.wait(PATIENCE) == (-9 if number == signal.SIGKILL else 129)
            finally:
                server.kill()
        wait_until(partial(is_gone, child))
        assert list(temporary.iterdir()) == []
    assert not place.exists()
