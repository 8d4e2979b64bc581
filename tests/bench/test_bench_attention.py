"""The benchmark of attention inside a layer, without a GPU: what it tries, how it fills the cache, what it leaves out.

Knows: the kernels' own choice, asked of NvidiaKernels itself. Does not know: any time; launches are stand-ins here.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.inputs import DecodeAttention
from models.kernels.matmul.choice_table import ChoiceTable
from models.kernels.traits import H200
from tests.bench.measure import PARTS

SHORTEST, MOST = 520, 1024
SHAPES = ("8B", "8B-tp2", "30B-A3B-tp2", "0.6B")
ROWS = (8, 32, 64, 128, 256)
OURS = ("models.kernels.nvidia", "tests.bench.attention_candidates")
BENCHES = ("tests.bench.kernels", "tests.bench.attention")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """tests.bench.attention on the CPU."""
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    before = {name: sys.modules.pop(name, None) for name in (*OURS, *BENCHES)}
    for name in BENCHES:
        monkeypatch.setattr(importlib.import_module(name), "DEVICE", torch.device("cpu"))
    yield sys.modules["tests.bench.attention"]
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_few_candidates_that_fit_and_the_current_one(bench: Any, shape: str, rows: int) -> None:
    asked = bench.launch_of(shape, rows, [SHORTEST, 760])
    found = bench.candidates(asked)
    assert found[0] == bench.current_choice(asked)
    assert len(set(found)) == len(found)
    assert 6 <= len(found) <= 18
    assert {one.many for one in found} == ({True, False} if rows * asked.kv_heads >= 512 else {False})
    assert len({(one.block_n, one.stages, one.warps) for one in found}) >= 5
    assert {one.splits for one in found} >= {1, 2}
    for one in found:
        assert asked.shared(one.blocks) + (6 << 10) <= 227 << 10  # what Triton adds included
        assert one.splits == 1 or one.splits <= max(SHORTEST // one.block_n, found[0].splits)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_current_choice_is_what_the_kernels_launch(
    bench: Any, shape: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[dict[str, Any]] = []
    hopper = sys.modules["models.kernels.nvidia"]

    def few(*arguments: Any, **options: Any) -> None:
        rule = arguments[4]
        launched.append(options | {"many": False, "block_n": rule.block, "splits": rule.fewest})

    def many(*_: Any, **options: Any) -> None:
        launched.append(options | {"many": True, "splits": 1})

    monkeypatch.setattr(hopper.__dict__["decode"], "decode_attention", few)
    monkeypatch.setattr(hopper.__dict__["decode_tma"], "attend_many", many)
    dense, pages = bench.SHAPES[shape], MOST // 64
    lengths = torch.ones(rows, dtype=torch.int32)
    inputs = DecodeAttention(lengths.new_zeros(rows, pages), lengths, 1, MOST)
    qkv = torch.empty(rows, (dense.heads + 2 * dense.kv_heads) * 128, dtype=torch.bfloat16)
    cache = torch.empty(2, 1, 64, dense.kv_heads, 128, dtype=torch.bfloat16)
    workspace = torch.empty(sys.modules["models.kernels.matmul.dispatch"].__dict__["PARTIAL_BYTES"] // 4)
    own = hopper.__dict__["NvidiaKernels"]
    kernels = own.__new__(own)
    kernels.__dict__.update(_attention_partial=workspace, _attention_counters=None, pdl=True, traits=H200)
    kernels.__dict__.update(matmul=SimpleNamespace(choices=ChoiceTable()), balanced=False)
    kernels._triton_attention(qkv, dense.heads, cache, inputs, 1.0, None)
    [options] = launched
    expected = bench.current_choice(bench.launch_of(shape, rows, [SHORTEST]))
    assert {name: options[name] for name in expected._fields} == expected._asdict()


def test_what_cannot_fit_or_differ_is_pruned(bench: Any) -> None:
    candidates = sys.modules["tests.bench.attention_candidates"].__dict__
    usual = bench.launch_of("8B", 256, [SHORTEST])
    assert candidates["block_choices"](usual) == [
        *((32, 3, 2), (32, 5, 2), (64, 3, 2), (64, 3, 4), (64, 5, 4)),
        (128, 3, 4),
    ]
    wide = usual._replace(head_dim=256)
    assert candidates["block_choices"](wide) == [(32, 3, 2), (64, 3, 4)]
    short = [one.splits for one in bench.candidates(usual._replace(shortest=60))]
    assert set(short) == {1}, "a row of one block is not split"


def test_rows_lie_one_after_the_other_in_a_larger_pool(bench: Any) -> None:
    dense = bench.Dense(64, 4, 4, 2, 64, head_dim=16)
    layers = bench.LayerBench(None, dense, 3, 2)
    layers.fill(130)
    table, (one, *_) = layers.cache.table, layers.cache.layers
    assert table[:, :3].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert not table[:, 3:].any()
    assert one.shape[1] > 10
    assert layers.cache.inputs.kv_lengths_B.tolist() == [130] * 3
    assert layers.rotation.positions_T.tolist() == [129] * 3
    assert layers.rotation.kv_slots_T.tolist() == [page * 64 + 1 for page in (3, 6, 9)]
    layers.fill(64)
    assert table[:, :2].tolist() == [[1, 0], [2, 0], [3, 0]]
    assert layers.rotation.kv_slots_T.tolist() == [page * 64 + 63 for page in (1, 2, 3)]


def test_a_layer_count_that_no_cache_holds(bench: Any) -> None:
    for dense in bench.SHAPES.values():
        for rows in ROWS:
            layers = bench.layer_count(dense, rows, SHORTEST)
            kv = layers * 4 * rows * SHORTEST * dense.kv_heads * 128
            weights = layers * 2 * sum(a * b for a, b in (dense.weights()["o"], dense.weights()["qkv"]))
            assert min(kv, weights) >= 4 * bench.L2_BYTES
            assert layers * 4 * rows * MOST * dense.kv_heads * 128 <= 40 << 30, "a GPU has room for it"
    assert bench.layer_count(bench.SHAPES["8B"], 256, SHORTEST) == 4


def test_the_whole_run(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every layer is launched; what disagrees, is refused or leaves its counters set is named and not timed."""
    dense = bench.Dense(64, 4, 4, 2, 64, head_dim=16)
    monkeypatch.setitem(bench.SHAPES, "0.6B", dense)
    monkeypatch.setattr(bench, "layer_count", lambda *_: 4)
    monkeypatch.setattr(bench, "NvidiaKernels", lambda device: None)
    wrong, refused, unclean = bench.candidates(bench.launch_of("0.6B", 8, [520]))[1:4]

    def attend(self: Any, packed: torch.Tensor, kv: torch.Tensor, candidate: Any, fused: bool) -> torch.Tensor:
        if candidate == refused:
            raise RuntimeError("out of resource:\nshared memory")
        self.counters.fill_(int(candidate == unclean))
        return packed[:, :64].reshape(8, 4, 16).add(float(candidate == wrong))

    def time_of(launch: partial[None], device: torch.device, replays: int) -> float:
        launch()
        [candidate] = launch.args
        return 40.0 if candidate is None else 40.0 + 4 * (candidate.block_n + candidate.splits)

    monkeypatch.setattr(bench.LayerBench, "attend", attend)
    monkeypatch.setattr(bench.autotune, "median_graph_us", time_of)
    words = ["bench_attention", "--out", str(tmp_path), "--models", "0.6B", "--rows", "8", "--tokens", "520", "700"]
    monkeypatch.setattr(sys, "argv", words)
    bench.main()
    [found] = json.loads((tmp_path / "attention-in-layer.json").read_text())
    assert found["layer_without_attention_us"] == {"520": 10.0, "700": 10.0}
    assert [" ".join(one["why"].split()[:3]) for one in found["left_out"]] == [
        "its output differs",
        "refused: out of",
        "it left its",
    ]
    means = [one["mean_us"] for one in found["candidates"]]
    assert means == sorted(means)
    assert all(one["us"]["700"] == one["block_n"] + one["splits"] for one in found["candidates"])
    assert sum(one["current"] for one in found["candidates"]) == 1
    assert len(found["candidates"]) + 3 == len(bench.candidates(bench.launch_of("0.6B", 8, [520])))
    printed = capsys.readouterr().out
    assert "0.6B, 8 rows, 4 layers; us of a layer without attention: 10.0 at 520, 10.0 at 700 tokens" in printed
    assert printed.count("(current)") == 1
    assert f"left out {tuple(wrong)}: its output differs" in printed


def test_lengths_beyond_the_pages_are_refused(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_attention", "--out", "out", "--tokens", "520", "1025"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--tokens 520 1025: each from 1 to 1024" in capsys.readouterr().err


def test_the_default_cases_and_the_chosen_ones(bench: Any) -> None:
    assert set(SHAPES) == set(bench.SHAPES)
    assert bench.chosen_cases(None, None) == list(bench.CASES)
    assert {shape for shape, _ in bench.CASES} <= set(bench.SHAPES)
    assert bench.chosen_cases(["0.6B"], None) == [("0.6B", rows) for rows in ROWS]
    assert bench.chosen_cases(None, [8]) == [(shape, 8) for shape in bench.SHAPES]
    [part] = [part for part in PARTS if part.name == "attention-in-layer"]
    assert (part.gpus, part.seconds) == (1, 110)
    assert "tests.bench.attention" in part.command
