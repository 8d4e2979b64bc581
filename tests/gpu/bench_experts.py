"""Micro-benchmark of a layer's experts: route, gate-up, down, sum, for a rank's share of a model's shape.

Run on one GPU:  python3 -m tests.gpu.bench_experts [--shape 30b-a3b] [--rows 1 32 256] [--ranks 2]
Prints the time of a layer, the bytes of the experts that were asked, and both as bandwidth. Weights of several layers
rotate through more memory than the L2 holds.

    python3 -m tests.gpu.bench_experts --rows 32 256 --tiles 32 256 --compile-workers 13 --out FOLDER

tries other tiles of the grouped path for the rows after ``--tiles``: first every tile of gate-up beside the default of
down and the other way round, some milliseconds each; then the fastest of both together against the default, and the
first of them and the default in the other order of programs, in rounds that take turns. FOLDER gets
expert-tiles-SHAPE.json, tiles as the fields of expert_tiles.Tiles.

Knows: which tiles are worth a try. Does not know: which of them an engine runs (expert_tiles.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from models.kernels import autotune
from models.kernels.expert_tiles import Tiles, default_tiles
from models.kernels.experts_triton import expert_mlp
from models.kernels.hopper import HopperKernels
from tests.gpu.bench_kernels import DEVICE, compile_all, run_share
from tests.gpu.bench_tune import captured, replay_for
from tests.gpu.expert_cases import SHAPES, Layer, share_of

LAYERS = 6
SHARED_BYTES = 227 << 10  # of a multiprocessor
FINALISTS = 2  # of each product: all their pairs are compared
TOLERANCE = 0.02  # relative, of bfloat16 sums in another order
ROUNDS, SECONDS = 10, 0.02  # of a pair of tiles in a round

Pair = tuple[Tiles, Tiles]


def microseconds(run: Callable[[int], Tensor], replays: int = 30) -> float:
    """Of one layer: the median of graph replays over LAYERS layers."""
    return autotune.median_graph_us(partial(every_layer, run), DEVICE, replays) / LAYERS


def every_layer(run: Callable[[int], Tensor]) -> None:
    for layer in range(LAYERS):
        run(layer)


def products(layer: Layer) -> dict[str, tuple[int, int]]:
    """(outputs, inner) of each."""
    return {"gate-up": (2 * layer.inner, layer.hidden), "down": (layer.hidden, layer.inner)}


def default_pair(layer: Layer, rows: int) -> Pair:
    return default_tiles(rows * layer.choices / layer.experts, layer.hidden, layer.inner)


def candidates(layer: Layer, rows: int, outputs: int, inner: int) -> list[Tiles]:
    """Tiles of blocks that hold nearly every list of tokens, or of half as many; as many loads in flight as there is
    room for where a multiprocessor has one to four programs.
    """
    mean = rows * layer.choices / layer.experts
    fitting = min(128, max(8, triton.next_power_of_2(math.ceil(mean + 3 * math.sqrt(mean)))))
    half = max(8, fitting // 2)
    found: dict[Tiles, None] = {}
    for m, o, k in product((half, 2 * half), (64, 128, 256), (64, 128, 256)):
        for programs, warps in product((1, 2, 3, 4), (4, 8)):
            stages = min(6, inner // k, (SHARED_BYTES // programs - 1024) // (2 * k * (m + o)))
            sums, loads = m * o // (32 * warps), k * o // (32 * warps)  # a thread's
            if outputs % o or inner % k or stages < 2 or sums > 128 or not 32 <= loads <= 256:
                continue
            if (stages - 1) * k * o * 2 * programs < 48 << 10:  # too little in flight for the memory's latency
                continue
            found[Tiles(m, o, k, stages, warps)] = None
    return list(found)


def every_pair(layer: Layer, rows: int) -> dict[str, list[Pair]]:
    """What the first round times: by the product whose tiles are tried."""
    up, down = default_pair(layer, rows)
    tried = {name: candidates(layer, rows, *size) for name, size in products(layer).items()}
    return {"gate-up": [(one, down) for one in tried["gate-up"]], "down": [(up, one) for one in tried["down"]]}


def compile_share(index: int, share: int, layer: Layer, rows: list[int]) -> None:
    """Every ``share``-th of what ``rows`` try, once, over lists that are empty: no program reads the weights."""
    nobody = torch.full((16, layer.choices), -1, dtype=torch.int32, device=DEVICE)
    x, scores = layer.tokens(16), torch.zeros(16, layer.choices, device=DEVICE)
    empty = torch.empty(1, dtype=layer.dtype, device=DEVICE)
    up, down = (empty.expand(layer.held, *size) for size in products(layer).values())
    given = partial(expert_mlp, x, up, down, scores, nobody, True, all_experts=layer.experts)
    todo: dict[Any, Callable[[], Any]] = {}
    for count in rows:
        tried = every_pair(layer, count)
        for pair in [block_by_block(default_pair(layer, count)), *tried["gate-up"], *tried["down"]]:
            for name, tiles in zip(products(layer), pair, strict=True):
                todo.setdefault((name, tiles), partial(given, pair))
    run_share(index, share, todo)


class TileBench:
    """``rows`` tokens before layers of experts, each of which chose its own."""

    def __init__(self, layer: Layer, weights: list[tuple[Tensor, Tensor]], chosen: list[tuple[Tensor, Tensor]]) -> None:
        self._layer, self._weights, self._chosen = layer, weights, chosen
        self._rows = chosen[0][0].shape[0]
        self._x = layer.tokens(self._rows)

    def sweep(self) -> dict[str, Any]:
        begun = time.monotonic()
        ranked: dict[str, list[tuple[float, Pair]]] = {}
        for name, pairs in every_pair(self._layer, self._rows).items():
            timed = [(us, pair) for pair in pairs if (us := self._once(pair)) is not None]
            ranked[name] = sorted(timed, key=lambda one: one[0])
            print(f"  {name}, {len(timed)} of {len(pairs)} tiles, {time.monotonic() - begun:.0f} s:", flush=True)
            for us, pair in ranked[name][:5]:
                print(f"    {us:8.1f} us {pair[name == 'down']}", flush=True)
        ups, downs = ([pair[which] for _, pair in ranked[name][:FINALISTS]] for which, name in enumerate(ranked))
        finals = self._in_turns(list(product(ups, downs)))
        print(f"  in turns, {time.monotonic() - begun:.0f} s:", flush=True)
        for one in finals:
            print(f"    {one['us']:8.1f} us, {one['of_default']:.3f} of the default's: {one['pair']}", flush=True)
        first = {name: [(us, astuple(pair[name == "down"])) for us, pair in timed] for name, timed in ranked.items()}
        return {"rows": self._rows, "first": first, "in_turns": finals}

    def _run(self, pair: Pair, number: int) -> Tensor:
        given = (self._x, *self._weights[number], *self._chosen[number], True, pair)
        return expert_mlp(*given, all_experts=self._layer.experts)

    def _once(self, pair: Pair) -> float | None:
        try:
            return microseconds(partial(self._run, pair), replays=6)
        except Exception as error:  # whatever a compiler or a launcher refuses with means the same here: not this one
            print("refused", pair, str(error)[:80].replace("\n", " "), flush=True)
            return None

    def _in_turns(self, pairs: list[Pair]) -> list[dict[str, Any]]:
        """The default, it in the other order of programs, ``pairs``, and the likeliest of them in the other order;
        times are medians of rounds, shares are medians of what each round says.
        """
        default = default_pair(self._layer, self._rows)
        tried = [default, block_by_block(default), *pairs, block_by_block(pairs[0])]
        expected = self._run(default, 0).float()
        for pair in tried:
            error = float((self._run(pair, 0).float() - expected).norm() / expected.norm())
            if not error < TOLERANCE:
                raise SystemExit(f"the result of {pair} differs from the default's by {error:.3f} of its norm")
        graphs = {pair: captured(partial(every_layer, partial(self._run, pair))) for pair in tried}
        times: dict[Pair, list[float]] = {pair: [] for pair in graphs}
        for turn in range(ROUNDS):
            for pair in list(graphs)[:: -1 if turn % 2 else 1]:  # there and back: what drifts hits all of them alike
                times[pair].append(replay_for(graphs[pair], SECONDS) / LAYERS)
        return [
            {
                "pair": [astuple(one) for one in pair],
                "us": statistics.median(took),
                "of_default": statistics.median(a / b for a, b in zip(took, times[default], strict=True)),
            }
            for pair, took in times.items()
        ]


def block_by_block(pair: Pair) -> Pair:
    """In the other order of programs: a block passes all tiles before the next block of its expert begins."""
    return replace(pair[0], group=1), replace(pair[1], group=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tiles", nargs="+", type=int, default=[], metavar="ROWS", help="try tiles for these rows")
    parser.add_argument("--compile-workers", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for what --tiles finds")
    args = parser.parse_args()
    if args.tiles and args.out is None:
        parser.error("--out is needed with --tiles: where the times go")
    layer = share_of(args.shape, args.ranks)
    if args.tiles and args.compile_workers:
        compile_all(compile_share, (layer, args.tiles), args.compile_workers)
    torch.manual_seed(0)
    kernels, weights = HopperKernels(DEVICE), [layer.weights() for _ in range(LAYERS)]
    expert_bytes = 2 * 3 * layer.hidden * layer.inner
    found: dict[str, Any] = {"shape": args.shape, "ranks": args.ranks, "gpu": torch.cuda.get_device_name(), "rows": []}
    for rows in sorted({*args.rows, *args.tiles}):
        x, logits, local = layer.tokens(rows), [layer.logits(rows) for _ in range(LAYERS)], layer.local()
        real = torch.ones(rows, dtype=torch.bool, device=DEVICE)

        def routed(number: int) -> tuple[Tensor, Tensor]:
            return kernels.route_top_k(logits[number], layer.choices, True, local, real)  # noqa: B023

        chosen = [routed(number) for number in range(LAYERS)]
        asked = sum(len(set(local_TC[local_TC >= 0].tolist())) for _, local_TC in chosen) / LAYERS
        route_us = microseconds(lambda number: routed(number)[0])
        layer_us = microseconds(
            lambda number: kernels.expert_mlp(x, *weights[number], *routed(number), all_experts=layer.experts)  # noqa: B023
        )
        moved = asked * expert_bytes / 1e6
        print(
            f"rows {rows:5d}: route {route_us:6.1f} us, layer {layer_us:8.1f} us, {asked:5.1f} experts, "
            f"{moved:6.1f} MB, {moved / layer_us:5.2f} TB/s",
            flush=True,
        )
        if rows in args.tiles:
            found["rows"].append(TileBench(layer, weights, chosen).sweep())
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"expert-tiles-{args.shape}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
