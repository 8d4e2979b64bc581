"""What is recorded of an engine's steps on the CPU twin is complete, consistent, and changes nothing."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Unpack

import pytest
import torch

from runtime.engine import Engine
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.device.cpu_twin_stream import TwinStream
from runtime.execute.device.protocol import Work
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.result_reader import StepTiming
from runtime.observe.observer import RECENT, StepObserver, around, open_ranges
from runtime.observe.step_record import VOID, StepRecord
from runtime.observe.timeline import Timeline, device_times_ns
from runtime.schedule.request import Request
from tests.runtime.engine.rig import RigLimits, request, rig, run
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.engine.test_speculation import repeating
from tests.runtime.observe.windows import speculative_rig

PATIENCE_S = 300.0  # a machine may be busy with other things


def observed(
    requests: list[Request], depth: int, /, **limits: Unpack[RigLimits]
) -> tuple[list[StepRecord], dict[str, int | float]]:
    """The records and counters of a run with device times."""
    observe = StepObserver(on_timing=lambda timing: None)
    given: RigLimits = {"depth": depth, "observe": observe, **limits}
    with rig(**given) as engine:
        run(engine, requests)
    records = observe.recent()
    assert len(records) < RECENT, "all steps of this run are still there"
    return records, dict(engine.counters)


def launched_at(step: StepRecord) -> int:
    return step.began_at_ns + step.agree_ns + step.plan_ns + step.launch_ns


@pytest.mark.parametrize("depth", [0, 2])
def test_records_agree_with_the_counters(depth: int) -> None:
    records, counters = observed(mixture(3), depth)
    assert [step.step for step in records] == list(range(len(records)))
    roles = Counter(step.role for step in records)
    kinds = ("prefill", "decode", "mixed", VOID)
    assert [roles[role] for role in kinds] == [counters[f"{role}_steps"] for role in kinds]
    assert roles["mixed"] > 0
    assert sum(roles.values()) == len(records), "no step has another name"
    assert sum(step.chained for step in records) == counters["chained_steps"]
    breaks = Counter(step.break_reason for step in records if step.role != VOID and not step.chained)
    assert {f"chain_breaks{{{reason}}}": count for reason, count in breaks.items()} == {
        name: count for name, count in counters.items() if name.startswith("chain_breaks")
    }
    assert sum(step.ghosts for step in records) == counters["ghost_rows"]
    assert (counters["ghost_rows"] > 0) is (depth > 0)


def test_why_a_chain_broke_is_told_by_the_step_after() -> None:
    """Memory for one of two: the second waits until the first is gone, and no step runs meanwhile."""
    requests = [request(i, range(1, 60), max_tokens=8, stops=()) for i in range(2)]
    records, counters = observed(requests, 2, blocks=9, max_model_len=68, prefix_caching=False)
    waited = [step for step in records if step.role == VOID and step.break_reason == "context_full"]
    assert waited
    assert counters["chain_breaks{context_full}"] == 1
    assert records[waited[-1].step + 1].break_reason == "context_full"
    assert records[waited[-1].step + 1].role == "prefill"


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_times_follow_each_other(depth: int) -> None:
    records, _ = observed(mixture(5), depth)
    for step in records:
        assert min(step.agree_ns, step.plan_ns, step.launch_ns, step.wait_ns, step.land_ns) >= 0
        assert 0 < launched_at(step) <= step.land_at_ns
        if step.role == VOID:
            assert step.device_started_ms is None
        else:
            assert step.device_started_ms is not None
            assert step.device_ended_ms is not None
            assert step.device_started_ms <= step.device_ended_ms
            assert launched_at(step) - step.launch_ns <= step.seen_at_ns <= step.read_at_ns
            assert step.read_at_ns <= step.land_at_ns + step.wait_ns
            assert step.gained is not None
            assert 0 < step.rows <= step.bucket
            assert step.ghosts <= step.rows
    for step, following in pairwise(records):
        assert launched_at(step) <= following.began_at_ns
        assert step.land_at_ns + step.wait_ns + step.land_ns <= following.land_at_ns
    for step, newest in zip(records, records[depth:], strict=False):
        assert launched_at(newest) <= step.land_at_ns, "a step lands only when D more are launched"


def test_chained_steps_queue_on_the_device() -> None:
    """While the device stands still the host launches D steps; then they run with nobody launching in between."""
    device, observe = TwinDevice(), StepObserver(on_timing=lambda timing: None)
    with rig(depth=2, device=device, observe=observe) as engine:
        engine.add(request(0, range(1, 9), max_tokens=30, stops=()))
        device.compute.pause()
        engine.step()
        engine.step()
        device.compute.resume()
        run(engine, [])
    first, second, *_ = records = [step for step in observe.recent() if step.role != VOID]
    (first_start, first_end), (second_start, _), *_ = device_times_ns(records)
    assert launched_at(first) < launched_at(second) < first_start
    assert first_end <= second_start


def launched_early(records: list[StepRecord]) -> list[bool]:
    """Of each step but the first: whether it was launched before the step before it ended on the device."""
    records = [step for step in records if step.role != VOID]
    times = device_times_ns(records)
    return [launched_at(step) < end for step, (_, end) in zip(records[1:], times, strict=False)]


def test_a_slow_device_always_has_its_next_step_when_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step stands on the device until the host comes to launch the step after the next, which at D = 2 it does
    before it reads the first. No clock decides: an engine that read earlier would wait here and fail."""
    held, device, launch = 16, TwinDevice(), Executor.launch
    reached = [threading.Event() for _ in range(held + 2)]
    steps = itertools.count()

    def stand(until: threading.Event) -> None:
        assert until.wait(PATIENCE_S), "the step after the next was never launched"

    def launched(self: Executor, spec: LaunchSpec) -> None:
        step = next(steps)
        if step < len(reached):
            reached[step].set()
        if step < held:
            device.compute.submit(lambda: stand(reached[step + 2]))
        launch(self, spec)

    monkeypatch.setattr(Executor, "launch", launched)
    records, _ = observed([request(0, range(1, 9), max_tokens=20, stops=())], 2, device=device)
    assert launched_early(records)[:held] == [True] * held


def test_a_slow_device_stands_between_steps_when_nothing_is_chained() -> None:
    device = TwinDevice(jitter_s=0.004, seed=1)
    records, _ = observed([request(0, range(1, 9), max_tokens=20, stops=())], 0, device=device)
    early = launched_early(records)
    assert early == [False] * 19


FEW = list(enumerate(repeating(4)))
Make = Callable[..., AbstractContextManager[Engine]]


@dataclass
class Watched:
    """A run: its answers, digest and counters, its launches, and what went onto the device's streams in all."""

    answers: object = None
    digest: int = 0
    counters: dict[str, int | float] = field(default_factory=dict)
    launches: list[tuple[object, ...]] = field(default_factory=list)
    submitted: Counter[str] = field(default_factory=Counter)


def watched(make: Make, requests: list[Request], **limits: Unpack[RigLimits]) -> Watched:
    found, launch, submit = Watched(), Executor.launch, TwinStream.submit

    def launched(self: Executor, spec: LaunchSpec) -> None:
        shape = spec.shape
        drafts = shape.width, shape.proposing
        found.launches.append((shape.label, shape.rows, *drafts, spec.captured, shape.variant))
        launch(self, spec)

    def submitted(self: TwinStream, work: Work) -> None:
        found.submitted[self.name] += 1
        submit(self, work)

    with make(**limits) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "launch", launched)
        patch.setattr(TwinStream, "submit", submitted)
        found.answers = outcome(run(engine, requests))
        found.digest, found.counters = engine.scheduler.digest.value, dict(engine.counters)
    return found


@pytest.mark.parametrize(
    ("make", "requests"),
    [(rig, mixture(9)), (speculative_rig, [*mixture(9, 5), *(replace(r, request_id=20 + i) for i, r in FEW)])],
    ids=["one token a row", "windows"],
)
def test_being_observed_changes_no_token_and_no_launch(make: Make, requests: list[Request], tmp_path: Path) -> None:
    alone = watched(make, requests, depth=2)
    if make is speculative_rig:
        assert alone.counters["spec_num_accepted_tokens"] > 0
        assert any(guessing for _, _, _, guessing, *_ in alone.launches), "windows beside chunks"
    ranges, heard = Stack(), list[StepTiming]()
    observe = StepObserver(ranges=ranges, timeline=Timeline(tmp_path / "trace.json", 0, 1), on_timing=heard.append)
    assert watched(make, requests, depth=2, observe=observe, ranges=ranges) == alone
    assert len(heard) == alone.counters["steps"]
    assert (tmp_path / "trace.json").exists()


# ---- ranges ----


class Stack:
    """Ranges as a profiler would see them: (depth, name), of the thread that made this; names alone of others."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, str]] = []
        self.open: list[str] = []
        self.elsewhere: list[str] = []
        self._thread = threading.get_ident()

    def push(self, name: str) -> None:
        if threading.get_ident() != self._thread:
            self.elsewhere.append(name)
            return
        self.opened.append((len(self.open), name))
        self.open.append(name)

    def pop(self) -> None:
        if threading.get_ident() == self._thread:
            self.open.pop()


def test_ranges_follow_the_phases() -> None:
    ranges = Stack()
    with rig(depth=1, observe=StepObserver(ranges=ranges), ranges=ranges) as engine:
        engine.add(request(0, (1, 2, 3), max_tokens=4, stops=()))
        engine.step()
        phases = [(0, "agree"), (0, "plan"), (0, "resolve")]
        assert ranges.opened == [*phases, (0, "launch prefill"), (1, "stage")]
        assert ranges.open == []
        ranges.opened.clear()
        engine.step()
        assert ranges.opened == [*phases, (0, "launch decode"), (1, "stage"), (0, "wait"), (0, "land")]
        run(engine, [])
    assert ranges.open == []
    assert ranges.elsewhere == ["results of prefill", *["results of decode"] * 3], "by the worker that reads results"


def test_ranges_name_the_launches_of_a_step_that_is_several() -> None:
    """Windows beside a chunk are proposed, run through the model and drawn in a launch each; a round is one launch."""
    ranges = Stack()
    first, *_, last = repeating(4)
    with speculative_rig(depth=0, ranges=ranges, observe=StepObserver(ranges=ranges)) as engine:
        parts = []
        for arriving in (first, None, last):
            if arriving is not None:
                engine.add(arriving)
            ranges.opened.clear()
            engine.step()
            launch = next(i for i, (_, name) in enumerate(ranges.opened) if name.startswith("launch"))
            inside = itertools.takewhile(lambda opened: opened[0] > 0, ranges.opened[launch + 1 :])
            parts.append([ranges.opened[launch][1], *(name for _, name in inside)])
        run(engine, [])
    assert parts == [
        ["launch prefill", "stage", "forward", "tail"],
        ["launch window of 4", "stage"],
        ["launch mixed", "stage", "propose", "forward", "tail"],
    ]


def test_ranges_that_nobody_asked_for_are_nothing() -> None:
    assert open_ranges(False) is None
    with around(None, "stage") as nothing:
        assert nothing is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA has ranges (tests/gpu)")
def test_ranges_without_cuda_are_nothing() -> None:
    assert open_ranges(True) is None
