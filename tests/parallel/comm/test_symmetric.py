"""Where symmetric memory cannot work, all ranks get the ordinary collectives or exchange, and one of them says why."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.call_log import CallLog
from parallel.comm.collectives import GroupCollectives
from parallel.comm.symmetric_all_reduce import SIZE_LIMITS, fastest_collectives
from parallel.comm.symmetric_exchange import (
    ROW_BYTES,
    ExchangeLimits,
    GroupExchange,
    SymmetricExchange,
    fastest_exchange,
    limits_of,
    runs_in_kernels,
)
from parallel.comm.symmetric_memory import MAX_RANKS, _log_fallback, _on_one_node, _why_not, build_on_every_rank

CPU = torch.device("cpu")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_without_gpus_the_ordinary_collectives_are_chosen(group: dist.ProcessGroup) -> None:
    chosen = fastest_collectives(group, CPU)
    assert type(chosen) is GroupCollectives
    assert torch.equal(chosen.all_reduce(torch.arange(8.0)), torch.arange(8.0))
    assert _why_not(group, CPU) == "the ranks compute on cpu"


def test_ranks_of_several_nodes_are_told_apart(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _on_one_node(group, CPU)
    ranks: list[Tensor] = []

    def least(numbers: Tensor, group: dist.ProcessGroup) -> list[int]:
        ranks.append(numbers)
        found: list[int] = torch.stack(ranks).amin(0).tolist()
        return found

    monkeypatch.setattr("parallel.comm.symmetric_memory._minimum", least)
    found = []
    for name in ("node0", "node0", "node1", "node0"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        found.append(_on_one_node(group, CPU))
    assert found == [True, True, False, False]


def test_without_gpus_the_ordinary_exchange_is_chosen(group: dist.ProcessGroup) -> None:
    calls = CallLog(3)
    chosen = fastest_exchange(group, CPU, calls)
    assert type(chosen) is GroupExchange
    assert chosen.calls is calls
    assert chosen.slower is not None
    assert GroupExchange(group, calls).slower is None, "nobody wanted another"
    ids = torch.tensor([[2, -1]], dtype=torch.int32)
    hidden, weights, numbers = chosen.dispatch(torch.ones(1, 4), torch.ones(1, 2), ids, 2, ids.new_tensor([5, 6, 7]))
    assert hidden.tolist() == [[1.0] * 4, [0.0] * 4]
    assert weights.tolist() == [[1.0] * 2, [0.0] * 2]
    assert numbers.tolist() == [[7, -1], [-1, -1]]
    assert numbers.dtype is torch.int32


@pytest.mark.parametrize(
    ("groups", "rows", "width", "choices", "dtype", "fits"),
    [
        (2, 1, 2048, 8, torch.bfloat16, True),
        (2, 16_131, 2048, 8, torch.float16, True),
        (2, 16_132, 2048, 8, torch.float16, False),  # more bytes than there may be
        (2, 100_000, 64, 8, torch.bfloat16, True),
        (2, 0, 2048, 8, torch.bfloat16, False),
        (4, 16_131, 2048, 8, torch.float16, True),  # as many bytes to each of the others
        (4, 16_132, 2048, 8, torch.float16, False),
        (3, 100_000, 64, 8, torch.bfloat16, True),  # in several launches
        (5, 128, 2048, 8, torch.bfloat16, True),
        (5, 129, 2048, 8, torch.bfloat16, False),  # nobody has timed more between more than four
        (5, 2_700, 64, 8, torch.bfloat16, True),
        (5, 2_800, 64, 8, torch.bfloat16, False),
        (8, 64, 2048, 8, torch.bfloat16, True),
        (2, 1, ROW_BYTES // 2, 0, torch.bfloat16, True),
        (2, 1, ROW_BYTES // 2, 1, torch.bfloat16, False),
        (2, 1, ROW_BYTES // 2 + 8, 0, torch.bfloat16, False),
        (2, 1, ROW_BYTES // 4, 0, torch.float32, True),
        (2, 1, 12, 8, torch.bfloat16, False),  # not whole vectors
        (2, 1, 2048, 8, torch.float64, False),
        (2, 1, 0, 0, torch.float32, False),
    ],
)
def test_which_exchanges_run_in_our_kernels(
    groups: int, rows: int, width: int, choices: int, dtype: torch.dtype, fits: bool
) -> None:
    assert runs_in_kernels(limits_of(groups), groups, rows, width, choices, dtype) == fits


def test_all_ranks_go_one_way_and_log_the_same_calls(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a group has of the agreed number of rows: here no launch is made, where there is one it is counted."""
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    launches: list[str] = []

    def gathered(hidden: Tensor, weights: Tensor, ids: Tensor, rows: int, numbers: Tensor, **_: object) -> object:
        launches.append(f"gather {rows}")
        return hidden, weights, ids

    def summed(x: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        launches.append(f"sum {x.shape[0]}")
        return x, x

    monkeypatch.setattr("parallel.comm.ep_exchange_triton.dispatch_rows", gathered)
    monkeypatch.setattr("parallel.comm.all_reduce_triton.all_reduce_rows", summed)
    monkeypatch.setattr("parallel.comm.symmetric_exchange.SentinelMemory", lambda *_: SimpleNamespace(addresses=(16,)))
    monkeypatch.setattr("parallel.comm.symmetric_exchange.has_dependent_launches", lambda device: False)
    logs = []
    for tokens in (1, 5):
        made = SymmetricExchange(group, CPU, limits=ExchangeLimits(512, 1 << 10))
        ids = torch.zeros(tokens, 2, dtype=torch.int32)
        for rows in (8, 8, 520):
            made.dispatch(torch.zeros(tokens, 8), torch.zeros(tokens, 2), ids, rows, ids[0])
            made.reduce_scatter(torch.zeros(rows, 8))
        logs.append(made.calls.snapshot())
    assert logs[0] == logs[1]
    assert [run.call for run in logs[0].runs][:2] == ["all_gather [8, 8] float32", "reduce_scatter [8, 8] float32"]
    assert logs[0].made == 6
    assert launches == ["gather 8", "sum 8"] * 4


def test_the_reason_is_logged_for_a_group_of_several(
    group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        _log_fallback(group, "sums go elsewhere", "no peers")
        assert not caplog.records, "a rank alone has nothing to lose"
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        _log_fallback(group, "sums go elsewhere", "no peers")
    assert [record.getMessage() for record in caplog.records] == ["sums go elsewhere: no peers"]


@pytest.mark.parametrize(
    ("what_make_does", "works", "others_agree", "says"),
    [
        (None, True, True, None),
        (None, False, True, "sums go elsewhere: the first ones came out wrong"),
        (RuntimeError("no handle"), True, True, "sums go elsewhere: RuntimeError: no handle"),
        (None, True, False, "sums go elsewhere: it failed on another rank"),
    ],
)
def test_what_fails_on_one_rank_is_used_on_none(
    what_make_does: Exception | None,
    works: bool,
    others_agree: bool,
    says: str | None,
    group: dist.ProcessGroup,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> str:
        if what_make_does is not None:
            raise what_make_does
        return "made"

    asked: list[bool] = []

    def all_agree(yes: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
        asked.append(yes)
        return yes and (others_agree or len(asked) == 1)  # another rank fails where it makes its own

    monkeypatch.setattr("parallel.comm.symmetric_memory._why_not", lambda group, device: None)
    monkeypatch.setattr("parallel.comm.symmetric_memory._all_agree", all_agree)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with caplog.at_level(logging.WARNING):
        made = build_on_every_rank(group, CPU, make, lambda made: works, "sums go elsewhere")
    assert made == ("made" if says is None else None)
    assert [record.getMessage() for record in caplog.records] == ([] if says is None else [says])
    assert len(asked) == 2, "ranks agree before they begin and after"


def test_every_group_that_may_share_memory_has_limits() -> None:
    assert set(SIZE_LIMITS) == set(range(2, MAX_RANKS + 1))
