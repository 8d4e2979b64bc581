"""Exchanges between processes, gathers and scatter-sums in turns, interpreted: ``TRITON_INTERPRET=1 python -m ...``.

A second time with fewer programs than rows, and fewer rows of buffers than an exchange has: launches follow each other.

Knows: in which order they come, and that ranks are late. Does not know: what each has to give (exchange_cases.py), GPUs
(tests/gpu/test_exchange_gpu.py), how processes share memory (interpreted_all_reduce.py, which also says why float32
alone is summed here; what is gathered travels as whole words of any dtype).
"""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor

from parallel.comm import all_reduce_triton, ep_exchange_triton
from parallel.comm.all_reduce_triton import all_reduce_rows
from parallel.comm.ep_exchange_triton import dispatch_rows
from parallel.comm.peer_buffers import SENTINEL, PeerBuffers, peer_buffer_bytes
from tests.parallel.comm.exchange_cases import layer, same_bits
from tests.parallel.comm.interpreted_all_reduce import RANKS, in_processes

ROWS, ROW_BYTES, TURNS = 7, 512, 9
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ORDERS = (("gather", "sum"), ("sum", "gather", "gather"), ("sum", "sum", "gather"))


def rank(number: int, memory: list[Tensor], most: int = ROWS) -> None:
    """``most``: rows of the buffers."""
    torch.set_num_threads(1)
    made = torch.zeros(most, dtype=torch.int32)
    own = PeerBuffers(tuple(one.data_ptr() for one in memory), torch.zeros_like(made), number, most, ROW_BYTES)
    late = random.Random(number)
    for turn in range(TURNS):
        rows, width, choices = 1 + turn * 3 % ROWS, (96, 40)[turn // 2 % 2], (8, 2, 3)[turn // 3 % 3]
        tokens = layer(turn, RANKS, rows, width, choices, DTYPES[turn % 3])
        terms = layer(turn, RANKS, rows, width, choices, torch.float32)
        for way in ORDERS[turn % len(ORDERS)]:
            time.sleep(late.choice((0, 0, 0.02)))
            each = -(-rows // -(-rows // most))
            for first in range(0, rows, each):
                made[: min(each, rows - first)] += 1
            if way == "sum":
                found = all_reduce_rows(terms.terms[number], own, scatter=True, pdl=False)[:1]
                assert same_bits(found, (terms.summed(number),)), f"the sum, rank {number}, turn {turn}"
            else:
                brought = dispatch_rows(*tokens.brought(number), own, pdl=False)
                assert same_bits(brought, tokens.gathered()), f"the gather, rank {number}, turn {turn}"
    assert torch.equal(own.use_counts, made)
    assert bool((memory[number] == SENTINEL).all()), "something was left where the next exchange waits"


def few_at_once(number: int, memory: list[Tensor]) -> None:
    """A program has up to two rows of a launch, an exchange up to three launches."""
    for module in (all_reduce_triton, ep_exchange_triton):
        for most in ("MOST_AT_ONCE", "PROGRAMS_OF_MANY"):
            setattr(module, most, 2)
    rank(number, memory, most=3)


if __name__ == "__main__":
    for each in (rank, few_at_once):
        in_processes(each, peer_buffer_bytes(RANKS, ROWS, ROW_BYTES))
