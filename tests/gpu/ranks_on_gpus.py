"""Ranks of a test as processes, each with a GPU of its own or several on each GPU; how long such a test may be, and
what it is called and when skipped for how many ranks.

Knows: how a group of them begins and ends. Does not know: what they check (test_symmetric.py, test_exchange_gpu.py,
test_pushed_all_reduce_gpu.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.comm.symmetric_all_reduce import SymmetricCollectives, fastest_collectives
from tests.gpu.untyped import sleep

RANKS = 2
_WORDS = {2: "two-ranks", 4: "four-ranks", 8: "eight-ranks"}


def called(ranks: int) -> str:
    """How many ranks a test has, as its id says it: pytest -k four-ranks takes those of four."""
    return _WORDS.get(ranks, f"{ranks}-ranks")


def on_gpus(ranks: int, *more: Any) -> Any:
    """Parameters of a test whose ranks have a GPU each: how many ranks, and ``more``. Where two GPUs are too few for
    it, it is skipped."""
    lacking = ranks > max(RANKS, torch.cuda.device_count())
    marks = [pytest.mark.skipif(lacking, reason=f"{ranks} ranks need {ranks} GPUs")]
    return pytest.param(ranks, *more, id="-".join([called(ranks), *map(str, more)]), marks=marks)


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is checked: ``rows`` of a sum, turns of two checks, calls in a graph's chain, replays of that.

    ``late``: cycles of the device; a rank is late by up to four times as many.
    """

    rows: tuple[int, ...]
    ways: int
    uneven: int
    chain: int
    replays: int
    late: int


OWN_GPUS = Extent(rows=(1, 3, 8, 64, 256, 5), ways=240, uneven=200, chain=64, replays=20, late=24_000)
# Processes on one GPU (without MPS) take turns of about 2 ms, and a rank that waits spins to the end of its own: a sum
# takes a turn of every rank there, or two. So there are few sums, and who is late is late by more than a turn.
SHARED_GPUS = Extent(rows=(1, 5, 64, 256), ways=40, uneven=40, chain=16, replays=8, late=5_000_000)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def joined(rank: int, port: int, ranks: int = RANKS) -> SymmetricCollectives:
    """This process as one of ``ranks``, with a GPU of its own."""
    device = torch.device("cuda", rank)
    made = fastest_collectives(group_of(rank, port, ranks, device, nccl=True), device)
    assert isinstance(made, SymmetricCollectives)
    return made


def group_of(rank: int, port: int, ranks: int, device: torch.device, *, nccl: bool) -> dist.ProcessGroup:
    """All ranks, this process as one of them. Without NCCL, which refuses two ranks on a GPU, they may share GPUs."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        device_id=device if nccl else None,
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def sharing(rank: int, port: int, ranks: int) -> tuple[dist.ProcessGroup, torch.device]:
    """All ranks, over as many GPUs as there are, and this process's GPU."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    return group_of(rank, port, ranks, device, nccl=False), device


def late_by_turns(rank: int, ranks: int, turns: int, cycles: int) -> Iterator[int]:
    """Turns in which one rank's GPU, and not the others', has something else to do first: up to 4 x ``cycles``."""
    for turn in range(turns):
        if turn % ranks == rank:
            sleep((1 + turn // ranks) % 5 * cycles)
        yield turn


def leave() -> None:
    """Nothing runs after this."""
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # destroying a group whose calls were captured may not return
