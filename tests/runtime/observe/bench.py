"""What observing costs the engine's thread: all marks of a step, without and with a timeline.

python -m tests.runtime.observe.bench
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from time import perf_counter_ns

from runtime.execute.launch_spec import LaunchSpec, StepShape
from runtime.execute.result_reader import StepTiming
from runtime.observe.observer import InFlight, StepObserver
from runtime.observe.timeline import Timeline
from runtime.schedule.plan import StepKind, StepPlan

STEPS = 20_000


def nanoseconds_a_step(observe: StepObserver) -> float:
    """The quickest of some runs."""
    plan = StepPlan(0, StepKind.DECODE, tuple(range(256)), (0,) * 256, 1)
    spec = LaunchSpec(plan, plan.kind, "decode", StepShape("decode", 256))
    took = []
    for _ in range(10):
        started = time.perf_counter_ns()
        for step in range(STEPS):
            flight = InFlight(step, perf_counter_ns())
            flight.agreed_at = perf_counter_ns()
            flight.plan = plan
            flight.planned_at = perf_counter_ns()
            flight.launch = spec
            flight.launched_at = perf_counter_ns()
            flight.landing_at = perf_counter_ns()
            flight.taken_at = perf_counter_ns()
            flight.landed_at = perf_counter_ns()
            observe.landed(flight)
        took.append(time.perf_counter_ns() - started)
    return min(took) / STEPS


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        timed = StepObserver(timeline=Timeline(Path(folder) / "trace.json", 0, 1))
        print(f"marks of a step              {nanoseconds_a_step(StepObserver()):6.0f} ns")
        print(f"marks, kept for a timeline   {nanoseconds_a_step(timed):6.0f} ns")
        timed.in_flight = {step: InFlight(step, 0) for step in range(STEPS)}
        started = time.perf_counter_ns()
        for step in range(STEPS):
            timed.on_timing(StepTiming(step, 1.0, 2.0, 3.0, 256))
        print(f"device times, other thread   {(time.perf_counter_ns() - started) / STEPS:6.0f} ns")
        started = time.perf_counter_ns()
        timed.close()
        print(f"writing the timeline         {(time.perf_counter_ns() - started) / 1e9:6.2f} s, 200,000 steps")


if __name__ == "__main__":
    main()
