"""Exchanges between processes, gathers and scatter-sums in turns, interpreted: ``TRITON_INTERPRET=1 python -m ...``.

Knows: in which order they come, and that ranks are late. Does not know: what each has to give (exchange_cases.py), GPUs
(tests/gpu/test_exchange_gpu.py), how processes share memory (interpreted_sums.py, which also says why float32 alone is
summed here; what is gathered travels as whole words of any dtype).
"""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor

from parallel.comm import peer_buffers as places
from parallel.comm.all_reduce_triton import summed
from parallel.comm.ep_exchange_triton import gathered
from parallel.comm.peer_buffers import EMPTY, PeerBuffers
from tests.parallel.comm.exchange_cases import layer, same_bits
from tests.parallel.comm.interpreted_sums import RANKS, in_processes

ROWS, ROW_BYTES, TURNS = 7, 512, 18
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ORDERS = (("gather", "sum"), ("sum", "gather", "gather"), ("sum", "sum", "gather"))


def rank(number: int, memory: list[Tensor]) -> None:
    torch.set_num_threads(1)
    made = torch.zeros(ROWS, dtype=torch.int32)
    own = PeerBuffers(tuple(one.data_ptr() for one in memory), torch.zeros_like(made), number, ROWS, ROW_BYTES)
    late = random.Random(number)
    for turn in range(TURNS):
        rows, width, choices = 1 + turn * 3 % ROWS, (96, 40)[turn // 2 % 2], (8, 2, 3)[turn // 3 % 3]
        tokens = layer(turn, RANKS, rows, width, choices, DTYPES[turn % 3])
        terms = layer(turn, RANKS, rows, width, choices, torch.float32)
        for way in ORDERS[turn % len(ORDERS)]:
            time.sleep(late.choice((0, 0, 0.02)))
            made[:rows] += 1
            if way == "sum":
                found = summed(terms.terms[number], own, scatter=True, pdl=False)[:1]
                assert same_bits(found, (terms.summed(number),)), f"the sum, rank {number}, turn {turn}"
            else:
                brought = gathered(*tokens.brought(number), own, pdl=False)
                assert same_bits(brought, tokens.gathered()), f"the gather, rank {number}, turn {turn}"
    assert torch.equal(own.exchanges, made)
    assert bool((memory[number] == EMPTY).all()), "something was left where the next exchange waits"


if __name__ == "__main__":
    in_processes(rank, places.memory_bytes(RANKS, ROWS, ROW_BYTES))
