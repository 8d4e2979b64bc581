"""A rank that was told to end names a peer that died, however late and quietly it did: no threads, no clocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel.control.errors import Cause, Verdict
from parallel.control.interface import SingleRankControl, Watch
from parallel.control.wire.frames import Codec, Heartbeat
from runtime.watchdog.blame import Patience
from runtime.watchdog.heartbeat import Channel, is_gone
from runtime.watchdog.options import WatchdogOptions
from runtime.watchdog.peer_view import PeerView
from runtime.watchdog.shutdown import EXIT_CODE, TERMINATED_CODE
from runtime.watchdog.watchdog import Watchdog

Heard = list[tuple[int, Any]]


def nothing_heard() -> Heard:
    return []


class Peers:
    """The links of rank 0 to ranks 1 and 2, which run in ``processes``; ``heard`` says what comes from them."""

    ranks = (1, 2)

    def __init__(self, processes: dict[int, int], heard: Callable[[], Heard] = nothing_heard) -> None:
        self.processes = processes
        self.heard = heard

    def broadcast(self, frame: bytes) -> int:
        return 0

    def send(self, rank: int, frame: bytes) -> None:
        pass

    def receive(self, timeout: float = 0.0) -> Heard:
        return self.heard()

    def behind(self, number: int) -> tuple[int, ...]:
        return ()

    def process(self, rank: int) -> int | None:
        return self.processes.get(rank)

    def close(self) -> None:
        pass


class Control(SingleRankControl):
    """Rank 0 of three."""

    world = 3

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch  # type: ignore[assignment]  # a world of one has none


@pytest.fixture
def dead() -> Iterator[int]:
    """A process that has ended, and that nobody has looked after yet."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process.pid


def told_to_end(folder: Path, peers: Peers) -> tuple[Watchdog, list[int]]:
    """Rank 0's watchdog after a SIGTERM, with no time to wait for causes, and the codes that it left with."""
    left: list[int] = []
    options = WatchdogOptions(folder / "bundles", explanation_wait=0.0, interval=0.0, grace=0.0)
    watch = Watch(Codec(1, 0, 3), 0, down=peers)
    watchdog = Watchdog(Control(watch), options, leave=left.append)
    watchdog._channel = Channel(watch, 0)
    watchdog._failure = Verdict(Cause.TERMINATED, 0, 0, "rank 0 ends at step 0: SystemExit: 143")
    return watchdog, left


def test_a_signal_that_nobody_died_of_is_what_it_is(tmp_path: Path) -> None:
    watchdog, left = told_to_end(tmp_path, Peers(dict.fromkeys((1, 2), os.getpid())))
    watchdog._run()
    assert left == [TERMINATED_CODE]
    assert watchdog.verdict is not None
    assert (watchdog.verdict.cause, watchdog.verdict.rank) == (Cause.TERMINATED, 0)


def test_a_peer_that_dies_after_the_report_is_named(tmp_path: Path) -> None:
    """Its connection ends when all that was waited for is over."""
    peers = Peers(dict.fromkeys((1, 2), os.getpid()))
    watchdog, left = told_to_end(tmp_path, peers)
    peers.heard = lambda: [(2, None)] if watchdog._reports else []
    watchdog._run()
    assert left == [EXIT_CODE]
    summary = json.loads((tmp_path / "bundles" / "summary.json").read_text())
    assert (summary["cause"], summary["culprit"]) == (Cause.LOST, 2)


def test_a_peer_whose_connection_outlives_it_is_named(tmp_path: Path, dead: int) -> None:
    """It is still giving back its memory, or a child of it has the socket."""
    watchdog, left = told_to_end(tmp_path, Peers({1: os.getpid(), 2: dead}))
    watchdog._run()
    assert left == [EXIT_CODE]
    assert watchdog.verdict is not None
    assert (watchdog.verdict.cause, watchdog.verdict.rank) == (Cause.LOST, 2)
    assert watchdog.verdict.text.startswith("rank 2 is gone")


# ---- what the kernel says of a process ----


def test_a_process_that_ended_is_gone_reaped_or_not(dead: int) -> None:
    assert is_gone(dead)
    os.waitpid(dead, 0)
    assert is_gone(dead)


def test_a_living_process_is_not_gone_nor_one_of_which_nothing_is_known() -> None:
    assert not is_gone(os.getpid())
    assert not is_gone(os.getppid())
    assert not is_gone(None)


def test_a_process_that_is_ending_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """PF_EXITING, while it still gives back its memory; the name of a process may hold anything."""
    line = "7 (a) b) R 1 1 1 0 -1 {} 100 0 0 0 0 0 0 0 20 0 5"
    for flags, expected in ((0x400140, False), (0x400144, True)):
        with monkeypatch.context() as kernel:
            kernel.setattr(Path, "read_text", lambda path, flags=flags: line.format(flags))
            assert is_gone(os.getpid()) is expected


def test_a_process_of_another_namespace_is_unknown() -> None:
    watch = Watch(Codec(1, 0, 3), 0, down=Peers({1: 0, 2: 5}))
    channel = Channel(watch, 0)
    assert [channel.process(rank) for rank in range(3)] == [None, None, 5]


# ---- the looks before the last one ----


def test_a_silent_rank_whose_process_is_gone_is_lost_at_once(dead: int) -> None:
    """Not after the patience with a rank that loads: its connection may never close."""
    watch = Watch(Codec(1, 0, 3), 0, down=Peers({1: os.getpid(), 2: dead}))
    outlook = PeerView(0, Patience(silence=2.0, stopped=10.0, mute=40.0))
    channel = Channel(watch, 0)
    outlook.begin(3, channel, now=100.0)
    loading = Heartbeat(0, 0, "load", 0.0, 1800.0, 0, 0, 0, ())
    for rank in range(3):
        outlook.note(rank, loading, now=100.0)
    assert outlook.judge(101.9) is None
    verdict = outlook.judge(102.1)
    assert verdict is not None
    assert (verdict.cause, verdict.rank) == (Cause.LOST, 2)
    channel.left.add(2)
    assert outlook.judge(102.1) is None, "it said goodbye"


def test_a_rank_that_was_away_itself_blames_nobody_s_silence() -> None:
    watch = Watch(Codec(1, 0, 3), 0, down=Peers({}))
    outlook = PeerView(0, Patience(silence=2.0))
    outlook.begin(3, Channel(watch, 0), now=100.0)
    told = Verdict(Cause.TERMINATED, 0, 0, "rank 0 ends at step 0: SystemExit: 143")
    assert outlook.weigh([told]) == told
    outlook.note(0, outlook.signs[0].heartbeat, now=102.1)
    assert outlook.weigh([told]).rank == 1
