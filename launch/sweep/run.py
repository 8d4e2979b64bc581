"""`sweep run`: the points of a grid here, one after the other, each a separate process.

Knows: which points are left, how a point's process is started, watched, ended. Does not know: what a point measures
(point.py), how attempts are kept (ledger.py), which points Slurm has (submit.py).

A sweep may be killed at any moment. Its running point is signalled by the kernel and ends; until it has ended it keeps
the point's lock, so that the next sweep does not start the point again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from launch.ranks.signals import Interrupts
from launch.sweep.grid import Grid
from launch.sweep.ledger import SUBMIT, Attempt, Ledger
from launch.sweep.outcome import point_rows, why_failed
from launch.sweep.point import Point, SweepError, local_command, models_of
from launch.sweep.slurm import Slurm
from launch.sweep.submit import Jobs, left_of
from launch.values import variable
from runtime.watchdog.parent_death import die_with_parent

CommandOf = Callable[[Point, Path], Sequence[str]]
Say = Callable[[str], None]

SOME_FAILED = 1
DRAIN_SECONDS = 20.0  # between asking a point's processes to end and killing them
_LOOK_SECONDS = 0.2
_HELD_SECONDS = 0.5  # between looks at points that another process runs


def run_here(
    grid: Grid,
    ledger: Ledger,
    environ: Mapping[str, str],
    *,
    resume: bool,
    retry_failed: bool,
    command_of: CommandOf = local_command,
    say: Say = print,
) -> int:
    """Run what is left of ``grid``; returns the exit code. Raises SweepError before anything is run, also where Slurm
    has points that are left."""
    if variable(environ, "WORLD_SIZE") > 1:
        raise SweepError("sweep run starts the ranks of each point itself: start it without torchrun")
    with ledger.claim(SUBMIT, shared=True) as lock, Interrupts() as interrupts:
        if lock is None:
            raise SweepError(f"a `sweep submit` over {ledger.out} is under way: wait for its end")
        _refuse_what_slurm_has(left_of(grid, ledger, retry_failed), Jobs(ledger), Slurm(environ), say)
        ledger.begin_sweep(grid, resume=resume)
        LocalSweep(grid, ledger, interrupts, retry_failed, command_of, say).run()
        if interrupts.signal is not None:
            say("interrupted: type the same with --resume to go on")
            return interrupts.exit_code
    return SOME_FAILED if ledger.failed().keys() & grid.by_key().keys() else 0


def _refuse_what_slurm_has(left: Sequence[Point], jobs: Jobs, slurm: Slurm, say: Say) -> None:
    try:
        in_hand = jobs.in_hand(slurm)
    except SweepError as error:  # perhaps the ledger was copied to a machine without Slurm
        say(f"points may be run a second time: {error}")
        return
    if held := [point.key for point in left if point.key in in_hand]:
        task = in_hand[held[0]]
        raise SweepError(
            f"Slurm has {len(held)} of the {len(left)} points that are left, {held[0]} as job {task.job}_{task.task}: "
            "wait for them, or scancel them, or type another --out"
        )


class LocalSweep:
    """``run`` once."""

    def __init__(
        self, grid: Grid, ledger: Ledger, interrupts: Interrupts, retry_failed: bool, command_of: CommandOf, say: Say
    ) -> None:
        self._grid = grid
        self._ledger = ledger
        self._interrupts = interrupts
        self._command_of = command_of
        self._say = say
        self._failed_before = {key: len(folders) for key, folders in ledger.failed().items()}
        done = ledger.done()
        self._left = [
            point
            for point in grid.points
            if point.key not in done and (retry_failed or point.key not in self._failed_before)
        ]
        self._finished = len(grid.points) - len(self._left)
        self._models = models_of(grid.points)

    def run(self) -> None:
        """Until every point is done or has failed, or a signal comes."""
        if self._finished:
            self._say(f"{self._finished} of {len(self._grid.points)} points are done or have failed already")
        left, told = self._left, False
        while left and self._interrupts.signal is None:
            held = [point for point in left if self._interrupts.signal is None and not self._claim_and_run(point)]
            if len(held) == len(left):
                if not told:
                    self._say(f"waiting for {len(held)} point(s) that another process still runs: {held[0].key}, ...")
                told = True
                time.sleep(_HELD_SECONDS)
            left = held

    def _claim_and_run(self, point: Point) -> bool:
        """Whether the point is finished now, by this or another process, or a signal came."""
        ledger = self._ledger
        with ledger.claim(point.key) as lock:
            if lock is None:
                return False
            failures = len(ledger.failed().get(point.key, ()))
            if point.key not in ledger.done() and failures == self._failed_before.get(point.key, 0):
                ledger.clear_work(point.key, job=None)
                self._run(ledger.begin(point), lock)
        return True

    def _run(self, attempt: Attempt, lock: int) -> None:
        point, total = attempt.point, len(self._grid.points)
        title = point.label(self._grid.varied, self._models) or point.key
        self._say(f"[{self._finished + 1}/{total}] {title} ...")
        began = time.monotonic()
        code, why_ended = self._execute(attempt, lock)
        if self._interrupts.signal is not None:
            self._ledger.abandon(attempt)
            return
        self._finished += 1
        reason = why_ended or why_failed(attempt.folder, code)
        rows = point_rows(attempt.folder)
        folder = self._ledger.file(attempt, reason, code)
        took = f"{time.monotonic() - began:.1f} s"
        ended = f"failed after {took}: {reason}; see {folder}" if reason else f"done in {took}{_figures(rows)}"
        self._say(f"[{self._finished}/{total}] {title}: {ended}")

    def _execute(self, attempt: Attempt, lock: int) -> tuple[int, str]:
        """The exit code (negative for a signal), and why the sweep ended the point, if it did."""
        folder = attempt.folder
        with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as errors:
            process = subprocess.Popen(
                self._command_of(attempt.point, folder),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,  # a Ctrl-C comes to us alone, and we can end all of it
                pass_fds=(lock,),
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        minutes = self._grid.minutes
        until = None if minutes is None else time.monotonic() + 60 * minutes
        why = ""
        try:
            while _still_runs(process, _LOOK_SECONDS):
                if until is not None and time.monotonic() > until:
                    why = f"it took longer than minutes: {minutes}"
                if why or self._interrupts.signal is not None:
                    self._end(process)
        finally:
            _signal_group(process, signal.SIGKILL)
        return process.returncode, why

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        _signal_group(process, signal.SIGTERM)
        until = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < until and not self._interrupts.hurry:
            if not _still_runs(process, _LOOK_SECONDS):
                return
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _still_runs(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _figures(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a person wants to know at once of a finished point."""
    shown = [
        f"batch {row.get('batch')} {row['tok_s']:.1f} tok/s, TPOT {row['tpot_ms']:.3f} ms"
        for row in rows
        if row.get("tok_s") is not None and row.get("tpot_ms") is not None
    ]
    return "".join(f"; {text}" for text in shown)
