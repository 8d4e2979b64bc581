"""`generate` as real processes: ranks that meet and part, signals, and a kill without warning."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]

from launch.ranks import process_group
from launch.ranks.process_group import address_between_nodes, joined, local_device, rank_groups
from launch.ranks.rendezvous import MeetingError, Rendezvous, RendezvousError
from launch.ranks.start_engine import LOAD_SECONDS
from parallel.topology import ParallelDegrees, Topology
from runtime.build import CAPTURE_SECONDS
from tests.launch.generate.batches import answers_of, generate, good_lines, model_folder, write_input
from tests.torchrun import Running, started_alone, torchrun

ROOT = Path(__file__).parents[3]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def program(folder: Path, *options: str) -> list[str]:
    arguments = ["--model", str(model_folder(folder)), "--input", str(folder / "in.jsonl"), "--device", "cpu"]
    return ["tests.launch.generate.fake_main", "generate", *arguments, "--output", str(folder / "out.jsonl"), *options]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def wait_for_rows(path: Path, running: Running, rows: int) -> None:
    """Until ``rows`` rows are in the file."""
    while not path.exists() or path.read_bytes().count(b"\n") < rows:
        assert not running.ended, "it ended before it was caught"
        time.sleep(0.005)


def expected_answers(folder: Path) -> dict[str, object]:
    (folder / "serial").mkdir()
    write_input(folder / "serial", (folder / "in.jsonl").read_bytes().splitlines())
    return answers_of(generate(folder / "serial")[1])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    write_input(tmp_path, good_lines(12))
    ended = torchrun(2, *program(tmp_path))
    assert ended.returncode == 0, ended.errors
    assert "Traceback" not in ended.errors
    assert "destroy_process_group" not in ended.errors
    assert ended.output.count("12 finished") == 1, "rank 0 alone speaks"
    assert answers_of(tmp_path / "out.jsonl") == expected_answers(tmp_path)


@pytest.mark.long  # with srun itself: tests/slurm
@pytest.mark.multiprocess
def test_two_ranks_as_srun_starts_them(tmp_path: Path) -> None:
    write_input(tmp_path, good_lines(12))
    step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_NODEID": "0", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", *program(tmp_path)],
            cwd=ROOT,
            env=environment(**step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in (0, 1)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert not any("Traceback" in text for text in errors), errors
    assert answers_of(tmp_path / "out.jsonl") == expected_answers(tmp_path)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_ended_in_the_middle_goes_on_where_it_was(tmp_path: Path, number: signal.Signals) -> None:
    write_input(tmp_path, good_lines(60))
    output = tmp_path / "out.jsonl"
    with started_alone(*program(tmp_path, "--max-num-seqs", "4"), FAKE_STEP_SECONDS="0.03") as running:
        wait_for_rows(output, running, 3)
        os.kill(running.pid, number)
        code = running.wait().returncode
    assert code == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    early = output.read_bytes()
    assert 3 <= early.count(b"\n") < 60
    assert generate(tmp_path)[0] == 0
    assert output.read_bytes().startswith(early[: early.rfind(b"\n") + 1])
    assert answers_of(output) == expected_answers(tmp_path)


def test_a_rank_that_does_not_come_is_named() -> None:
    alone = Rendezvous(Topology(world=2, local_world=2), "slurm", master_port=free_port(), job="a test")
    with pytest.raises(MeetingError, match=r"rank\(s\) \[1\] of 2 did not come"), joined(alone, "cpu", timeout_s=0.3):
        pytest.fail("there is no world to join")


def test_a_leader_that_does_not_come_is_named() -> None:
    topology = Topology(rank=1, world=2, local_rank=1, local_world=2)
    alone = Rendezvous(topology, "slurm", master_port=free_port(), job="a test")
    with pytest.raises(MeetingError, match="rank 1 cannot meet the others at 127"), joined(alone, "cpu", timeout_s=0.3):
        pytest.fail("there is no world to join")


@pytest.mark.parametrize("address", ["127.0.1.1", "no-such-node.invalid"])
def test_ranks_of_one_node_meet_whatever_it_is_called(address: str) -> None:
    port = free_port()

    def meet(rank: int) -> Store:
        topology = Topology(rank=rank, world=2, local_rank=rank, local_world=2)
        return process_group._meet(Rendezvous(topology, "slurm", address, port), timedelta(seconds=120))

    with ThreadPoolExecutor() as threads:
        first, second = threads.map(meet, range(2))
    first.set("said", "hello")
    assert second.get("said") == b"hello"


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        leader = Rendezvous(Topology(world=2, local_world=2), "slurm", master_port=port)
        with pytest.raises(MeetingError, match=f"port {port} .*MASTER_PORT"), joined(leader, "cpu", timeout_s=0.3):
            pytest.fail("there is no world to join")


def test_devices_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    second = Topology(rank=1, world=2, local_rank=1, local_world=2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert str(local_device(Rendezvous(second, "torchrun"), "cuda")) == "cuda:1"
    assert str(local_device(Rendezvous(second, "torchrun"), "cpu")) == "cpu"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert str(local_device(Rendezvous(second, "slurm"), "cuda")) == "cuda:0", "Slurm shows a task its own GPU"
    with pytest.raises(RendezvousError, match=r"local rank 1 needs GPU 1, but 1 are visible .*--device cpu"):
        local_device(Rendezvous(second, "torchrun"), "cuda")


def test_a_collective_waits_longer_than_the_watchdog_for_a_rank_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree on the size of their caches when the slowest has loaded and compiled; who waits must not give up."""
    timeouts: list[timedelta] = []
    for name in ("_meet", "_all_come_to", "PrefixStore"):
        monkeypatch.setattr(process_group, name, lambda *arguments: None)
    monkeypatch.setattr(dist, "init_process_group", lambda **options: timeouts.append(options["timeout"]))
    monkeypatch.setattr(dist, "new_group", lambda members, **options: timeouts.append(options["timeout"]))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(distributed_c10d._world, "default_pg", object())
    with joined(Rendezvous(Topology(world=4, local_world=4), "slurm"), "cpu"):
        rank_groups(ParallelDegrees(4, 2), 0, "cpu")
    assert len(timeouts) == 5
    assert min(timeouts).total_seconds() > max(LOAD_SECONDS, CAPTURE_SECONDS)


def test_a_node_without_an_address_is_refused_at_once() -> None:
    topology = Topology(rank=1, world=2, node_rank=1, nodes=2)
    elsewhere = Rendezvous(topology, "slurm", "no-such-node.invalid", free_port())
    with pytest.raises(MeetingError, match=r"no-such-node\.invalid, which has no address"), joined(elsewhere, "cpu"):
        pytest.fail("there is no world to join")


def test_rank_0_on_another_node_than_the_meeting_address_is_refused_at_once() -> None:
    leader = Rendezvous(Topology(world=2, nodes=2), "slurm", "192.0.2.77", free_port())  # an address of nobody
    refused = pytest.raises(MeetingError, match=r"does not have the address 192.0.2.77: set MASTER_ADDR")
    with refused, joined(leader, "cpu"):
        pytest.fail("there is no world to join")


def test_a_name_that_is_loopback_to_its_own_node_is_refused() -> None:
    here = Rendezvous(Topology(world=2, nodes=2), "slurm", "localhost")
    with pytest.raises(MeetingError, match=r"localhost, is 127.0.0.1 to itself, .*LOCKSTRIDE_INTERFACE"):
        address_between_nodes(here)
    assert address_between_nodes(replace(here, master_address="127.0.0.1")) == "127.0.0.1", "as it was asked for"


def test_ranks_of_differently_large_worlds_are_refused_with_both_sizes() -> None:
    port = free_port()
    ended: list[MeetingError] = []

    def start(topology: Topology) -> None:
        try:
            with joined(Rendezvous(topology, "slurm", master_port=port, job="a test"), "cpu", timeout_s=5):
                pytest.fail("there is no world to join")
        except MeetingError as error:
            ended.append(error)

    topologies = [Topology(world=2, local_world=2), Topology(rank=1, world=4, local_rank=1, local_world=4)]
    ranks = [threading.Thread(target=start, args=(topology,)) for topology in topologies]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
    texts = " ".join(map(str, ended))
    assert "started for 4 ranks, but another rank for 2" in texts or "for 2 ranks, but another rank for 4" in texts
