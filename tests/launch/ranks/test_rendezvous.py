"""Who started this process: torchrun's and Slurm's environments, and worlds that must be refused."""

from __future__ import annotations

import pytest

from launch.ranks.rendezvous import Rendezvous, RendezvousError, check_degrees, discover, first_host, hosts
from parallel.topology import Topology

Environment = dict[str, str]


def torchrun(rank: int, world: int, local_world: int, **more: str) -> Environment:
    node = rank // local_world
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local_world, "LOCAL_WORLD_SIZE": local_world}
    numbers |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": world // local_world, "TORCHELASTIC_RESTART_COUNT": 0}
    texts = {name: str(number) for name, number in numbers.items()}
    return texts | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "job7"} | more


def srun(rank: int, tasks: int, nodes: int, **more: str) -> Environment:
    per_node = tasks // nodes
    numbers = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % per_node, "SLURM_NODEID": rank // per_node}
    numbers |= {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_NUM_NODES": nodes, "SLURM_JOB_ID": 4711, "SLURM_STEP_ID": 0}
    texts = {name: str(number) for name, number in numbers.items()}
    return texts | {"SLURM_STEP_NODELIST": "gpu[07-08]"} | more


def test_a_plain_process_is_alone() -> None:
    assert discover({"PATH": "/bin"}).topology == Topology()
    assert discover({"PATH": "/bin"}).launcher == "plain"


def test_a_batch_script_is_no_task() -> None:
    """sbatch sets SLURM_PROCID too; only srun makes tasks."""
    assert discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}).launcher == "plain"


def test_torchrun_on_two_nodes() -> None:
    found = discover(torchrun(5, 8, 4))
    assert found.topology == Topology(rank=5, world=8, local_rank=1, local_world=4, node_rank=1, nodes=2)
    assert (found.launcher, found.master_address, found.master_port, found.epoch) == ("torchrun", "n1", 29500, 0)


def test_all_ranks_of_a_start_agree_on_the_job_and_other_starts_differ() -> None:
    jobs = {discover(torchrun(rank, 8, 4)).job_number for rank in range(8)}
    assert len(jobs) == 1
    assert discover(torchrun(0, 8, 4, MASTER_PORT="29501")).job_number not in jobs
    restarted = discover(torchrun(0, 8, 4, TORCHELASTIC_RESTART_COUNT="1"))
    assert (restarted.job_number in jobs, restarted.epoch) == (True, 1)
    assert {discover(srun(rank, 4, 2)).job for rank in range(4)} == {"4711-0"}


def test_one_process_by_torchrun_needs_no_meeting_point() -> None:
    environ = torchrun(0, 1, 1)
    del environ["MASTER_ADDR"]
    assert discover(environ).topology == Topology()


def test_variables_set_by_a_script_are_as_good_as_torchrun_s() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert discover(environ).topology == Topology(3, 4, 1, 2, 1, 2)


def test_srun_tasks_on_two_nodes_meet_at_the_first() -> None:
    found = discover(srun(3, 4, 2))
    assert found.topology == Topology(rank=3, world=4, local_rank=1, local_world=2, node_rank=1, nodes=2)
    assert (found.launcher, found.master_address) == ("slurm", "gpu07")
    assert found.master_port == discover(srun(0, 4, 2)).master_port
    assert 20_000 <= found.master_port < 30_000
    assert discover(srun(0, 4, 2, SLURM_STEP_ID="1")).master_port != found.master_port


def test_srun_tasks_on_one_node_stay_on_loopback() -> None:
    assert discover(srun(1, 2, 1)).master_address == "127.0.0.1"
    assert discover(srun(1, 2, 1, MASTER_ADDR="b", MASTER_PORT="5")).master_address == "b"


def test_torchrun_once_a_node_under_srun() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert discover(torchrun(5, 8, 4, **step)).topology.world == 8


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        # every node a world of its own: srun started two torchruns that did not meet
        (
            torchrun(0, 4, 4, SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2"),
            ["2 task(s)", "brought 1 together", "--nnodes 2"],
        ),
        # variables of a script that do not fit what srun started
        (
            {"RANK": "0", "WORLD_SIZE": "8", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            ["SLURM_STEP_NUM_TASKS is 2", "WORLD_SIZE is 8", "srun --ntasks 8"],
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            ["SLURM_STEP_NUM_TASKS is 2", "WORLD_SIZE is 1"],
        ),
        (srun(0, 3, 2), ["3 task(s) on 2 node(s)", "--ntasks-per-node 1"]),
        (srun(0, 4, 2, SLURM_STEP_NODELIST=""), ["SLURM_STEP_NODELIST", "MASTER_ADDR"]),
        (srun(0, 4, 2, SLURM_STEP_NODELIST="gpu[3-"), ["brackets", "MASTER_ADDR"]),
        ({"WORLD_SIZE": "2"}, ["RANK is not set"]),
        ({"RANK": "0"}, ["WORLD_SIZE is not set"]),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ["RANK is 'x'"]),
        (torchrun(0, 2, 2, MASTER_ADDR=""), ["MASTER_ADDR is not set"]),
        (torchrun(0, 2, 2, MASTER_PORT="0"), ["MASTER_PORT is 0, but must be 1 to 65535"]),
        (srun(0, 2, 1, MASTER_PORT="70000"), ["MASTER_PORT is 70000, but must be 1 to 65535"]),
        (torchrun(0, 3, 2), ["WORLD_SIZE is 3", "LOCAL_WORLD_SIZE 2"]),
        (torchrun(9, 8, 4, GROUP_RANK="1"), ["rank is 9", "0 to 7"]),
        (torchrun(1, 8, 4, GROUP_RANK="1"), ["rank is 1", "node 1"]),
    ],
)
def test_a_world_that_does_not_add_up_is_refused_with_both_numbers(environ: Environment, words: list[str]) -> None:
    with pytest.raises(RendezvousError) as refusal:
        discover(environ)
    for word in words:
        assert word in str(refusal.value)


def test_the_tensor_parallel_degree_is_the_world() -> None:
    two = Rendezvous(Topology(world=2, local_world=2), "torchrun")
    assert check_degrees(None, None, two) == check_degrees(2, 1, two) == 2
    with pytest.raises(RendezvousError, match=r"is 4, but 2 rank.*--nproc-per-node 4"):
        check_degrees(4, None, two)


def test_groups_times_tensor_parallel_ranks_is_the_world() -> None:
    eight = Rendezvous(Topology(world=8, local_world=8), "torchrun")
    assert [check_degrees(None, groups, eight) for groups in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert check_degrees(2, 4, eight) == 2
    with pytest.raises(RendezvousError, match=r"size is 3, which does not divide the 8 rank.*\[1, 2, 4, 8\].*node 3"):
        check_degrees(None, 3, eight)
    with pytest.raises(RendezvousError, match=r"2 x --data-parallel-size 2 is 4 ranks, but 8 .*size 4, or start 4"):
        check_degrees(2, 2, eight)
    with pytest.raises(RendezvousError, match=r"2 x --data-parallel-size 3 is 6 ranks, but 8 were started: start 6"):
        check_degrees(2, 3, eight)


@pytest.mark.parametrize(
    ("node_list", "wanted"),
    [
        ("n1", ["n1"]),
        ("a,b-2", ["a", "b-2"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[08-11,20]", ["gpu08", "gpu09", "gpu10", "gpu11", "gpu20"]),
        ("r[1-2]n[0-1],login", ["r1n0", "r1n1", "r2n0", "r2n1", "login"]),
        ("x[3]-ib.cluster", ["x3-ib.cluster"]),
    ],
)
def test_node_lists(node_list: str, wanted: list[str]) -> None:
    assert [*hosts(node_list)] == wanted
    assert first_host(node_list) == wanted[0]


@pytest.mark.parametrize(
    "text", ["", "a,", "a[", "a[1", "a]1[", "a[[1]]", "a[x]", "a[3-1]", "a[]", "a[1-2-3]", "[1]a]"]
)
def test_node_lists_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        [*hosts(text)]


def test_the_first_of_endless_hosts_costs_nothing() -> None:
    assert first_host("n[0-999999999]") == "n0"
