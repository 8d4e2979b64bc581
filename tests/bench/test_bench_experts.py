"""Tiles in bench/experts.py, without a GPU: what is tried fits, and the fastest is found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plant import reference_kernels

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")

from models.kernels.experts import grouped_tma, streamed
from models.kernels.experts.tiles import LongListTiles, Tiles
from parallel.layers.weight import Weight
from tests.bench import expert_timing
from tests.bench import experts as bench_experts
from tests.bench.expert_timing import LAYERS
from tests.bench.experts import Pair, TileBench, block_by_block, candidates, default_pair, products
from tests.gpu.expert_cases import SHAPES, Layer, share_of


@pytest.mark.parametrize("rows", [8, 32, 128, 256, 2048])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_tried_fits_and_is_little_enough_to_try(shape: str, rows: int) -> None:
    layer = share_of(shape, 2)
    for outputs, inner in products(layer).values():
        found = candidates(layer, rows, outputs, inner)
        assert 20 <= len(found) == len(set(found)) <= 80
        assert len({one.block_m for one in found}) == 2
        for one in found:
            assert outputs % one.block_o == 0
            assert inner % one.block_k == 0
            assert one.stages * one.block_k * (one.block_m + one.block_o) * 2 <= 227 << 10


def test_blocks_hold_nearly_every_list() -> None:
    """Mixtral's 256 rows give each expert 64 tokens, with a standard deviation of 7."""
    layer = share_of("mixtral-8x7b", 2)
    assert {one.block_m for one in candidates(layer, 256, *products(layer)["down"])} == {64, 128}


def test_the_fastest_pair_is_found_and_compared_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = replace(share_of("30b-a3b", 2), device="cpu")
    default = default_pair(layer, 32)
    tried = bench_experts.every_pair(layer, 32)
    fast, refused = (tried["gate-up"][7][0], tried["down"][3][1]), tried["down"][5][1]

    def cost(pair: Pair) -> float:
        """100 of the default; 30 less for the fast gate-up, 20 less for the fast down, 1 more block by block."""
        if pair[1] == refused:
            raise RuntimeError("out of resources")
        saved = 30.0 * (pair[0] == fast[0]) + 20.0 * (pair[1] == fast[1]) - (pair[0].group == 1)
        return 100.0 - saved

    def microseconds(run: Any, replays: int) -> float:
        return cost(run.args[0])

    monkeypatch.setattr(bench_experts, "microseconds", microseconds)
    launched = replayed(monkeypatch, cost)
    result = bench(layer).sweep()

    first = result["first"]
    assert first["gate-up"][0] == (70.0, astuple(fast[0]))
    assert first["down"][0] == (80.0, astuple(fast[1]))
    assert len(first["down"]) == len(tried["down"]) - 1, "what is refused is left out"
    in_turns = {tuple(Tiles(*one) for one in final["pair"]): final["ratio"] for final in result["in_turns"]}
    assert in_turns[default] == 1.0
    assert in_turns[block_by_block(default)] == pytest.approx(1.01)
    assert min(in_turns, key=lambda pair: in_turns[pair]) == fast
    assert in_turns[fast] == pytest.approx(0.50)
    assert block_by_block(fast) in in_turns
    assert launched[: len(in_turns)] == launched[len(in_turns) : 2 * len(in_turns)][::-1], "there and back"


def test_tiles_that_compute_something_else_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = replace(share_of("30b-a3b", 2), device="cpu")
    default = default_pair(layer, 32)

    def differing(*given: Any, all_experts: int) -> torch.Tensor:
        return torch.ones(2) * (1 if given[-1] == default else 2)

    monkeypatch.setattr(bench_experts, "microseconds", lambda run, replays: 1.0)
    monkeypatch.setattr(bench_experts, "expert_mlp", differing)
    with pytest.raises(SystemExit, match=r"differs from the default.s by 1\.000"):
        bench(layer).sweep()


LONG = Tiles(128, 256, 64, 4, 8)


def run_main(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> Layer:
    """The command before a small layer of Mixtral's kind, where nothing is launched; the layer."""
    layer = replace(share_of("mixtral-8x7b", 2), hidden=256, inner=128, device="cpu")
    monkeypatch.setattr(bench_experts, "share_of", lambda shape, ranks: layer)
    monkeypatch.setattr(bench_experts, "nvidia_kernels", lambda device: reference_kernels())
    monkeypatch.setattr(bench_experts, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(bench_experts, "microseconds", lambda run, replays=30: 1.0)
    monkeypatch.setattr(sys, "argv", ["bench_experts", "--shape", "mixtral-8x7b", "--out", str(out), *words])
    bench_experts.main()
    return layer


def test_every_kernel_that_there_is_for_so_many_rows_is_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halves = LongListTiles(LONG, LONG, 2)
    replayed(monkeypatch, lambda tiles: {None: 80.0, halves: 90.0}.get(tiles, 100.0))
    monkeypatch.setattr(grouped_tma, "expert_mlp", lambda *_: torch.ones(2))
    monkeypatch.setattr(streamed, "expert_mlp", lambda *_: torch.ones(2))
    run_main(monkeypatch, tmp_path, "--rows", "2", "8", "64", "2048", "--kernels")
    found = json.loads((tmp_path / "expert-kernels-mixtral-8x7b.json").read_text())["rows"]
    assert {one["rows"]: {name: final["us"] for name, final in one["in_turns"].items()} for one in found} == {
        2: {"short lists": 100.0, "pair by pair": 80.0},
        8: {"short lists": 100.0, "pair by pair": 80.0},
        64: {"short lists": 100.0},
        2048: {"short lists": 100.0, "long lists, down / 1": 100.0, "long lists, down / 2": 90.0},
    }
    whole = "long lists, down / 1"  # an inner dimension of 128 is too short for halves
    assert [one["chosen"] for one in found] == ["pair by pair", "short lists", "short lists", whole]
    assert "80.0 us, 0.800 (0.800 to 0.800): pair by pair, chosen\n" in capsys.readouterr().out


def test_a_kernel_that_computes_something_else_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replayed(monkeypatch, lambda tiles: 100.0)
    monkeypatch.setattr(streamed, "expert_mlp", lambda *_: torch.ones(2) * 2)
    with pytest.raises(SystemExit, match=r"2 rows: pair by pair differs from short lists by 1\.000"):
        run_main(monkeypatch, tmp_path, "--rows", "2", "--kernels")


def bench(layer: Layer) -> TileBench:
    empty = Weight.of(torch.empty(0, 0))
    return TileBench(layer, [(empty, empty)] * LAYERS, [layer.chosen(32) for _ in range(LAYERS)])


def replayed(monkeypatch: pytest.MonkeyPatch, cost: Callable[[Any], float]) -> list[Any]:
    """A layer takes what ``cost`` says of its tiles, None where it has none; what was replayed, in its order."""
    launched: list[Any] = []

    def replay_for(graph: Any, seconds: float) -> float:
        run = graph.args[0]
        tiles = run.args[0] if isinstance(run, partial) else None
        launched.append(tiles)
        return cost(tiles) * LAYERS

    monkeypatch.setattr(expert_timing, "captured", lambda run: run)
    monkeypatch.setattr(expert_timing, "replay_for", replay_for)
    monkeypatch.setattr(bench_experts, "expert_mlp", lambda *_, **__: torch.ones(2))
    return launched
