"""Micro-benchmark of a layer's experts: route, gate-up, down, sum, for a rank's share of the 30B-A3B shape.

Run on one GPU:  python3 tests/gpu/bench_experts.py [--rows 1 32 256] [--ranks 2] [--tiles]
Prints the time of a layer, the bytes of the experts that were asked, and both as bandwidth. Weights of several layers
rotate through more memory than the L2 holds. ``--tiles`` tries other tiles for the grouped path.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import torch
import triton
from torch import Tensor

from models.kernels import experts_triton
from models.kernels.experts_triton import Tiles, default_tiles
from models.kernels.hopper import MOST_STREAMED, HopperKernels
from tests.gpu.expert_cases import Layer
from tests.gpu.untyped import Event, Stream

LAYERS = 6


def microseconds(run: Callable[[int], Tensor]) -> float:
    """Of one layer: the median of graph replays over LAYERS layers."""
    side = Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for layer in range(LAYERS):
            run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            run(layer)
    took = []
    for _ in range(30):
        start, end = Event(enable_timing=True), Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(float(start.elapsed_time(end)) * 1000 / LAYERS)
    return sorted(took)[len(took) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    layer = Layer(2048, 768, 128, 128 // args.ranks, 8, torch.bfloat16)
    kernels, weights = HopperKernels("cuda"), [layer.weights() for _ in range(LAYERS)]
    expert_bytes = 2 * 3 * layer.hidden * layer.inner
    for rows in args.rows:
        x, logits, local = layer.tokens(rows), [layer.logits(rows) for _ in range(LAYERS)], layer.local()
        real = torch.ones(rows, dtype=torch.bool, device="cuda")

        def routed(number: int) -> tuple[Tensor, Tensor]:
            return kernels.route_top_k(logits[number], layer.choices, True, local, real)  # noqa: B023

        chosen = [routed(number) for number in range(LAYERS)]
        asked = sum(len(set(local_TC[local_TC >= 0].tolist())) for _, local_TC in chosen) / LAYERS
        route_us = microseconds(lambda number: routed(number)[0])
        layer_us = microseconds(
            lambda number: kernels.expert_mlp(x, *weights[number], *routed(number))  # noqa: B023
        )
        moved = asked * expert_bytes / 1e6
        print(
            f"rows {rows:5d}: route {route_us:6.1f} us, layer {layer_us:8.1f} us, {asked:5.1f} experts, "
            f"{moved:6.1f} MB, {moved / layer_us:5.2f} TB/s",
            flush=True,
        )
        if args.tiles and rows > MOST_STREAMED:
            try_tiles(layer, x, weights, chosen)


def try_tiles(
    layer: Layer, x: Tensor, weights: list[tuple[Tensor, Tensor]], chosen: list[tuple[Tensor, Tensor]]
) -> None:
    """Each product's tiles in turn, the other's by default; the five fastest."""
    default = tuple(
        default_tiles(x.shape[0], layer.choices, layer.held, outputs, inner)
        for outputs, inner in ((2 * layer.inner, layer.hidden), (layer.hidden, layer.inner))
    )
    for which, name in enumerate(("gate-up", "down")):
        found: list[tuple[float, Tiles]] = []
        for m, o, k, stages, warps in product((16, 32, 64, 128), (64, 128, 256), (64, 128), (2, 3, 4), (4, 8)):
            tiles = replace(default[which], block_m=m, block_o=o, block_k=k, stages=stages, warps=warps)
            if stages * k * (m + o) * 2 > 220_000 or m * o // (warps * 32) > 128:
                continue
            pair = (tiles, default[1]) if which == 0 else (default[0], tiles)
            try:
                us = microseconds(
                    lambda number: experts_triton.expert_mlp(x, *weights[number], *chosen[number], True, pair)  # noqa: B023
                )
            except triton.runtime.errors.OutOfResources as refused:
                print("refused", tiles, str(refused)[:80], flush=True)
                continue
            found.append((us, tiles))
        for us, tiles in sorted(found, key=lambda item: item[0])[:5]:
            print(f"    {name}: {us:8.1f} us {tiles}", flush=True)


if __name__ == "__main__":
    main()
