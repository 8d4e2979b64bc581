"""Micro-benchmark of decode attention over rows of different lengths: the work list against splits by bucket alone.

Run on one GPU:  python3 -m tests.bench.ragged_attention --out FOLDER --compile-workers 13 [--only "one head" "16 x"]
For every case (model, rows, lengths): a graph of 36 layers' attention, norm, rotation and cache write included, by the
kernels' choice without a list, by their choice with one, and by other rules and launch shapes. All graphs of a case are
replayed in turns. FOLDER/ragged-attention.md has a line a case, and which constants win; ragged-attention.json has
every time. A candidate whose output differs from that without a list is named and left out.

--in-layer puts a layer's o and qkv products between two launches of attention, and takes the time of a graph without
attention away: in a step nothing hides how attention begins and ends. --grid: all combinations of few forms, longest
splits and programs over a list, instead of variations of one number each; --grid-forms, --grid-longest and
--grid-programs make it smaller.

Knows: the loads that decode attention has to serve. Does not know: the rest of a layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.inputs import DecodeAttention
from models.kernels.attention import decode, decode_balanced, decode_balanced_tma, decode_choice, decode_work
from models.kernels.attention.decode_work import SplitRule
from models.kernels.interface import Rotation
from models.kernels.nvidia import NvidiaKernels
from tests.bench.dense_shapes import BF16
from tests.bench.kernels import compile_all, run_share

DEVICE = torch.device("cuda", 0)
PAGE, DIM = 64, 128
LAYERS = 36
USUAL, LONG = 40960, 131072  # the most tokens of a row
COLD_BYTES = 512 << 20  # of keys and values until the first is read again; several times the L2
ROUNDS = 3
_MOST_OFF = 5e-3  # of the norm; two forms differ by 1e-3 in bfloat16
HEADS = {"8B": (32, 8), "0.6B": (16, 8), "30B-A3B-tp2": (16, 2), "one head": (4, 1)}
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
LONGEST = (256, 512, 1024, 2048)
PROGRAMS = (16, 32)
GRID_LONGEST = (128, 192, 256, 384, 512, 768, 1024)
GRID_PROGRAMS = (4, 8, 16, 32)
GRID_VARIANTS = ((True, (32, 3, 1)), (True, (32, 3, 2)), (False, (32, 5, 2)))  # TMA, (keys a block, stages, warps)
MANY_LENGTHS = 8, 16, 24, 32  # rows of 8B with longer contexts, too: there the most depends on them
FEWEST_PAIRS = 2  # of row and kv head, which are less than the multiprocessors in most splits
FEWEST_VARIANTS = ((64, 3, 4), (64, 5, 4), (64, 5, 2), (32, 5, 2), (128, 3, 4), (128, 3, 8))

Launch = Callable[[Tensor, Tensor], Tensor]  # packed qkv, a layer's keys and values -> what is attended


class Case(NamedTuple):
    """``most``: tokens that a row's pages have room for. Rows of length 0 are absent, as in mixed steps."""

    model: str
    name: str
    lengths: tuple[int, ...]
    most: int = USUAL

    @property
    def bytes_read(self) -> int:
        return 4 * sum(self.lengths) * HEADS[self.model][1] * DIM

    @property
    def pages(self) -> int:
        return sum(-(-length // PAGE) for length in self.lengths)


class Grid(NamedTuple):
    """``variants``: (by TMA, (keys a block, stages, warps))."""

    variants: tuple[tuple[bool, tuple[int, int, int]], ...] = GRID_VARIANTS
    longest: tuple[int, ...] = GRID_LONGEST
    programs: tuple[int, ...] = GRID_PROGRAMS


class Candidate(NamedTuple):
    """``blocks``: keys a block, stages, warps. Without ``rule``: every row is split alike, by the bucket alone."""

    rule: SplitRule | None = None
    each: int = 0  # programs a multiprocessor; 0 where every split that a row could have is one, without a list
    tma: bool = False
    blocks: tuple[int, int, int] = (0, 0, 0)

    def __str__(self) -> str:
        if self.rule is None:
            return "alike"
        how = "tma" if self.tma else "pointers"
        rule = f"<= {self.rule.longest} keys, >= {self.rule.fewest} and <= {self.rule.most} splits"
        programs = f"{self.each} programs" if self.each else "no list"
        return f"{rule}; {programs}; {how} {','.join(map(str, self.blocks))}"


def lognormal(rows: int, seed: int = 6) -> tuple[int, ...]:
    """Chat-like: a prompt and half of its answer, both lognormal."""
    pick = random.Random(seed)

    def one(median: int, sigma: float, most: int) -> int:
        return max(8, min(most, int(pick.lognormvariate(math.log(median), sigma))))

    return tuple(one(220, 1.0, 2000) + one(180, 0.9, 1000) // 2 for _ in range(rows))


def cases(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """``quick``: the ones that decide. ``only``: those whose model or name has one of these words in it."""
    found = _cases(quick)
    return [case for case in found if any(word in f"{case.model} {case.name}" for word in only)] if only else found


def _cases(quick: bool) -> list[Case]:
    found = [
        Case("8B", "[131072] + 63 x [1024]", (LONG, *[1024] * 63), LONG),
        Case("8B", "64 x 3055, pages for 131072", (3055,) * 64, LONG),
        Case("8B", "8 x 32768", (32768,) * 8),
        *(Case("one head", f"1 x {length}, pages for {LONG}", (length,), LONG) for length in (640, 4096, 16384, LONG)),
        Case("8B", "[40000] + 255 x [450]", (40000, *[450] * 255)),
        *(
            Case("8B", f"{n} x lognormal, {256 - n} absent", lognormal(n) + (0,) * (256 - n))
            for n in (16, 64, 128, 255)
        ),
    ]
    for rows in (1, 16, 64) if quick else BUCKETS:
        for length in (512, 640, 1024, 3055, *((1536, 8192) if rows in MANY_LENGTHS else ())):
            found.append(Case("8B", f"{rows} x {length}", (length,) * rows))
        found.append(Case("8B", f"{rows} x lognormal", lognormal(rows)))
    for model in () if quick else ("0.6B", "30B-A3B-tp2"):
        for rows in (1, 16, 64, 256):
            found += [Case(model, f"{rows} x {length}", (length,) * rows) for length in (1024, 3055)]
            found.append(Case(model, f"{rows} x lognormal", lognormal(rows)))
    return found


class Bench:
    """A case's rows over ``copies`` layers' caches, which lie in ``pool``; as many as the L2 does not hold."""

    def __init__(
        self, kernels: NvidiaKernels, case: Case, pool: Tensor, copies: int | None = None, *, in_layer: bool = False
    ) -> None:
        self.kernels, self.case = kernels, case
        self.heads, self.kv_heads = HEADS[case.model]
        width, packed = self.heads * DIM, (self.heads + 2 * self.kv_heads) * DIM
        layers = -(-COLD_BYTES // (2 * width * (width + packed))) if in_layer else 0
        self.products = [tuple(self._weight(outputs, width) for outputs in (width, packed)) for _ in range(layers)]
        shape = (2, case.pages + 1, PAGE, self.kv_heads, DIM)
        size, copies = math.prod(shape), copies or layers_of(case)
        self.layers = [pool[i * size : (i + 1) * size].view(shape) for i in range(copies)]
        rows = len(case.lengths)
        table = torch.zeros(rows, -(-(case.most + 1) // PAGE), dtype=torch.int32)
        order, begin = torch.randperm(case.pages, generator=torch.Generator().manual_seed(0)).int() + 1, 0
        for row, length in enumerate(case.lengths):
            pages = -(-length // PAGE)
            table[row, :pages] = order[begin : begin + pages]
            begin += pages
        lengths = torch.tensor(case.lengths, dtype=torch.int32)
        positions = (lengths.long() - 1).clamp(min=0)
        slots = table.gather(1, (positions // PAGE)[:, None])[:, 0].long() * PAGE + positions % PAGE
        self.norm = torch.ones(width, dtype=BF16, device=DEVICE)
        norm = self.norm[:DIM]
        angles = torch.ones(case.most + 1, DIM, device=DEVICE)
        self.rotation = Rotation(norm, norm, 1e-6, angles, positions.to(DEVICE), slots.to(DEVICE))
        self.live = torch.tensor([row for row, length in enumerate(case.lengths) if length], device=DEVICE)
        skip, most = len(self.live) < rows, table.shape[1] * PAGE
        self.inputs = DecodeAttention(table.to(DEVICE), lengths.to(DEVICE), 1, most, skip_empty=skip)
        self.qkv = torch.randn(rows, (self.heads + 2 * self.kv_heads) * DIM, dtype=BF16, device=DEVICE)

    @staticmethod
    def _weight(outputs: int, inner: int) -> Tensor:
        return torch.randn(outputs, inner, dtype=BF16, device=DEVICE).mul_(inner**-0.5)

    def usual(self) -> Candidate:
        """What the kernels choose."""
        rule = self.kernels._decode.rule(self.inputs, self.heads, self.layers[0])
        tma, blocks = self.kernels._decode.variant(self.inputs, self.heads, self.layers[0])
        if self.kernels._decode.without_list(self.inputs, self.heads, self.layers[0]):
            return Candidate(rule, 0, tma, blocks)
        return Candidate(rule, decode_choice.programs_each(self.inputs, self.kv_heads, tma), tma, blocks)

    @property
    def few_listed(self) -> bool:
        """Whether a row over a list has at most _MOST_OF_FEW splits."""
        pairs = len(self.case.lengths) * self.kv_heads
        listed = not self.kernels._decode.without_list(self.inputs, self.heads, self.layers[0])
        return listed and pairs < decode_choice._FEW_LISTED

    def with_longest(self, one: Candidate, longest: int, fewest: int | None = None) -> Candidate:
        assert one.rule is not None
        rule = decode_work.choose_rule(
            len(self.case.lengths),
            self.kv_heads,
            self.heads // self.kv_heads,
            DIM,
            self.inputs.max_kv_length,
            block=one.blocks[0],
            longest=longest,
            fewest=fewest or one.rule.fewest,
            most=decode_choice._MOST_OF_FEW if self.few_listed else decode_work.MOST_SPLITS,
            room=self.kernels._attention_partial.numel(),
        )
        return one._replace(rule=rule)

    def grid(self, grid: Grid) -> list[Candidate]:
        """No list, the kernels' choice, then all combinations of ``grid``."""
        usual = self.usual()
        distinct: dict[object, Candidate] = {self._key(usual): usual}
        for (tma, blocks), longest, each in product(*grid):
            one = self.with_longest(Candidate(usual.rule, each, tma, blocks), longest, fewest=1)
            distinct.setdefault(self._key(one), one)
        return [Candidate(), *distinct.values()]

    def candidates(self, all_of_them: bool) -> list[Candidate]:
        """No list, the kernels' choice, then variations of one number each that make a difference to these rows."""
        usual = self.usual()
        assert usual.rule is not None
        pairs = len(self.case.lengths) * self.kv_heads
        found = [self.with_longest(usual, longest) for longest in LONGEST]
        found += [usual._replace(each=each) for each in (*PROGRAMS, decode_choice._PROGRAMS_EACH)]
        if pairs <= 256:
            found += [self.with_longest(usual._replace(each=0, tma=False), longest) for longest in (256, 512, 1024)]
        found += [usual._replace(rule=dataclasses.replace(usual.rule, fewest=fewest)) for fewest in self._fewest(usual)]
        if pairs <= FEWEST_PAIRS:
            for blocks, longest in product(FEWEST_VARIANTS, LONGEST):
                found.append(self.with_longest(usual._replace(each=0, tma=False, blocks=blocks), longest))
        if all_of_them and self.case.model == "8B":
            variants: list[tuple[bool, tuple[int, int, int]]] = [(False, (64, 3, 4)), (False, (32, 5, 2))]
            if pairs >= 256:
                variants += [(True, (32, 3, 1)), (True, (32, 3, 2))]
            else:
                variants += [(False, (64, 5, 4))]
            for tma, blocks in variants:
                one = usual._replace(tma=tma, blocks=blocks)
                found.append(self.with_longest(one, usual.rule.longest))
        distinct: dict[object, Candidate] = {self._key(usual): usual}
        for one in found:
            distinct.setdefault(self._key(one), one)
        return [Candidate(), *distinct.values()]

    def _fewest(self, usual: Candidate) -> list[int]:
        assert usual.rule is not None
        return [n for n in (usual.rule.fewest // 2, usual.rule.fewest * 2) if 1 <= n <= usual.rule.most]

    def _key(self, one: Candidate) -> object:
        """Equal for candidates that launch the same work."""
        assert one.rule is not None
        return one.tma, one.blocks, self.programs(one), tuple(splits_of(one.rule, n) for n in self.case.lengths)

    def programs(self, one: Candidate) -> int:
        assert one.rule is not None
        if not one.each:
            return 0
        return decode_choice.programs_of(
            self.inputs, self.kv_heads, one.rule, self.kernels.traits.multiprocessors, one.each
        )

    def launch(self, one: Candidate) -> Launch:
        """One layer's attention over its cache. Makes the list."""
        kernels, scale = self.kernels, DIM**-0.5
        if one.rule is None and self.usual().tma:
            return lambda qkv, kv: kernels.rope_cache_attend(qkv, self.heads, kv, self.rotation, self.inputs, scale)
        if one.rule is None or not one.each:
            return self._without_list(one, scale)
        attend = decode_balanced_tma.attend_list_tma if one.tma else decode_balanced.attend_list
        work = decode_work.plan_decode(self.inputs, one.rule, kernels.pdl)
        torch.cuda.synchronize()  # attention may read the list before its predecessor ends
        block_n, stages, warps = one.blocks
        return lambda qkv, kv: attend(
            qkv,
            self.heads,
            kv,
            self.inputs,
            work,
            scale,
            kernels._attention_partial,
            kernels._attention_counters,
            rotation=self.rotation,
            block_n=block_n,
            stages=stages,
            warps=warps,
            programs=self.programs(one),
            pdl=kernels.pdl,
        )

    def _without_list(self, one: Candidate, scale: float) -> Launch:
        kernels, (block_n, stages, warps) = self.kernels, one.blocks if one.rule else self.usual().blocks
        rule = one.rule
        if rule is None:
            rows, most = len(self.case.lengths), self.inputs.max_kv_length
            splits = decode_work.choose_splits(rows, self.kv_heads, most, block_n, kernels.traits.multiprocessors)
            rule = decode_work.even_rule(block_n, splits)
        return lambda qkv, kv: decode.decode_attention(
            qkv,
            self.heads,
            kv,
            self.inputs,
            rule,
            scale,
            kernels._attention_partial,
            kernels._attention_counters,
            rotation=self.rotation,
            stages=stages,
            warps=warps,
            pdl=kernels.pdl,
        )

    def once(self, launch: Launch) -> Tensor:
        return launch(self.qkv, self.layers[0])

    def all_layers(self, launch: Launch | None) -> None:
        """``launch``: None leaves attention out."""
        qkv, attended = self.qkv, self.qkv[:, : self.heads * DIM].contiguous()
        residual, norm = attended, self.norm
        for number in range(LAYERS):
            if self.products:
                o, packed = self.products[number % len(self.products)]
                added = self.kernels.linear(attended, o)
                qkv, residual = self.kernels.add_norm_linear(added, residual, norm, 1e-6, packed)
            if launch is not None:
                attended = launch(qkv, self.layers[number % len(self.layers)]).flatten(1)


def splits_of(rule: SplitRule, length: int) -> int:
    blocks = -(-length // rule.block)
    wanted = min(max(rule.fewest, -(-length // rule.longest)), rule.most)
    return -(-blocks // max(1, -(-blocks // wanted)))


def layers_of(case: Case) -> int:
    return max(1, min(LAYERS, -(-COLD_BYTES // case.bytes_read)))


def pool_size(chosen: Sequence[Case], copies: int | None = None) -> int:
    """Elements that the caches of any of the cases need."""
    return max(
        (copies or layers_of(case)) * 2 * (case.pages + 1) * PAGE * HEADS[case.model][1] * DIM for case in chosen
    )


def graph_of(launch: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream: Any = torch.cuda.Stream
    side = stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        launch()
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        launch()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Mean microseconds of a replay."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize(DEVICE)
    return float(start.elapsed_time(end)) * 1e3 / replays


def objection(found: Tensor, expected: Tensor, counters: Tensor) -> str | None:
    """Why a candidate is not to be timed."""
    off = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not off < _MOST_OFF:
        return f"its output differs by {off:.2e} of its norm"
    return "it left its counters set" if counters.any() else None


def measure(
    bench: Bench, candidates: Sequence[Candidate]
) -> tuple[dict[Candidate, float], dict[Candidate, str], float]:
    """(microseconds of a layer's attention, why others were left out, microseconds of what surrounds attention)"""
    kernels, graphs, left_out = bench.kernels, dict[Candidate, torch.cuda.CUDAGraph](), dict[Candidate, str]()
    expected = bench.once(bench.launch(Candidate()))[bench.live]
    launches = []  # a captured launch reads the list that its function holds
    for one in candidates:
        try:
            launches.append(launch := bench.launch(one))
            why = objection(bench.once(launch)[bench.live], expected, kernels._attention_counters)
            if why is None:
                graphs[one] = graph_of(partial(bench.all_layers, launch))
        except Exception as error:  # the compiler's and the launcher's have no common class
            why = f"refused: {str(error)[:100]}".replace("\n", " ")
        if why is not None:
            left_out[one] = why
            kernels._attention_counters.zero_()
    took: dict[Candidate, list[float]] = {one: [] for one in graphs}
    once = replay_us(graphs[Candidate()], 2)
    replays = max(1, min(10, int(12_000 / once)))
    rest, rests = graph_of(partial(bench.all_layers, None)) if bench.products else None, [0.0]
    for _ in range(ROUNDS):
        for one, graph in graphs.items():
            took[one].append(replay_us(graph, replays))
        if rest is not None:
            rests.append(replay_us(rest, 3 * replays))
    beside = statistics.median(rests[1:] or rests) / LAYERS
    return {one: statistics.median(us) / LAYERS - beside for one, us in took.items()}, left_out, beside


def plan_us(bench: Bench) -> float:
    """Of making the list once, launched again and again without a pause."""
    rule = bench.usual().rule
    assert rule is not None

    def plans() -> None:
        for _ in range(LAYERS):
            decode_work.plan_decode(bench.inputs, rule, bench.kernels.pdl)

    return replay_us(graph_of(plans), 10) / LAYERS


def line(case: Case, us: dict[Candidate, float], usual: Candidate, plan: float) -> str:
    before, now = us[Candidate()], us.get(usual, math.nan)
    best = min((one for one in us if one.rule is not None), key=lambda one: us[one])
    rate = case.bytes_read / 1e6
    return (
        f"| {case.model} | {case.name} | {before:.1f} ({rate / before:.2f}) | {now:.1f} ({rate / now:.2f}) "
        f"| {now / before:.3f} | {us[best]:.1f} ({us[best] / before:.3f}) | {best} | {plan:.1f} |"
    )


HEADER = (
    "| model | rows | alike: us (TB/s) | ours: us (TB/s) | ratio | best: us (ratio) | best is | plan us |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |"
)


def summary(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Of every variation of one number: its mean time relative to the kernels' choice, by number of pairs."""
    groups: dict[tuple[str, str], list[float]] = {}
    for case in found:
        chosen = [one for one in case["candidates"] if one["usual"]]
        for usual, one in product(chosen, case["candidates"]):
            for name in ("longest", "each", "fewest", "form"):
                others = [key for key in ("longest", "each", "fewest", "form") if key != name]
                if one["form"] and all(one[key] == usual[key] for key in others):
                    key = (f"{case['pairs']:5} pairs, {case['kind']}", f"{name} {one[name]}")
                    groups.setdefault(key, []).append(one["us"] / usual["us"])
    yield "\n| pairs of row and kv head | variation | time / that of the choice |\n| --- | --- | ---: |"
    for (pairs, name), ratios in sorted(groups.items()):
        yield f"| {pairs} | {name} | {statistics.fmean(ratios):.3f} |"


def as_dict(case: Case, us: dict[Candidate, float], left_out: dict[Candidate, str], usual: Candidate) -> dict[str, Any]:
    rows = len(case.lengths)
    return {
        "model": case.model,
        "case": case.name,
        "rows": rows,
        "pairs": rows * HEADS[case.model][1],
        "kind": "uniform" if len(set(case.lengths)) == 1 else "ragged",
        "bytes": case.bytes_read,
        "no_list_us": us.get(Candidate()),
        "candidates": [
            {
                "usual": one == usual,
                "us": took,
                "tb_per_s": case.bytes_read / took / 1e6,
                "longest": one.rule.longest,
                "fewest": one.rule.fewest,
                "most": one.rule.most,
                "each": one.each,
                "form": f"{'tma' if one.tma else 'pointers'} {one.blocks}",
            }
            for one, took in sorted(us.items(), key=lambda entry: entry[1])
            if one.rule is not None
        ],
        "left_out": {str(one): why for one, why in left_out.items()},
    }


def compile_share(index: int, share: int, quick: bool, only: Sequence[str], grid: Grid | None) -> None:
    """Run every ``share``-th launch once, so that Triton's cache on disk holds it."""
    kernels = NvidiaKernels(DEVICE)
    todo: dict[Any, Callable[[], Any]] = {}
    for case in cases(quick, only):
        heads, kv_heads = HEADS[case.model]
        shapes = torch.empty(pool_size([case]), dtype=BF16, device="meta")  # enough to choose candidates by
        bench = Bench(kernels, case, shapes)
        for one in bench.candidates(not quick) if grid is None else bench.grid(grid):
            # Of a list, only the form is compiled in; without, the number of splits, too.
            form = (one.tma, one.blocks) if one.rule is not None else ("no list", len(case.lengths), case.most)
            small = case._replace(lengths=(1,) * len(case.lengths))
            todo.setdefault((heads // kv_heads, kv_heads == 1, form), partial(_once, kernels, small, one))
    run_share(index, share, todo)


def _once(kernels: NvidiaKernels, case: Case, one: Candidate) -> None:
    bench = Bench(kernels, case, torch.zeros(pool_size([case], 1), dtype=BF16, device=DEVICE), copies=1)
    bench.once(bench.launch(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="three buckets of 8B and the ragged extremes")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases whose model or name has it")
    parser.add_argument("--in-layer", action="store_true", help="between products, as in a step")
    parser.add_argument("--grid", action="store_true", help="all combinations, instead of one number each")
    parser.add_argument("--grid-forms", type=int, default=len(GRID_VARIANTS), help="only the first of them: 2 is TMA")
    parser.add_argument("--grid-longest", type=int, nargs="+", default=GRID_LONGEST, metavar="KEYS")
    parser.add_argument("--grid-programs", type=int, nargs="+", default=GRID_PROGRAMS, metavar="EACH")
    parser.add_argument("--compile-workers", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    grid = None
    if args.grid:
        grid = Grid(GRID_VARIANTS[: args.grid_forms], tuple(args.grid_longest), tuple(args.grid_programs))
    if args.compile_workers:
        compile_all(compile_share, (args.quick, args.only, grid), args.compile_workers)
    torch.manual_seed(0)
    kernels, chosen, found = NvidiaKernels(DEVICE), cases(args.quick, args.only), []
    pool = torch.empty(pool_size(chosen), dtype=BF16, device=DEVICE).normal_()
    lines = [HEADER]
    print(HEADER, flush=True)
    for case in chosen:
        bench = Bench(kernels, case, pool, in_layer=args.in_layer)
        us, left_out, beside = measure(bench, bench.candidates(not args.quick) if grid is None else bench.grid(grid))
        lines.append(line(case, us, bench.usual(), plan_us(bench)))
        print(lines[-1], flush=True)
        lines += [f"\nleft out {one}: {why}\n" for one, why in left_out.items()]
        found.append(as_dict(case, us, left_out, bench.usual()) | {"beside_us": beside})
        (args.out / "ragged-attention.json").write_text(json.dumps(found, indent=1))
        (args.out / "ragged-attention.md").write_text("\n".join(lines) + "\n")
    lines += summary(found)
    (args.out / "ragged-attention.md").write_text("\n".join(lines) + "\n")
    print("\n".join(summary(found)), flush=True)
    print(f"-- in all {time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
