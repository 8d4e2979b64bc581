"""Exchanges between processes, gathers and scatter-sums in turns, interpreted: ``TRITON_INTERPRET=1 python -m ...``.

Knows: in which order they come, and that ranks are late. Does not know: what each has to give (exchange_cases.py), GPUs
(tests/gpu/test_exchange_gpu.py), how processes share memory (interpreted_all_reduce.py, which also says why float32
alone is summed here; what is gathered travels as whole words of any dtype).
"""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor

from parallel.comm.all_reduce_triton import all_reduce_rows
from parallel.comm.ep_exchange_triton import dispatch_rows
from parallel.comm.peer_buffers import SENTINEL, PeerBuffers, peer_buffer_bytes
from tests.parallel.comm.exchange_cases import layer, same_bits
from tests.parallel.comm.interpreted_all_reduce import RANKS, in_processes

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
                found = all_reduce_rows(terms.terms[number], own, scatter=True, pdl=False)[:1]
                assert same_bits(found, (terms.summed(number),)), f"the sum, rank {number}, turn {turn}"
            else:
                brought = dispatch_rows(*tokens.brought(number), own, pdl=False)
                assert same_bits(brought, tokens.gathered()), f"the gather, rank {number}, turn {turn}"
    assert torch.equal(own.use_counts, made)
    assert bool((memory[number] == SENTINEL).all()), "something was left where the next exchange waits"


if __name__ == "__main__":
    in_processes(rank, peer_buffer_bytes(RANKS, ROWS, ROW_BYTES))
