"""Micro-benchmark of decode attention where it really runs: between the products of a layer, which hide nothing of it.

Run on one GPU:  python3 -m tests.bench.attention --out FOLDER [--models 8B ...] [--rows 128 ...] [--tokens 520 ...]
A graph of several layers: product with the o-projection, product with the qkv-projection, then norm, rotation, cache
write and attention in one launch; and the same graph without the last. The difference is attention's share. Layers have
keys, values and weights of their own, several times what the L2 holds. A candidate whose output differs from that of
the current choice is named and left out. One table a model and number of rows; FOLDER/attention-in-layer.json has all.

Knows: how a layer surrounds its attention. Does not know: which candidates there are (attention_candidates.py), or
attention alone (bench/kernels.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.kernels.matmul import autotune
from models.kernels.nvidia import NvidiaKernels
from tests.bench.attention_candidates import Attention, Candidate, candidates, current_choice
from tests.bench.dense_shapes import BF16, MODELS, Dense
from tests.bench.kernels import (
    DEVICE,
    MOST,
    PAGE,
    AttentionBench,
    compile_all,
    run_attention,
    run_share,
)

L2_BYTES = 60 << 20
_MOST_OFF = 5e-3  # of the norm; two forms differ by 1e-3 in bfloat16
ROUNDS, REPLAYS = 3, 20  # every candidate once a round, so that a clock that drifts meets all of them
ROWS = (8, 32, 64, 128, 256)
TOKENS = (520, 640, 760)
SHAPES = {
    "8B": MODELS["8B"],
    "8B-tp2": MODELS["8B-tp2"],
    "30B-A3B-tp2": Dense(2048, 48, 32, 4, 768).split(2),  # of whose experts nothing runs here
    "0.6B": MODELS["0.6B"],
}
CASES = (
    ("8B", 256),
    ("8B", 128),
    ("8B-tp2", 32),
    ("8B-tp2", 256),
    ("30B-A3B-tp2", 32),
    ("30B-A3B-tp2", 256),
    ("8B", 32),
)


def layer_count(dense: Dense, rows: int, shortest: int) -> int:
    """So many that the keys and values of all layers, and the weights of all, are each four times the L2."""
    kv = 4 * rows * shortest * dense.kv_heads * dense.head_dim
    sizes = dense.weights()
    weights = sum(2 * outputs * inner for outputs, inner in (sizes["o"], sizes["qkv"]))
    return max(4, -(-4 * L2_BYTES // min(kv, weights)))


class LayerBench(AttentionBench):
    """Layers of o-projection, qkv-projection and attention; ``fill`` before any of it."""

    def __init__(self, kernels: NvidiaKernels, dense: Dense, rows: int, layers: int) -> None:
        super().__init__(kernels, dense, rows, 1, layers)
        sizes = [dense.weights()[name] for name in ("o", "qkv")]
        self.weights = [
            [torch.randn(*size, dtype=BF16, device=DEVICE).mul_(size[1] ** -0.5) for size in sizes]
            for _ in range(layers)
        ]
        self.attended = torch.randn(rows, dense.heads, dense.head_dim, dtype=BF16, device=DEVICE)

    def fill(self, length: int) -> None:
        """Rows of ``length`` tokens, in place: each row's pages in order, one row after the other, the rest unused."""
        table = self.cache.table
        rows, pages = table.shape[0], -(-length // PAGE)
        table.zero_()
        table[:, :pages] = torch.arange(1, rows * pages + 1, dtype=table.dtype, device=table.device).view(rows, pages)
        self.cache.lengths.fill_(length)
        positions = self.cache.positions
        self.rotation.positions_T.copy_(positions)
        self.rotation.kv_slots_T.copy_(self.cache.slots(positions))

    def layers(self, candidate: Candidate | None) -> None:
        """All layers; with None without their attention."""
        attended = self.attended
        for (o, qkv), kv in zip(self.weights, self.cache.layers, strict=True):
            packed = F.linear(F.linear(attended.flatten(1), o), qkv)
            if candidate is not None:
                attended = self.attend(packed, kv, candidate, True)

    def one(self, candidate: Candidate) -> Tensor:
        """What a candidate makes of the first layer: [rows, heads, head_dim]."""
        self.counters.zero_()
        return self.attend(self.qkv, self.cache.layers[0], candidate, True)

    def microseconds(self, candidate: Candidate | None) -> float:
        """A layer's."""
        us = autotune.median_graph_us(partial(self.layers, candidate), DEVICE, REPLAYS)
        return us / len(self.weights)


def objection(bench: LayerBench, candidate: Candidate, expected: Tensor) -> str | None:
    """Why ``candidate`` is not to be timed."""
    try:
        found = bench.one(candidate)
    except Exception as error:  # the compiler's and the launcher's have no common class
        return f"refused: {str(error)[:100]}".replace("\n", " ")
    # One weight that rounds the other way may change an output by a hundredth; many outputs at once it does not change.
    off = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not off < _MOST_OFF:
        return f"its output differs by {off:.2e} of its norm"
    if bench.counters.any():
        return "it left its counters set"
    return None


@dataclass(frozen=True)
class Sweep:
    """Of one model and number of rows; microseconds of a layer's attention by tokens a row, and of a layer without."""

    model: str
    rows: int
    layers: int
    current: Candidate
    attention_us: dict[Candidate, dict[int, float]]
    rest_us: dict[int, float]
    left_out: dict[Candidate, str]

    def best_first(self) -> list[tuple[Candidate, float]]:
        means = [(candidate, statistics.fmean(us.values())) for candidate, us in self.attention_us.items()]
        return sorted(means, key=lambda entry: entry[1])

    def tb_per_s(self, candidate: Candidate, tokens: int) -> float:
        dense = SHAPES[self.model]
        return 4 * self.rows * tokens * dense.kv_heads * dense.head_dim / self.attention_us[candidate][tokens] / 1e6

    def table(self) -> str:
        tokens = list(self.rest_us)
        rest = ", ".join(f"{us:.1f} at {length}" for length, us in self.rest_us.items())
        lines = [
            f"\n{self.model}, {self.rows} rows, {self.layers} layers; us of a layer without attention: {rest} tokens\n",
            f"| keys, splits, stages, warps, many | {' | '.join(f'{n}: us (TB/s)' for n in tokens)} | mean us |",
            f"| --- |{' ---: |' * (len(tokens) + 1)}",
        ]
        for candidate, mean in self.best_first():
            name = ", ".join(map(str, candidate)) + (" (current)" if candidate == self.current else "")
            us = self.attention_us[candidate]
            cells = [f"{us[n]:.1f} ({self.tb_per_s(candidate, n):.2f})" for n in tokens]
            lines.append(f"| {name} | {' | '.join(cells)} | {mean:.1f} |")
        lines += [f"left out {tuple(candidate)}: {why}" for candidate, why in self.left_out.items()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        timed = [
            candidate._asdict()
            | {
                "current": candidate == self.current,
                "mean_us": mean,
                "us": self.attention_us[candidate],
                "tb_per_s": {n: self.tb_per_s(candidate, n) for n in self.rest_us},
            }
            for candidate, mean in self.best_first()
        ]
        left_out = [candidate._asdict() | {"why": why} for candidate, why in self.left_out.items()]
        return {
            "model": self.model,
            "rows": self.rows,
            "layers": self.layers,
            "layer_without_attention_us": self.rest_us,
            "candidates": timed,
            "left_out": left_out,
        }


def launch_of(model: str, rows: int, tokens: Sequence[int]) -> Attention:
    dense = SHAPES[model]
    return Attention(rows, dense.heads, dense.kv_heads, dense.head_dim, min(tokens), MOST)


def sweep(kernels: NvidiaKernels, model: str, rows: int, tokens: Sequence[int]) -> Sweep:
    """Every candidate at every length."""
    asked = launch_of(model, rows, tokens)
    layers = layer_count(SHAPES[model], rows, asked.shortest)
    bench, current = LayerBench(kernels, SHAPES[model], rows, layers), current_choice(asked)
    timed, left_out = candidates(asked), dict[Candidate, str]()
    for length in tokens:
        bench.fill(length)
        expected = bench.one(current)
        for candidate in timed:
            why = objection(bench, candidate, expected)
            if why is not None:
                left_out[candidate] = f"{why} ({length} tokens)"
        timed = [candidate for candidate in timed if candidate not in left_out]
    bench.counters.zero_()
    attention_us: dict[Candidate, dict[int, float]] = {candidate: {} for candidate in timed}
    rest_us = {}
    for length in tokens:
        bench.fill(length)
        rests, shares = [], dict[Candidate, list[float]]()
        for _ in range(ROUNDS):
            rests.append(bench.microseconds(None))
            for candidate in timed:
                shares.setdefault(candidate, []).append(bench.microseconds(candidate) - rests[-1])
        rest_us[length] = statistics.median(rests)
        for candidate, each in shares.items():
            attention_us[candidate][length] = statistics.median(each)
    return Sweep(model, rows, layers, current, attention_us, rest_us, left_out)


def compile_share(index: int, share: int, cases: Sequence[tuple[str, int]], tokens: Sequence[int]) -> None:
    """Run every ``share``-th candidate once, so that Triton's cache on disk holds it."""
    kernels = NvidiaKernels(DEVICE)
    todo: dict[Any, Callable[[], Any]] = {}
    for model, rows in cases:
        dense = SHAPES[model]
        for candidate in candidates(launch_of(model, rows, tokens)):
            # Neither rows nor kv heads are compiled in: what they have in common is compiled once.
            todo[dense.heads // dense.kv_heads, candidate] = partial(run_attention, kernels, dense, candidate, True)
    run_share(index, share, todo)
    torch.cuda.synchronize()


def chosen_cases(models: Sequence[str] | None, rows: Sequence[int] | None) -> list[tuple[str, int]]:
    """(model, rows): CASES where neither is given; what is not given is all there is."""
    if models is None and rows is None:
        return list(CASES)
    return list(product(models or SHAPES, rows or ROWS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--compile-workers", type=int, default=0)
    args = parser.parse_args()
    if not all(0 < length <= MOST for length in args.tokens):
        parser.error(f"--tokens {' '.join(map(str, args.tokens))}: each from 1 to {MOST}, for which there are pages")
    if args.rows is not None and min(args.rows) < 1:
        parser.error(f"--rows {' '.join(map(str, args.rows))}: at least 1 each")
    args.out.mkdir(parents=True, exist_ok=True)
    cases, begun = chosen_cases(args.models, args.rows), time.time()
    if args.compile_workers:
        compile_all(compile_share, (cases, args.tokens), args.compile_workers)
    torch.manual_seed(0)
    kernels, found = NvidiaKernels(DEVICE), []
    for model, rows in cases:
        start = time.time()
        swept = sweep(kernels, model, rows, args.tokens)
        print(f"{swept.table()}\n-- {model}, {rows} rows: {time.time() - start:.0f} s", flush=True)
        found.append(swept.as_dict())
        (args.out / "attention-in-layer.json").write_text(json.dumps(found, indent=1))
        torch.cuda.empty_cache()  # what the graphs held
    print(f"-- in all {time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
