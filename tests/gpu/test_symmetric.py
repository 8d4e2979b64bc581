"""All-reduces over symmetric memory, in one step and in two: right, the same bits, in graphs, beside NCCL. On two GPUs,
and on all that the machine has.

Run: python3 -m pytest -m multigpu tests/gpu/test_symmetric.py
"""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

from parallel.collectives import Unsummed
from parallel.places import EMPTY
from parallel.symmetric import SymmetricCollectives, fastest_collectives
from tests.gpu.untyped import Stream, spawn

RANKS = 2


@pytest.mark.multigpu
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", sorted({RANKS, min(8, max(RANKS, torch.cuda.device_count()))}))
def test_ranks_sum_the_same(ranks: int) -> None:
    spawn(_rank, args=(free_port(), ranks), nprocs=ranks)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def joined(rank: int, port: int, ranks: int = RANKS) -> SymmetricCollectives:
    """This process as one of ``ranks``, with a GPU of its own."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        device_id=device,
    )
    assert dist.group.WORLD is not None
    made = fastest_collectives(dist.group.WORLD, device)
    assert isinstance(made, SymmetricCollectives)
    return made


def leave() -> None:
    """Nothing runs after this."""
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # destroying a group whose calls were captured may not return


def _rank(rank: int, port: int, ranks: int) -> None:
    made = joined(rank, port, ranks)
    for rows in (1, 3, 8, 64, 256, 5, *((512,) if ranks <= 4 else ())):  # what NCCL sums is not looked at
        _check(made, rank, rows)
        _check_norm(made, rank, rows, torch.bfloat16)
    _check_norm(made, rank, 7, torch.float32)
    _check_ways(made, rank)
    _check_what_looks_empty(made)
    _check_graph(made, rank)
    _check_uneven_ranks(made, rank)
    leave()


def _parts(made: SymmetricCollectives, rows: int, seed: int) -> list[torch.Tensor]:
    """Every rank's part, known to all: [rows, 4096] bf16."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 4096, generator=generator).bfloat16() for _ in range(made.size)]


def _check(made: SymmetricCollectives, rank: int, rows: int) -> None:
    parts = _parts(made, rows, seed=rows)
    x = parts[rank].cuda()
    assert made.sums.of(x)
    summed = made.all_reduce(x)
    expected = sum(part.double() for part in parts)
    assert isinstance(expected, torch.Tensor)
    error = (summed.cpu().double() - expected).norm() / expected.norm()
    assert error < 4e-3
    copies = [torch.empty_like(summed) for _ in range(made.size)]
    dist.all_gather(copies, summed)
    assert all(torch.equal(copy, summed) for copy in copies), "ranks summed in different orders"
    large = torch.full((8 << 20,), float(rank + 1), dtype=torch.bfloat16, device="cuda")
    assert made.sums.of(large) is None
    assert bool((made.all_reduce(large) == sum(range(1, made.size + 1))).all())


def _check_norm(made: SymmetricCollectives, rank: int, rows: int, dtype: torch.dtype) -> None:
    """Sum, residual and norm at once give what one after the other gives, rounding included."""
    x = _parts(made, rows, seed=rows)[rank].to(dtype).cuda()
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(rows, 4096, generator=generator).to(dtype).cuda()
    norm = torch.rand(4096, generator=generator).to(dtype).cuda()
    for before in (residual, None):
        total = made.all_reduce(x.clone())
        total = total if before is None else (total.float() + before.float()).to(dtype)
        late = made.sum_before_norm(x)
        assert isinstance(late, Unsummed)
        normed, kept = late.normed(before, norm, 1e-6)
        assert torch.equal(kept, total)
        h = total.double()
        expected = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.double()
        assert float((normed.double() - expected).norm() / expected.norm()) < 4e-3


def _check_ways(made: SymmetricCollectives, rank: int) -> None:
    """One step and two give the same bits, whichever this size of group uses, and in whatever order they come."""
    delay = torch.zeros(1 << 22, device="cuda")
    norm = torch.rand(4096, generator=torch.Generator().manual_seed(2)).bfloat16().cuda()
    ways = {"one step": made.sums.one_step, "two steps": made.sums.two_steps}
    given = {rows: [part.cuda() for part in _parts(made, rows, seed=rows)] for rows in (1, 6, 33, 300)}
    found = []
    for turn in range(240):
        if turn % made.size == rank:
            for _ in range(turn % 5):
                delay.sin_()
        rows = list(given)[turn * 7 % len(given)]
        name = list(ways)[turn * 5 % 7 % 2]
        x, residual = given[rows][rank], given[rows][0]
        found.append((turn, name, rows, ways[name](x, residual_TN=residual, norm_N=norm, eps=1e-6)))
    for turn, name, rows, (normed, kept) in found:
        parts = given[rows]
        total = torch.zeros(parts[0].shape, device="cuda")
        for part in parts:
            total += part.float()
        expected = (total.bfloat16().float() + parts[0].float()).bfloat16()
        assert torch.equal(kept, expected), f"turn {turn}, {name}, {rows} rows"
        h = expected.double()
        expected_norm = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.double()
        assert float((normed.double() - expected_norm).norm() / expected_norm.norm()) < 4e-3, f"turn {turn}, {name}"


def _check_what_looks_empty(made: SymmetricCollectives) -> None:
    """Minus zero is what memory holds where nothing is: a rank that sent it would be waited for for ever."""
    for dtype in (torch.bfloat16, torch.float32):
        halves = torch.full((33 * 4096 * dtype.itemsize // 2,), EMPTY, dtype=torch.int16, device="cuda")
        x = halves.view(dtype).view(33, 4096)
        for way in (made.sums.one_step, made.sums.two_steps, made.sums.one_step):
            assert float(way(x)[0].abs().max()) < 1e-39, dtype


def _check_uneven_ranks(made: SymmetricCollectives, rank: int) -> None:
    """Calls right behind each other, of other numbers of rows each time, with one rank late by turns."""
    delay = torch.zeros(1 << 22, device="cuda")
    for turn in range(200):
        if turn % made.size == rank:
            for _ in range(turn % 5):
                delay.sin_()
        rows = 1 + turn * 37 % 512
        x = torch.full((rows, 256), float(turn % 16 + rank), dtype=torch.bfloat16, device="cuda")
        twice = made.all_reduce(made.all_reduce(x))
        once = made.size * (turn % 16) + sum(range(made.size))
        assert bool((twice == made.size * once).all()), f"turn {turn}"


def _check_graph(made: SymmetricCollectives, rank: int) -> None:
    """A chain of sums: a rank that ran ahead and overwrote its part too early would change the other's result."""
    x = torch.zeros(8, 4096, dtype=torch.float32, device="cuda")
    factors = [1 + turn % (128 // made.size) for turn in range(64)]  # sums up to 128: bfloat16 holds them exactly

    def chain() -> torch.Tensor:
        total = torch.zeros_like(x)
        for factor in factors:
            total += made.all_reduce((x * factor).bfloat16()).float()
        return total

    side = Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # as the engine does, beside NCCL's own threads
        out = chain()
    for seed in range(20):
        values = [part.sign().float() for part in _parts(made, 8, seed)]  # -1, 0 or 1: every sum is exact
        x.copy_(values[rank])
        graph.replay()
        expected = sum(value.double() for value in values) * sum(factors)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(out.cpu().double(), expected), f"replay {seed}"
    graph.reset()
