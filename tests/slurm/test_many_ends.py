"""More ways for a job on Slurm to run and to end than CI has time for: `make test-all PART=slurm`."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.jobs import CAUGHT, FEW, GenerateJob, answers, write_prompts

pytestmark = [pytest.mark.slurm, pytest.mark.long]

LAUNCHERS = ("torchrun", "srun")
HERE = {"LOCKSTRIDE_INTERFACE": "lo", "LOCKSTRIDE_RANKS_PER_NODE": "2"}  # two ranks, on nodes that are this machine
IN_PYTHON = ["#!/bin/bash", "#SBATCH --exclusive --ntasks-per-node=1", 'export PYTHONPATH="$LOCKSTRIDE_ROOT"']


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path, expected: dict[str, list[int]]) -> Iterator[GenerateJob]:
    cluster.wait_until_idle()
    job = GenerateJob(cluster, tmp_path, expected, {**HERE, "LOCKSTRIDE_LAUNCHER": "srun"})
    yield job
    job.end()


@pytest.fixture
def far_job(network_cluster: Cluster, tmp_path: Path, expected: dict[str, list[int]]) -> Iterator[GenerateJob]:
    """On hosts of their own, one rank each."""
    network_cluster.wait_until_idle()
    job = GenerateJob(network_cluster, tmp_path, expected, {"LOCKSTRIDE_LAUNCHER": "srun"})
    yield job
    job.end()


def check_completed(job: GenerateJob, restarts: int = 0) -> None:
    ended = job.cluster.wait_for_job(job.id)
    assert (ended.state, ended.exit_code, ended.restarts) == ("COMPLETED", "0:0", restarts), job.said
    job.check_answers()


def shorten(job: GenerateJob) -> GenerateJob:
    job.expected = {f"r{i}": job.expected[f"r{i}"] for i in range(FEW)}
    return job


# ---- starting ----


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("nodes", "ranks"), [("1", "1"), ("2", "2"), ("4", "1")])
def test_other_worlds(job: GenerateJob, launcher: str, nodes: str, ranks: str) -> None:
    shorten(job).variables |= {"LOCKSTRIDE_LAUNCHER": launcher, "LOCKSTRIDE_RANKS_PER_NODE": ranks}
    job.submit(f"--nodes={nodes}")
    check_completed(job)
    assert f"{nodes} node(s) x {ranks} rank(s) by {launcher}" in job.said


@pytest.mark.parametrize(
    "command",
    [
        "srun --ntasks-per-node=1 --kill-on-bad-exit=1 $LOCKSTRIDE_PYTHON -m launch",
        "export MASTER_ADDR=n1 MASTER_PORT=23456; srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c "
        "'exec $LOCKSTRIDE_PYTHON -m torch.distributed.run --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID "
        '--nproc-per-node 1 --master-addr $MASTER_ADDR --master-port $MASTER_PORT -m launch "$@"\' bash',
    ],
    ids=["srun alone", "static torchrun"],
)
def test_batch_scripts_of_one_s_own(far_job: GenerateJob, command: str) -> None:
    """As docs/slurm.md has them."""
    script = far_job.folder / "own.sbatch"
    script.write_text("\n".join([*IN_PYTHON, f'{command} generate "$@"']) + "\n")
    shorten(far_job).submit("--nodes=2", script=script)
    check_completed(far_job)


def test_a_site_of_its_own(job: GenerateJob) -> None:
    """Modules, a container command and more options of srun."""
    site = job.folder / "my.env"
    shipped = (Path(__file__).parents[2] / "slurm/site.env").read_text()
    site.write_text(shipped + 'module() { export LOADED="$*"; }\n')
    job.variables |= {
        "LOCKSTRIDE_SITE": str(site),
        "LOCKSTRIDE_MODULES": "cuda/13.0 gcc/13",
        "LOCKSTRIDE_CONTAINER": "env INSIDE=1",
        "LOCKSTRIDE_SRUN_OPTIONS": "--job-name=inside --mpi=none",
        "LOCKSTRIDE_LOGS": str(job.folder / "slurm-logs"),
    }
    job.submit()
    job.wait_for_rows(1)
    first, *_ = job.ranks(SLURM_PROCID="0", INSIDE="1")
    assert b"LOADED=load cuda/13.0 gcc/13" in Path(f"/proc/{first}/environ").read_bytes().split(b"\0")
    check_completed(job)


def test_a_part_of_a_node(job: GenerateJob) -> None:
    shorten(job).submit("--oversubscribe", "--cpus-per-task=2", "--mem=1000M")
    check_completed(job)


def test_parts_of_the_input_as_an_array_of_which_one_fails(job: GenerateJob) -> None:
    shorten(job).variables["LOCKSTRIDE_RANKS_PER_NODE"] = "1"
    for part in (0, 1, 3):
        write_prompts(job.folder / f"part-{part}.jsonl", FEW)
    job.submit("--array=0-3%2", options=("--input", "part-%a.jsonl", "--output", "answers-%a.jsonl"))
    states = {part: job.cluster.wait_for_job(f"{job.id}_{part}") for part in range(4)}
    assert {part: (ended.state, ended.exit_code) for part, ended in states.items()} == {
        **dict.fromkeys((0, 1, 3), ("COMPLETED", "0:0")),
        2: ("FAILED", "2:0"),
    }, job.said
    assert "--input part-2.jsonl: there is no such file" in job.said
    for part in (0, 1, 3):
        assert answers(job.folder / f"answers-{part}.jsonl") == job.expected


def test_lines_that_cannot_be_served_are_the_job_s_exit_code(job: GenerateJob) -> None:
    write_prompts(job.folder / "in.jsonl", FEW)
    with (job.folder / "in.jsonl").open("a") as lines:
        lines.write('{"id": "bad", "prompt": 7}\n')
    job.submit()
    ended = job.cluster.wait_for_job(job.id)
    assert (ended.state, ended.exit_code) == ("FAILED", "1:0"), job.said
    assert job.rows() == FEW + 1


# ---- ending, and going on ----


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_time_limit_itself(job: GenerateJob, launcher: str) -> None:
    """Slurm may warn a minute sooner than it was asked to: two minutes are left for a start and a few rows."""
    job.variables["LOCKSTRIDE_LAUNCHER"] = launcher
    write_prompts(job.folder / "in.jsonl", 20_000)
    job.submit("--time=4", "--signal=B:USR1@60")
    wait_until(lambda: job.cluster.job(job.id).restarts >= 1, "the requeue", 400, every=1)
    assert "the time limit is near" in job.said
    rows = job.rows()
    assert 0 < rows < 20_000, job.said
    wait_until(lambda: job.rows() > rows, "more rows after the restart", 300, every=0.5)
    job.cluster.run("scancel", job.id)
    assert job.cluster.wait_for_job(job.id).state == "CANCELLED"
    job.wait_for_the_end_of_processes()
    assert len(answers(job.output)) == job.rows()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_usr1_while_ranks_are_still_starting(job: GenerateJob, launcher: str) -> None:
    job.variables["LOCKSTRIDE_LAUNCHER"] = launcher
    job.submit()
    wait_until(lambda: bool(job.ranks()), "a first rank", 120)
    job.cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.cluster.wait_for_requeue(job.id)
    check_completed(job, restarts=1)


def test_two_time_limits(job: GenerateJob) -> None:
    job.submit()
    for restarts, rows in ((1, CAUGHT), (2, 9)):
        job.wait_for_rows(rows)
        job.cluster.run("scancel", "--batch", "--signal=USR1", job.id)
        job.cluster.wait_for_requeue(job.id, restarts)
    check_completed(job, restarts=2)


def test_no_more_restarts_than_allowed(job: GenerateJob) -> None:
    job.variables["LOCKSTRIDE_MAX_RESTARTS"] = "0"
    job.submit()
    job.wait_for_rows()
    job.cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    assert job.cluster.wait_for_job(job.id).state == "FAILED"
    assert "restarted 0 times (LOCKSTRIDE_MAX_RESTARTS): submit the same command again" in job.said


def test_an_administrator_requeues_the_job(job: GenerateJob) -> None:
    job.submit()
    job.wait_for_rows()
    job.cluster.run("scontrol", "requeue", job.id)
    check_completed(job, restarts=1)


@pytest.mark.parametrize("seed", range(8))
def test_a_job_cancelled_at_any_moment(job: GenerateJob, seed: int) -> None:
    """By SIGTERM with its KillWait, or by SIGKILL; twice; then it is left to end."""
    rng = random.Random(seed)
    job.variables["LOCKSTRIDE_LAUNCHER"] = rng.choice(LAUNCHERS)
    for _ in range(2):
        job.submit()
        wait_until(lambda: job.cluster.job(job.id).state == "RUNNING", "a start", 120)
        time.sleep(rng.uniform(0, 8))
        hard = ["--signal=KILL", "--full"] if rng.random() < 0.5 else []
        subprocess.run(  # it may have ended already
            [*job.cluster.wiring.on("head"), "scancel", *hard, job.id], env=job.cluster.environment, check=False
        )
        job.cluster.wait_for_job(job.id)
        job.cluster.wait_until_idle()
        job.wait_for_the_end_of_processes()
    job.submit()
    check_completed(job)


# ---- faults ----


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_rank_is_killed(job: GenerateJob, launcher: str, victim: str) -> None:
    job.variables["LOCKSTRIDE_LAUNCHER"] = launcher
    job.submit()
    job.wait_for_rows()
    name = "RANK" if launcher == "torchrun" else "SLURM_PROCID"
    (rank,) = job.ranks(**{name: victim})
    os.kill(rank, signal.SIGKILL)
    assert job.cluster.wait_for_job(job.id).state == "FAILED", job.said
    # Another rank names it, or the launcher does, which tells the others to end at the same moment.
    assert re.search(rf"rank\s*:? {victim}\b|task {victim}: Killed", job.said), job.said
    job.wait_for_the_end_of_processes()
    job.submit()
    check_completed(job)


def test_a_rank_that_stands_still_is_named(job: GenerateJob) -> None:
    job.variables["LOCKSTRIDE_RANKS_PER_NODE"] = "1"
    job.submit("--nodes=2")
    job.wait_for_rows()
    (rank,) = job.ranks(SLURM_PROCID="1")
    os.kill(rank, signal.SIGSTOP)
    assert job.cluster.wait_for_job(job.id).state == "FAILED", job.said
    assert re.search(r"ends the job.*rank 1\b", job.said), job.said
    job.wait_for_the_end_of_processes()


def test_torchrun_s_agent_is_killed(job: GenerateJob) -> None:
    """Its ranks do not outlive it."""
    job.variables |= {"LOCKSTRIDE_LAUNCHER": "torchrun", "LOCKSTRIDE_RANKS_PER_NODE": "1"}
    job.submit("--nodes=2")
    job.wait_for_rows()
    (agent,) = job.processes("torch.distributed.run", SLURM_PROCID="1")
    os.kill(agent, signal.SIGKILL)
    assert job.cluster.wait_for_job(job.id).state == "FAILED", job.said
    job.wait_for_the_end_of_processes()


def test_a_node_s_daemon_is_killed(job: GenerateJob) -> None:
    job.submit("--nodelist=n2")
    job.wait_for_rows()
    job.cluster.kill("slurmd.n2")
    job.cluster.start_node("n2")
    ended = job.cluster.wait_for_job(job.id)
    assert ended.state == "COMPLETED", job.said
    job.check_answers()


def test_the_controller_is_killed_and_comes_back(job: GenerateJob) -> None:
    job.submit()
    wait_until(lambda: job.cluster.job(job.id).state == "RUNNING", "a start", 120)
    job.cluster.wait_until_saved(job.id)
    job.wait_for_rows()
    job.cluster.kill("slurmctld")
    job.cluster.start_controller()
    check_completed(job)


def test_the_link_between_two_nodes_is_cut(far_job: GenerateJob) -> None:
    """All ranks end, on both sides; submitted again once the link is back, the job goes on.

    Slurm has requeued it by then, perhaps. That start is not waited for: Slurm repeats what it could not tell the first
    start's ranks on n2 once a minute, and would end the second start's, which have the same job and step number.
    """
    far_job.submit("--nodes=2")
    far_job.wait_for_rows()
    far_job.cluster.cut("n2")
    try:
        far_job.wait_for_the_end_of_processes(240)
        far_job.end()
    finally:
        far_job.cluster.mend("n2")
    far_job.cluster.kill("slurmd.n2")  # it may hang over what it could not say meanwhile, as the node's boot would end
    far_job.cluster.start_node("n2")
    far_job.cluster.wait_until_idle()
    far_job.submit("--nodes=2")
    ended = far_job.cluster.wait_for_job(far_job.id)
    assert ended.state == "COMPLETED", far_job.said
    far_job.check_answers()
