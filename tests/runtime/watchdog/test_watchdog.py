"""The watchdog: real processes that die, stop, hang and disagree; every job ends by name and leaves its bundles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import runtime.watchdog.watchdog as watchdog_module
from parallel.comm.call_log import CollectiveError
from parallel.control.errors import Cause, Disagreement, Verdict
from parallel.control.interface import ControlPlane, SingleRankControl
from runtime.schedule.digest import RollingDigest
from runtime.watchdog.crash_report import STEP_RECORDS, Evidence, write_bundle
from runtime.watchdog.options import WatchdogOptions
from runtime.watchdog.parent_death import OrphanedError, die_with_parent
from runtime.watchdog.shutdown import EXIT_CODE, TERMINATED_CODE, CrashLog
from runtime.watchdog.watchdog import Watchdog
from tests.parallel.control.ranks import run_nodes, run_ranks, short_folder, take_turns

ROOT = Path(__file__).parents[3]


def options(tmp_path: Path, limit: float = 5.0, explanation_wait: float = 0.3) -> WatchdogOptions:
    return WatchdogOptions(
        tmp_path / "bundles", limit=limit, interval=0.02, silence=0.2, explanation_wait=explanation_wait, grace=0.2
    )


def run_job(bundles: Path, fault: str, world: int = 3, step: int = 20) -> tuple[list[int], list[str]]:
    """Exit codes and stderr of all ranks."""
    said = []
    with short_folder() as folder:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.runtime.watchdog.one_rank",
                    *map(str, (rank, world, folder, bundles, fault, step)),
                ],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            said = [process.communicate(timeout=600)[1] for process in processes]
        finally:
            for process in processes:
                with process:
                    process.kill()
        assert list(folder.iterdir()) == []  # no socket is left behind
    return [process.returncode for process in processes], said


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "cause", "code", "text"),
    [
        ("kill", Cause.LOST, -signal.SIGKILL, "rank 2 is gone"),
        ("exit", Cause.LOST, 0, "rank 2 is gone"),
        ("stop", Cause.NO_PROGRESS, None, "it is stopped, or its interpreter is held"),
        ("loop", Cause.NO_PROGRESS, EXIT_CODE, "rank 2 stands still at step 20 in plan"),
        ("raise", Cause.ABORTED, EXIT_CODE, "rank 2 ends at step 20: MemoryError: no room"),
        ("decide", Cause.DISAGREEMENT, EXIT_CODE, "rank 2 decided plan(-1) at step 999"),
    ],
)
def test_every_fault_ends_the_job_by_name(
    tmp_path: Path, fault: str, cause: Cause, code: int | None, text: str
) -> None:
    codes, said = run_job(tmp_path / "bundles", fault)
    assert codes[:2] == [EXIT_CODE, EXIT_CODE], said
    if fault == "stop":  # it is woken to show where it stood, and may or may not leave by itself before it is killed
        shown = (tmp_path / "bundles" / "rank-00002" / "crash.txt").read_text()
        assert codes[2] in (EXIT_CODE, -signal.SIGKILL), (said, shown)
        assert "misbehave" in shown, shown
    else:
        assert codes[2] == code, said
    summary = json.loads((tmp_path / "bundles" / "summary.json").read_text())
    assert (summary["culprit"], summary["cause"]) == (2, cause.value)
    assert text in summary["text"]
    assert set(summary["ranks"]) == {"0", "1", "2"}
    for rank in (0, 1):
        folder = tmp_path / "bundles" / f"rank-{rank:05d}"
        assert json.loads((folder / "verdict.json").read_text())["rank"] == 2
        assert "one_rank.py" in (folder / "stacks.txt").read_text()
        steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()]
        assert steps == list(range(len(steps)))
        # Rank 2 has taken the leader's record of step 19, which goes out once the others have taken that of step 16.
        least = 19 if rank == 0 else 16
        assert len(steps) >= least
        assert len((folder / "decisions.jsonl").read_text().splitlines()) >= least
        assert "rank 2" in said[rank]


@pytest.mark.multiprocess
def test_an_agreed_end_leaves_nothing_behind(tmp_path: Path) -> None:
    codes, said = run_job(tmp_path / "bundles" / "job", "none")
    assert codes == [0, 0, 0], said
    assert said == ["", "", ""]
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_all_jobs_goes_with_the_last_of_them(tmp_path: Path) -> None:
    parent = tmp_path / "bundles"
    jobs = [Watchdog(SingleRankControl(), WatchdogOptions(parent / f"job.{i}", parent)) for i in range(2)]
    for job in jobs:
        job.start()
    jobs[0].stop()
    assert [folder.name for folder in parent.iterdir()] == ["job.1"]
    jobs[1].stop()
    assert list(tmp_path.iterdir()) == []


def test_a_crash_log_finds_its_folder_though_others_remove_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ends removes empty folders; another may be about to put its own there."""
    made, removals = Path.mkdir, iter(range(4))

    def mkdir(folder: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        made(folder, mode, parents, exist_ok)
        if next(removals, None) is not None:
            folder.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    log = CrashLog(tmp_path / "bundles" / "job", whole_process=False)
    assert log.path.exists()
    log.close()


@pytest.mark.multiprocess
def test_a_rank_dies_with_its_parent(tmp_path: Path) -> None:
    child = "import os, time; from runtime.watchdog.parent_death import die_with_parent; die_with_parent(); "
    child += "print(os.getpid(), flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    until = time.monotonic() + 300
    while _running(grandchild) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _running(grandchild)


def _running(pid: int) -> bool:
    """Neither gone nor a zombie that nobody reaps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    with pytest.raises(OrphanedError, match=f"was started by 1234567, whose death left it to {os.getppid()}"):
        die_with_parent(1234567, with_signal=0)


def test_health_means_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = 100.0, list[int]()
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: now))

    def listen(timeout: float) -> None:
        nonlocal now
        now += timeout

    plane = SingleRankControl()
    watchdog = Watchdog(plane, options(tmp_path, limit=2.0), leave=left.append)
    monkeypatch.setattr(watchdog, "_listen", listen)
    watchdog._last_acts.prepare()
    try:
        for step in range(3):
            watchdog.step, watchdog.place = step, "run"
            plane.exchange(step, 0)
            assert (watchdog.still_for(now), watchdog.limit) == (0.0, 2.0)
            now += 1.9
            assert watchdog.still_for(now) == pytest.approx(1.9)
        with watchdog.phase("compile", 60.0):
            assert watchdog.still_for(now) == 0.0
            now += 3.0  # longer than the limit outside
            assert 2.0 < watchdog.still_for(now) < watchdog.limit == 60.0
            assert watchdog.place == "compile"
        assert watchdog.still_for(now) == 0.0
        watchdog._run()  # nothing more happens: it ends by itself
        assert left == [EXIT_CODE]
        assert watchdog.verdict is not None
        assert watchdog.verdict.text.startswith("rank 0 stands still at step 2 in run (limit 2 s)")
    finally:
        watchdog.stop()
    assert json.loads((tmp_path / "bundles" / "summary.json").read_text())["culprit"] == 0


@pytest.mark.parametrize(("stopped", "ends"), [(14.0, False), (25.0, False), (0.25, True)])
def test_a_rank_that_was_stopped_made_no_progress_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: float, ends: bool
) -> None:
    """The whole job may be suspended. What it stood still before and after counts."""
    now = 100.0
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: now))
    watchdog = Watchdog(SingleRankControl(), WatchdogOptions(tmp_path), leave=lambda code: None)
    monkeypatch.setattr(watchdog, "_last_acts", Mock())
    passing = iter([0.25] * 16 + [stopped] + [0.25] * (40 if ends else 16))

    def listen(timeout: float) -> None:
        nonlocal now
        if timeout == 0.0:
            return
        seconds = next(passing, None)
        if seconds is None:
            watchdog._stopping.set()
        else:
            now += seconds

    monkeypatch.setattr(watchdog, "_listen", listen)
    watchdog._run()
    assert (watchdog.verdict is not None) == ends
    if not ends:
        assert 8.0 <= watchdog.still_for(now) < 9.0


def ends(
    tmp_path: Path,
    nodes: int,
    local: int,
    reasons: Callable[[int], BaseException | None],
    explanation_wait: float = 10.0,
) -> tuple[set[Verdict | Exception | None], dict[int, int]]:
    """The verdicts and exit codes of all ranks when those that have a reason fail at once, each with its own."""
    left: dict[int, int] = {}
    told = threading.Barrier(nodes * local)

    def body(plane: ControlPlane) -> Verdict | None:
        asked = options(tmp_path, limit=60.0, explanation_wait=explanation_wait)
        watchdog = Watchdog(plane, asked, leave=lambda code: left.__setitem__(plane.rank, code))
        watchdog.start()
        plane.exchange(0, 0)
        reason = reasons(plane.rank)
        if reason is not None:
            watchdog.fail(reason)
        watchdog._thread.join(300)
        told.wait(300)
        watchdog.stop()
        take_turns_from(plane)
        return watchdog.verdict

    def take_turns_from(plane: ControlPlane) -> None:
        if plane.rank == 0:
            plane.stop()
        step = 1
        while not plane.stopped:
            plane.exchange(step, 0)
            step += 1

    with short_folder() as folder:
        return set(run_nodes(nodes, local, folder, body).values()), left


@pytest.mark.parametrize(("nodes", "local", "culprit"), [(1, 3, 1), (1, 3, 0), (2, 2, 3), (2, 2, 2), (2, 2, 1)])
def test_a_failure_is_told_to_every_rank(tmp_path: Path, nodes: int, local: int, culprit: int) -> None:
    verdicts, codes = ends(tmp_path, nodes, local, lambda rank: OSError("disk full") if rank == culprit else None)
    said = f"rank {culprit} ends at step 0: OSError: disk full"
    assert verdicts == {Verdict(Cause.ABORTED, culprit, 0, said)}
    assert codes == dict.fromkeys(range(nodes * local), EXIT_CODE)


@pytest.mark.parametrize(("nodes", "local", "culprit"), [(1, 3, 1), (1, 3, 0), (2, 2, 3), (2, 2, 0)])
def test_a_broken_collective_waits_for_its_cause(tmp_path: Path, nodes: int, local: int, culprit: int) -> None:
    """All others fail at once, because one of them will be gone in a moment."""

    def reason(rank: int) -> BaseException:
        if rank == culprit:
            time.sleep(0.1)
            return MemoryError("no room")
        error = RuntimeError("a step failed")
        error.__cause__ = CollectiveError("connection closed by peer")
        return error

    verdicts, codes = ends(tmp_path, nodes, local, reason)
    assert verdicts == {Verdict(Cause.ABORTED, culprit, 0, f"rank {culprit} ends at step 0: MemoryError: no room")}
    assert set(codes.values()) == {EXIT_CODE}


def test_a_broken_collective_without_a_cause_is_told_as_such(tmp_path: Path) -> None:
    verdicts, codes = ends(
        tmp_path, 1, 3, lambda rank: CollectiveError("reset") if rank == 2 else None, explanation_wait=0.3
    )
    (verdict,) = verdicts
    assert isinstance(verdict, Verdict)
    assert (verdict.cause, verdict.rank) == (Cause.COLLECTIVE, 2)
    assert verdict.text.startswith("rank 2 ends at step 0: CollectiveError: reset; no rank is gone")
    assert set(codes.values()) == {EXIT_CODE}


def test_the_end_of_a_long_patience_is_told_at_once(tmp_path: Path) -> None:
    """A rank that hangs just after it has loaded is not waited for as one that loads."""
    loaded, told = threading.Event(), threading.Event()

    def body(plane: ControlPlane) -> float:
        watchdog = Watchdog(plane, replace(options(tmp_path, limit=60.0), interval=3600.0))
        signs = watchdog._outlook.signs
        if plane.rank == 1:
            with watchdog.phase("load", 600.0):
                watchdog.start()
                loaded.wait(300)
            watchdog.announce_limit(60.0)
            assert watchdog._told_limit == 60.0
            told.wait(300)
        else:
            watchdog.start()
            heard_by(lambda: 1 in signs and signs[1].heartbeat.limit == 600.0)
            loaded.set()
            heard_by(lambda: signs[1].heartbeat.limit == 60.0)
            told.set()
        take_turns(plane, [])
        watchdog.stop()
        return signs[1].heartbeat.limit

    def heard_by(condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 300
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)

    with short_folder() as folder:
        assert run_ranks(2, folder / "control", body) == {0: 60.0, 1: 60.0}


def test_a_signal_from_outside_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    verdicts, codes = ends(tmp_path, 1, 2, lambda rank: SystemExit(143), explanation_wait=0.3)
    (verdict,) = verdicts
    assert isinstance(verdict, Verdict)
    assert verdict.cause is Cause.TERMINATED
    assert codes == {0: TERMINATED_CODE, 1: TERMINATED_CODE}


def test_a_folder_that_cannot_be_written_costs_the_bundle_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bundles").write_text("a file")
    left: list[int] = []
    watchdog = Watchdog(SingleRankControl(), options(tmp_path), leave=left.append)
    watchdog.start()
    watchdog.fail("for a test")
    watchdog.stop()
    assert left == [EXIT_CODE]
    said = capfd.readouterr().err
    assert "rank 0 will leave no bundle" in said
    assert "rank 0 ends the job: rank 0 ends at step 0: for a test" in said
    assert "no summary" in said


@pytest.mark.parametrize(
    ("nodes", "local", "first"), [(1, 3, 0), (1, 3, 2), (2, 2, 0), (2, 2, 1), (2, 2, 2), (2, 2, 3)]
)
def test_after_an_agreed_end_any_rank_may_leave_before_the_others(
    tmp_path: Path, nodes: int, local: int, first: int
) -> None:
    """Also the one that speaks for its node, before rank 0 has said goodbye."""
    gone = threading.Event()
    left: list[int] = []

    def body(plane: ControlPlane) -> Verdict | None:
        watchdog = Watchdog(plane, options(tmp_path), leave=left.append)
        watchdog.start()
        take_turns(plane, [])
        if plane.rank != first:
            gone.wait(300)
            time.sleep(0.1)  # several rounds
        watchdog.stop()
        gone.set()
        return watchdog.verdict

    with short_folder() as folder:
        ended = run_nodes(nodes, local, folder, body)
    assert left == []
    assert ended == dict.fromkeys(range(nodes * local))


def test_a_watchdog_explains_for_an_engine_that_hangs(tmp_path: Path) -> None:
    """Rank 1 sits in a collective with the leader and cannot speak on the step channel: its watchdog does."""
    collective = threading.Event()

    def body(plane: ControlPlane) -> str:
        digest = RollingDigest()
        plane.explain_with(digest.recent)
        watchdog = Watchdog(plane, options(tmp_path), leave=lambda code: None)
        watchdog.start()
        said = ""
        try:
            digest.fold(0, "plan", (plane.rank,))
            if plane.rank == 0:
                time.sleep(0.05)
            plane.exchange(0, digest.value)
            if plane.rank == 1:
                collective.wait(300)
            plane.exchange(1, digest.value)
            plane.exchange(2, digest.value)
        except Disagreement as error:
            said = str(error)
            collective.set()
        watchdog.stop()
        return said

    with short_folder() as folder:
        ended = run_ranks(2, folder / "control", body)
    assert (
        "decision 0: rank 0 decided plan(0) at step 0, rank 1 decided plan(1) at step 0 (integer 0: 0 against 1)"
        in str(ended[0])
    )
    assert ended[0] == ended[1]


def test_a_bundle_is_bounded_and_survives_its_broken_parts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> list[tuple[int, int, str, bytes, int]]:
        raise RuntimeError("ring is gone")

    def flight_recorder(folder: Path) -> None:
        (folder / "nccl.bin").write_bytes(b"x")

    evidence = Evidence(lambda: [{"step": n, "odd": {1, 2}} for n in range(500)], broken)
    evidence.hooks["nccl"] = flight_recorder
    evidence.hooks["bad"] = lambda folder: (folder / "no" / "where").touch()
    folder = write_bundle(tmp_path, 4, Verdict(Cause.LOST, 1, 2, "why"), evidence)
    assert folder == tmp_path / "rank-00004"
    assert len((folder / "steps.jsonl").read_text().splitlines()) == STEP_RECORDS
    assert json.loads((folder / "verdict.json").read_text())["text"] == "why"
    assert (folder / "nccl.bin").exists()
    said = capfd.readouterr().err
    assert "bundle part decisions.jsonl failed: RuntimeError('ring is gone')" in said
    assert "bundle part bad failed" in said
