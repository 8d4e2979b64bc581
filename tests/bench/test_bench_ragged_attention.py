"""The benchmark of balanced attention, without a GPU: its cases, what it tries for each, what it prints.

Knows: the kernels' own choice, asked of NvidiaKernels itself. Does not know: any time.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.kernels.matmul.choice_table import ChoiceTable
from models.kernels.traits import H200


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tests.bench.ragged_attention on the CPU."""
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    module = importlib.import_module("tests.bench.ragged_attention")
    monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    return module


@pytest.fixture
def kernels(bench: Any) -> Any:
    """NvidiaKernels that choose as on an H200, and launch nothing."""
    own: Any = bench.NvidiaKernels.__new__(bench.NvidiaKernels)
    matmul = SimpleNamespace(choices=ChoiceTable())
    own.__dict__.update(
        traits=H200, pdl=True, balanced=True, matmul=matmul, _attention_partial=torch.empty(16 << 20, device="meta")
    )
    return own


def case_of(bench: Any, kernels: Any, case: Any) -> Any:
    return bench.Bench(kernels, case, torch.empty(bench.pool_size([case]), dtype=torch.bfloat16, device="meta"))


def test_every_case_fits_a_gpu_and_has_few_distinct_candidates(bench: Any, kernels: Any) -> None:
    found = bench.cases(quick=False)
    assert len(found) == len(set(found)) == 99
    assert set(bench.cases(quick=True)) <= set(found)
    assert 2 * bench.pool_size(found) <= 24 << 30, "bytes of all caches"
    for case in found:
        one = case_of(bench, kernels, case)
        tried = one.candidates(True)
        assert tried[:2] == [bench.Candidate(), one.usual()]
        assert len(set(tried)) == len(tried)
        few = len(case.lengths) * bench.HEADS[case.model][1] <= bench.FEWEST_PAIRS
        assert 3 <= len(tried) <= (32 if few else 16)
        launched = {(c.tma, c.blocks, one.programs(c), str([bench.splits_of(c.rule, n) for n in case.lengths]))
                    for c in tried[1:]}  # fmt: skip
        assert len(launched) == len(tried) - 1, "two candidates launch the same"


def test_a_grid_has_every_combination_once(bench: Any, kernels: Any) -> None:
    [case] = [case for case in bench.cases(quick=False) if (case.model, case.name) == ("8B", "16 x lognormal")]
    one = case_of(bench, kernels, case)
    tried = one.grid(bench.Grid(longest=(128, 512)))
    assert tried[:2] == [bench.Candidate(), one.usual()]
    assert len(set(tried)) == len(tried)
    assert {(c.tma, c.blocks) for c in tried[2:]} == set(bench.GRID_VARIANTS)
    assert {c.each for c in tried[2:]} == {4, 8, 16}, "32 are more than 16 splits a row"
    assert {c.rule.longest for c in tried[2:]} == {128, 512}
    assert max(c.rule.most for c in tried[1:]) == 16, "as the kernels themselves choose for so few pairs"


def test_a_long_row_among_short_ones_is_read_by_many_programs(bench: Any, kernels: Any) -> None:
    [case] = [case for case in bench.cases(quick=True) if case.name == "[131072] + 63 x [1024]"]
    one = case_of(bench, kernels, case)
    usual = one.usual()
    assert bench.splits_of(usual.rule, 1024) <= 2
    assert bench.splits_of(usual.rule, 131072) * one.kv_heads >= 3 * H200.multiprocessors
    assert one.programs(usual) >= 4 * H200.multiprocessors


def test_absent_rows_get_no_programs_of_their_own(bench: Any, kernels: Any) -> None:
    [case] = [case for case in bench.cases(quick=True) if case.name.startswith("16 x lognormal, 240 absent")]
    one = case_of(bench, kernels, case)
    assert one.inputs.skip_empty
    assert sum(one.inputs.kv_lengths_B > 0) == 16
    assert one.programs(one.usual()) == 32 * H200.multiprocessors < 256 * one.kv_heads * one.usual().rule.most


def test_rows_lie_in_the_pool_without_overlap(bench: Any, kernels: Any) -> None:
    case = bench.Case("one head", "three", (130, 64, 1), 256)
    pool = torch.zeros(bench.pool_size([case], 2), dtype=torch.bfloat16)
    one = bench.Bench(kernels, case, pool, copies=2)
    assert [layer.shape for layer in one.layers] == [(2, 6, 64, 1, 128)] * 2
    assert one.live.tolist() == [0, 1, 2]
    assert not one.inputs.skip_empty
    used = [*one.inputs.page_table_BP[0, :3].tolist(), one.inputs.page_table_BP[1, 0].item(),
            one.inputs.page_table_BP[2, 0].item()]  # fmt: skip
    assert sorted(used) == [1, 2, 3, 4, 5]
    assert one.rotation.positions_T.tolist() == [129, 63, 0]
    assert one.rotation.kv_slots_T.tolist() == [used[2] * 64 + 1, used[3] * 64 + 63, used[4] * 64]


def test_the_table_names_what_won(bench: Any, kernels: Any) -> None:
    case = bench.Case("8B", "4 x 512", (512,) * 4)
    one = case_of(bench, kernels, case)
    usual, other = one.usual(), one.usual()._replace(each=16)
    us = {bench.Candidate(): 10.0, usual: 9.0, other: 4.5}
    told = bench.line(case, us, usual, 2.0)
    assert "| 10.0 (0.84) | 9.0 (0.93) | 0.900 | 4.5 (0.450) |" in told
    found = bench.as_dict(case, us, {other._replace(each=3): "refused"}, usual)
    assert [c["us"] for c in found["candidates"]] == [4.5, 9.0]
    assert found["pairs"] == 32
    assert any("each 16 | 0.500" in line for line in bench.summary([found]))


def test_what_disagrees_is_named(bench: Any) -> None:
    right, counters = torch.ones(4, 8), torch.zeros(3, dtype=torch.int32)
    assert bench.objection(right, right, counters) is None
    assert "differs" in bench.objection(right * 1.1, right, counters)
    assert "differs" in bench.objection(right * float("nan"), right, counters)
    assert "counters" in bench.objection(right, right, counters + 1)


def test_lognormal_lengths_are_those_of_chats(bench: Any) -> None:
    lengths = bench.lognormal(256)
    assert lengths == bench.lognormal(256)
    assert min(lengths) >= 12
    assert max(lengths) <= 2500
    assert 300 < sum(lengths) / 256 < 700
