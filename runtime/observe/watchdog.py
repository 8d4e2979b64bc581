"""The watchdog: a thread a rank that tells the others how its engine gets on, and ends the job when one does not.

Knows: when to speak and to judge, what a rank reports of itself, how a process ends.
Does not know: who is to blame (judgement.py), how frames travel (channel.py), what a bundle holds (bundle.py), what the
engine does.

    every ``interval``   each rank tells its leader where its engine is and for how long; the leader tells the others
                         that it is there, and judges
    report               a rank whose collective broke, or whom a signal ends, says so. That may follow from another
                         rank's fault: for ``settle`` seconds a better explanation is waited for
    verdict              (a rank stands still, its process is gone, or it says that it ends)  the leader tells all; each
                         rank writes its bundle and leaves with EXIT_CODE; the leader writes the summary, and kills what
                         has not left its own node a moment later
    agreed end           ``stop`` says goodbye, so that a closing connection means nothing

The engine's thread only stores into attributes here. It may hang anywhere but in C code that holds the interpreter; for
that, a timer of faulthandler that needs no interpreter is wound up again in every round.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NamedTuple

from parallel.call_log import CollectiveError
from parallel.control.errors import Cause, ControlError, Verdict
from parallel.control.plane import ControlPlane
from parallel.control.record import Heartbeat, Kind
from runtime.observe.bundle import Evidence, rank_folder, summary_file, write_bundle, write_summary
from runtime.observe.channel import Channel, News, is_stopped
from runtime.observe.crash_log import CrashLog, kill
from runtime.observe.judgement import CONSEQUENCES, Patience, Sign, judge, standing_still, weigh
from runtime.schedule.digest import RollingDigest

EXIT_CODE = 70  # sysexits.h's EX_SOFTWARE: ended by the watchdog, look at the bundle
TERMINATED_CODE = 128 + signal.SIGTERM  # a signal from outside, and nothing worse, ended the job
_LAST_SECONDS = 10.0  # for writing a bundle; after that the process ends without one


@dataclass(frozen=True, slots=True)
class WatchdogOptions:
    """Times in seconds. ``limit``: longest time without progress while running (phases may allow more).

    ``silence``: a rank without a sign for so long counts as stopped once the job stands still. ``settle``: how long a
    report that may be a consequence waits for its cause. ``grace``: what other processes get for their last words.
    ``held``: a C call may hold the interpreter for this long beyond the limit.

    ``bundles``: the job's own folder for what is left behind, removed again when that is nothing. ``whole_process``:
    the process is this rank's alone, so that its signals are, too (crash_log.py).
    """

    bundles: Path
    whole_process: bool = False
    limit: float = 10.0
    interval: float = 0.25
    silence: float = 2.0
    settle: float = 0.75
    grace: float = 1.5
    held: float = 30.0


class Health(NamedTuple):
    """``ok`` means progress, not a living process. ``still_for`` and ``limit`` are seconds."""

    ok: bool
    still_for: float
    limit: float
    step: int
    place: str


class Watchdog:
    """One a rank. Set ``place`` and ``step`` while the engine works; ``progress`` counts turns by itself.

    ``leave`` ends the process and does not return; tests pass something else.
    """

    def __init__(
        self,
        control: ControlPlane,
        options: WatchdogOptions,
        evidence: Evidence | None = None,
        digest: Callable[[], int] = int,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.options = options
        self.evidence = evidence or Evidence()
        self.place = "load"
        self.step = 0
        self.limit = options.limit
        self.verdict: Verdict | None = None
        self.rank = control.rank
        self._control = control
        self._channel: Channel | None = None
        self._digest = digest
        self._leave = leave
        self._parent = os.getppid()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._marks = 0
        self._seen_turns = -1
        self._progress_at = time.monotonic()
        self._signs: dict[int, Sign] = {}
        self._far = frozenset[int]()  # ranks on other nodes
        self._reports: list[Verdict] = []
        self._settled_at = inf
        self._failure: Verdict | None = None
        self._crash_log: CrashLog | None = None
        self.release: Callable[[], object] | None = None  # once the bundle is written: lets go of what others wait for
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    # ---- the engine's side ----

    def start(self) -> None:
        """A folder that cannot be written costs the bundle, not the job."""
        if self._control.watch is not None:
            self._channel = Channel(self._control.watch, self.rank)
        folder = rank_folder(self.options.bundles, self.rank)
        try:
            self._crash_log = CrashLog(folder, self.options.whole_process)
            if self.rank == 0:
                summary_file(self.options.bundles).unlink(missing_ok=True)  # of an earlier start
        except OSError as error:
            _say(f"rank {self.rank} will leave no bundle in {folder}: {error}")
        self._thread.start()

    def attend(self, digest: RollingDigest, steps: Callable[[], Iterable[object]]) -> None:
        """From now on there is an engine: what its heartbeats and its bundle tell."""
        self._digest = lambda: digest.value
        self.evidence.decisions = digest.recent
        self.evidence.steps = steps

    def mark(self) -> None:
        """Progress that is no turn, while loading or compiling."""
        self._marks += 1

    @contextmanager
    def phase(self, place: str, limit: float) -> Iterator[None]:
        """A part of the program with a patience of its own: ``with watchdog.phase("load", 600): ...``

        ``phase("idle", math.inf)`` is for a front end that waits for its user.
        """
        before = self.place, self.limit
        self.place, self.limit = place, limit
        self._marks += 1
        try:
            yield
        finally:
            self._marks += 1
            self.place, self.limit = before

    def health(self) -> Health:
        still = self._still(time.monotonic())
        ok = self.verdict is None and still <= self.limit and not self._stopping.is_set()
        return Health(ok, still, self.limit, self.step, self.place)

    def fail(self, reason: BaseException | str) -> None:
        """This rank ends: all ranks write their bundles and leave. Does not return (unless ``leave`` does).

        A ControlError is what all ranks agreed on already, and stays the verdict; other reasons become this rank's,
        unless a collective broke or a signal came, and it shows in time whose fault that was.
        """
        verdict = self._verdict_on(reason)
        if self.options.whole_process and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):  # the launcher's, for another rank's end: we are leaving
                signal.signal(number, signal.SIG_IGN)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._failure = verdict  # one thread speaks on the channel
            self._thread.join(self.options.settle + 2 * self.options.grace + _LAST_SECONDS)
        self._end(verdict)

    def stop(self) -> None:
        """The agreed end: says goodbye and closes the watch connections."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._channel is not None:
            if self.verdict is None:
                self._channel.say(Kind.BYE)
                self._channel.say_below(Kind.BYE)
            self._channel.close()
        if self._crash_log is not None:
            self._crash_log.close()
            for folder in (self._crash_log.path.parent, self.options.bundles):
                with contextlib.suppress(OSError):  # not empty, or another rank was quicker
                    folder.rmdir()

    # ---- the thread ----

    def _run(self) -> None:
        next_round = 0.0
        begins = Sign(Heartbeat(0, 0, "start", 0.0, inf, 0, 0, 0, ()), time.monotonic())
        channel = self._channel  # who has not spoken yet may be gone or stopped, too
        followed = range(self._control.world) if channel is None or channel.leads else (channel.leader,)
        self._signs.update(dict.fromkeys(followed, begins))
        if channel is not None:  # nobody has left yet, and processes are known of this node only
            self._far = frozenset(rank for rank in followed if rank != self.rank and channel.process(rank) is None)
        try:
            while not self._stopping.is_set() and self.verdict is None:
                now = time.monotonic()
                if now >= next_round:
                    if now > next_round + self.options.silence > self.options.silence:
                        self._was_away(now)
                    next_round = now + self.options.interval
                    self._round(now)
                self._listen(min(self.options.interval, 0.1))
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    self._listen(0.0)  # the verdict may be there already
                    self._beat(time.monotonic())
                    self._report(failure)
                if time.monotonic() >= self._settled_at:
                    self._end(weigh(self._reports, self._signs))
        except Exception as error:  # a watchdog that dies unnoticed is worse than none
            self._end(self._verdict_on(f"its watchdog failed: {error!r}"))

    def _was_away(self, now: float) -> None:
        """This process was stopped, or had no processor for long: the others' silence is its own."""
        self._listen(0.0)
        self._signs = {rank: Sign(sign.heartbeat, max(sign.at, now)) for rank, sign in self._signs.items()}

    def _still(self, now: float) -> float:
        turns = self._control.turns + self._marks
        if turns != self._seen_turns:
            self._seen_turns, self._progress_at = turns, now
        return now - self._progress_at

    def _beat(self, now: float) -> None:
        still = self._still(now)
        beat = Heartbeat(
            self._seen_turns, self.step, self.place, still, self.limit, self._digest(), *self.evidence.calls()
        )
        self._signs[self.rank] = Sign(beat, now)
        if self._channel is not None:
            self._channel.say(Kind.HEARTBEAT, beat)
            self._channel.say_below(Kind.HEARTBEAT, beat)

    def _round(self, now: float) -> None:
        if self._crash_log is not None:
            self._crash_log.end_process_in(self.limit + self.options.held)
        if os.getppid() != self._parent:
            self._end(self._verdict_on(f"the process that started it ({self._parent}) is gone"))
            return
        self._beat(now)
        if self._channel is not None:
            self._channel.pass_on_requests()
        verdict = self._judge(now)
        if verdict is not None:
            self._end(verdict)

    def _judge(self, now: float) -> Verdict | None:
        """The leader judges all; a follower its leader, or itself once the leader has said goodbye."""
        options, channel, signs = self.options, self._channel, self._signs
        patience = Patience(options.silence, options.limit, options.limit + options.held)
        if channel is not None and not channel.leads:
            if channel.leader not in channel.left:
                return self._judge_leader(channel, now, patience)
            signs = {self.rank: signs[self.rank]}
        elif channel is not None:
            signs = {rank: sign for rank, sign in signs.items() if rank not in channel.left}
        stopped = {rank for rank, sign in signs.items() if now - sign.at > patience.silence and self._stopped(rank)}
        return judge(signs, now, patience, stopped, self._far)

    def _judge_leader(self, channel: Channel, now: float, patience: Patience) -> Verdict | None:
        """A leader that has fallen silent gets the time to judge first, unless it is known to be stopped."""
        sign = self._signs[channel.leader]
        beat, silent = sign.heartbeat, now - sign.at
        if silent <= patience.silence:
            return None
        if self._stopped(channel.leader):
            due = patience.stopped
        else:
            due = min(max(beat.limit - beat.still_for, 0.0) + patience.silence, patience.mute)
        if silent <= due:
            return None
        return standing_still(channel.leader, {channel.leader: sign}, now, patience.silence, self._far)

    def _stopped(self, rank: int) -> bool:
        return self._channel is not None and is_stopped(self._channel.process(rank))

    def _listen(self, timeout: float) -> None:
        if self._channel is None:
            self._stopping.wait(timeout)
            return
        for news in self._channel.hear(timeout):
            if self.verdict is not None:
                return
            self._take(self._channel, news)

    def _take(self, channel: Channel, news: News) -> None:
        rank, frame = news.rank, news.frame
        if news.error is not None:
            text = f"rank {rank} broke the protocol: {news.error}"
            self._end(Verdict(Cause.FRAME, rank, self.step, text))
        elif frame is None:
            if all(report.rank != rank for report in self._reports):  # else it has said why
                self._end(self._gone(rank))
        elif isinstance(frame.body, Heartbeat):
            self._signs[rank] = Sign(frame.body, time.monotonic())
        elif isinstance(frame.body, Verdict):
            if rank == channel.leader and not channel.leads:
                self._end(frame.body)
            else:
                self._report(frame.body)

    def _gone(self, rank: int) -> Verdict:
        beat = self._signs[rank].heartbeat
        how = ", or the network to its node was cut for long" if rank in self._far else ""
        text = f"rank {rank} is gone: its process ended without an agreed stop{how}; last seen at step {beat.step} in "
        return Verdict(Cause.LOST, rank, beat.step, text + beat.phase)

    # ---- the end ----

    def _verdict_on(self, reason: BaseException | str) -> Verdict:
        if isinstance(reason, ControlError):
            return reason.verdict
        said = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        cause = Cause.ABORTED
        if isinstance(reason, (SystemExit, KeyboardInterrupt)):
            cause = Cause.TERMINATED
        elif isinstance(reason, BaseException) and any(isinstance(e, CollectiveError) for e in _causes(reason)):
            cause = Cause.COLLECTIVE
        return Verdict(cause, self.rank, self.step, f"rank {self.rank} ends at step {self.step}: {said}")

    def _report(self, verdict: Verdict) -> None:
        """A rank ends. What may be a consequence waits for its cause; a follower waits for the leader's word on it."""
        channel = self._channel
        if verdict.cause not in CONSEQUENCES or channel is None:
            self._end(verdict)
            return
        if not channel.leads and verdict.rank == self.rank:
            channel.say(Kind.END, verdict)
        self._reports.append(verdict)
        wait = self.options.settle + (0.0 if channel.leads else 2 * self.options.grace)
        self._settled_at = min(self._settled_at, time.monotonic() + wait)

    def _end(self, verdict: Verdict) -> None:
        """Tells the others, writes what there is to write, leaves. The first verdict counts."""
        with self._lock:
            if self.verdict is not None:
                return
            self.verdict = verdict
        try:
            self._last_acts(verdict)
        except Exception as error:  # nothing may keep this process
            _say(f"rank {self.rank} could not do all of its last acts: {error!r}")
        self._leave(TERMINATED_CODE if verdict.cause is Cause.TERMINATED else EXIT_CODE)

    def _last_acts(self, verdict: Verdict) -> None:
        options, channel, now = self.options, self._channel, time.monotonic()
        if self._crash_log is not None:
            self._crash_log.end_process_in(options.grace + _LAST_SECONDS)
        if channel is not None:
            channel.say(Kind.END, verdict)
            channel.say_below(Kind.END, verdict)
        _say(f"rank {self.rank} ends the job: {verdict.text}")
        folder = write_bundle(options.bundles, self.rank, verdict, self.evidence)
        if folder is not None:
            _say(f"rank {self.rank} left its bundle in {folder}")
        if self.rank == 0:
            self._summarise(verdict, now)
        if self.release is not None:
            self.release()
        if channel is not None:
            self._see_off(channel, now)
        if self.rank == 1 and verdict.rank == 0:
            self._summarise_unless_rank_0_can(verdict, now)

    def _summarise(self, verdict: Verdict, now: float) -> None:
        path = write_summary(self.options.bundles, self.rank, verdict, self._signs, now)
        if path is not None:
            _say(f"summary in {path}")

    def _summarise_unless_rank_0_can(self, verdict: Verdict, now: float) -> None:
        """It knows more of the other ranks, but it is the one that failed."""
        until = now + self.options.grace
        while not summary_file(self.options.bundles).exists():
            if verdict.cause in (Cause.LOST, Cause.NO_PROGRESS) or time.monotonic() > until:
                self._summarise(verdict, now)
                return
            time.sleep(0.02)

    def _see_off(self, channel: Channel, now: float) -> None:
        """Waits until the ranks of this node have left, hardly for those that had fallen silent; kills the others.

        A leader that said nothing any more is waited for, and killed, by those below it.
        """
        silent = {rank for rank, sign in self._signs.items() if now - sign.at > self.options.silence}
        leader_hangs = not channel.leads and channel.leader in silent
        until = now + self.options.grace
        for rank in channel.remaining(self.options.interval, leader_hangs):
            if rank in silent:
                self._kill(channel, rank)
        for rank in channel.remaining(until - time.monotonic(), leader_hangs):
            self._kill(channel, rank)

    def _kill(self, channel: Channel, rank: int) -> None:
        process = channel.process(rank)
        if process is not None and process != os.getpid():
            _say(f"rank {rank} (process {process}) does not leave: killed")
            kill(process)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it came from."""
    step: BaseException | None = error
    while step is not None:
        yield step
        step = step.__cause__ or step.__context__


def _say(text: str) -> None:
    sys.stderr.write(f"lockstride: {text}\n")  # in one piece: the ranks share a terminal
    sys.stderr.flush()
