"""Micro-benchmark of a layer's experts: route, gate-up, down, sum, for a rank's share of a model's shape.

Run on one GPU:  python3 -m tests.bench.experts [--shape 30b-a3b] [--rows 1 32 256] [--ranks 2]
Prints the times of routing, of making lists and of a layer, and with the bytes of the experts that were asked the
bandwidth.

    python3 -m tests.bench.experts --rows 32 256 --tiles 32 256 --compile-workers 13 --out FOLDER

tries other tiles of the grouped path for the rows after ``--tiles``: first every tile of gate-up beside the default of
down and the other way round, some milliseconds each; then the fastest of both together against the default, and the
first of them and the default in the other order of programs, in rounds that take turns. FOLDER gets
expert-tiles-SHAPE.json, tiles as the fields of expert_tiles.Tiles.

    python3 -m tests.bench.experts --shape mixtral-8x7b --rows 2 4 512 2048 8192 --kernels --out FOLDER

times the other kernels against the one for short lists in such rounds: pair by pair where rows are few, the one for
long lists, with down whole and in halves, where lists are long. FOLDER gets expert-kernels-SHAPE.json.

Knows: which tiles are worth a try. Does not know: which of them an engine runs (tiles.py).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from models.kernels.experts import grouped_tma, streamed
from models.kernels.experts.grouped import expert_mlp
from models.kernels.experts.route import pairs_by_expert
from models.kernels.experts.tiles import LongListTiles, Tiles, default_tiles, long_list_tiles, without_lists
from parallel.layers.weight import Weight
from tests.bench.expert_timing import DEVICE, LAYERS, Run, agree, in_turns, microseconds
from tests.gpu.expert_cases import SHAPES, Layer, share_of
from tests.models.kernels.nvidia_kernels import nvidia_kernels

SHARED_BYTES = 227 << 10  # of a multiprocessor
MOST_APART = 16  # rows for which pair by pair is worth a look
FINALISTS = 2  # of each product: all their pairs are compared

Pair = tuple[Tiles, Tiles]  # of gate-up and of down


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


def compile_all(workers: int, layer: Layer, rows: list[int]) -> None:
    """``compile_share`` in each of ``workers`` processes, which leave compiled kernels on disk."""
    begun, context = time.monotonic(), multiprocessing.get_context("spawn")
    processes = [context.Process(target=compile_share, args=(i, workers, layer, rows)) for i in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(f"compiled in {time.monotonic() - begun:.0f} s by {workers} processes", flush=True)


def compile_share(index: int, share: int, layer: Layer, rows: list[int]) -> None:
    """Every ``share``-th of what ``rows`` try, once, over lists that are empty: no program reads the weights."""
    no_expert = torch.full((16, layer.choices), -1, dtype=torch.int32, device=DEVICE)
    x, scores = layer.tokens(16), torch.zeros(16, layer.choices, device=DEVICE)
    empty = torch.empty(1, dtype=layer.dtype, device=DEVICE)
    up, down = (Weight.of(empty.expand(layer.held, *size)) for size in products(layer).values())
    given = partial(expert_mlp, x, up, down, scores, no_expert, True, all_experts=layer.experts)
    todo: dict[Any, Callable[[], Any]] = {}
    for count in rows:
        tried = every_pair(layer, count)
        for pair in [block_by_block(default_pair(layer, count)), *tried["gate-up"], *tried["down"]]:
            for name, tiles in zip(products(layer), pair, strict=True):
                todo.setdefault((name, tiles), partial(given, pair))
    for key in list(todo)[index::share]:
        try:
            todo[key]()
        except Exception as error:  # of the compiler or the launcher
            print("refused", key, str(error)[:100].replace("\n", " "), flush=True)
    torch.cuda.synchronize()


class TileBench:
    """``rows`` tokens before layers of experts, each of which chose its own."""

    def __init__(self, layer: Layer, weights: list[tuple[Weight, Weight]], chosen: list[tuple[Tensor, Tensor]]) -> None:
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
            name = "/".join(",".join(map(str, astuple(tiles))) for tiles in pair)
            print(f"    {one.us:8.1f} us, {one.ratio:.3f} ({one.least:.3f} to {one.most:.3f}): {name}", flush=True)
        finals = [{"pair": [astuple(one) for one in pair], **asdict(took)} for pair, took in found.items()]
        return {"rows": self._rows, "in_turns": finals}

    def kernels(self) -> dict[str, Any]:
        """Short lists, and what else there is for so many rows: pair by pair, long lists, with halves of down."""
        layer, rows = self._layer, self._rows
        mean = rows * layer.choices / layer.experts
        runs: dict[str, Run] = {"short lists": partial(self._run, default_pair(layer, rows))}
        if rows <= MOST_APART:
            runs["pair by pair"] = self._run_apart
        chosen = "pair by pair" if without_lists(rows, layer.choices, layer.experts) else "short lists"
        if (tiles := long_list_tiles(mean, layer.held, layer.hidden, layer.inner)) is not None:
            runs |= {f"long lists, down / {n}": partial(self._run_long, replace(tiles, split=n)) for n in (1, 2)}
            chosen = f"long lists, down / {tiles.split}"
        for name, run in runs.items():
            agree(f"{rows} rows: {name} differs from short lists", run, runs["short lists"])
        found = in_turns(runs)
        for name, one in found.items():
            mark = ", chosen" if name == chosen else ""
            print(
                f"    {one.us:8.1f} us, {one.ratio:.3f} ({one.least:.3f} to {one.most:.3f}): {name}{mark}", flush=True
            )
        return {"rows": rows, "chosen": chosen, "in_turns": {name: asdict(one) for name, one in found.items()}}

    def _run_apart(self, number: int) -> Tensor:
        return streamed.expert_mlp(self._x, *self._weights[number], *self._chosen[number], True)

    def _run_long(self, tiles: LongListTiles, number: int) -> Tensor:
        return grouped_tma.expert_mlp(self._x, *self._weights[number], *self._chosen[number], True, tiles)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192])
    parser.add_argument("--ranks", type=int, default=2)
    tried = parser.add_mutually_exclusive_group()
    tried.add_argument("--tiles", nargs="+", type=int, default=[], metavar="ROWS", help="try tiles for these rows")
    tried.add_argument("--kernels", action="store_true", help="time all kernels that there are for these rows")
    parser.add_argument("--compile-workers", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for what --tiles or --kernels finds")
    args = parser.parse_args()
    if (args.tiles or args.kernels) and args.out is None:
        parser.error("--out is needed with --tiles and --kernels: where the times go")
    layer = share_of(args.shape, args.ranks)
    if args.tiles and args.compile_workers:
        compile_all(args.compile_workers, layer, args.tiles)
    torch.manual_seed(0)
    kernels, weights = nvidia_kernels(DEVICE), [layer.weights() for _ in range(LAYERS)]
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
        lists_us = microseconds(lambda number: pairs_by_expert(chosen[number][1], layer.held, True)[0])  # noqa: B023
        layer_us = microseconds(
            lambda number: kernels.expert_mlp(x, *weights[number], *routed(number), all_experts=layer.experts)  # noqa: B023
        )
        moved = asked * expert_bytes / 1e6
        print(
            f"rows {rows:5d}: route {route_us:6.1f} us, lists {lists_us:5.1f} us, layer {layer_us:8.1f} us, "
            f"{asked:5.1f} experts, {moved:6.1f} MB, {moved / layer_us:5.2f} TB/s",
            flush=True,
        )
        bench = TileBench(layer, weights, chosen)
        if args.kernels:
            kind, result = "kernels", bench.kernels()
        elif rows in args.tiles:
            kind, result = "tiles", bench.sweep()
        else:
            continue
        found["rows"].append(result)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"expert-{kind}-{args.shape}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
