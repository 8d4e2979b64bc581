"""`sweep status` and `sweep plan`: every state a point can be in, and what estimates are made from."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from launch.sweep.command import run as run_sweep
from launch.sweep.estimate import batches_of, estimate_seconds, runs_of
from launch.sweep.grid import grid_of
from launch.sweep.ledger import Ledger
from launch.sweep.options import SweepCommand
from launch.sweep.plan import plan_json, plan_text
from launch.sweep.point import Point, Setting
from launch.sweep.status import NOT_ALL, shown_seconds, status, status_of, table
from launch.sweep.submit import submit
from tests.launch.api.parsed import parsed
from tests.launch.sweep.fake_slurm import FakeSlurm
from tests.launch.sweep.fake_sweep import grid_with, run_fake


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_seconds_between_looks_are_above_zero(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(SweepCommand, ["sweep", "status", "night", "--watch", seconds])
    assert f"argument --watch: {seconds} is not a finite number above 0" in capsys.readouterr().err


def test_every_state_is_told_apart(tmp_path: Path) -> None:
    cluster, ledger = FakeSlurm(tmp_path / "slurm"), Ledger(tmp_path / "out")
    grid = grid_with(range(1, 10), minutes=5)
    points = grid.points
    (job,) = submit(
        grid, ledger, cluster.slurm, resume=False, retry_failed=False, max_array=None, throttle=None, show=False,
        say=lambda _: None,
    )  # fmt: skip
    for number in (0, 1, 4, 5, 6, 8):
        cluster.move(job, number, "COMPLETED")
    for number in (2, 7):
        cluster.move(job, number, "RUNNING")
    ledger.file(ledger.begin(points[0]), "", 0)
    ledger.file(ledger.begin(points[1]), "thirteen is too many", 2)
    running = ledger.begin(points[2], f"{job}_2")
    (running.folder / "results" / "latency.b3-run0.json").write_text("{}")
    ledger.begin(points[4])  # nobody holds its lock
    here = ledger.begin(points[5])
    with ledger.claim(points[5].key):
        found = status_of(ledger, cluster.slurm)
    assert [point.state for point in found.points] == [
        *("done", "failed", "running", "queued", "left over", "running", "to come", "running", "to come")
    ]
    details = [point.detail for point in found.points]
    assert details[1:4] == ["thirteen is too many", "1/3 runs", "pending"]
    assert details[7] == "not begun"
    assert found.points[2].where == f"{running.began.host}, job {job}_2"
    assert found.points[5].where == here.began.host
    assert found.exit_code == NOT_ALL
    text = table(found).splitlines()
    assert text[0] == f"fake  [{'#' * 8}{'.' * 32}] 2/9"
    assert text[1] == "1 done, 1 failed, 3 running, 1 queued, 1 left over, 2 to come"
    assert text[3].split()[:3] == [points[1].key, "batch2", "failed"]


def test_what_slurm_cannot_be_asked_is_said(tmp_path: Path) -> None:
    cluster, ledger, grid = FakeSlurm(tmp_path / "slurm"), Ledger(tmp_path / "out"), grid_with([1], minutes=5)
    submit(
        grid, ledger, cluster.slurm, resume=False, retry_failed=False, max_array=None, throttle=None, show=False,
        say=lambda _: None,
    )  # fmt: skip
    cluster.set(down=True)
    found = status_of(ledger, cluster.slurm)
    assert found.note.startswith("Slurm cannot be asked: scontrol -o failed")
    assert found.note in table(found)


def test_it_is_shown_again_until_all_is_finished(tmp_path: Path) -> None:
    ledger, grid, stream = Ledger(tmp_path), grid_with([1, 2]), io.StringIO()
    ledger.begin_sweep(grid, resume=False)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        ledger.file(ledger.begin(grid.points[len(pauses) - 1]), "", 0)

    slurm = FakeSlurm(tmp_path / "slurm").slurm
    assert status(tmp_path, slurm, watch=2.5, as_json=False, stream=stream, sleep=sleep) == 0
    assert pauses == [2.5, 2.5]
    assert stream.getvalue().count("fake  [") == 3
    assert "\x1b" not in stream.getvalue(), "no terminal, no control characters"


def test_as_json_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = parsed(SweepCommand, ["sweep", "status", str(out), "--json"])
    assert run_sweep(command, {}) == 2
    assert "holds no sweep" in capsys.readouterr().err
    run_fake(grid_with([1, 13]), out)
    assert run_sweep(command, {}) == 1
    content = json.loads(capsys.readouterr().out)
    assert [(point["label"], point["state"]) for point in content["points"]] == [
        ("batch1", "done"),
        ("batch13", "failed"),
    ]
    run_fake(grid_with([1]), out, resume=True)
    assert run_sweep(command, {}) == 0


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "?"), (0.4, "0 s"), (99.4, "99 s"), (720, "12 min"), (12_240, "3.4 h")]
)
def test_times_are_rounded(seconds: float | None, shown: str) -> None:
    assert shown_seconds(seconds) == shown


# ---- plan ----


def test_a_plan_lists_points_gpus_and_time(tmp_path: Path) -> None:
    content = {
        "options": {"model": "qwen3-8b", "input-len": 512},
        "grid": {"tp": [1, 2, 16], "batch": [1, 8]},
        "exclude": [{"tp": 16, "batch": 1}],
    }
    grid, ledger = grid_of(content, "night"), Ledger(tmp_path)
    lines = plan_text(grid, ledger).splitlines()
    assert lines[0] == f"night: 5 points (1 excluded) of launch bench latency; ledger {tmp_path}"
    assert lines[1] == "every point: qwen3-8b input-len512"
    assert lines[2].split() == ["key", "tp", "batch", "nodes", "GPUs", "about", "state"]
    assert [line.split()[1:5] for line in lines[3:8]] == [
        ["1", "1", "1", "1"],
        ["1", "8", "1", "1"],
        ["2", "1", "1", "2"],
        ["2", "8", "1", "2"],
        ["16", "8", "2", "16"],
    ]
    assert lines[8].endswith("GPU hours (estimated from bytes and FLOPs, so roughly)")
    plan = json.loads(plan_json(grid, ledger))
    assert [point["ranks"] for point in plan["points"]] == [1, 1, 2, 2, 16]
    assert all(point["seconds"] > 10 for point in plan["points"])


def test_a_plan_of_a_grid_that_was_run_says_what_is_done(tmp_path: Path) -> None:
    grid = grid_with([1, 13, 2])
    run_fake(grid_with([1, 13]), tmp_path / "out")
    lines = plan_text(grid, Ledger(tmp_path / "out")).splitlines()
    assert [line.partition(")")[2].split() for line in lines[3:6]] == [["?", "done"], ["?", "failed"], ["?"]]


def test_a_command_without_a_grid_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sweep(parsed(SweepCommand, ["sweep", "plan"]), {}) == 2
    assert "sweep plan GRID, or sweep plan --dry-run-world N --model M" in capsys.readouterr().err


# ---- estimates ----


def point(**settings: Setting) -> Point:
    return Point("latency", {"model": "qwen3-8b", **settings})


def test_more_work_takes_longer() -> None:
    base = estimate_seconds(point(batch=8))
    assert base is not None
    for more in ({"batch": 256}, {"batch": "8,32"}, {"batch": 8, "output-len": 2000}, {"batch": 8, "num-iters": 30}):
        longer = estimate_seconds(point(**more))
        assert longer is not None
        assert longer > base, more
    quicker = estimate_seconds(point(batch=8, tp=4))
    assert quicker is not None
    assert quicker < base
    few_bytes = estimate_seconds(point(batch=8, quantization="fp8"))
    fewer = estimate_seconds(point(batch=8, quantization="fp8", **{"kv-cache-dtype": "fp8"}))
    assert few_bytes is not None
    assert fewer is not None
    assert fewer < few_bytes < base
    assert estimate_seconds(Point("latency", {"model": "nowhere"})) is None


def test_points_that_were_measured_correct_the_estimate() -> None:
    alone, slow = estimate_seconds(point(batch=8)), point(batch=1)
    expected = estimate_seconds(slow)
    assert alone is not None
    assert expected is not None
    assert estimate_seconds(point(batch=8), [(slow, 3 * expected)]) == pytest.approx(3 * alone)
    other = Point("latency", {"model": "qwen3-8b", "batch": 1, "tp": 2})
    assert estimate_seconds(point(batch=8), [(other, 1e6)]) == alone, "another number of ranks says nothing"


def test_runs_and_batches_of_a_point() -> None:
    assert runs_of(point(batch="1,8", **{"num-iters": 4})) == (8, 10)
    assert batches_of(point()) == [1, 8, 32, 128, 256]
    assert batches_of(Point("throughput", {"model": "m", "concurrency": 7})) == [7]


def load(**settings: Setting) -> Point:
    return Point("serve", {"model": "qwen3-8b", **settings})


def test_a_load_takes_as_long_as_its_requests_or_their_arrivals() -> None:
    base = estimate_seconds(load(concurrency=64))
    assert base is not None
    others: list[dict[str, Setting]] = [{"concurrency": 16}, {"concurrency": "64,16"}]
    others.append({"concurrency": 64, "num-prompts": 9000})
    for more in others:
        longer = estimate_seconds(Point("serve", {"model": "qwen3-8b", **more}))
        assert longer is not None
        assert longer > base, more
    for name in ("random", "long", "prefix", "burst"):
        assert estimate_seconds(load(**{"dataset-name": name})) is not None
    slow = estimate_seconds(load(**{"request-rate": 0.5}))
    assert slow is not None
    assert slow > 1000 / 0.5
    several: dict[str, Setting] = {"concurrency": "16,64", "request-rate": "1,2,inf", "num-iters": 2}
    assert runs_of(load(**several)) == (12, 12)
    assert batches_of(load()) == [256]
