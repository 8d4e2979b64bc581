"""What planning and landing cost: steady decode steps of 1 to 1,024 rows, a queue of 10,000, and mixed steps.

Knows: what one plan() and one land() take of each step. Does not know: devices, engines.

    python -m tests.runtime.schedule.bench [--repeats 1] [--rows 1024] [--waiting-tokens 8192] [--cpu]

A run is the same each time, step by step. With repeats a step's time is the least that it took in any of them, so that
what other programs do to the machine is left out, and the steps that cost more than others stay in. On a busy machine
``--cpu`` counts only the time that the thread had a core.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from runtime.schedule.config import MixedSteps, SchedulerConfig, StepLimits
from runtime.schedule.plan import Admit, Cancel, StepKind, StepPlan, StepResult
from runtime.schedule.request import Request, SamplingParams, packed
from runtime.schedule.scheduler import Scheduler

# Seconds of plan() and of land() of each step
Times = list[tuple[float, float]]

_MAX_MODEL_LEN = 8192


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

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._in_flight: deque[StepPlan | None] = deque()
        gc.collect()
        gc.freeze()

    def turn(self) -> tuple[StepPlan | None, float, float]:
        scheduler, in_flight, clock = self._scheduler, self._in_flight, self._clock
        started = clock()
        plan = scheduler.plan()
        planning = clock() - started
        in_flight.append(plan)
        landing = 0.0
        if len(in_flight) > scheduler.config.limits.depth:
            result = result_of(in_flight[0])
            before = clock()
            scheduler.land(scheduler.step - len(in_flight), result)
            in_flight.popleft()
            landing = clock() - before
        return plan, planning, landing


def _waiting(first_id: int, count: int, tokens: int, max_tokens: int) -> Iterator[Admit]:
    """``count`` requests of ``tokens`` each, over one prompt: nothing of it is read before one of them has a row
    (test_unread_prompts.py), so 10,000 of their own would only take memory."""
    prompt = packed([i % 1000 for i in range(tokens)])
    for request_id in range(first_id, first_id + count):
        yield Admit(Request(request_id, prompt, SamplingParams(max_tokens=max_tokens)))


def mixed_steps(
    rows: int,
    waiting: int,
    steps: int = 1000,
    depth: int = 2,
    waiting_tokens: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Of mixed steps: in every other step a request ends, and the next one is prefilled.

    ``waiting_tokens``: of each prompt that waits to the end; 0: those are as long as the others.
    """
    longest = _MAX_MODEL_LEN + waiting_tokens
    config = SchedulerConfig(
        StepLimits(rows=rows, slots=2 * rows, block_size=64, max_model_len=longest, depth=depth),
        blocks=rows * 64,
        mixed=MixedSteps(tuple(range(64, rows + 2049, 64)), ((rows, 1 << 30, rows + 512),), ((rows, 200),)),
    )
    scheduler = Scheduler(config)
    come = rows + steps
    for request_id in range(come if waiting_tokens else come + waiting):
        prompt = packed([(request_id * 31 + i) % 1000 for i in range(200 + request_id % 300)])
        scheduler.submit(Admit(Request(request_id, prompt, SamplingParams(max_tokens=2000))))
    if waiting_tokens:
        for admit in _waiting(come, waiting, waiting_tokens, 2000):
            scheduler.submit(admit)
    turns, oldest = _Turns(scheduler, clock), 0
    took: Times = []
    while len(took) < steps and oldest < steps:
        plan, planning, landing = turns.turn()
        if plan is not None and plan.kind is StepKind.MIXED and len(plan.slots) >= rows - 4:
            took.append((planning, landing))
        if plan is not None and plan.decode_rows >= rows - 4 and scheduler.step % 2:
            scheduler.submit(Cancel(oldest))
            oldest += 1
    assert scheduler.waiting >= waiting, "those that are to wait have waited to the end"
    return took


def decode_steps(
    rows: int,
    waiting: int,
    steps: int = 2000,
    depth: int = 2,
    waiting_tokens: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Of decode steps with ``rows`` running, all as long as each other, and ``waiting`` more queued, of
    ``waiting_tokens`` each where that is not 0."""
    config = SchedulerConfig(
        StepLimits(
            rows=rows,
            slots=2 * rows,
            block_size=64,
            max_model_len=_MAX_MODEL_LEN + waiting_tokens,
            depth=depth,
            max_prefill_tokens=1 << 20,
        ),
        blocks=rows * 128,
    )
    scheduler = Scheduler(config)
    for request_id in range(rows if waiting_tokens else rows + waiting):
        prompt = packed([(request_id * 31 + i) % 1000 for i in range(512)])
        scheduler.submit(Admit(Request(request_id, prompt, SamplingParams(max_tokens=7000))))
    if waiting_tokens:
        for admit in _waiting(rows, waiting, waiting_tokens, 7000):
            scheduler.submit(admit)
    turns = _Turns(scheduler, clock)
    took: Times = []
    while len(took) < steps:
        plan, planning, landing = turns.turn()
        if plan is not None and plan.kind is StepKind.DECODE and len(plan.slots) == rows:
            took.append((planning, landing))
    assert scheduler.waiting == waiting
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
    ("decode", decode_steps, 1024, 10_000),
    ("mixed", mixed_steps, 16, 0),
    ("mixed", mixed_steps, 256, 0),
    ("mixed", mixed_steps, 256, 10_000),
    ("mixed", mixed_steps, 1024, 0),
    ("mixed", mixed_steps, 1024, 10_000),
)


def at(ordered: list[float], part: float) -> float:
    return ordered[int(len(ordered) * part)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", help="only these")
    parser.add_argument("--waiting", type=int, nargs="*", help="only with so many that wait")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--waiting-tokens", type=int, default=0, help="of each prompt that waits to the end")
    parser.add_argument("--cpu", action="store_true", help="the thread's own time, without its waits for a core")
    options = parser.parse_args()
    clock = time.thread_time if options.cpu else time.perf_counter
    print(
        f"{'step':<7} {'rows':>6} {'waiting':>8} {'plan p50':>8} {'p99':>8} {'land p50':>8} {'p99':>8} "
        f"{'both p50':>8} {'p90':>8} {'p99 us':>8} {'max us':>8}"
    )
    for kind, steps, rows, waiting in _CASES:
        if (options.rows and rows not in options.rows) or (options.waiting and waiting not in options.waiting):
            continue
        run = partial(steps, rows, waiting, options.steps, waiting_tokens=options.waiting_tokens, clock=clock)
        times = least(run, options.repeats)
        plans, lands, both = (
            sorted(1e6 * each for each in column)
            for column in (*zip(*times, strict=True), [planning + landing for planning, landing in times])
        )
        figures = [at(plans, 0.5), at(plans, 0.99), at(lands, 0.5), at(lands, 0.99)]
        figures += [at(both, part) for part in (0.5, 0.9, 0.99)]
        columns = " ".join(f"{figure:>8.1f}" for figure in (*figures, both[-1]))
        print(f"{kind:<7} {rows:>6} {waiting:>8} {columns}", flush=True)


if __name__ == "__main__":
    main()
