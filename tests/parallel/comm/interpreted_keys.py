"""Gathers of keys between processes, behind each other and between sums, interpreted: ``TRITON_INTERPRET=1 python -m
...``.

Knows: in which order they come, and that ranks are late. Does not know: GPUs (tests/gpu/test_symmetric.py), how
processes share memory (interpreted_all_reduce.py).
"""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor

from parallel.comm.all_reduce_triton import all_reduce_rows
from parallel.comm.key_gather_triton import gather_keys
from parallel.comm.peer_buffers import SENTINEL, PeerBuffers, peer_buffer_bytes
from runtime.execute.sampling.packed_argmax import NO_CANDIDATE, pack
from tests.parallel.comm.interpreted_all_reduce import RANKS, in_processes

ROWS, ROW_BYTES, TURNS = 7, 512, 24
WIDTHS = (1, 3, 64, 17)  # keys a row
WAYS = ("all", "largest", "sum")


def given(turn: int) -> list[Tensor]:
    """Every rank's keys of a turn, known to all: scores of every kind, and ranks without a candidate."""
    generator = torch.Generator().manual_seed(turn)
    rows, width = 1 + turn * 3 % ROWS, WIDTHS[turn % len(WIDTHS)]
    scores = torch.randn(RANKS, rows, width, generator=generator)
    scores[turn % RANKS, :, 0] = (float("nan"), float("-inf"), -0.0)[turn % 3]
    keys = pack(scores, torch.randint(0, 2**31, scores.shape, generator=generator))
    if turn % 4 == 3:
        keys[(turn + 1) % RANKS] = NO_CANDIDATE
    return list(keys)


def rank(number: int, memory: list[Tensor]) -> None:
    torch.set_num_threads(1)
    made = torch.zeros(ROWS, dtype=torch.int32)
    own = PeerBuffers(tuple(one.data_ptr() for one in memory), torch.zeros_like(made), number, ROWS, ROW_BYTES)
    late = random.Random(number)
    for turn in range(TURNS):
        keys = given(turn)
        for way in (WAYS[turn % 3], WAYS[turn % 2], WAYS[2 - turn % 3]):
            time.sleep(late.choice((0, 0, 0.02)))
            made[: len(keys[0])] += 1
            where = f"{way}, rank {number}, turn {turn}"
            if way == "sum":
                part = torch.full((len(keys[0]), 96), float(turn + number))  # whole numbers: exact in any order
                total = torch.full_like(part, RANKS * turn + sum(range(RANKS)))
                assert torch.equal(all_reduce_rows(part, own, pdl=False)[0], total), where
                continue
            sent = [one.amax(1, keepdim=True) for one in keys] if way == "largest" else keys
            found = gather_keys(keys[number], own, largest=way == "largest", pdl=False)
            assert torch.equal(found, torch.cat(sent, 1)), where
    assert torch.equal(own.use_counts, made)
    assert bool((memory[number] == SENTINEL).all()), "something was left where the next one waits"


if __name__ == "__main__":
    in_processes(rank, peer_buffer_bytes(RANKS, ROWS, ROW_BYTES))
