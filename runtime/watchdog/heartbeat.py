"""The watch channel as a watchdog uses it: who said what, and passing on what is for others.

Knows: which way frames go in a job of one node or several, which ranks said goodbye, which processes are whose.
Does not know: what a heartbeat or a verdict means (blame.py), when to speak (watchdog.py).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from parallel.control.errors import FrameError, Verdict
from parallel.control.interface import Watch
from parallel.control.wire.frames import EVERYONE, Frame, Heartbeat, Kind

_MOMENT = 0.05
_EXITING = 0x4  # PF_EXITING of the flags in /proc/PID/stat


class News(NamedTuple):
    """What came from a rank: a frame, or an ``error`` for bytes that are none; with neither, the rank is gone."""

    rank: int
    frame: Frame | None = None
    error: FrameError | None = None


class Channel:
    """This rank's end of the watch channel. One thread, the watchdog's, calls everything here."""

    def __init__(self, watch: Watch, rank: int) -> None:
        self.rank = rank
        self.leader = watch.leader
        self.leads = watch.up is None
        self.left: set[int] = set()
        self._watch = watch
        watch.taken = True

    def say(self, kind: Kind, body: Heartbeat | Verdict | None = None) -> None:
        """To the leader; the leader speaks to everybody."""
        watch = self._watch
        frame = watch.codec.encode(kind, EVERYONE if self.leads else self.rank, body=body)
        if watch.up is not None:
            watch.up.send(frame)
        elif watch.down is not None:
            watch.down.broadcast(frame)

    def say_below(self, kind: Kind, body: Heartbeat | Verdict | None = None) -> None:
        """The leader of a node among several: to the ranks of its node."""
        watch = self._watch
        if watch.up is not None and watch.down is not None:
            watch.down.broadcast(watch.codec.encode(kind, EVERYONE, body=body))

    def pass_on_requests(self) -> None:
        """What the engine's side wants to ask of other ranks' watchdogs."""
        watch = self._watch
        while watch.requests:
            rank, frame = watch.requests.popleft()
            if watch.down is not None:
                watch.down.send(rank, frame)

    def hear(self, timeout: float) -> list[News]:
        """What came within ``timeout`` seconds; returns early with the first."""
        watch, news = self._watch, list[News]()
        above = watch.up is not None and self.leader not in self.left
        if above:
            news += self._hear_above(timeout)
        elif watch.down is None:
            time.sleep(timeout)
        if watch.down is not None:
            for via, what in watch.down.receive(0.0 if above else timeout):
                news += self._hear_below(via, what)
        return news

    def process(self, rank: int) -> int | None:
        """The process id of a rank that is connected directly and runs on this node; None for others, and when gone."""
        watch = self._watch
        if watch.up is not None and rank == self.leader:
            return watch.up.process() or None  # 0: of another namespace, where it has another number
        return None if watch.down is None else watch.down.process(rank) or None

    def remaining(self, seconds: float, wait_for_leader: bool) -> list[int]:
        """The ranks connected directly that have not closed after ``seconds``: those below, and perhaps the leader."""
        watch = self._watch
        waiting = set() if watch.down is None else set(watch.down.ranks)
        if watch.up is not None and wait_for_leader:
            waiting.add(self.leader)
        until = time.monotonic() + seconds
        while waiting and time.monotonic() < until:
            if watch.down is not None:
                waiting.difference_update(via for via, what in watch.down.receive(_MOMENT) if what is None)
            if self.leader in waiting and watch.up is not None:
                try:
                    watch.up.receive(_MOMENT)
                except EOFError:
                    waiting.discard(self.leader)
                except FrameError:
                    pass  # it is the end of the connection that we wait for
        return sorted(waiting)

    def close(self) -> None:
        self._watch.close()

    def _hear_above(self, timeout: float) -> list[News]:
        watch = self._watch
        assert watch.up is not None
        try:
            data = watch.up.receive(timeout)
            if data is None:
                return []
            frame = watch.codec.decode(data)
        except EOFError:
            return [News(self.leader)]
        except FrameError as error:
            return [News(self.leader, error=error)]
        if watch.down is not None and frame.rank != self.rank:
            watch.down.broadcast(data) if frame.rank == EVERYONE else watch.down.send(frame.rank, data)
        if frame.kind is Kind.EXPLAIN and frame.rank == self.rank and watch.explain is not None:
            watch.up.send(watch.explain(frame.step))
        elif frame.rank in (self.rank, EVERYONE):
            return self._note(News(self.leader, frame))
        return []

    def _hear_below(self, via: int, what: bytes | FrameError | None) -> list[News]:
        watch = self._watch
        covered = sorted(watch.covers.get(via, (via,)))
        if what is None:
            return [News(rank) for rank in covered if rank not in self.left]
        try:
            if isinstance(what, FrameError):
                raise what
            frame = watch.codec.decode(what)
            if frame.rank not in covered:
                raise FrameError("rank", f"{frame.kind.name} of rank {frame.rank} came from rank {via}")
        except FrameError as error:
            return [News(via, error=error)]
        if watch.up is not None:
            watch.up.send(what)
        if frame.kind is Kind.DECISIONS:
            watch.answers.append(frame)
        return self._note(News(frame.rank, frame))

    def _note(self, news: News) -> list[News]:
        if news.frame is not None and news.frame.kind is Kind.BYE:
            self.left.add(news.rank)
            self.left.update(self._watch.covers.get(news.rank, ()))  # a node's leader says goodbye for its node
        return [news]


def is_stopped(process: int | None) -> bool:
    """Whether the kernel says that a process of this node is stopped (SIGSTOP, a debugger)."""
    return process is not None and _state_of(process)[0] in ("T", "t")


def is_gone(process: int | None) -> bool:
    """Whether a process of this node has ended or is ending, though its connections may still be open.

    It closes them only after it has given its memory back, and never where a child of it holds them, too.
    """
    if process is None:
        return False
    try:
        os.kill(process, 0)
    except OSError:  # no process has this number, or another one
        return True
    state, flags = _state_of(process)
    return state in ("Z", "X") or bool(flags & _EXITING)


def _state_of(process: int) -> tuple[str, int]:
    """The state's letter and the flags of its main thread, as the kernel reports them; nothing where it does not."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[6])
    except (OSError, IndexError, ValueError):
        return "", 0
