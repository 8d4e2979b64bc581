"""All-reduces and gathers of keys over symmetric memory: right, the same bits, in graphs, beside NCCL. Between two
GPUs and all that the machine has; and between more ranks than that, which share its GPUs and have no NCCL.

Knows: what a sum has to give, however its ranks are spread over GPUs. Does not know: products that push
(test_pushed_all_reduce_gpu.py), what a sum costs (all_reduce.py).

Run: python3 -m pytest -m multigpu tests/gpu/test_symmetric.py
     python3 -m pytest -m gpu tests/gpu/test_symmetric.py         # ranks that share GPUs; one GPU is enough
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.collectives import PendingAllReduce
from parallel.comm.peer_buffers import SENTINEL
from parallel.comm.quantised import Quantised
from parallel.comm.symmetric_all_reduce import SymmetricCollectives
from runtime.execute.sampling.packed_argmax import pack
from tests.gpu.ranks_on_gpus import (
    OWN_GPUS,
    RANKS,
    SHARED_GPUS,
    Extent,
    called,
    free_port,
    joined,
    late_by_turns,
    leave,
    sharing,
)
from tests.gpu.untyped import Stream, spawn


@pytest.mark.multigpu
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", sorted({RANKS, min(8, max(RANKS, torch.cuda.device_count()))}), ids=called)
def test_ranks_sum_the_same(ranks: int) -> None:
    spawn(_rank, args=(free_port(), ranks), nprocs=ranks)


@pytest.mark.gpu
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_ranks_that_share_gpus_sum_the_same(ranks: int) -> None:
    spawn(_sharing_rank, args=(free_port(), ranks), nprocs=ranks)


def _rank(rank: int, port: int, ranks: int) -> None:
    made = joined(rank, port, ranks)
    _check_beside_nccl(made)
    _check_all(made, OWN_GPUS)
    leave()


def _sharing_rank(rank: int, port: int, ranks: int) -> None:
    made = SymmetricCollectives(*sharing(rank, port, ranks))  # not by fastest_collectives, which wants a GPU for each
    _check_all(made, SHARED_GPUS)
    leave()


def _check_all(made: SymmetricCollectives, extent: Extent) -> None:
    large = (512, 1500, 5000) if made.size <= 4 else ()  # what NCCL sums is not looked at
    for rows in (*extent.rows, *large):
        _check(made, rows)
        _check_norm(made, rows, torch.bfloat16)
        _check_codes(made, rows)
    _check_norm(made, 7, torch.float32)
    _check_ways(made, extent)
    _check_what_looks_empty(made)
    _check_keys(made, extent)
    _check_graph(made, extent)
    _check_uneven_ranks(made, extent)


def _parts(made: SymmetricCollectives, rows: int, seed: int) -> list[Tensor]:
    """Every rank's part, known to all: [rows, 4096] bf16, on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    return [*torch.randn(made.size, rows, 4096, generator=generator).bfloat16().cuda()]


def _in_rank_order(parts: list[Tensor]) -> Tensor:
    """What every rank has to have, to the bit: added in float32, first rank first, rounded once."""
    total = torch.zeros(parts[0].shape, device=parts[0].device)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def _check(made: SymmetricCollectives, rows: int) -> None:
    parts = _parts(made, rows, seed=rows)
    assert made.dispatch.kernel_for(parts[made.rank])
    summed = made.all_reduce(parts[made.rank])
    assert torch.equal(summed, _in_rank_order(parts)), f"{rows} rows"
    mine = summed.cpu().view(torch.uint8)  # over gloo, and to the bit of a zero's sign
    copies = [torch.empty_like(mine) for _ in range(made.size)]
    dist.all_gather(copies, mine)
    assert all(torch.equal(copy, mine) for copy in copies), "ranks summed in different orders"


def _check_beside_nccl(made: SymmetricCollectives) -> None:
    """Messages that are too large for us, between some that are not."""
    for rows in (1, 64, 256):
        _check(made, rows)
        large = torch.full((8 << 20,), float(made.rank + 1), dtype=torch.bfloat16, device="cuda")
        assert made.dispatch.kernel_for(large) is None
        assert bool((made.all_reduce(large) == sum(range(1, made.size + 1))).all())


def _check_norm(made: SymmetricCollectives, rows: int, dtype: torch.dtype) -> None:
    """Sum, residual and norm at once give what one after the other gives, rounding included."""
    x = _parts(made, rows, seed=rows)[made.rank].to(dtype)
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(rows, 4096, generator=generator).to(dtype).cuda()
    norm = torch.rand(4096, generator=generator).to(dtype).cuda()
    for before in (residual, None):
        total = made.all_reduce(x.clone())
        total = total if before is None else (total.float() + before.float()).to(dtype)
        late = made.all_reduce_before_norm(x)
        assert isinstance(late, PendingAllReduce)
        normed, kept = late.normed(before, norm, 1e-6)
        assert torch.equal(kept, total)
        h = total.double()
        expected = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.double()
        assert float((normed.double() - expected).norm() / expected.norm()) < 4e-3


def _check_codes(made: SymmetricCollectives, rows: int) -> None:
    """A sum with norm that also quantises changes no bit of it, and gives the codes of a launch that only quantises."""
    from models.kernels.matmul.codes import quantise

    parts = _parts(made, rows, seed=rows)
    x, residual, norm = parts[made.rank], parts[0], parts[0][0].abs()
    for group in (128, 4096):
        for way in (made.dispatch.one_shot, made.dispatch.two_shot):
            into = Quantised.empty(rows, 4096, group, x.dtype, "cuda", numbers=True)
            normed, kept = way(x, residual_TN=residual, norm_N=norm, eps=1e-6, into=into)
            without = way(x, residual_TN=residual, norm_N=norm, eps=1e-6)
            alone = quantise(normed, group, pdl=False)
            for found, expected in [
                (normed, without[0]), (kept, without[1]),
                (into.codes[:rows].view(torch.uint8), alone.codes[:rows].view(torch.uint8)),
                (into.scale[:, :rows], alone.scale[:, :rows]),
            ]:  # fmt: skip
                assert torch.equal(found, expected), (rows, group)


def _check_ways(made: SymmetricCollectives, extent: Extent) -> None:
    """One step and two give the same bits, whichever this size of group uses, and in whatever order they come."""
    norm = torch.rand(4096, generator=torch.Generator().manual_seed(2)).bfloat16().cuda()
    ways = {"one step": made.dispatch.one_shot, "two steps": made.dispatch.two_shot}
    given = {rows: _parts(made, rows, seed=rows) for rows in (1, 6, 33, 300)}
    found = []
    for turn in late_by_turns(made.rank, made.size, extent.ways, extent.late):
        rows = list(given)[turn * 7 % len(given)]
        name = list(ways)[turn * 5 % 7 % 2]
        x, residual = given[rows][made.rank], given[rows][0]
        found.append((turn, name, rows, ways[name](x, residual_TN=residual, norm_N=norm, eps=1e-6)))
    for turn, name, rows, (normed, kept) in found:
        expected = (_in_rank_order(given[rows]).float() + given[rows][0].float()).bfloat16()
        assert torch.equal(kept, expected), f"turn {turn}, {name}, {rows} rows"
        h = expected.double()
        expected_norm = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.double()
        assert float((normed.double() - expected_norm).norm() / expected_norm.norm()) < 4e-3, f"turn {turn}, {name}"


def _check_what_looks_empty(made: SymmetricCollectives) -> None:
    """Minus zero is what memory holds where nothing is: a rank that sent it would be waited for for ever."""
    for dtype in (torch.bfloat16, torch.float32):
        halves = torch.full((33 * 4096 * dtype.itemsize // 2,), SENTINEL, dtype=torch.int16, device="cuda")
        x = halves.view(dtype).view(33, 4096)
        for way in (made.dispatch.one_shot, made.dispatch.two_shot, made.dispatch.one_shot):
            assert float(way(x)[0].abs().max()) < 1e-39, dtype


def _check_keys(made: SymmetricCollectives, extent: Extent) -> None:
    """Keys of few and of many columns, all or a row's largest, between sums, one rank late by turns."""
    taken = set()
    for turn in late_by_turns(made.rank, made.size, extent.ways, extent.late):
        rows, width, largest = 1 + turn * 37 % 300, (1, 33, 128)[turn % 3], turn % 2 == 1
        generator = torch.Generator().manual_seed(turn)
        ids = torch.randint(0, 2**31, (made.size, rows, width), generator=generator)
        keys = pack(torch.randn(made.size, rows, width, generator=generator), ids)
        found = made.all_gather_keys(keys[made.rank].cuda(), largest=largest)
        sent = keys.amax(2, keepdim=True) if largest else keys
        assert torch.equal(found.cpu(), torch.cat([*sent], 1)), f"turn {turn}"
        taken.add(made.dispatch.gather_keys_for(keys[0], largest) is not None)
        x = torch.full((rows, 256), float(made.rank), dtype=torch.bfloat16, device="cuda")
        assert bool((made.all_reduce(x) == sum(range(made.size))).all()), f"turn {turn}"
    assert True in taken


def _check_uneven_ranks(made: SymmetricCollectives, extent: Extent) -> None:
    """Calls right behind each other, of other numbers of rows each time, with one rank late by turns."""
    for turn in late_by_turns(made.rank, made.size, extent.uneven, extent.late):
        rows = 1 + turn * 397 % (4500 if made.size <= 4 else 512)
        x = torch.full((rows, 256), float(turn % 16 + made.rank), dtype=torch.bfloat16, device="cuda")
        twice = made.all_reduce(made.all_reduce(x))
        once = made.size * (turn % 16) + sum(range(made.size))
        assert torch.equal(twice, torch.full_like(twice, made.size * once)), f"turn {turn}"  # rounded once, as that is


def _check_graph(made: SymmetricCollectives, extent: Extent) -> None:
    """A chain of sums: a rank that ran ahead and overwrote its part too early would change the other's result."""
    x = torch.zeros(8, 4096, dtype=torch.float32, device="cuda")
    most = 128 // made.size  # bfloat16 holds sums up to 128 exactly
    factors = [1 + turn % most for turn in range(extent.chain)]

    def chain() -> Tensor:
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
    for seed in late_by_turns(made.rank, made.size, extent.replays, extent.late):
        values = [part.sign().float() for part in _parts(made, 8, seed)]  # -1, 0 or 1: every sum is exact
        x.copy_(values[made.rank])
        graph.replay()
        expected = sum(value.double() for value in values) * sum(factors)
        assert isinstance(expected, Tensor)
        assert torch.equal(out.double(), expected), f"replay {seed}"
    graph.reset()
