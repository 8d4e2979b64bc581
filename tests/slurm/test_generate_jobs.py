"""`slurm/generate.sbatch` on a real Slurm: ranks on one and two nodes, ends of all kinds, and going on after them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import CAUGHT, FEW, GenerateJob

pytestmark = pytest.mark.slurm

LAUNCHERS = ("torchrun", "srun")
LONG = (
    pytest.mark.long
)  # CI has time for one job of each kind: start, two nodes, array and requeue, signal, serve, resume


HERE = {"LOCKSTRIDE_INTERFACE": "lo", "LOCKSTRIDE_RANKS_PER_NODE": "2"}  # two ranks, on nodes that are this machine


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path, expected: dict[str, list[int]]) -> Iterator[GenerateJob]:
    cluster.wait_until_idle()
    job = GenerateJob(cluster, tmp_path, expected, {**HERE, "LOCKSTRIDE_LAUNCHER": "srun"})
    yield job
    job.end()


def first(expected: dict[str, list[int]], lines: int = FEW) -> dict[str, list[int]]:
    """Of a shorter input file."""
    return {f"r{i}": expected[f"r{i}"] for i in range(lines)}


def check_completed(job: GenerateJob, *sbatch: str) -> None:
    job.expected = first(job.expected)
    ended = job.cluster.wait_for_job(job.submit(*sbatch))
    assert (ended.state, ended.exit_code) == ("COMPLETED", "0:0"), job.said
    # torchrun's agents log one of their own where the node that keeps their store leaves first.
    assert not re.search(r"^(\[default\d+\]:)?Traceback", job.said, re.MULTILINE), job.said
    assert f"{len(job.expected)} finished" in (job.folder / "job.out").read_text(), "rank 0 is heard there"
    job.check_answers()


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=LONG), "srun"])
def test_one_node(job: GenerateJob, launcher: str) -> None:
    job.variables["LOCKSTRIDE_LAUNCHER"] = launcher
    check_completed(job)


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("srun", marks=LONG)])
def test_two_nodes(job: GenerateJob, launcher: str) -> None:
    job.variables |= {"LOCKSTRIDE_LAUNCHER": launcher, "LOCKSTRIDE_RANKS_PER_NODE": "1"}
    check_completed(job, "--nodes=2")
    assert "2 node(s) x 1 rank(s)" in job.said


@LONG
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_hosts_that_meet_by_name(
    network_cluster: Cluster, tmp_path: Path, expected: dict[str, list[int]], launcher: str
) -> None:
    """site.env as shipped, on nodes with names, addresses and interfaces of their own."""
    job = GenerateJob(network_cluster, tmp_path, expected, {"LOCKSTRIDE_LAUNCHER": launcher})
    check_completed(job, "--nodes=2")
    assert "2 node(s) x 1 rank(s)" in job.said


def test_usr1_ends_tasks_of_arrays_which_go_on_after_a_requeue(
    cluster: Cluster, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    """As Slurm sends it before the time limit, with either launcher: one runs while the other waits in the queue.

    --overwrite counts once.
    """
    cluster.wait_until_idle()
    jobs = []
    for launcher in LAUNCHERS:
        (tmp_path / launcher).mkdir()
        job = GenerateJob(cluster, tmp_path / launcher, expected, {**HERE, "LOCKSTRIDE_LAUNCHER": launcher})
        jobs.append(job)
        array = job.submit("--array=3", options=("--overwrite",))
        job.id = f"{array}_3"
        job.wait_for_rows()
        cluster.run("scancel", "--batch", "--signal=USR1", job.id)
        cluster.wait_for_requeue(job.id)
        assert CAUGHT <= job.rows() < len(expected), job.said
    for job in jobs:
        ended = cluster.wait_for_job(job.id)
        assert (ended.state, ended.exit_code, ended.restarts) == ("COMPLETED", "0:0", 1), job.said
        assert "--overwrite counts for the first start only" in job.said
        job.check_answers()


@LONG
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_cancelled_job_goes_on_when_it_is_submitted_again(job: GenerateJob, launcher: str) -> None:
    job.variables["LOCKSTRIDE_LAUNCHER"] = launcher
    job.submit()
    job.wait_for_rows()
    job.cluster.run("scancel", job.id)
    assert job.cluster.wait_for_job(job.id).state == "CANCELLED"
    job.cluster.wait_until_idle()
    before = job.rows()
    assert CAUGHT <= before < len(job.expected)
    assert "interrupted: run the same command again to go on" in job.said
    ended = job.cluster.wait_for_job(job.submit())
    assert (ended.state, ended.exit_code) == ("COMPLETED", "0:0"), job.said
    assert f"going on: {before} rows are there, 0 torn bytes cut off" in job.said
    job.check_answers()


def test_sigterm_to_the_ranks_ends_the_job_with_143(job: GenerateJob) -> None:
    job.submit()
    job.wait_for_rows()
    job.cluster.run("scancel", "--signal=TERM", job.id)
    ended = job.cluster.wait_for_job(job.id)
    assert (ended.state, ended.exit_code) == ("FAILED", "143:0"), job.said


@LONG
def test_the_controller_restarts_under_a_running_job(job: GenerateJob) -> None:
    job.submit()
    job.wait_for_rows()
    job.cluster.kill("slurmctld", signal.SIGTERM)  # SIGKILL would forget a job of the last seconds: Slurm saves late
    job.cluster.start_controller()
    ended = job.cluster.wait_for_job(job.id)
    assert (ended.state, ended.exit_code) == ("COMPLETED", "0:0"), job.said
    job.check_answers()


@LONG
def test_a_node_that_is_lost_gives_its_job_to_another(job: GenerateJob) -> None:
    job.submit("--nodelist=n2")
    job.wait_for_rows()
    job.cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    job.cluster.run("scontrol", "update", f"jobid={job.id}", "reqnodelist=")
    try:
        ended = job.cluster.wait_for_job(job.id)
    finally:
        job.cluster.run("scontrol", "update", "nodename=n2", "state=idle")
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), job.said
    job.check_answers()


@LONG
def test_a_rank_that_dies_ends_the_job_with_its_name(job: GenerateJob) -> None:
    job.variables["LOCKSTRIDE_RANKS_PER_NODE"] = "1"
    job.submit("--nodes=2")
    job.wait_for_rows()
    (rank,) = job.ranks(SLURM_PROCID="1")
    os.kill(rank, signal.SIGKILL)
    assert job.cluster.wait_for_job(job.id).state == "FAILED", job.said
    # Rank 0 names it, or srun does, which tells rank 0 to end at the same moment.
    assert re.search(r"rank 1\b|task 1: Killed", job.said), job.said
    job.wait_for_the_end_of_processes()


# ---- worlds of the wrong size: refused before anything is loaded, where they used to hang ----


@LONG
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            "srun --ntasks-per-node=1 $PYTHON -m torch.distributed.run --standalone --nproc-per-node 1 -m launch",
            "srun started 2 task(s), but torchrun brought 1 together (WORLD_SIZE 1)",
        ),
        (
            "RANK=0 WORLD_SIZE=1 srun --ntasks-per-node=1 $PYTHON -m launch",
            "SLURM_STEP_NUM_TASKS is 2, but WORLD_SIZE is 1",
        ),
        (
            "MASTER_ADDR=127.0.0.1 srun --ntasks=3 --ntasks-per-node=2 --distribution=block $PYTHON -m launch",
            "srun started 3 task(s) on 2 node(s), but every node must have the same number",
        ),
    ],
    ids=["every node a world of its own", "every rank a world of its own", "nodes of different size"],
)
def test_a_world_of_the_wrong_size_is_refused(job: GenerateJob, command: str, reason: str) -> None:
    script = job.folder / "wrong.sbatch"
    lines = ["#!/bin/bash", "#SBATCH --exclusive --ntasks-per-node=1"]
    lines += ['export PYTHONPATH="$LOCKSTRIDE_ROOT" PYTHON="$LOCKSTRIDE_PYTHON"']
    script.write_text("\n".join([*lines, f'{command} generate "$@" 2>&1']) + "\n")
    job.submit("--nodes=2", script=script)
    assert job.cluster.wait_for_job(job.id).state == "FAILED", job.said
    assert reason in job.said
    assert job.rows() == 0


@LONG
def test_a_tensor_parallel_size_other_than_the_ranks_is_refused(job: GenerateJob) -> None:
    job.submit(options=("--tensor-parallel-size", "4"))
    assert job.cluster.wait_for_job(job.id).state == "FAILED"
    assert "--tensor-parallel-size is 4, but 2 rank(s) were started" in job.said
