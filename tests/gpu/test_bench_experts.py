"""The choice of tiles by bench_experts.py, without a GPU: what is tried fits, and the fastest of it is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")

from models.kernels.expert_tiles import Tiles
from tests.gpu import bench_experts
from tests.gpu.bench_experts import Pair, TileBench, block_by_block, candidates, default_pair, products
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

    def captured(run: Callable[[], None]) -> Callable[[], None]:
        return run

    launched: list[Pair] = []

    def replay_for(graph: Any, seconds: float) -> float:
        pair: Pair = graph.args[0].args[0]
        launched.append(pair)
        return cost(pair) * bench_experts.LAYERS

    for stub in (microseconds, captured, replay_for):
        monkeypatch.setattr(bench_experts, stub.__name__, stub)
    monkeypatch.setattr(bench_experts, "expert_mlp", lambda *_, **__: torch.ones(2))
    result = bench(layer).sweep()

    first = result["first"]
    assert first["gate-up"][0] == (70.0, astuple(fast[0]))
    assert first["down"][0] == (80.0, astuple(fast[1]))
    assert len(first["down"]) == len(tried["down"]) - 1, "what is refused is left out"
    in_turns = {tuple(Tiles(*one) for one in final["pair"]): final["of_default"] for final in result["in_turns"]}
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


def bench(layer: Layer) -> TileBench:
    empty = torch.empty(0)
    layers = bench_experts.LAYERS
    return TileBench(layer, [(empty, empty)] * layers, [layer.chosen(32) for _ in range(layers)])
