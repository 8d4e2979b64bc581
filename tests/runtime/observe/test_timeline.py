"""The trace: what Chrome and Perfetto expect, one clock for all, one file of all ranks, and never in the way."""

from __future__ import annotations

import gzip
import json
import logging
import random
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import ConfigError, EngineConfig
from runtime.observe.observer import StepObserver
from runtime.observe.step_record import VOID, StepRecord
from runtime.observe.timeline import Part, Timeline, device_times_ns, part_path, write_trace
from tests.runtime.engine.rig import request, rig, run, tiny_folder
from tests.runtime.engine.test_depths import mixture
from tests.runtime.engine.test_speculation import repeating
from tests.runtime.observe.windows import speculative_rig
from tests.torchrun import torchrun

ROOT = Path(__file__).parents[3]
HOST_ARGS = {"step", "role", "bucket", "rows", "ghosts", "chained", "break"}
ARGS = {"host": HOST_ARGS, "device": HOST_ARGS | {"width", "gained"}, "landing": {"step"}}
ROUNDING_US = 0.002


def checked(trace: dict[str, Any]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """(pid, thread name) -> its slices by time, after a check of everything that the trace event format demands."""
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in trace["traceEvents"]:
        pid, tid = event["pid"], event["tid"]
        assert (type(pid), type(tid), type(event["name"])) == (int, int, str)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                processes[pid] = event["args"]["name"]
            elif event["name"] == "thread_name":
                threads[pid, tid] = event["args"]["name"]
            else:
                assert event["name"] in ("process_sort_index", "thread_sort_index")
                assert isinstance(event["args"]["sort_index"], int)
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["args"].keys() == ARGS[threads[pid, tid]]
            slices[pid, tid].append(event)
    assert {pid for pid, _ in slices} <= processes.keys()
    assert slices.keys() <= threads.keys()
    for found in slices.values():
        found.sort(key=lambda event: event["ts"])
        for before, after in pairwise(found):
            assert before["ts"] + before["dur"] <= after["ts"] + ROUNDING_US, "slices of a thread do not overlap"
    return {(pid, threads[pid, tid]): found for (pid, tid), found in slices.items()}


def phases(pid: int, threads: dict[tuple[int, str], list[dict[str, Any]]]) -> Counter[str]:
    return Counter(event["name"] for event in threads[pid, "host"])


@pytest.mark.parametrize("depth", [0, 2])
def test_a_run_as_a_trace(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    observe = StepObserver(timeline=Timeline(path, 0, 1))
    with rig(depth=depth, observe=observe) as engine:
        run(engine, mixture(3))
        assert not path.exists()
    threads = checked(json.loads(path.read_text()))
    records = observe.recent()
    real = [step for step in records if step.role != VOID]
    assert threads.keys() == {(0, thread) for thread in ARGS}
    expected = {"agree": len(records), "plan": len(records), "launch": len(real), "wait": len(real)}
    assert phases(0, threads) == expected | {"land": len(records)}
    device = threads[0, "device"]
    assert [event["name"] for event in device] == [f"{step.role} {step.bucket}" for step in real]
    for event, step in zip(device, real, strict=True):
        assert event["args"] == {
            "step": step.step,
            "role": step.role,
            "bucket": step.bucket,
            "rows": step.rows,
            "ghosts": step.ghosts,
            "width": 1,
            "gained": step.gained,
            "chained": step.break_reason is None,
            "break": step.break_reason,
        }
    host = {(event["name"], event["args"]["step"]): event for event in threads[0, "host"]}
    for event in device:
        step_number = event["args"]["step"]
        assert host["launch", step_number]["ts"] <= event["ts"] + ROUNDING_US
        assert event["ts"] + event["dur"] <= host["land", step_number]["ts"] + ROUNDING_US
    landing = threads[0, "landing"]
    assert [event["name"] for event in landing] == [
        name for step in real for name in ("wait", f"results of {step.role}")
    ]
    assert [event["args"]["step"] for event in landing[::2]] == [step.step for step in real]
    assert [event["args"]["step"] for event in landing[1::2]] == [step.step for step in real]
    for waited, read, run_there in zip(landing[::2], landing[1::2], device, strict=True):
        assert read["ts"] == pytest.approx(waited["ts"] + waited["dur"], abs=ROUNDING_US)
        assert run_there["ts"] + run_there["dur"] <= read["ts"] + ROUNDING_US, "results are there when the step ended"
        assert host["launch", read["args"]["step"]]["ts"] <= waited["ts"] + ROUNDING_US
        assert read["ts"] + read["dur"] <= host["land", read["args"]["step"]]["ts"] + ROUNDING_US
    assert sum(event["dur"] for event in landing[1::2]) > 0
    assert list(path.parent.iterdir()) == [path]


def test_slices_of_windows_say_what_they_gained(tmp_path: Path) -> None:
    """All tokens of all answers, those dropped by the host included."""
    path = tmp_path / "trace.json"
    observe = StepObserver(timeline=Timeline(path, 0, 1))
    with speculative_rig(observe=observe) as engine:
        run(engine, repeating(3))
        gained = engine.counters["wasted_tokens"] + 3 * 40
        rounds, kept = (engine.counters[f"spec_num_{name}"] for name in ("drafts", "accepted_tokens"))
    device = [event["args"] for event in checked(json.loads(path.read_text()))[0, "device"]]
    assert sum(args["gained"] for args in device) == gained
    windows = [args for args in device if args["role"] == "window of 4"]
    assert {args["width"] for args in windows} == {4}
    assert {args["width"] for args in device if args["role"] == "prefill"} == {1}
    assert any(args["gained"] > args["rows"] for args in windows), "some guesses were kept"
    assert kept > 0
    assert sum(args["gained"] for args in device if args["width"] > 1) >= rounds + kept


def test_a_compressed_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with rig(observe=StepObserver(timeline=Timeline(path, 0, 1))) as engine:
        run(engine, [request(0, (1, 2, 3))])
    with gzip.open(path, "rt") as file:
        assert checked(json.load(file))[0, "device"]


def test_a_long_run_keeps_its_end_and_says_what_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    with (
        caplog.at_level(logging.INFO),
        rig(observe=StepObserver(timeline=Timeline(path, 0, 1, capacity=10))) as engine,
    ):
        run(engine, [request(0, (1, 2, 3), max_tokens=40, stops=())])
    trace = json.loads(path.read_text())
    steps = {event["args"]["step"] for event in trace["traceEvents"] if event["ph"] == "X"}
    last = engine.scheduler.step - 1
    assert steps == set(range(last - 9, last + 1))
    assert trace["otherData"]["dropped_steps_by_rank"] == {"0": last - 9}
    assert f"({last - 9} before them were dropped)" in caplog.text


def test_an_engine_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with rig(observe=StepObserver(timeline=Timeline(path, 0, 1))) as engine:
        engine.add(request(0, (1, 2, 3), max_tokens=40, stops=()))
        for _ in range(8):
            engine.step()
        with pytest.raises(ZeroDivisionError), engine:
            raise ZeroDivisionError
        assert {event["args"]["step"] for event in checked(json.loads(path.read_text()))[0, "device"]} == set(range(6))


# ---- several ranks ----


def a_step(number: int, at_ns: int) -> StepRecord:
    return StepRecord(
        number,
        at_ns,
        "decode",
        4,
        3,
        agree_ns=10,
        plan_ns=20,
        launch_ns=30,
        land_at_ns=at_ns + 1000,
        wait_ns=5,
        land_ns=6,
    )


def a_part(rank: int, clock: str, wall_ns: int, offset_ns: int = 0, at_ns: int = 10**6) -> Part:
    return Part(rank, f"node-{clock}", clock, wall_ns, offset_ns, 0, [a_step(0, at_ns)])


def start_of_host(path: Path) -> dict[int, float]:
    """Where each rank's first slice begins, in us."""
    threads = checked(json.loads(path.read_text()))
    return {pid: found[0]["ts"] for (pid, thread), found in threads.items() if thread == "host"}


def test_ranks_of_one_node_share_a_clock_and_others_are_moved(tmp_path: Path) -> None:
    """The wall clock of node b is 500 ns ahead of a's, as the handshake found; its host clock began elsewhere."""
    wall = 1_700_000_000_000_000_000
    parts = [
        a_part(0, "a", wall),
        a_part(1, "a", wall + 777, at_ns=10**6 + 50),  # reading two clocks takes a moment: not used on one node
        a_part(2, "b", wall + 500 + 9 * 10**9, offset_ns=-500, at_ns=10**6 + 70 - 9 * 10**9),
    ]
    path = tmp_path / "trace.json"
    with path.open("wb") as file:
        write_trace(file, parts)
    assert start_of_host(path) == pytest.approx({0: 0.0, 1: 0.05, 2: 0.07}, abs=1e-6)


class FarRank(SingleRankControl):
    """Rank 1, on a node whose wall clock the handshake found to be an hour ahead of rank 0's."""

    rank = 1
    world = 2
    clock_offset_ns = -3600 * 10**9


def test_an_engine_leaves_its_clocks_offset_with_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    config = EngineConfig(
        model=str(tiny_folder(tmp_path / "model")),
        load_format="dummy",
        device="cpu",
        max_num_seqs=2,
        num_blocks=40,
        max_model_len=64,
        timeline=str(path),
    )
    control = FarRank()
    with build_engine(config, control=control, collectives=SingleRank(), agree_min=int, device="cpu") as engine:
        run(engine, [request(0, (3, 4, 5), max_tokens=4)])
    part = msgspec.json.decode(part_path(path, 1).read_bytes(), type=Part)
    assert (part.rank, part.offset_ns) == (1, -3600 * 10**9)
    assert part.steps


def closed_with_one_step(timeline: Timeline, wait_s: float = 5.0) -> None:
    timeline.add(a_step(0, 10**6 + timeline.rank))
    timeline.close(wait_s)


def test_rank_0_merges_what_all_ranks_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    part_path(path, 1).write_text("of a run that was killed")
    ranks = [Timeline(path, rank, 3) for rank in range(3)]
    assert not part_path(path, 1).exists(), "nobody takes an old part for a new one"
    for timeline in reversed(ranks):
        closed_with_one_step(timeline)
    ranks[0].close(0.0)
    assert start_of_host(path).keys() == {0, 1, 2}
    assert [found.name for found in tmp_path.iterdir()] == ["trace.json"]


def test_a_rank_that_leaves_nothing_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    timelines = [Timeline(path, rank, 3) for rank in range(3)]
    closed_with_one_step(timelines[1])
    closed_with_one_step(timelines[0], wait_s=0.0)
    assert "no part came from ranks [2]" in caplog.text
    assert start_of_host(path).keys() == {0, 1}


@pytest.mark.parametrize("bad", ["folder", "file/trace.json"])
def test_a_place_that_cannot_be_written_is_refused_at_once(bad: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written by rank 0.*type --timeline"):
        Timeline(tmp_path / bad, 0, 1)


def test_a_disk_that_fails_at_the_end_costs_no_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(tmp_path / "gone" / "trace.json", 0, 1)
    (tmp_path / "gone").rmdir()
    closed_with_one_step(timeline)
    assert "rank 0 could not write" in caplog.text


# ---- the device's clock ----


def test_a_drifting_device_clock_is_followed() -> None:
    """60 s of steps on a clock that runs 40 ppm fast, which is 2.4 ms in the end; landings are seen 10 us late or more,
    now and then much more.
    """
    draw = random.Random(5)
    steps, true_ends, ended_ns = [], [], 10**15
    for number in range(20_000):
        started_ns, ended_ns = ended_ns + 2_000, ended_ns + 3_000_000
        step = a_step(number, started_ns - 100_000)
        step.device_started_ms, step.device_ended_ms = (
            (at_ns - 10**15) * (1 + 40e-6) / 1e6 for at_ns in (started_ns, ended_ns)
        )
        step.seen_at_ns = ended_ns + 10_000 + int(draw.expovariate(1 / 30_000)) + 5_000_000 * (draw.random() < 0.01)
        steps.append(step)
        true_ends.append(ended_ns)
    times = device_times_ns(steps)
    late = [end - true for (_, end), true in zip(times, true_ends, strict=True)]
    assert min(late) > -100_000
    assert max(late) < 100_000
    assert all(end <= step.seen_at_ns for (_, end), step in zip(times, steps, strict=True))
    assert all(before[1] <= after[0] <= after[1] for before, after in pairwise(times))


def test_no_device_times_no_slices() -> None:
    assert device_times_ns([]) == []


# ---- the command ----


@pytest.mark.multiprocess
def test_generate_on_two_ranks_writes_one_timeline(tmp_path: Path) -> None:
    lines = [{"id": i, "prompt": f"def f{i}(x):", "max_tokens": 12, "temperature": 0} for i in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["generate", "--model", "models/demo", "--device", "cpu", "--max-num-seqs", "4"]
    command += ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--nvtx"]
    command += ["--timeline", str(tmp_path / "trace" / "t.json")]
    ran = torchrun(2, "launch", *command)
    assert ran.returncode == 0, ran.said[-3000:]
    assert "of 2 ranks are in" in ran.said
    assert [found.name for found in (tmp_path / "trace").iterdir()] == ["t.json"], "the parts are gone"
    threads = checked(json.loads((tmp_path / "trace" / "t.json").read_text()))
    assert threads.keys() == {(rank, thread) for rank in range(2) for thread in ARGS}
    assert phases(0, threads) == phases(1, threads)
    steps = [[(event["name"], event["args"]) for event in threads[rank, "device"]] for rank in range(2)]
    assert steps[0] == steps[1], "both ranks ran the same steps"
    assert len(steps[0]) >= 12
    together = [
        max(one["ts"], other["ts"]) < min(one["ts"] + one["dur"], other["ts"] + other["dur"])
        for one, other in zip(threads[0, "device"], threads[1, "device"], strict=True)
    ]
    assert sum(together) > 0.8 * len(together), "on one clock, ranks that wait for each other overlap in every step"
