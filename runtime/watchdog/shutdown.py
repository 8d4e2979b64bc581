"""What a rank does before it leaves: it writes its bundle, lets go of the others, sees them off, and kills who stays.

Knows: the order of the last acts, which rank writes the summary, exit codes, that nothing may keep the process.
Does not know: why the job ends (watchdog.py passes the verdict), what a bundle holds (crash_report.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from parallel.control.errors import Cause, Verdict
from parallel.control.wire.frames import Kind
from runtime.watchdog.crash_report import Evidence, rank_folder, summary_file, write_bundle, write_summary
from runtime.watchdog.heartbeat import Channel
from runtime.watchdog.options import WatchdogOptions
from runtime.watchdog.peer_view import PeerView

ASK = signal.SIGUSR2
_WRITING_SECONDS = 0.2
_TRIES = 20
_LONGEST = 1e6  # seconds; what the timer takes


class CrashLog:
    """``crash.txt`` in ``folder``, removed again by ``close`` when there was nothing to say.

    ``whole_process``: fatal signals and ASK are written here too; one log a process may have them. Raises OSError.
    """

    def __init__(self, folder: Path, whole_process: bool) -> None:
        self.path = folder / "crash.txt"
        self._file: TextIO = _opened(self.path)
        self._whole_process = whole_process
        if whole_process:
            faulthandler.enable(self._file)
            faulthandler.register(ASK, self._file)

    def end_process_in(self, seconds: float) -> None:
        """Unless this is called again before, the process writes its stacks and exits with code 1 after ``seconds``."""
        faulthandler.dump_traceback_later(min(seconds, _LONGEST), exit=True, file=self._file)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._whole_process:
            faulthandler.unregister(ASK)
            faulthandler.disable()
        self._file.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_size == 0:
                self.path.unlink()


def _opened(path: Path) -> TextIO:
    """A job that ends now may remove the folder that both share, between its making and the opening of the file."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("w")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w")


def kill(process: int) -> None:
    """Ends a process of this node that cannot be talked to any more; its stacks are asked for first, stopped or not."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, ASK)
        os.kill(process, signal.SIGCONT)
        time.sleep(_WRITING_SECONDS)
        os.kill(process, signal.SIGKILL)


EXIT_CODE = 70  # sysexits.h's EX_SOFTWARE: ended by the watchdog, look at the bundle
TERMINATED_CODE = 128 + signal.SIGTERM  # a signal from outside, and nothing worse, ended the job
LAST_SECONDS = 10.0  # for writing a bundle; after that the process ends without one


def exit_code(verdict: Verdict) -> int:
    return TERMINATED_CODE if verdict.cause is Cause.TERMINATED else EXIT_CODE


class Shutdown:
    """One a rank, from ``prepare`` on. Then either ``perform``, once, or ``leave_nothing`` after an agreed end."""

    def __init__(self, rank: int, options: WatchdogOptions, evidence: Evidence, outlook: PeerView) -> None:
        self.rank = rank
        self._options = options
        self._evidence = evidence
        self._outlook = outlook
        self._crash_log: CrashLog | None = None

    def prepare(self) -> None:
        """A folder that cannot be written costs the bundle, not the job."""
        folder = rank_folder(self._options.bundles, self.rank)
        try:
            self._crash_log = CrashLog(folder, self._options.whole_process)
            if self.rank == 0:
                summary_file(self._options.bundles).unlink(missing_ok=True)  # of an earlier start
        except OSError as error:
            _say(f"rank {self.rank} will leave no bundle in {folder}: {error}")

    def end_process_in(self, seconds: float) -> None:
        """Whatever holds the interpreter: unless this is called again before, the process ends after ``seconds``."""
        if self._crash_log is not None:
            self._crash_log.end_process_in(seconds)

    def leave_nothing(self) -> None:
        """Removes the folders again, unless there is something in them."""
        if self._crash_log is None:
            return
        self._crash_log.close()
        for folder in (self._crash_log.path.parent, self._options.bundles, self._options.parent):
            with contextlib.suppress(OSError):  # not empty, or another rank was quicker
                if folder is not None:
                    folder.rmdir()

    def perform(self, verdict: Verdict, channel: Channel | None, release: Callable[[], object] | None) -> None:
        """``release``: called once the bundle is written, lets go of what others wait for. Does not raise."""
        try:
            self._perform(verdict, channel, release)
        except Exception as error:  # nothing may keep this process
            _say(f"rank {self.rank} could not do all of its last acts: {error!r}")

    def _perform(self, verdict: Verdict, channel: Channel | None, release: Callable[[], object] | None) -> None:
        options, now = self._options, time.monotonic()
        self.end_process_in(options.grace + LAST_SECONDS)
        if channel is not None:
            channel.say(Kind.END, verdict)
            channel.say_below(Kind.END, verdict)
        _say(f"rank {self.rank} ends the job: {verdict.text}")
        folder = write_bundle(options.bundles, self.rank, verdict, self._evidence)
        if folder is not None:
            _say(f"rank {self.rank} left its bundle in {folder}")
        if self.rank == 0:
            self._summarise(verdict, now)
        if release is not None:
            release()
        if channel is not None:
            self._see_off(channel, now)
        if self.rank == 1 and verdict.rank == 0:
            self._summarise_unless_rank_0_can(verdict, now)

    def _summarise(self, verdict: Verdict, now: float) -> None:
        path = write_summary(self._options.bundles, self.rank, verdict, self._outlook.signs, now)
        if path is not None:
            _say(f"summary in {path}")

    def _summarise_unless_rank_0_can(self, verdict: Verdict, now: float) -> None:
        """It knows more of the other ranks, but it is the one that failed."""
        until = now + self._options.grace
        while not summary_file(self._options.bundles).exists():
            if verdict.cause in (Cause.LOST, Cause.NO_PROGRESS) or time.monotonic() > until:
                self._summarise(verdict, now)
                return
            time.sleep(0.02)

    def _see_off(self, channel: Channel, now: float) -> None:
        """Waits until the ranks of this node have left, hardly for those that had fallen silent; kills the others.

        A leader that said nothing any more is waited for, and killed, by those below it.
        """
        silent = self._outlook.silent(now)
        leader_hangs = not channel.leads and channel.leader in silent
        until = now + self._options.grace
        for rank in channel.remaining(self._options.interval, leader_hangs):
            if rank in silent:
                self._kill(channel, rank)
        for rank in channel.remaining(until - time.monotonic(), leader_hangs):
            self._kill(channel, rank)

    def _kill(self, channel: Channel, rank: int) -> None:
        process = channel.process(rank)
        if process is not None and process != os.getpid():
            _say(f"rank {rank} (process {process}) does not leave: killed")
            kill(process)


def _say(text: str) -> None:
    sys.stderr.write(f"lockstride: {text}\n")  # in one piece: the ranks share a terminal
    sys.stderr.flush()
