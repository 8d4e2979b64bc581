"""What planning and landing cost: steady decode steps of 1 to 1,024 rows, a queue of 10,000, and mixed steps.

Knows: what one plan() and one land() take of each step. Does not know: devices, engines.

    python -m tests.runtime.schedule.bench [--repeats 1] [--rows 1024]

A run is the same each time, step by step. With repeats a step's time is the least that it took in any of them, so that
what other programs do to the machine is left out, and the steps that cost more than others stay in.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import deque
from collections.abc import Callable

from runtime.schedule.config import MixedSteps, SchedulerConfig, StepLimits
from runtime.schedule.plan import Admit, Cancel, StepKind, StepPlan, StepResult
from runtime.schedule.request import Request, SamplingParams, packed
from runtime.schedule.scheduler import Scheduler

# Seconds of plan() and of land() of each step
Times = list[tuple[float, float]]


def result_of(plan: StepPlan | None) -> StepResult | None:
    """Every row gains token 7 (those with a chunk only with their last one) and nobody stops."""
    if plan is None:
        return None
    rows = len(plan.slots)
    counts = [1] * rows
    for row, chunk in enumerate(plan.chunks, plan.decode_rows):
        counts[row] = int(chunk.last)
    return StepResult(plan.step, [7] * rows, counts, [0] * rows)


class _Turns:
    """Turns of a scheduler, timed. What there is when they begin is hidden from the garbage collector, as an engine
    hides what it is made of (gc_freeze.py)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: deque[StepPlan | None] = deque()
        gc.collect()
        gc.freeze()

    def turn(self) -> tuple[StepPlan | None, float, float]:
        scheduler, in_flight = self._scheduler, self._in_flight
        started = time.perf_counter()
        plan = scheduler.plan()
        planning = time.perf_counter() - started
        in_flight.append(plan)
        landing = 0.0
        if len(in_flight) > scheduler.config.limits.depth:
            result = result_of(in_flight[0])
            before = time.perf_counter()
            scheduler.land(scheduler.step - len(in_flight), result)
            in_flight.popleft()
            landing = time.perf_counter() - before
        return plan, planning, landing


def mixed_steps(rows: int, waiting: int, steps: int = 1000, depth: int = 2) -> Times:
    """Of mixed steps: in every other step a request ends, and the next one is prefilled."""
    config = SchedulerConfig(
        StepLimits(rows=rows, slots=2 * rows, block_size=64, max_model_len=8192, depth=depth),
        blocks=rows * 64,
        mixed=MixedSteps(tuple(range(64, rows + 2049, 64)), ((rows, 1 << 30, rows + 512),), ((rows, 200),)),
    )
    scheduler = Scheduler(config)
    for request_id in range(rows + steps + waiting):
        prompt = packed([(request_id * 31 + i) % 1000 for i in range(200 + request_id % 300)])
        scheduler.submit(Admit(Request(request_id, prompt, SamplingParams(max_tokens=2000))))
    turns, oldest = _Turns(scheduler), 0
    took: Times = []
    while len(took) < steps and oldest < steps:
        plan, planning, landing = turns.turn()
        if plan is not None and plan.kind is StepKind.MIXED and len(plan.slots) >= rows - 4:
            took.append((planning, landing))
        if plan is not None and plan.decode_rows >= rows - 4 and scheduler.step % 2:
            scheduler.submit(Cancel(oldest))
            oldest += 1
    return took


def decode_steps(rows: int, waiting: int, steps: int = 2000, depth: int = 2) -> Times:
    """Of decode steps with ``rows`` running, all as long as each other, and ``waiting`` more queued."""
    config = SchedulerConfig(
        StepLimits(
            rows=rows,
            slots=2 * rows,
            block_size=64,
            max_model_len=8192,
            depth=depth,
            max_prefill_tokens=1 << 20,
        ),
        blocks=rows * 128,
    )
    scheduler = Scheduler(config)
    for request_id in range(rows + waiting):
        prompt = packed([(request_id * 31 + i) % 1000 for i in range(512)])
        scheduler.submit(Admit(Request(request_id, prompt, SamplingParams(max_tokens=7000))))
    turns = _Turns(scheduler)
    took: Times = []
    while len(took) < steps:
        plan, planning, landing = turns.turn()
        if plan is not None and plan.kind is StepKind.DECODE and len(plan.slots) == rows:
            took.append((planning, landing))
    return took


def least(run: Callable[[], Times], repeats: int) -> Times:
    """Of each step the least that plan and land took."""
    runs = []
    for _ in range(repeats):
        runs.append(run())
        gc.unfreeze()
    return [(min(p for p, _ in step), min(land for _, land in step)) for step in zip(*runs, strict=True)]


_CASES = (
    ("decode", decode_steps, 1, 0),
    ("decode", decode_steps, 16, 0),
    ("decode", decode_steps, 256, 0),
    ("decode", decode_steps, 256, 10_000),
    ("decode", decode_steps, 1024, 0),
    ("mixed", mixed_steps, 16, 0),
    ("mixed", mixed_steps, 256, 0),
    ("mixed", mixed_steps, 256, 10_000),
    ("mixed", mixed_steps, 1024, 0),
    ("mixed", mixed_steps, 1024, 10_000),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", help="only these")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    print(
        f"{'step':<7} {'rows':>6} {'waiting':>8} {'plan':>8} {'land':>8} {'p50 us':>8} {'p90':>8} {'p99 us':>8} "
        f"{'max us':>8}"
    )
    for kind, steps, rows, waiting in _CASES:
        if options.rows and rows not in options.rows:
            continue
        times = least(lambda: steps(rows, waiting, options.steps), options.repeats)  # noqa: B023
        plan, land = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
        took = sorted(1e6 * sum(step) for step in times)
        p50, p90, p99 = (took[int(len(took) * part)] for part in (0.5, 0.9, 0.99))
        print(
            f"{kind:<7} {rows:>6} {waiting:>8} {plan:>8.1f} {land:>8.1f} {p50:>8.1f} {p90:>8.1f} {p99:>8.1f} "
            f"{took[-1]:>8.1f}"
        )


if __name__ == "__main__":
    main()
