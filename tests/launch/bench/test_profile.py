"""`bench latency --profile`: whose step a kernel belongs to, sums that add up, and a run through a real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent

from launch.bench import command as bench
from launch.bench.kernel_tables import Call, after_prefill, host_side, part, short_name, tables
from launch.bench.options import BenchCommand
from launch.bench.point import Point
from launch.bench.profile import device_calls, host_calls
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


def event(name: str, start: float, end: float, *, device: bool = False, **more: Any) -> FunctionEvent:
    kind = DeviceType.CUDA if device else DeviceType.CPU
    return FunctionEvent(1, name, 1, start, end, device_type=kind, **more)  # type: ignore[no-untyped-call]


def test_events_are_told_apart_by_window_and_device() -> None:
    window = event("window", 10, 20, is_user_annotation=True)
    outer, inner = event("outer", 11, 15), event("inner", 12, 14)
    outer.append_cpu_child(inner)  # type: ignore[no-untyped-call]
    events = [
        window,
        event("window", 10, 20, device=True, is_user_annotation=True),
        event("early", 9, 12, device=True),
        event("second", 18, 25, device=True),
        event("first", 12, 19, device=True),
        event("late", 20, 21, device=True),
        event("waits elsewhere", 11, 19, is_async=True),
        inner,
        outer,
    ]
    assert device_calls(events, window) == calls(("first", 12, 19), ("second", 18, 25))
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


# ---- a run ----


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
