"""Exchanges over symmetric memory: the bits of a gather over gloo and of a sum in the groups' order, behind each other
with ranks late by turns, in graphs, beside NCCL. Between GPUs of their own, and between ranks that share GPUs.

Knows: in which orders exchanges come. Does not know: what each has to give (tests/parallel/comm/exchange_cases.py), a
sparse model's answers over them (test_experts_gpu.py), what one costs (exchange.py).

Run: python3 -m pytest -m multigpu tests/gpu/test_exchange_gpu.py
     python3 -m pytest -m gpu tests/gpu/test_exchange_gpu.py      # ranks that share GPUs; one GPU is enough
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from parallel.comm.peer_buffers import SENTINEL
from parallel.comm.symmetric_exchange import (
    GroupExchange,
    SymmetricExchange,
    fastest_exchange,
    limits_of,
    runs_in_kernels,
)
from tests.gpu.ranks_on_gpus import (
    OWN_GPUS,
    RANKS,
    SHARED_GPUS,
    Extent,
    called,
    free_port,
    group_of,
    late_by_turns,
    leave,
    sharing,
)
from tests.gpu.untyped import Stream, spawn
from tests.parallel.comm.exchange_cases import Layer, layer, same_bits, sendable

BF16 = torch.bfloat16
WIDTH = 2048
SHAPES = (  # rows, width, choices, dtype: one variant of the kernels each
    *((rows, WIDTH, 8, BF16) for rows in (1, 5, 64, 512)),
    (513, WIDTH, 8, BF16),  # programs with several rows, most of them two
    (2 * limits_of(2).rows + 7, 256, 8, BF16),  # three launches
    (1500, 4096, 8, BF16),
    (7, 6144, 2, BF16),
    (33, 96, 3, torch.float16),
    (16, WIDTH, 3, torch.float32),
)
IN_A_STEP = (8, 8, 64, 1, 16, 8)  # rows of its layers
OF_A_PROMPT = (700, 700, 16, 2500, 8, 700)
WAYS = ("gather", "sum")


@pytest.mark.multigpu
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", sorted({RANKS, min(8, max(RANKS, torch.cuda.device_count()))}), ids=called)
def test_groups_exchange_the_same(ranks: int) -> None:
    spawn(_rank, args=(free_port(), ranks), nprocs=ranks)


@pytest.mark.gpu
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_groups_that_share_gpus_exchange_the_same(ranks: int) -> None:
    spawn(_sharing_rank, args=(free_port(), ranks), nprocs=ranks)


def _rank(rank: int, port: int, ranks: int) -> None:
    device = torch.device("cuda", rank)
    made = fastest_exchange(group_of(rank, port, ranks, device, nccl=True), device)
    assert isinstance(made, SymmetricExchange)
    _check_beside_nccl(made, device)
    _check_all(made, OWN_GPUS, device)
    leave()


def _sharing_rank(rank: int, port: int, ranks: int) -> None:
    group, device = sharing(rank, port, ranks)
    _check_all(SymmetricExchange(group, device), SHARED_GPUS, device)  # fastest_exchange wants a GPU for each
    leave()


def _check_all(made: SymmetricExchange, extent: Extent, device: torch.device) -> None:
    for seed, shape in enumerate(_shapes(made, extent)):
        _check(made, layer(seed, made.groups, *shape), device)
    _check_behind_each_other(made, extent, device)
    _check_graph(made, extent, device, IN_A_STEP)
    if made.groups <= 4 and extent is OWN_GPUS:
        _check_graph(made, extent, device, OF_A_PROMPT)
    torch.cuda.synchronize()
    assert bool((made._memory._own == SENTINEL).all()), "something was left where the next exchange waits"


def _shapes(made: SymmetricExchange, extent: Extent) -> list[tuple[int, int, int, torch.dtype]]:
    """Those that our kernels take: all between up to four groups, none of 512 rows or more between others. None of a
    prompt's rows where ranks share a GPU: a program's next row waits for the other ranks' turns again and again.
    """
    fitting = [shape for shape in SHAPES if runs_in_kernels(made.limits, made.groups, *shape)]
    assert len(fitting) == len(SHAPES) - 4 * (made.groups > 4)
    return fitting if extent is OWN_GPUS else [shape for shape in fitting if shape[0] <= 512]


def _check(made: SymmetricExchange, given: Layer, device: torch.device) -> None:
    """Three times, so that both places are used; then against a gather of CPU tensors over gloo."""
    here = given.on(device)
    for _ in range(3):
        found = made.dispatch(*here.brought(made.index))
        assert same_bits(found, here.gathered()), f"{given.rows} rows of {found[0].shape[1]}"
        total = made.reduce_scatter(here.terms[made.index])
        assert same_bits((total,), (here.summed(made.index),)), f"the sum of {given.rows} rows"
    hidden, *choices = GroupExchange(made.group).dispatch(*given.brought(made.index))
    here_again = tuple(part.cpu() for part in found)
    assert same_bits(here_again, (sendable(hidden), *choices)), f"not what gloo brings: {given.rows} rows"


def _check_beside_nccl(made: SymmetricExchange, device: torch.device) -> None:
    """More rows than go through shared memory, between fewer."""
    most = 5000 if made.groups <= 4 else 513
    for seed, rows in enumerate((4, most, 4)):
        width = 8000 if rows == most else 256
        given = layer(seed, made.groups, rows, width, 8, BF16).on(device)
        assert runs_in_kernels(made.limits, made.groups, rows, width, 8, BF16) == (rows < most)
        found, wanted = made.dispatch(*given.brought(made.index)), given.gathered()
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.nan_to_num(-7.0), other.nan_to_num(-7.0)), f"{rows} rows"
        total, expected = made.reduce_scatter(given.terms[made.index]).float(), given.summed(made.index).float()
        assert float((total - expected).norm() / expected.norm()) < 1e-2, f"the sum of {rows} rows"


def _run(made: GroupExchange, way: str, given: Layer) -> tuple[Tensor, ...]:
    if way == "gather":
        return made.dispatch(*given.brought(made.index))
    return (made.reduce_scatter(given.terms[made.index]),)


def _wanted(made: GroupExchange, way: str, given: Layer) -> tuple[Tensor, ...]:
    return given.gathered() if way == "gather" else (given.summed(made.index),)


def _check_behind_each_other(made: SymmetricExchange, extent: Extent, device: torch.device) -> None:
    """Of other rows each time and in any order, while no host waits for its device."""
    given = [layer(seed, made.groups, *shape).on(device) for seed, shape in enumerate(_shapes(made, extent))]
    steps = [*product(given, WAYS)]
    found = []
    for turn in late_by_turns(made.index, made.groups, extent.ways, extent.late):
        one, way = steps[turn * 5 % len(steps)]
        found.append((turn, way, one, _run(made, way, one)))
    for turn, way, one, results in found:
        assert same_bits(results, _wanted(made, way, one)), f"turn {turn}: the {way} of {one.rows} rows"


def _check_graph(made: SymmetricExchange, extent: Extent, device: torch.device, in_a_step: tuple[int, ...]) -> None:
    """Layers of a step, replayed with other values while ranks are late by turns, exchanges outside between replays."""
    values = [
        [layer(10 * number + at, made.groups, rows, WIDTH, 8, BF16, full=True) for at, rows in enumerate(in_a_step)]
        for number in range(3)
    ]
    given = [[one.on(device) for one in layers] for layers in values]
    static = [[part.clone() for part in _brought(made, one)] for one in given[0]]

    def step() -> list[tuple[Tensor, ...]]:
        out: list[tuple[Tensor, ...]] = []
        for rows, (hidden, weights, ids, numbers, terms) in zip(in_a_step, static, strict=True):
            out.append(made.dispatch(hidden, weights, ids, rows, numbers))
            out.append((made.reduce_scatter(terms),))
        return out

    side = Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step()
    found = []
    for turn in late_by_turns(made.index, made.groups, extent.replays, extent.late):
        layers = given[turn % len(given)]
        for kept, one in zip(static, layers, strict=True):
            for part, brought in zip(kept, _brought(made, one), strict=True):
                part.copy_(brought)
        graph.replay()
        found.append([tuple(part.clone() for part in one) for one in out])
        made.reduce_scatter(layers[turn % len(layers)].terms[made.index])
    for turn, results in enumerate(found):
        layers = given[turn % len(given)]
        for (one, way), result in zip(product(layers, WAYS), results, strict=True):
            assert same_bits(result, _wanted(made, way, one)), f"replay {turn}: the {way} of {one.rows} rows"
    graph.reset()


def _brought(made: SymmetricExchange, given: Layer) -> tuple[Tensor, ...]:
    hidden, weights, ids, _, numbers = given.brought(made.index)
    return hidden, weights, ids, numbers, given.terms[made.index]
