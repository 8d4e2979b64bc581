"""Micro-benchmark of a layer's experts: route, gate-up, down, sum, for a rank's share of a model's shape.

Run on one GPU:  python3 -m tests.gpu.bench_experts [--shape 30b-a3b] [--rows 1 32 256] [--ranks 2]
Prints the time of a layer, the bytes of the experts that were asked, and both as bandwidth.

    python3 -m tests.gpu.bench_experts --rows 32 256 --tiles 32 256 --compile-workers 13 --out FOLDER

tries other tiles of the grouped path for the rows after ``--tiles``: first every tile of gate-up beside the default of
down and the other way round, some milliseconds each; then the fastest of both together against the default, and the
first of them and the default in the other order of programs, in rounds that take turns. FOLDER gets
expert-tiles-SHAPE.json, tiles as the fields of expert_tiles.Tiles.

    python3 -m tests.gpu.bench_experts --rows 8 32 --pairs 16,128,128,4,4,1/16,128,128,4,4,1 --out FOLDER

times the default and the pairs after ``--pairs`` in such rounds at each number of rows, without a sweep. A pair is the
fields of Tiles for gate-up and, behind the slash, for down. FOLDER gets expert-pairs-SHAPE.json.

Knows: which tiles are worth a try. Does not know: which of them an engine runs (expert_tiles.py).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from models.kernels.expert_tiles import Tiles, default_tiles, largest_power
from models.kernels.experts_triton import expert_mlp
from models.kernels.hopper import HopperKernels
from tests.gpu.bench_kernels import DEVICE, compile_all, run_share
from tests.gpu.expert_cases import SHAPES, Layer, share_of
from tests.gpu.expert_timing import LAYERS, agree, in_turns, microseconds

SHARED_BYTES = 227 << 10  # of a multiprocessor
FINALISTS = 2  # of each product: all their pairs are compared
SUCH_AS = "16,64,128,3,4,8"  # tiles in a pair that is named

Pair = tuple[Tiles, Tiles]


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
        pairs, default = list(product(ups, downs)), default_pair(self._layer, self._rows)
        finals = self.in_turns([block_by_block(default), *pairs, block_by_block(pairs[0])])
        first = {name: [(us, astuple(pair[name == "down"])) for us, pair in timed] for name, timed in ranked.items()}
        return {"first": first, **finals}

    def in_turns(self, pairs: list[Pair]) -> dict[str, Any]:
        """The default and ``pairs``."""
        begun, default = time.monotonic(), default_pair(self._layer, self._rows)
        runs = {pair: partial(self._run, pair) for pair in [default, *pairs]}
        for pair, run in runs.items():
            agree(f"{self._rows} rows: the result of {pair} differs from the default's", run, runs[default])
        found = in_turns(runs)
        print(f"  in turns, {time.monotonic() - begun:.0f} s, and as shares of the default's:", flush=True)
        for pair, one in found.items():
            print(
                f"    {one.us:8.1f} us, {one.ratio:.3f} ({one.least:.3f} to {one.most:.3f}): {named(pair)}", flush=True
            )
        finals = [{"pair": [astuple(one) for one in pair], **asdict(took)} for pair, took in found.items()]
        return {"rows": self._rows, "in_turns": finals}

    def _run(self, pair: Pair, number: int) -> Tensor:
        given = (self._x, *self._weights[number], *self._chosen[number], True, pair)
        return expert_mlp(*given, all_experts=self._layer.experts)

    def _once(self, pair: Pair) -> float | None:
        try:
            return microseconds(partial(self._run, pair), replays=6)
        except Exception as error:  # whatever a compiler or a launcher refuses with means the same here: not this one
            print("refused", pair, str(error)[:80].replace("\n", " "), flush=True)
            return None


def block_by_block(pair: Pair) -> Pair:
    """In the other order of programs: a block passes all tiles before the next block of its expert begins."""
    return replace(pair[0], group=1), replace(pair[1], group=1)


def named(pair: Pair) -> str:
    """As --pairs takes it."""
    return "/".join(",".join(map(str, astuple(tiles))) for tiles in pair)


def pair_of(text: str, layer: Layer) -> Pair:
    """What ``named`` made of it. Raises ValueError for what is no pair of tiles, or not one for ``layer``."""
    words = text.split("/")
    if len(words) != 2:
        raise ValueError(f"{text!r} is no pair: type tiles of gate-up, a slash, tiles of down, as {SUCH_AS}/{SUCH_AS}")
    gate_up, down = (
        _tiles_of(f"{name} in {text!r}", word, *size)
        for word, (name, size) in zip(words, products(layer).items(), strict=True)
    )
    return gate_up, down


def _tiles_of(where: str, text: str, outputs: int, inner: int) -> Tiles:
    names, words = [field.name for field in fields(Tiles)], text.split(",")
    if len(words) != len(names) or not all(word.isdecimal() for word in words):
        raise ValueError(f"{where}: {text!r} is not {','.join(names)}: type {len(names)} whole numbers as {SUCH_AS}")
    tiles = Tiles(*map(int, words))
    powers = {"block_m": (8, 256), "block_o": (16, largest_power(outputs)), "block_k": (16, largest_power(inner))}
    for name, (least, most) in {**powers, "warps": (1, 16)}.items():
        number = getattr(tiles, name)
        if not least <= number <= most or number != largest_power(number):
            raise ValueError(f"{where}: {name} is {number}: type a power of two from {least} to {most}")
    if 0 in (tiles.stages, tiles.group):
        raise ValueError(f"{where}: {text!r}: stages and group are at least 1 each: type them as in {SUCH_AS}")
    return tiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192])
    parser.add_argument("--ranks", type=int, default=2)
    tried = parser.add_mutually_exclusive_group()
    tried.add_argument("--tiles", nargs="+", type=int, default=[], metavar="ROWS", help="try tiles for these rows")
    tried.add_argument("--pairs", nargs="+", default=[], metavar="PAIR", help=f"try these, as {SUCH_AS}/{SUCH_AS}")
    parser.add_argument("--compile-workers", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for what --tiles or --pairs finds")
    args = parser.parse_args()
    if (args.tiles or args.pairs) and args.out is None:
        parser.error("--out is needed with --tiles and with --pairs: where the times go")
    layer = share_of(args.shape, args.ranks)
    try:
        pairs = [pair_of(text, layer) for text in args.pairs]
    except ValueError as error:
        parser.error(f"--pairs: {error}")
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
        if rows in args.tiles or pairs:
            bench = TileBench(layer, weights, chosen)
            found["rows"].append(bench.in_turns(pairs) if pairs else bench.sweep())
            args.out.mkdir(parents=True, exist_ok=True)
            file = args.out / f"expert-{'pairs' if pairs else 'tiles'}-{args.shape}.json"
            file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
