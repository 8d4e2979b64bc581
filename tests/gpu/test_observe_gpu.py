"""Observed steps on a GPU: timed, kept and named for a profiler, without a synchronisation or another token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.bench import command as bench
from launch.bench.options import BenchCommand
from launch.bench.profile import STAGES
from launch.ranks.start_engine import open_engine
from runtime.observe.observer import RECENT, StepObserver, open_ranges
from runtime.observe.step_record import VOID
from runtime.observe.timeline import Timeline, device_times_ns
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.test_engine_gpu import gpu_rig
from tests.launch.api.parsed import parsed
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


def test_a_profile_tells_the_stages_of_captured_rounds(tmp_path: Path) -> None:
    """Of a drafter's chain, whose layers run at both ends of a round: four rows of a random model, by a script."""
    script = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3, "disable_by_batch_size": 4}
    config = {"method": "dflash", "model": "models/shapes/qwen3-8b/dflash", "num_speculative_tokens": 15, **script}
    line = "bench latency --model qwen3-8b --load-format dummy --batch-size 4 --decode-buckets 4 --max-num-seqs 4"
    line += " --max-model-len 1024 --input-len 64 --output-len 60 --num-iters 1 --num-warmups 0 --profile"
    words = [*line.split(), "--result-dir", str(tmp_path), "--speculative-config", json.dumps(config)]
    bench.run(parsed(BenchCommand, words), {}, open_engine)
    (stages,), (table,) = (list(tmp_path.glob(f"*.b4.{name}.json")) for name in ("stages", "profile"))
    found, decode = json.loads(stages.read_text()), json.loads(table.read_text())["decode"]
    assert 0 < found["rounds"] <= decode["steps"]
    assert found["accept"]["kernels"] == 1
    assert found["verify"]["us"] > found["propose"]["us"] > found["accept"]["us"] > 0, "36 layers, 5, and one kernel"
    assert found["observe"]["kernels"] > 1
    assert sum(found[name]["us"] for name in STAGES) == pytest.approx(decode["span"], rel=0.1)
