"""`bench latency --profile`: whose step a kernel belongs to, sums that add up, and a run through a real engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent

from launch.bench import command as bench
from launch.bench import profile
from launch.bench.kernel_tables import Call, after_prefill, host_side, part, short_name, tables
from launch.bench.options import BenchCommand
from launch.bench.point import Point
from launch.bench.profile import COMMIT, GATHER, STAGES, Stage, device_calls, host_calls, rounds_of, summary
from launch.bench.results import ResultFiles
from launch.ranks.start_engine import open_engine
from tests.launch.api.parsed import parsed
from tests.runtime.engine.rig import tiny_folder

LINE = "--device cpu --input-len 20 --output-len 9 --num-iters 1 --num-warmups 0 --block-size 8"
LAYERS = 2


def measure(folder: Path, line: str) -> None:
    arguments = f"bench latency {LINE} {line} --model {tiny_folder(folder / 'tiny')} --result-dir {folder / 'results'}"
    bench.run(parsed(BenchCommand, arguments.split()), {}, open_engine)  # the code is about rates, which may be refused


def profile_of(folder: Path, batch: int) -> Any:
    (path,) = (folder / "results").glob(f"latency-tiny-tp1-*.b{batch}.profile.json")
    return json.loads(path.read_text())


def calls(*spans: tuple[str, float, float]) -> list[Call]:
    return [Call(name, start, end, end - start) for name, start, end in spans]


# ---- whose step ----


def test_calls_beyond_those_of_prefill_are_decode_s() -> None:
    short = calls(("norm", 0, 5), ("gemm", 5, 50), ("norm", 50, 55))
    long = calls(("norm", 100, 105), ("gemm", 105, 150), ("norm", 150, 155), ("norm", 155, 156), ("small", 156, 158))
    decode, note = after_prefill(short, long)
    assert [(call.name, call.start) for call in decode] == [("norm", 155), ("small", 156)]
    assert note is None


def test_a_prefill_that_was_not_the_same_is_told() -> None:
    decode, note = after_prefill(calls(("a", 0, 1), ("b", 1, 2), ("b", 2, 3)), calls(("a", 0, 1), ("b", 1, 2)))
    assert decode == []
    assert note == "the run of one token made 2 calls of b, the longer one only 1"


def event(name: str, start: float, end: float, *, device: bool = False, number: int = 1, **more: Any) -> FunctionEvent:
    kind = DeviceType.CUDA if device else DeviceType.CPU
    return FunctionEvent(number, name, 1, start, end, device_type=kind, **more)  # type: ignore[no-untyped-call]


def test_events_are_told_apart_by_window_and_device() -> None:
    window = event("window", 10, 20, is_user_annotation=True)
    outer, inner = event("outer", 11, 15), event("inner", 12, 14)
    outer.append_cpu_child(inner)  # type: ignore[no-untyped-call]
    events = [
        window,
        event("window", 10, 20, device=True, is_user_annotation=True),
        event("early", 9, 12, device=True),
        event("second", 18, 25, device=True, number=7),
        event("first", 12, 19, device=True, number=7),
        event("late", 20, 21, device=True),
        event("waits elsewhere", 11, 19, is_async=True),
        inner,
        outer,
    ]
    of_a_graph = [replace(call, launch=7) for call in calls(("first", 12, 19), ("second", 18, 25))]
    assert device_calls(events, window) == of_a_graph, "kernels of one launch have its number"
    assert host_calls(events, window) == [Call("outer", 11, 15, 2), Call("inner", 12, 14, 2)]


# ---- sums ----


def test_overlapping_kernels_add_to_more_than_the_device_is_busy() -> None:
    found = part(calls(("a", 0, 10), ("b", 5, 12), ("c", 6, 8), ("a", 20, 24)), 2, 13.0)
    assert (found.sum, found.busy, found.span) == (23 / 2, 16 / 2, 24 / 2)
    assert found.measured == 13.0
    assert [row["name"] for row in found.kernels] == ["a", "b", "c"]
    first = found.kernels[0]
    assert (first["calls_per_step"], first["us_per_call"], first["us_per_step"]) == (1.0, 7.0, 7.0)
    assert first["share"] == pytest.approx(14 / 23)
    assert [row["adds_per_step"] for row in found.kernels] == [14 / 2, 2 / 2, 0], "a wait for others is not added"
    assert [row["gap_us"] for row in found.kernels] == [4, -5, -6], "from the end of all before it, in the median"


def test_launches_of_the_host_are_counted() -> None:
    found = host_side(
        calls(
            ("aten::mm", 0, 30), ("cudaLaunchKernel", 30, 34), ("cuLaunchKernelEx", 40, 43), ("cudaEventRecord", 44, 45)
        )
    )
    assert (found["launches"], found["launch_us"], found["first_to_last_launch_us"]) == (2, 7, 13)
    assert found["operators"][0] == {"name": "aten::mm", "calls": 1, "us": 30}


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    name = "void kernel<" + "x" * 80 + ", 128, 64>(int*)"
    short = short_name(name)
    assert len(short) == 60
    assert short.startswith("void kernel<x")
    assert short.endswith(", 128, 64>(int*)")
    assert short_name("x" * 60) == "x" * 60


def test_kernels_beyond_the_shown_ones_are_one_row() -> None:
    found = part(calls(*((f"k{i:02}", i, i + 1) for i in range(30))), 1, None)
    kernels = {"steps": 1, "sum": 30.0, "busy": 30.0, "span": 30.0, "measured": None, "kernels": found.kernels}
    host = {"launches": 2, "launch_us": 7.0, "first_to_last_launch_us": 13.0, "operators": []}
    record = {"batch": 3, "refused": None, "note": "odd", "decode": kernels, "prefill": kernels, "prefill_host": host}
    printed = tables(record).splitlines()
    assert printed.count("batch 3: odd") == 1
    assert sum("measured n/a" in line for line in printed) == 2
    others = [line.split() for line in printed if line.endswith("others")]
    assert others == [["5.00", "16.7%", "5.00", "5", "others"]] * 2
    assert "2 launches take 7 us; from the first to the last 13 us" in printed[-2]


# ---- stages of rounds ----

VERIFIED = ((GATHER, 50, 52), ("layer", 52, 190), ("draw", 188, 200), (COMMIT, 200, 204))
ROUND = (("draft", 0, 40), ("choose", 40, 50), *VERIFIED, ("keep", 204, 206), ("draft", 206, 230))


def replayed(start: float, launch: int, *spans: tuple[str, float, float]) -> list[Call]:
    return [Call(name, start + begin, start + end, end - begin, launch) for name, begin, end in spans]


def test_stages_of_rounds_that_follow_each_other() -> None:
    """A drafter's layers run at both ends of a round; only the launch tells one round's end from the next one's begin.
    Copies of results and steps of one token are nobody's."""
    found = [*replayed(0, 11, *ROUND), *replayed(230, 12, *ROUND), *replayed(460, 13, ("layer", 0, 90))]
    found.append(Call("Memcpy DtoH", 231, 233, 2, 14))
    found.sort(key=lambda call: call.start)
    rounds = rounds_of(found)
    spans = zip(STAGES, (0, 50, 200, 204), (50, 200, 204, 230), (2, 3, 1, 2), strict=True)
    expected = [Stage(name, start, end, count) for name, start, end, count in spans]
    later = [replace(stage, start=stage.start + 230, end=stage.end + 230) for stage in expected]
    assert rounds == [expected, later]
    sums = summary(rounds)
    assert sums["rounds"] == 2
    assert [sums[name]["us"] for name in STAGES] == [50, 150, 4, 26]
    assert [sums[name]["kernels"] for name in STAGES] == [2, 3, 1, 2]
    assert sum(sums[name]["share"] for name in STAGES) == pytest.approx(1)
    assert "verify 150.0 (65.2%, 3 kernels)" in profile.text(8, sums)


def test_a_round_without_a_drafter_has_no_stage_behind_the_commit() -> None:
    (stages,) = rounds_of(replayed(0, 1, *ROUND[1:6]))
    assert [stage.name for stage in stages] == ["propose", "verify", "accept"]
    assert summary([stages])["observe"] == {"us": 0, "share": 0, "kernels": 0}


def test_launches_that_are_not_told_apart_have_no_stages() -> None:
    with pytest.raises(ValueError, match=f"launch 0 has 2 calls of {GATHER} and 2 of {COMMIT}"):
        rounds_of([*replayed(0, 0, *ROUND), *replayed(230, 0, *ROUND)])
    assert rounds_of(replayed(0, 5, *ROUND[:3])) == [], "a profile that ends within a round"


def test_stages_lie_over_their_kernels_in_a_trace() -> None:
    found = replayed(0, 3, *ROUND)
    slices = [event for event in profile.trace(found, rounds_of(found))["traceEvents"] if event["ph"] == "X"]
    stages, kernels = ([one for one in slices if one["tid"] == thread] for thread in (1, 2))
    assert [one["name"] for one in stages] == list(STAGES)
    assert [one["name"] for one in kernels] == [call.name for call in found]
    for stage in stages:
        within = [one for one in kernels if stage["ts"] <= one["ts"] < stage["ts"] + stage["dur"]]
        assert len(within) == stage["args"]["kernels"]


def test_the_kernels_that_part_stages_have_these_names() -> None:
    triton = pytest.importorskip("triton")
    from runtime.execute.step import window_io_triton

    kernels = [one for one in vars(window_io_triton).values() if isinstance(one, triton.JITFunction)]
    assert {GATHER, COMMIT} <= {kernel.__name__ for kernel in kernels}


def test_a_profile_of_rounds_leaves_stages_and_a_trace(tmp_path: Path) -> None:
    files = ResultFiles(tmp_path, "x")
    assert "2 rounds" in profile._stages(4, [*replayed(0, 1, *ROUND), *replayed(230, 2, *ROUND)], files)
    (stages,), (trace,) = (list(tmp_path.glob(f"x-*.b4.{ending}.json")) for ending in ("stages", "rounds.trace"))
    assert json.loads(stages.read_text())["verify"]["us"] == 150
    assert len(json.loads(trace.read_text())["traceEvents"]) == 4 + 2 * (4 + 8)
    assert "no stages: launch 1 has 2" in profile._stages(5, 2 * replayed(0, 1, *ROUND), files)
    assert "no stages: no launch" in profile._stages(5, replayed(0, 1, ("layer", 0, 9)), files)


# ---- a run ----


@pytest.mark.slow
def test_a_profile_of_each_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(tmp_path, "--batch-size 1,4 --profile --max-num-batched-tokens 40 --chain-depth 2")
    for batch, prefills in ((1, 1), (4, 2)):
        found = profile_of(tmp_path, batch)
        assert (found["refused"], found["note"], found["rank"]) == (None, None, 0)
        for kind, steps in (("prefill", prefills), ("decode", 8)):
            table = found[kind]
            assert table["steps"] == steps
            assert sum(row["us_per_step"] for row in table["kernels"]) == pytest.approx(table["sum"])
            assert sum(row["share"] for row in table["kernels"]) == pytest.approx(1.0)
            assert sum(row["adds_per_step"] for row in table["kernels"]) == pytest.approx(table["busy"])
            assert 0 < table["busy"] <= table["span"]
            times = [row["us_per_step"] for row in table["kernels"]]
            assert times == sorted(times, reverse=True)
            products = next(row for row in table["kernels"] if row["name"] == "aten::mm")
            assert products["calls_per_step"] == 4 * LAYERS + 1, "qkv, output, gate and up, down; and the vocabulary"
        assert len(found["prefill_host"]["operators"]) == 10
        assert found["prefill_host"]["launches"] == 0, "nothing is launched on a CPU"
    printed = capsys.readouterr().out
    for batch in (1, 4):
        assert f"batch {batch}, decode: us a step, 8 steps" in printed
        assert f"batch {batch}, prefill: us a step" in printed
    assert "aten::mm" in printed


def test_what_was_timed_is_the_same_with_a_profile_and_without(tmp_path: Path) -> None:
    for name, flag in (("with", "--profile"), ("without", "")):
        measure(tmp_path / name, f"--batch-size 2 {flag}")
    left = {}
    for name in ("with", "without"):
        files = list((tmp_path / name / "results").iterdir())
        left[name] = sorted(path.name.split("Z.", 1)[1] for path in files)
        (points,) = (path for path in files if path.name.endswith(".points.jsonl"))
        (line,) = points.read_text().splitlines()
        assert json.loads(line).keys() == {*Point.__dataclass_fields__}
        (run,) = (path for path in files if path.name.endswith(".b2-run0.json"))
        assert json.loads(run.read_text())["total_output"] == 18, "not the profiled answers"
    assert left["with"] == sorted([*left["without"], "b2.profile.json"])
