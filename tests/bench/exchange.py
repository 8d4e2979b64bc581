"""What the two exchanges of a sparse layer cost between groups of one GPU each: one launch of parallel/, and NCCL.

Run: python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.bench.exchange --out FOLDER

Microseconds by the rows that each group brings, of 30B-A3B: 2048 bfloat16 (``--width``: others), with the weights and
ids of 8 choices there; as many rows as our kernels take between so many groups, or, with ``--whole``, up to 8,192.
NCCL's gather is with what makes one message of three tensors and three of one message, and what finds a rank's own
numbers of the chosen experts. Every figure is the median of rounds, in each of which the ways take turns; a round is
replays of a graph of calls that follow each other, each with a norm's launch behind it, which is timed alone, too. Both
exchanges of ours have to give the right bits before that.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.kernels.matmul.autotune import median_graph_us
from parallel.comm.symmetric_exchange import (
    ExchangeLimits,
    GroupExchange,
    SymmetricExchange,
    limits_of,
    runs_in_kernels,
)
from tests.bench.all_reduce import CALLS, chain, leave, ranks_of_torchrun, show
from tests.parallel.comm.exchange_cases import Layer, layer, same_bits

ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
OF_PROMPTS = (640, 1024, 2048, 4096, 8192)
CHOICES = 8
ROUNDS = 5
CHECKS = 200  # of each, behind each other


def check(made: SymmetricExchange, given: Layer) -> None:
    """Raises SystemExit where something comes out wrong."""
    gathered, total = given.gathered(), given.summed(made.index)
    for turn in range(CHECKS):
        if not same_bits(made.dispatch(*given.brought(made.index)), gathered):
            raise SystemExit(f"gather {turn} of {given.rows} rows came out wrong")
        if not same_bits((made.reduce_scatter(given.terms[made.index]),), (total,)):
            raise SystemExit(f"scatter-sum {turn} of {given.rows} rows came out wrong")


def calls_of(made: GroupExchange, given: Layer) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """There, of any rows, and back, whatever they are: both give as many rows as the group has."""
    _, weights, ids, rows, numbers = given.brought(made.index)
    mine = slice(made.index * rows, (made.index + 1) * rows)
    terms = given.terms[made.index]
    return (
        lambda x: made.dispatch(x, weights, ids, rows, numbers)[0][mine],
        lambda x: made.reduce_scatter(terms),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for exchange.json")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--fewest", type=int, default=1, help="rows of the smallest exchange")
    parser.add_argument("--whole", action="store_true", help="rows of prompts between any number of groups")
    asked = parser.parse_args()
    group, device = ranks_of_torchrun()
    limits = ExchangeLimits(limits_of(2).rows, 1 << 30) if asked.whole else None
    ours = SymmetricExchange(group, device, limits=limits)  # kept: exchanges go through its memory
    nccl = GroupExchange(group)
    norm = torch.ones(asked.width, dtype=torch.bfloat16, device=device)
    found = []
    sizes = [rows for rows in (*ROWS, *OF_PROMPTS) if rows >= asked.fewest]
    kind = asked.width, CHOICES, torch.bfloat16
    for rows in [rows for rows in sizes if runs_in_kernels(ours.limits, ours.groups, rows, *kind)]:
        given = layer(rows, ours.groups, rows, *kind, full=True).on(device)
        check(ours, given)
        x = given.hidden[ours.index]
        (our_gather, our_sum), (nccl_gather, nccl_sum) = calls_of(ours, given), calls_of(nccl, given)
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "norm alone": lambda y: y,
            "gather": our_gather,
            "NCCL gather": nccl_gather,
            "scatter-sum": our_sum,
            "NCCL scatter-sum": nccl_sum,
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, call in ways.items():
                dist.barrier()
                times[name].append(median_graph_us(chain(call, x, norm), device) / CALLS)
        row: dict[str, Any] = {"rows": rows, "kib": x.numel() * x.element_size() / 1024}
        row |= {name: statistics.median(rounds) for name, rounds in times.items()}
        found.append(row)
        show(row)
    leave(found, asked.out / "exchange.json")


if __name__ == "__main__":
    main()
