"""Observed steps on a GPU: timed, kept and named for a profiler, without a synchronisation or another token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.observe.observer import RECENT, StepObserver
from runtime.observe.ranges import open_ranges
from runtime.observe.step_record import VOID
from runtime.observe.timeline import Timeline
from runtime.observe.trace import device_times_ns
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.test_engine_gpu import gpu_rig
from tests.runtime.engine.rig import run
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.observe.test_timeline import checked

pytestmark = pytest.mark.gpu


def test_observed_steps_do_not_synchronise(tmp_path: Path) -> None:
    """Everything on: NVTX ranges, device times, a timeline. The first run captures the variants that come lazily, the
    second those of its own steps: prompts that the prefix cache holds are shorter."""
    requests = mixture(3)
    with gpu_rig(depth=2) as engine:
        alone, digest = outcome(run(engine, requests)), engine.scheduler.digest.value
    path = tmp_path / "trace.json"
    ranges = open_ranges(True)
    assert ranges is not None
    observe = StepObserver(ranges=ranges, timeline=Timeline(path, 0, 1))
    with gpu_rig(depth=2, observe=observe, ranges=ranges) as engine:
        assert outcome(run(engine, requests)) == alone
        assert engine.scheduler.digest.value == digest
        run(engine, [replace(item, request_id=100 + item.request_id) for item in requests])
        with no_synchronisation():
            run(engine, [replace(item, request_id=200 + item.request_id) for item in requests])
        steps = engine.counters["steps"]
    records = [step for step in observe.recent() if step.role != VOID]
    assert steps == len(records) < RECENT
    for step, (start, end) in zip(records, device_times_ns(records), strict=True):
        assert start <= end <= step.seen_at_ns <= step.land_at_ns + step.wait_ns
    assert len(checked(json.loads(path.read_text()))[0, "device"]) == len(records)
