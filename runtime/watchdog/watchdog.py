"""The watchdog: a thread a rank that reports its engine's progress to the others, and ends the job when one does not.

Knows: when to speak, to listen and to judge, and how long a report waits for a better explanation.
Does not know: what the engine reports as progress, who is to blame (peer_view.py, blame.py), how frames travel
(heartbeat.py), what is done before the process leaves (shutdown.py), what the engine does.

    every ``interval``   each rank reports where its engine is, and for how long, to its leader, which reports to others
                         that it is there, and judges
    report               a rank whose collective broke, or whom a signal ends, says so. That may follow from another
                         rank's fault: for ``explanation_wait`` seconds a better explanation is waited for
    verdict              (a rank stands still, its process is gone, or says that it ends)  the leader reports it; each
                         rank writes its bundle and leaves with EXIT_CODE; the leader writes the summary, and kills what
                         has not left its own node a moment later
    agreed end           ``stop`` says goodbye, so that a closing connection means nothing

The engine's thread only stores into attributes here. It may hang anywhere but in C code that holds the interpreter; for
that, a timer of faulthandler that needs no interpreter is wound up again in every round.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from math import inf

from parallel.control.errors import Cause, Verdict
from parallel.control.interface import ControlPlane
from parallel.control.wire.frames import Heartbeat, Kind
from runtime.schedule.digest import RollingDigest
from runtime.watchdog.blame import CONSEQUENCES, Patience, verdict_on
from runtime.watchdog.crash_report import Evidence
from runtime.watchdog.heartbeat import Channel, News
from runtime.watchdog.options import WatchdogOptions
from runtime.watchdog.peer_view import PeerView
from runtime.watchdog.shutdown import LAST_SECONDS, Shutdown, exit_code


class Progress:
    """Set ``place`` and ``step`` while the engine works; the turns of ``control`` count by themselves.

    ``limit``: seconds without progress that are fine where the engine is. The engine's thread only stores into
    attributes here; any thread may read.
    """

    def __init__(self, control: ControlPlane, limit: float) -> None:
        self.place = "load"
        self.step = 0
        self.limit = limit
        self.turns = -1  # with the ends of phases, when they were last looked at
        self._control = control
        self._marks = 0
        self._since = time.monotonic()

    @contextmanager
    def phase(self, place: str, limit: float) -> Iterator[None]:
        """A part of the program with a separate limit: ``with watchdog.phase("load", 600): ...``

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

    def still_for(self, now: float) -> float:
        """Seconds until ``now``, by time.monotonic, since the first observer saw the latest progress."""
        turns = self._control.turns + self._marks
        if turns != self.turns:
            self.turns, self._since = turns, now
        return now - self._since

    def was_away(self, seconds: float, now: float) -> None:
        """This process was stopped for so long until ``now``, by time.monotonic: no time to make progress in."""
        self._since = min(self._since + seconds, now)


class Watchdog(Progress):
    """One a rank: the progress that it makes, and the thread that watches over it and the others'.

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
        super().__init__(control, options.limit)
        self.options = options
        self.evidence = evidence or Evidence()
        self.verdict: Verdict | None = None
        self.rank = control.rank
        self.release: Callable[[], object] | None = None  # once the bundle is written: lets go of what others wait for
        self.on_verdict: Callable[[str], object] | None = None  # called with the reason, before anything is written
        self._channel: Channel | None = None
        self._digest = digest
        self._leave = leave
        self._parent = os.getppid()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._outlook = PeerView(self.rank, Patience(options.silence, options.limit, options.limit + options.held))
        self._last_acts = Shutdown(self.rank, options, self.evidence, self._outlook)
        self._told_limit = 0.0
        self._reports: list[Verdict] = []
        self._judge_at = inf
        self._failure: Verdict | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    # ---- the engine's side ----

    def start(self) -> None:
        if self._control.watch is not None:
            self._channel = Channel(self._control.watch, self.rank)
        self._last_acts.prepare()
        self._thread.start()

    def announce_limit(self, wait_s: float = 1.0) -> None:
        """Until the others know the ``limit`` that holds now: a tenth of a second at the end of a long phase.

        From here on this rank may fall silent for good, and the others go by what they received last.
        """
        until = time.monotonic() + wait_s
        while self._told_limit != self.limit and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.005)

    def attend(self, digest: RollingDigest, steps: Callable[[], Iterable[object]]) -> None:
        """From now on there is an engine: which its heartbeats and its bundle show."""
        self._digest = lambda: digest.value
        self.evidence.decisions = digest.recent
        self.evidence.steps = steps

    def silent_ranks(self, seconds: float) -> tuple[int, ...]:
        """The ranks that this one follows and has received nothing from for longer; from any thread."""
        now = time.monotonic()
        return tuple(sorted(rank for rank, sign in dict(self._outlook.signs).items() if now - sign.at > seconds))

    def ignore_signals(self) -> None:
        """This process is about to leave and has a bundle to write: a launcher's SIGTERM, which another rank's end
        brings, must not be quicker.
        """
        if self.options.whole_process and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)

    def fail(self, reason: BaseException | str) -> None:
        """This rank ends: all ranks write their bundles and leave. Does not return (unless ``leave`` does).

        A ControlError is what all ranks agreed on already, and stays the verdict; other reasons become this rank's,
        unless a collective broke or a signal came, and it shows in time whose fault that was.
        """
        verdict = verdict_on(reason, self.rank, self.step)
        self.ignore_signals()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._failure = verdict  # one thread speaks on the channel
            self._thread.join(self.options.explanation_wait + 2 * self.options.grace + LAST_SECONDS)
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
        self._last_acts.leave_nothing()

    # ---- the thread ----

    def _run(self) -> None:
        next_round = 0.0
        self._outlook.begin(self._control.world, self._channel, time.monotonic())
        try:
            while not self._stopping.is_set() and self.verdict is None:
                now = time.monotonic()
                shorter = self.limit < self._told_limit  # see announce_limit
                if now >= next_round or shorter:
                    if now > next_round + self.options.silence > self.options.silence:
                        self._listen(0.0)
                        self._outlook.was_away(now)
                        self.was_away(now - next_round, now)
                    next_round = now + self.options.interval
                    self._round(now)
                self._listen(min(self.options.interval, 0.1))
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    self._listen(0.0)  # the verdict may be there already
                    self._beat(time.monotonic())
                    self._report(failure)
                if time.monotonic() >= self._judge_at:
                    self._listen(0.0)  # the verdict may have been quicker than what came before it
                    self._end(self._outlook.weigh(self._reports))
        except Exception as error:  # a watchdog that dies unnoticed is worse than none
            self._end(verdict_on(f"its watchdog failed: {error!r}", self.rank, self.step))

    def _round(self, now: float) -> None:
        self._last_acts.end_process_in(self.limit + self.options.held)
        if os.getppid() != self._parent:
            text = f"the process that started it ({self._parent}) is gone"
            self._end(verdict_on(text, self.rank, self.step))
            return
        self._beat(now)
        if self._channel is not None:
            self._channel.pass_on_requests()
        verdict = self._outlook.judge(now)
        if verdict is not None:
            self._end(verdict)

    def _beat(self, now: float) -> None:
        still, limit = self.still_for(now), self.limit
        beat = Heartbeat(self.turns, self.step, self.place, still, limit, self._digest(), *self.evidence.calls())
        self._outlook.note(self.rank, beat, now)
        if self._channel is not None:
            self._channel.say(Kind.HEARTBEAT, beat)
            self._channel.say_below(Kind.HEARTBEAT, beat)
        self._told_limit = limit

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
                self._end(self._outlook.lost(rank))
        elif isinstance(frame.body, Heartbeat):
            self._outlook.note(rank, frame.body, time.monotonic())
        elif isinstance(frame.body, Verdict):
            if rank == channel.leader and not channel.leads:
                self._end(frame.body)
            else:
                self._report(frame.body)

    # ---- the end ----

    def _report(self, verdict: Verdict) -> None:
        """A rank ends. What may be a consequence waits for its cause; a follower waits for the leader's word on it."""
        channel = self._channel
        if verdict.cause not in CONSEQUENCES or channel is None:
            self._end(verdict)
            return
        if not channel.leads and verdict.rank == self.rank:
            channel.say(Kind.END, verdict)
        self._reports.append(verdict)
        wait = self.options.explanation_wait + (0.0 if channel.leads else 2 * self.options.grace)
        self._judge_at = min(self._judge_at, time.monotonic() + wait)

    def _end(self, verdict: Verdict) -> None:
        """Informs the others, writes what there is to write, leaves. The first verdict counts."""
        with self._lock:
            if self.verdict is not None:
                return
            self.verdict = verdict
        if self.on_verdict is not None:
            with suppress(Exception):  # a listener must not keep this process
                self.on_verdict(verdict.text)
        self._last_acts.perform(verdict, self._channel, self.release)
        self._leave(exit_code(verdict))
