"""What planning and landing cost: a steady 256-row decode step, 1,024 rows, a queue of 10,000, and mixed steps.

python -m tests.runtime.schedule.bench
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from runtime.schedule.config import MixedSteps, SchedulerConfig, StepLimits
from runtime.schedule.plan import Admit, Cancel, StepKind, StepPlan, StepResult
from runtime.schedule.request import Request, SamplingParams
from runtime.schedule.scheduler import Scheduler


def result_of(plan: StepPlan | None) -> StepResult | None:
    """Every row gains token 7 (those with a chunk only with their last one) and nobody stops."""
    if plan is None:
        return None
    rows = len(plan.slots)
    counts = [int(plan.draws(row)) for row in range(rows)]
    return StepResult(plan.step, [7] * rows, counts, [0] * rows)


def mixed_step(rows: int, waiting: int, steps: int = 1000, depth: int = 2) -> list[float]:
    """Seconds of plan + land of each mixed step: in every other step a request ends, and the next one is prefilled."""
    config = SchedulerConfig(
        StepLimits(rows=rows, slots=2 * rows, block_size=64, max_model_len=8192, depth=depth),
        blocks=rows * 64,
        mixed=MixedSteps(tuple(range(64, rows + 2049, 64)), ((rows, 1 << 30, rows + 512),), ((rows, 200),)),
    )
    scheduler = Scheduler(config)
    for request_id in range(rows + steps + waiting):
        prompt = tuple((request_id * 31 + i) % 1000 for i in range(200 + request_id % 300))
        scheduler.submit(Admit(Request(request_id, prompt, SamplingParams(max_tokens=2000))))
    in_flight: deque[StepPlan | None] = deque()
    took: list[float] = []
    oldest = 0
    while len(took) < steps and oldest < steps:
        started = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        in_flight.append(plan)
        landing = 0.0
        if len(in_flight) > depth:
            result = result_of(in_flight[0])
            before = time.perf_counter()
            scheduler.land(scheduler.step - len(in_flight), result)
            in_flight.popleft()
            landing = time.perf_counter() - before
        if plan is not None and plan.kind is StepKind.MIXED and len(plan.slots) >= rows - 4:
            took.append(planned - started + landing)
        if plan is not None and plan.decode_rows >= rows - 4 and scheduler.step % 2:
            scheduler.submit(Cancel(oldest))
            oldest += 1
    return took


def steady_step(rows: int, waiting: int, steps: int = 2000, depth: int = 2) -> list[float]:
    """Seconds of plan + land of each decode step with ``rows`` running and ``waiting`` more queued."""
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
        prompt = tuple((request_id * 31 + i) % 1000 for i in range(512))
        scheduler.submit(Admit(Request(request_id, prompt, SamplingParams(max_tokens=7000))))
    in_flight: deque[StepPlan | None] = deque()
    took: list[float] = []
    while len(took) < steps:
        started = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        in_flight.append(plan)
        landing = 0.0
        if len(in_flight) > depth:
            result = result_of(in_flight[0])
            before = time.perf_counter()
            scheduler.land(scheduler.step - len(in_flight), result)
            in_flight.popleft()
            landing = time.perf_counter() - before
        if plan is not None and plan.kind is StepKind.DECODE and len(plan.slots) == rows:
            took.append(planned - started + landing)
    return took


def main() -> None:
    print(f"{'step':<7} {'rows':>6} {'waiting':>8} {'p50 us':>8} {'p99 us':>8} {'max us':>8}")
    for kind, step, rows, waiting in (
        ("decode", steady_step, 1, 0),
        ("decode", steady_step, 16, 0),
        ("decode", steady_step, 256, 0),
        ("decode", steady_step, 256, 10_000),
        ("decode", steady_step, 1024, 0),
        ("mixed", mixed_step, 16, 0),
        ("mixed", mixed_step, 256, 0),
        ("mixed", mixed_step, 256, 10_000),
        ("mixed", mixed_step, 1024, 0),
    ):
        took = sorted(1e6 * seconds for seconds in step(rows, waiting))
        p99 = took[int(len(took) * 0.99)]
        print(f"{kind:<7} {rows:>6} {waiting:>8} {statistics.median(took):>8.1f} {p99:>8.1f} {took[-1]:>8.1f}")


if __name__ == "__main__":
    main()
