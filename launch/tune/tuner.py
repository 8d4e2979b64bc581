"""How a choice is made, and the loop over all of them.

Two rounds: every candidate for some milliseconds, then the fastest few again for longer, there and back. A step of many
rows draws more than a GPU may: its clock falls until it does not, and then the kernel that spends the least energy is
the fastest, which no measurement of milliseconds can see.

Knows: rounds, the journal, the table on disk, the budget. Does not know: what a candidate is or how it runs
(gpu_runner.py), nor which tasks there are (plan.py). Time comes from a clock that it is given.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from launch.tune.journal import AnyChoice, Failed, Journal, Measured, Timed, TuneWriteError
from launch.tune.plan import Task
from models.kernels.attention.decode_variant import DecodeVariant
from models.kernels.matmul import choice_table
from models.kernels.matmul.autotune import forward_and_backward, reason_of
from models.kernels.matmul.choice_table import ChoiceTable, LinearShape

log = logging.getLogger("lockstride")

CLOSE = 1.04  # times the fastest of the first round
WORTH = 0.995  # of the current choice's time: less of a gain is noise, and the table stays as it is
REMEMBERED = 6  # candidates of a task that neighbouring buckets try


class DeviceLost(RuntimeError):
    """A candidate broke this process's use of the GPU: nothing else can be measured in it."""


class Bench(Protocol):
    """One task on the GPU. Both raise what a compiler, a launch or a wrong result does, and DeviceLost."""

    def brief_us(self, choice: AnyChoice, replays: int) -> float: ...
    def lasting_us(self, choice: AnyChoice, seconds: float) -> float: ...


class Runner(Protocol):
    """What the GPU does of a task."""

    def current(self, task: Task) -> AnyChoice:
        """What an engine would run now."""
        ...

    def candidates(self, task: Task, beside: Sequence[AnyChoice]) -> list[AnyChoice]:
        """What is worth timing; ``beside``: what was fast in the buckets around, best first."""
        ...

    def bench(self, task: Task) -> Bench: ...

    def keep(self, task: Task, choice: AnyChoice) -> None:
        """``choice`` is in place for the tasks that follow."""
        ...


@dataclass(frozen=True, slots=True)
class Rounds:
    """``timed``: best first; ``failed``: what did not run."""

    timed: list[Timed]
    failed: list[Failed]


class Tuner:
    """Runs tasks in order; every choice is in the journal and in the table at ``path`` before the next task begins.

    ``now``: seconds of any clock. ``budget``: seconds that all of it may take, from ``began`` on; None is no limit.
    ``stop``: asked between tasks.
    """

    def __init__(
        self,
        runner: Runner,
        journal: Journal,
        table: ChoiceTable,
        path: Path,
        *,
        now: Callable[[], float],
        began: float,
        budget: float | None = None,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[Task, Measured | None], None] = lambda task, measured: None,
    ) -> None:
        self._runner, self._journal, self._table, self._path = runner, journal, table, path
        self._now, self._began, self._budget, self._stop, self._progress = now, began, budget, stop, progress
        self._pace = Pace()

    def run(self, tasks: Sequence[Task]) -> list[Task]:
        """Returns what was not measured, for want of time or because of ``stop``. What the journal has is taken.

        Raises DeviceLost, when the journal knows which candidate is to be avoided from now on.
        """
        left: list[Task] = []
        for task in tasks:
            known = self._journal.done.get(task.key)
            if known is not None:
                self._runner.keep(task, known.after)
                self._put(task, known.after)
                continue
            if left or self._stop() or not self._fits(task):
                left.append(task)
                continue
            began = self._now()
            measured = self._measure(task)
            self._pace.note(task.estimate, self._now() - began)
            if measured is not None:
                self._journal.add(replace(measured, seconds=self._now() - began))
                self._runner.keep(task, measured.after)
                self._put(task, measured.after)
            self._progress(task, measured)
            self._save()
        self._save()
        return left

    def remaining(self, tasks: Sequence[Task]) -> float:
        """Seconds that the tasks not measured yet will take, at the pace so far."""
        return self._pace.of(sum(task.estimate for task in tasks if task.key not in self._journal.done))

    def _fits(self, task: Task) -> bool:
        if self._budget is None:
            return True
        return self._now() - self._began + self._pace.of(task.estimate) <= self._budget

    def _measure(self, task: Task) -> Measured | None:
        """None where no candidate ran: the engine's own default stays."""
        runner, effort = self._runner, task.effort
        current = runner.current(task)
        avoided = self._journal.avoided.get(task.key, {})
        wanted = dict.fromkeys([current, *runner.candidates(task, self._beside(task))])
        tried = [choice for choice in wanted if choice not in avoided]
        try:
            bench = runner.bench(task)
        except Exception as error:  # no memory for the weights of so large a product, for one
            log.warning("%s is not measured: %s", task.key, reason_of(error))
            runner.keep(task, current)
            return None
        watched = _Watched(bench)
        try:
            rounds = two_rounds(
                watched, tried, current, finalists=effort.finalists, seconds=effort.seconds, replays=effort.replays
            )
        except DeviceLost as error:
            self._journal.avoid(task.key, watched.latest, reason_of(error))
            raise
        rounds.failed.extend(Failed(choice, reason) for choice, reason in avoided.items())
        for failed in rounds.failed:
            log.info("%s: %s is left out: %s", task.key, failed.choice, failed.reason)
        if not rounds.timed:
            log.warning("%s: none of %d candidates ran", task.key, len(tried))
            runner.keep(task, current)
            return None
        best = rounds.timed[0]
        was = next((one for one in rounds.timed if one.choice == current), None)
        if was is not None and lasting(best) > WORTH * lasting(was):
            best = was
        us_before = None if was is None else lasting(was)
        return Measured(
            task.key,
            task.rows,
            current,
            best.choice,
            us_before,
            lasting(best),
            tuple(rounds.timed),
            tuple(rounds.failed),
        )

    def _beside(self, task: Task) -> list[AnyChoice]:
        """What was fast for the same product at the nearest measured buckets below and above, best first."""
        if not isinstance(task.what, LinearShape):
            return []
        found: list[AnyChoice] = []
        prefix = f"{task.part} {task.what.product} x"
        measured = [one for key, one in self._journal.done.items() if key.startswith(prefix)]
        above = min((one for one in measured if one.rows > task.rows), key=lambda one: one.rows, default=None)
        below = max((one for one in measured if one.rows < task.rows), key=lambda one: one.rows, default=None)
        for one in (above, below):
            if one is not None:
                found += [one.after, *(timed.choice for timed in one.timed[:REMEMBERED])]
        return list(dict.fromkeys(found))

    def _put(self, task: Task, choice: AnyChoice) -> None:
        put(self._table, task, choice)

    def _save(self) -> None:
        save(self._path, self._table)


class _Watched:
    """A Bench that knows what it was asked for last."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.latest: AnyChoice = None

    def brief_us(self, choice: AnyChoice, replays: int) -> float:
        self.latest = choice
        return self._bench.brief_us(choice, replays)

    def lasting_us(self, choice: AnyChoice, seconds: float) -> float:
        self.latest = choice
        return self._bench.lasting_us(choice, seconds)


class Pace:
    """How long tasks take, as a multiple of their estimates: of all so far, beginning as if 20 s had been exact."""

    def __init__(self) -> None:
        self._estimated, self._took = 20.0, 20.0

    def note(self, estimated: float, took: float) -> None:
        self._estimated += estimated
        self._took += took

    def of(self, estimated: float) -> float:
        return estimated * self._took / self._estimated


def save(path: Path, table: ChoiceTable) -> None:
    """Raises TuneWriteError; the table that was there stays."""
    try:
        choice_table.save(path, table)
    except OSError as error:
        raise TuneWriteError(
            f"{path} cannot be written ({error.strerror or error}): make room there, or name another folder with --out"
        ) from error


def put(table: ChoiceTable, task: Task, choice: AnyChoice) -> None:
    """``choice`` into the part of the table that is for ``task``; None takes the entry out."""
    if isinstance(task.what, LinearShape):
        if choice is not None and not isinstance(choice, DecodeVariant):
            table.put(task.what, choice)
    elif isinstance(choice, DecodeVariant):
        table.attention[task.what.key] = choice
    else:
        table.attention.pop(task.what.key, None)


def two_rounds(
    bench: Bench, choices: Sequence[AnyChoice], current: AnyChoice, *, finalists: int, seconds: float, replays: int
) -> Rounds:
    """Every choice briefly; then ``current`` and the fastest few, for ``seconds`` each, forward and backward.
    Raises DeviceLost.
    """
    brief: list[Timed] = []
    failed: list[Failed] = []
    for choice in choices:
        try:
            brief.append(Timed(choice, bench.brief_us(choice, replays)))
        except DeviceLost:
            raise
        except Exception as error:  # any error of a compiler or a launch, or a wrong result, means: not this one
            failed.append(Failed(choice, reason_of(error)))
    if not brief:
        return Rounds([], failed)
    ranked = sorted(brief, key=lambda one: one.us)
    close = [one for one in ranked[:finalists] if one.us <= CLOSE * ranked[0].us]
    again = [*close, *(one for one in brief if one.choice == current and one not in close)]
    times = forward_and_backward(lambda one: bench.lasting_us(one.choice, seconds), again)
    lasted = [replace(one, lasting_us=us) for one, us in zip(again, times, strict=True)]
    rest = [one for one in ranked if one not in again]
    return Rounds([*sorted(lasted, key=lambda one: (lasting(one), one.us)), *rest], failed)


def lasting(timed: Timed) -> float:
    return math.inf if timed.lasting_us is None else timed.lasting_us
