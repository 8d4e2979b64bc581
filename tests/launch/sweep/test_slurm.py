"""`sweep render`, `submit` and `task`: what Slurm gets, who has which point, and what a task does with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.sweep.grid import Grid, grid_of
from launch.sweep.ledger import SUBMIT, Ledger
from launch.sweep.options import GIVE_UP_AFTER, SweepCommand
from launch.sweep.point import SweepError
from launch.sweep.render import MARK, TEMPLATE, chunks_of, shape_of
from launch.sweep.slurm import Slurm, numbers_in
from launch.sweep.submit import Jobs, render, submit
from launch.sweep.task import NOTHING_LEFT, task
from tests.launch.api.parsed import parsed
from tests.launch.sweep.fake_slurm import FakeSlurm
from tests.launch.sweep.fake_sweep import grid_with, journal_lines, run_fake, write_grid

ROOT = Path(__file__).resolve().parents[3]


def gpu_grid(**more: Any) -> Grid:
    content = {"options": {"model": "qwen3-0.6b"}, "grid": {"tp": [1, 2], "batch": [1, 8, 32]}, **more}
    return grid_of(content, "gpus")


def hand_in(grid: Grid, ledger: Ledger, slurm: Slurm, **options: Any) -> list[str]:
    given = {"resume": False, "retry_failed": False, "max_array": None, "throttle": None, "show": False, **options}
    return submit(grid, ledger, slurm, say=lambda _: None, **given)


def options_of(script: str) -> dict[str, str]:
    """As sbatch reads them: of an option that is there twice, the last counts."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE))


# ---- scripts ----


def test_points_of_one_shape_share_an_array(tmp_path: Path) -> None:
    one, two = chunks_of(gpu_grid(), gpu_grid().points, tmp_path)
    assert [len(chunk.tasks) for chunk in (one, two)] == [3, 3]
    first, second = options_of(one.script), options_of(two.script)
    assert (first["array"], first["nodes"], first["gpus-per-node"]) == ("0-2", "1", "1")
    assert second["gpus-per-node"] == "2"
    assert first["job-name"] == one.name == one.folder.name
    assert first["output"] == f"{one.folder}/task-%a.log"
    assert int(first["time"]) > 10
    assert one.points_text.splitlines() == [point.key for point in gpu_grid().points[:3]]


def test_a_script_is_the_shipped_one_with_lines_of_its_own(tmp_path: Path) -> None:
    (chunk, _) = chunks_of(gpu_grid(), gpu_grid().points, tmp_path)
    head, body = TEMPLATE.read_text().split(MARK)
    assert chunk.script.startswith(head)
    assert chunk.script.endswith(body)
    own = chunk.script.removeprefix(head).removesuffix(body).splitlines()
    assert own[-1] == f"set -- --points {chunk.folder}/points --out {tmp_path}"
    assert all(line.startswith("#SBATCH --") for line in own[:-2])
    subprocess.run(["bash", "-n"], input=chunk.script, text=True, check=True)
    subprocess.run(["bash", "-n", str(TEMPLATE)], check=True)


def test_arrays_end_where_slurm_allows_no_more_tasks(tmp_path: Path) -> None:
    grid = grid_with(range(1, 12), minutes=1)
    chunks = chunks_of(grid, grid.points, tmp_path, max_array=4, throttle=2)
    assert [options_of(chunk.script)["array"] for chunk in chunks] == ["0-3%2", "0-3%2", "0-2%2"]
    assert [key for chunk in chunks for key in chunk.keys] == [point.key for point in grid.points]
    assert len({chunk.name for chunk in chunks}) == 3


def test_several_points_a_task(tmp_path: Path) -> None:
    grid = grid_with(range(1, 6), cluster={"points-per-task": 2, "throttle": 3}, minutes=7)
    (chunk,) = chunks_of(grid, grid.points, tmp_path)
    keys = [point.key for point in grid.points]
    assert chunk.tasks == (tuple(keys[:2]), tuple(keys[2:4]), (keys[4],))
    options = options_of(chunk.script)
    assert (options["array"], options["time"]) == ("0-2%3", "17")


def test_cpu_points_ask_for_cpus_and_further_options_are_handed_on(tmp_path: Path) -> None:
    grid = grid_with([1], cluster={"cpus-per-rank": 3, "sbatch": ["--mem=4G", "--constraint=a100"]}, minutes=1)
    options = options_of(chunks_of(grid, grid.points, tmp_path)[0].script)
    assert "gpus-per-node" not in options
    assert (options["cpus-per-task"], options["mem"], options["constraint"]) == ("3", "4G", "a100")


def test_points_larger_than_a_node_take_whole_nodes() -> None:
    content = {"options": {"model": "m"}, "grid": {"tp": [4, 8, 16, 12]}}
    points = grid_of(content, "g").points
    cluster = grid_of(content, "g").cluster
    shapes = [shape_of(point, cluster) for point in points[:3]]
    assert [(shape.nodes, shape.ranks_per_node) for shape in shapes] == [(1, 4), (1, 8), (2, 8)]
    with pytest.raises(SweepError, match="12 ranks does not fill nodes of cluster: gpus-per-node 8"):
        shape_of(points[3], cluster)


def test_the_same_points_give_the_same_text_and_others_another_name(tmp_path: Path) -> None:
    first, again = (chunks_of(gpu_grid(), gpu_grid().points, tmp_path) for _ in range(2))
    assert first == again
    names = {chunk.name for chunk in chunks_of(gpu_grid(), gpu_grid().points[1:], tmp_path)}
    assert len(names & {chunk.name for chunk in first}) == 1


@pytest.mark.parametrize("name", ["with blank", "per%cent", "quote'"])
def test_a_path_that_slurm_s_options_cannot_carry_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SweepError, match="Slurm's options cannot carry this path"):
        chunks_of(gpu_grid(), gpu_grid().points, tmp_path / name)


def test_a_model_that_cannot_be_estimated_needs_minutes(tmp_path: Path) -> None:
    grid = grid_of({"options": {"model": "/no/such/model"}}, "g")
    with pytest.raises(SweepError, match="write minutes: N in the grid"):
        chunks_of(grid, grid.points, tmp_path)


def test_render_shows_what_submit_hands_in(tmp_path: Path) -> None:
    cluster, ledger, grid = FakeSlurm(tmp_path / "slurm"), Ledger(tmp_path / "out"), grid_with([1, 2], minutes=5)
    (shown,) = render(grid, ledger, max_array=None, throttle=None, to=tmp_path / "scripts")
    assert not (tmp_path / "out").exists()
    (job,) = hand_in(grid, ledger, cluster.slurm)
    assert cluster.jobs[job]["script"] == shown.script
    assert (tmp_path / "scripts" / f"{shown.name}.sbatch").read_text() == shown.script


# ---- submit ----


def test_a_grid_is_handed_in_once(tmp_path: Path) -> None:
    cluster, ledger, grid = FakeSlurm(tmp_path / "slurm"), Ledger(tmp_path / "out"), grid_with([1, 2, 3], minutes=5)
    (job,) = hand_in(grid, ledger, cluster.slurm, throttle=2)
    assert job == "101"
    assert cluster.jobs[job]["options"]["array"] == "0-2%2"
    with pytest.raises(SweepError, match="has jobs in Slurm already: type --resume"):
        hand_in(grid, ledger, cluster.slurm)
    assert hand_in(grid, ledger, cluster.slurm, resume=True) == []
    assert {key: held.task for key, held in Jobs(ledger).in_hand(cluster.slurm).items()} == {
        point.key: number for number, point in enumerate(grid.points)
    }


def test_two_submits_at_once_hand_in_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, ledger, grid = FakeSlurm(tmp_path / "slurm"), Ledger(tmp_path / "out"), grid_with([1, 2], minutes=5)
    sbatch = cluster.slurm.submit

    def slow(script: Path) -> str:
        with pytest.raises(SweepError, match=f"another `sweep submit` or a `sweep run` over {ledger.out} is under way"):
            hand_in(grid, Ledger(ledger.out), FakeSlurm(tmp_path / "other").slurm, resume=True)
        with pytest.raises(SweepError, match=f"a `sweep submit` over {ledger.out} is under way: wait for its end"):
            run_fake(grid, ledger.out, resume=True)
        return sbatch(script)

    monkeypatch.setattr(cluster.slurm, "submit", slow)
    (job,) = hand_in(grid, ledger, cluster.slurm)
    assert list(cluster.jobs) == [job]
    assert hand_in(grid, ledger, cluster.slurm, resume=True) == []


def test_points_are_not_run_here_beside_slurm(tmp_path: Path) -> None:
    cluster, ledger, grid = FakeSlurm(tmp_path / "slurm"), Ledger(tmp_path / "out"), grid_with([1, 2, 3], minutes=5)
    (job,) = hand_in(grid, ledger, cluster.slurm)
    ledger.file(ledger.begin(grid.points[0], f"{job}_0"), "", 0)
    cluster.move(job, 0, "COMPLETED")
    cluster.move(job, 2, "CANCELLED")
    words = (
        rf"Slurm has 1 of the 2 points that are left, {grid.points[1].key} as job {job}_1: wait for them, or scancel"
    )
    with pytest.raises(SweepError, match=words):
        run_fake(grid, ledger.out, resume=True, environ=cluster.environ)
    assert journal_lines(ledger.out) == []
    cluster.set(down=True)
    code, said = run_fake(grid, ledger.out, resume=True, environ=cluster.environ)
    assert code == 0
    assert said[0].startswith("points may be run a second time: scontrol -o failed")
    assert len(ledger.done()) == 3


def test_nothing_is_handed_in_beside_a_sweep_that_runs_here(tmp_path: Path) -> None:
    cluster, ledger, grid = FakeSlurm(tmp_path / "slurm"), Ledger(tmp_path / "out"), grid_with([1], minutes=5)
    with ledger.claim(SUBMIT, shared=True):
        assert run_fake(grid, ledger.out)[0] == 0, "two of those share the points"
        with pytest.raises(SweepError, match="is under way: wait for its end"):
            hand_in(grid, ledger, cluster.slurm, resume=True)
        assert hand_in(grid, ledger, cluster.slurm, resume=True, show=True) == []
    assert cluster.jobs == {}


def test_slurm_s_limit_of_an_array_is_asked_for(tmp_path: Path) -> None:
    cluster, grid = FakeSlurm(tmp_path / "slurm"), grid_with(range(1, 8), minutes=5)
    cluster.set(max_array=3, federated=True)
    jobs = hand_in(grid, Ledger(tmp_path / "out"), cluster.slurm)
    assert jobs == ["101", "102", "103"]
    assert [cluster.jobs[job]["options"]["array"] for job in jobs] == ["0-2", "0-2", "0-0"]


def test_show_submits_and_writes_nothing(tmp_path: Path) -> None:
    cluster, ledger = FakeSlurm(tmp_path / "slurm"), Ledger(tmp_path / "out")
    assert hand_in(grid_with([1], minutes=5), ledger, cluster.slurm, show=True) == []
    assert cluster.jobs == {}
    assert not ledger.out.exists()


def test_resume_hands_in_what_ended_without_a_result_and_what_was_forgotten(tmp_path: Path) -> None:
    cluster, ledger, grid = FakeSlurm(tmp_path / "slurm"), Ledger(tmp_path / "out"), grid_with(range(1, 7), minutes=5)
    cluster.set(max_array=4)
    one, two = hand_in(grid, ledger, cluster.slurm)
    points = grid.points
    ledger.file(ledger.begin(points[0], f"{one}_0"), "", 0)
    ledger.file(ledger.begin(points[1], f"{one}_1"), "it broke", 1)
    for number, state in enumerate(["COMPLETED", "FAILED", "CANCELLED", "RUNNING"]):
        cluster.move(one, number, state)
    cluster.forget(two)
    (again,) = hand_in(grid, ledger, cluster.slurm, resume=True)
    (chunk,) = (job.chunk for job in Jobs(ledger).recorded() if job.job == again)
    assert [key for keys in Jobs(ledger).tasks(chunk) for key in keys] == [points[n].key for n in (2, 4, 5)]
    (retried,) = hand_in(grid, ledger, cluster.slurm, resume=True, retry_failed=True)
    assert cluster.jobs[retried]["options"]["array"] == "0-0"


def test_an_id_that_slurm_gave_to_another_job_is_not_ours(tmp_path: Path) -> None:
    cluster, ledger, grid = FakeSlurm(tmp_path / "slurm"), Ledger(tmp_path / "out"), grid_with([1], minutes=5)
    (job,) = hand_in(grid, ledger, cluster.slurm)
    jobs = cluster.jobs
    jobs[job]["name"] = "somebody"
    cluster.set(jobs=jobs)
    assert hand_in(grid, ledger, cluster.slurm, resume=True) == ["102"]


def test_a_slurm_that_does_not_answer_has_not_forgotten(tmp_path: Path) -> None:
    cluster, ledger, grid = FakeSlurm(tmp_path / "slurm"), Ledger(tmp_path / "out"), grid_with([1], minutes=5)
    hand_in(grid, ledger, cluster.slurm)
    cluster.set(down=True)
    with pytest.raises(SweepError, match="Unable to contact slurm controller"):
        hand_in(grid, ledger, cluster.slurm, resume=True, max_array=10)
    with pytest.raises(SweepError, match="there is no scontrol here"):
        Slurm({"PATH": str(tmp_path)}).max_array()


def test_a_job_whose_id_was_not_recorded_is_found_by_its_name(tmp_path: Path) -> None:
    """sbatch takes the job, and the submitter is killed before it reads the answer."""
    cluster, out, grid = FakeSlurm(tmp_path / "slurm"), tmp_path / "out", write_grid(tmp_path, [1, 2], minutes=5)
    cluster.set(lose_answer=True)
    command = [sys.executable, "-m", "launch", "sweep", "submit", str(grid), "--out", str(out)]
    environ = {**os.environ, "PATH": f"{cluster.bin}:{os.environ['PATH']}"}
    assert subprocess.run(command, cwd=ROOT, env=environ, capture_output=True).returncode == -9
    assert list(cluster.jobs) == ["101"]
    cluster.set(lose_answer=False)
    ended = subprocess.run([*command, "--resume"], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "job 101 was handed in before, but not recorded" in ended.stdout
    assert "0 done, 0 failed, 2 in Slurm's hands, 0 to hand in" in ended.stdout
    assert list(cluster.jobs) == ["101"]


def test_the_environment_does_not_overrule_the_script(tmp_path: Path) -> None:
    cluster = FakeSlurm(tmp_path / "slurm", SBATCH_GPUS_PER_NODE="8", SBATCH_TIMELIMIT="9", SBATCH_PARTITION="gpu")
    (job,) = hand_in(grid_with([1], minutes=5), Ledger(tmp_path / "out"), cluster.slurm)
    assert cluster.jobs[job]["environment"] == ["SBATCH_PARTITION"]


@pytest.mark.parametrize(
    ("expression", "numbers"),
    [("7", [7]), ("0,3-5%2", [0, 3, 4, 5]), ("0-6:2", [0, 2, 4, 6]), ("2-3,9,11-12%4", [2, 3, 9, 11, 12])],
)
def test_array_expressions_are_read(expression: str, numbers: list[int]) -> None:
    assert list(numbers_in(expression)) == numbers


# ---- tasks ----


class Task:
    """A task of an array over one chunk, as slurm/sweep.sbatch calls `sweep task`."""

    def __init__(self, folder: Path, grid: Grid, capsys: pytest.CaptureFixture[str], index: int = 0) -> None:
        self.ledger = Ledger(folder / "out")
        self.ledger.begin_sweep(grid, resume=True)
        (self.chunk,) = chunks_of(grid, grid.points, self.ledger.out)
        self.chunk.folder.mkdir(parents=True, exist_ok=True)
        (self.chunk.folder / "points").write_text(self.chunk.points_text)
        self.environ = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": str(index)}
        self._arguments = ["--points", str(self.chunk.folder / "points"), "--out", str(self.ledger.out)]
        self._index = index
        self._capsys = capsys

    def begin(self) -> tuple[int, Path]:
        command = ["sweep", "task", "begin", *self._arguments, "--index", str(self._index)]
        code = task(parsed(SweepCommand, command).options, self.environ)
        return code, Path(self._capsys.readouterr().out.strip())

    def end(self, attempt: Path, code: int, asked: str = "none") -> int:
        arguments = [
            "--attempt",
            str(attempt),
            "--exit-code",
            str(code),
            "--asked",
            asked,
            "--out",
            str(self.ledger.out),
        ]
        return task(parsed(SweepCommand, ["sweep", "task", "end", *arguments]).options, self.environ)

    def requeue(self) -> None:
        self.environ["SLURM_RESTART_COUNT"] = str(int(self.environ.get("SLURM_RESTART_COUNT", 0)) + 1)


def measured(attempt: Path) -> None:
    (attempt / "results" / "x.points.jsonl").write_text('{"refused": null}\n')


def test_a_task_goes_through_its_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = grid_with([1, 2], cluster={"points-per-task": 2}, minutes=1)
    it = Task(tmp_path, grid, capsys)
    for point in grid.points:
        code, attempt = it.begin()
        assert code == 0
        assert attempt.parent == it.ledger.out / "work"
        assert (attempt / "command").read_bytes().split(b"\0")[:2] == [b"bench", b"latency"]
        assert (attempt / "command").read_bytes().decode().split("\0")[-2] == str(attempt / "results")
        assert (attempt / "ranks-per-node").read_text() == "1\n"
        measured(attempt)
        assert it.end(attempt, 0) == 0
        assert point.key in it.ledger.done()
    assert it.begin()[0] == NOTHING_LEFT


def test_a_point_that_fails_is_filed_and_the_next_one_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = grid_with([1, 2], cluster={"points-per-task": 2}, minutes=1)
    it = Task(tmp_path, grid, capsys)
    _, attempt = it.begin()
    (attempt / "stderr.log").write_text("lockstride bench: error: broken\n")
    assert it.end(attempt, 2) == 1
    _, attempt = it.begin()
    measured(attempt)
    assert it.end(attempt, 0) == 0
    assert it.begin()[0] == 1, "the task as a whole has failed"
    assert list(it.ledger.failed()) == [grid.points[0].key]
    it.requeue()
    assert it.begin()[0] == 0, "a requeued task tries again: its node may have been lost"


def test_the_time_limit_gives_a_point_back_and_at_last_gives_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    it = Task(tmp_path, grid_with([1], minutes=1), capsys)
    for _ in range(GIVE_UP_AFTER - 1):
        assert it.end(it.begin()[1], 143, "USR1") == NOTHING_LEFT
        assert (it.ledger.failed(), it.ledger.working()) == ({}, {})
        it.requeue()
    assert it.end(it.begin()[1], 143, "USR1") == 1
    ((folder,),) = it.ledger.failed().values()
    outcome = it.ledger.outcome(folder)
    assert outcome is not None
    assert outcome.reason == f"the time limit ended it {GIVE_UP_AFTER} times: write more minutes: in the grid"
    it.requeue()
    assert it.begin()[0] == 1, "nothing is tried again"
    it.environ["SLURM_ARRAY_JOB_ID"] = "71"
    assert it.begin()[0] == 0, "but by a job that was handed in since"


def test_a_point_that_was_done_in_time_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    it = Task(tmp_path, grid_with([1], minutes=1), capsys)
    _, attempt = it.begin()
    measured(attempt)
    assert it.end(attempt, 0, "USR1") == 0
    assert len(it.ledger.done()) == 1


def test_scancel_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    it = Task(tmp_path, grid_with([1], minutes=1), capsys)
    assert it.end(it.begin()[1], 143, "TERM") == NOTHING_LEFT
    assert (it.ledger.failed(), it.ledger.working()) == ({}, {})


def test_a_task_whose_node_was_lost_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    it = Task(tmp_path, grid_with([1], minutes=1), capsys)
    _, lost = it.begin()
    it.requeue()
    _, attempt = it.begin()
    assert attempt != lost
    assert not lost.exists()
    with pytest.raises(SweepError, match="no attempt under way"):
        it.end(lost, 0)


def test_a_task_by_hand_takes_the_grid_s_point_of_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = write_grid(tmp_path, [1, 2])
    given = ["--grid", str(grid), "--out", str(tmp_path / "out")]
    assert task(parsed(SweepCommand, ["sweep", "task", "begin", *given, "--index", "1"]).options, {}) == 0
    attempt = Path(capsys.readouterr().out.strip())
    assert b"--batch-size\x002\0" in (attempt / "command").read_bytes()
    with pytest.raises(SweepError, match=r"has 2 points: type --array=0-1"):
        task(parsed(SweepCommand, ["sweep", "task", "begin", *given, "--index", "2"]).options, {})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["begin"], "a task needs --grid GRID or --points FILE"),
        (["begin", "--points", "none"], "--points needs --out"),
        (["begin", "--points", "none", "--out", "{out}"], "cannot be read"),
        (["begin", "--points", "{points}", "--out", "{out}", "--index", "9"], "--index is 9, but"),
        (["begin", "--points", "{strange}", "--out", "{out}"], "names abc, which is not in"),
        (["end"], "end needs --out and --attempt"),
    ],
)
def test_a_task_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    it = Task(tmp_path, grid_with([1], minutes=1), capsys)
    (tmp_path / "strange").write_text("abc\n")
    places = {"out": it.ledger.out, "points": it.chunk.folder / "points", "strange": tmp_path / "strange"}
    given = [argument.format(**places) for argument in arguments]
    with pytest.raises(SweepError) as refused:
        task(parsed(SweepCommand, ["sweep", "task", *given]).options, {})
    assert words in str(refused.value)
