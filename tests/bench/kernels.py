"""Micro-benchmarks of models/kernels/nvidia.py: products, attention, small kernels, and a whole decode step of both.

Run on one GPU:  python3 -m tests.bench.kernels --out FOLDER [--part linear|attention|small|step ...]
Every figure is the median of graph replays; weights rotate through more memory than the L2 holds.
``linear`` writes FOLDER/linear.jsonl (every candidate alone). Choices are made by `launch tune`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.inputs import DecodeAttention
from models.kernels.attention import decode, decode_tma
from models.kernels.attention.decode_work import COUNTERS, choose_splits, even_rule
from models.kernels.interface import Rotation
from models.kernels.matmul import autotune, choice_table
from models.kernels.matmul.choice_table import ChoiceTable, LinearShape
from models.kernels.nvidia import NvidiaKernels
from models.kernels.traits import H200
from tests.bench.dense_shapes import BF16, MODELS, Dense

DEVICE = torch.device("cuda", 0)
PAGE = 64
MOST = 1024  # tokens that a row's pages have room for, where attention is measured


def shapes(models: list[str], rows: list[int]) -> list[LinearShape]:
    return [shape for model in models for m in rows for shape in MODELS[model].products(m).values()]


def compile_share(index: int, share: int, models: list[str], rows: list[int], parts: list[str]) -> None:
    """Run every ``share``-th candidate once, so that Triton's cache on disk holds it."""
    kernels = NvidiaKernels(DEVICE)
    todo: dict[Any, Callable[[], Any]] = {}
    for shape in shapes(models, rows) if "linear" in parts else []:
        for choice in kernels.matmul.candidates(shape):
            if isinstance(choice, choice_table.Gemv | choice_table.Skinny | choice_table.Wide):
                key = (shape.inner, shape.normed, shape.gate_up, shape.rows, choice)
                todo[key] = partial(run_product, kernels, shape, choice)
    for model in models if "attention" in parts else []:
        for batch in ATTENTION_ROWS:
            for config in attention_configs(batch, MODELS[model].kv_heads, MOST):
                for fused in (False, True):
                    todo[model, config, fused] = partial(run_attention, kernels, MODELS[model], config, fused)
    run_share(index, share, todo)


def run_share(index: int, share: int, todo: dict[Any, Callable[[], Any]]) -> None:
    """Every ``share``-th of ``todo`` once; what the GPU or the compiler refuses is named."""
    for key in list(todo)[index::share]:
        try:
            todo[key]()
        except Exception as error:
            print("refused", key, str(error)[:100].replace("\n", " "), flush=True)
    torch.cuda.synchronize()


def run_product(kernels: NvidiaKernels, shape: LinearShape, choice: choice_table.Choice) -> None:
    x = torch.zeros(shape.rows, shape.inner, dtype=BF16, device=DEVICE)
    weight = torch.zeros(min(shape.outputs, 4096), shape.inner, dtype=BF16, device=DEVICE)
    kernels.matmul.runner(shape)(x, weight, choice)


def run_attention(kernels: NvidiaKernels, dense: Dense, config: tuple[int, ...], fused: bool) -> None:
    AttentionBench(kernels, dense, 1, 64, 1).own(config, fused)


def compile_all(share: Callable[..., None], arguments: tuple[Any, ...], workers: int) -> None:
    """``share(index, workers, *arguments)`` in each of ``workers`` processes, which leave compiled kernels on disk."""
    start = time.time()
    context = multiprocessing.get_context("spawn")
    workers_running = [context.Process(target=share, args=(i, workers, *arguments)) for i in range(workers)]
    for worker in workers_running:
        worker.start()
    for worker in workers_running:
        worker.join()
    print(f"compiled in {time.time() - start:.0f} s by {workers} processes", flush=True)


def bench_linear(out: Path, models: list[str], rows: list[int]) -> None:
    """Each product alone, its norm in front and SiLU-mul behind included; the best of every kind of kernel."""
    kernels = NvidiaKernels(DEVICE)
    print("model matrix M | best us TB/s | best of each kind us", flush=True)
    with (out / "linear.jsonl").open("w") as log:
        for model in models:
            for m in rows:
                for name, shape in MODELS[model].products(m).items():
                    product = autotune.ColdProduct(shape, kernels.matmul.runner(shape), DEVICE)
                    timed = autotune.measure(shape, kernels.matmul.candidates(shape), product)
                    kinds: dict[str, float] = {}
                    for choice, us in timed:
                        log.write(json.dumps([model, name, m, str(choice), us]) + "\n")
                        kinds[type(choice).__name__] = min(kinds.get(type(choice).__name__, math.inf), us)
                    best, us = min(timed, key=lambda entry: entry[1])
                    rate = shape.outputs * shape.inner * 2 / us / 1e6
                    others = " ".join(f"{kind} {us:.1f}" for kind, us in kinds.items())
                    print(f"{model} {name} {m} | {us:.1f} {rate:.2f} {short_name(best)} | {others}", flush=True)


def short_name(choice: choice_table.Choice) -> str:
    if isinstance(choice, choice_table.CublasLt):
        return "CublasLt"
    return type(choice).__name__ + str(list(dataclasses.asdict(choice).values()))


class Cache:
    """Several layers' paged caches with shuffled pages, so that replays read device memory."""

    def __init__(self, dense: Dense, rows: int, length: int, most: int, layers: int) -> None:
        width = -(-most // PAGE)
        self.table = (torch.randperm(rows * width, device=DEVICE) + 1).int().view(rows, width)
        self.lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
        one = torch.randn(2, rows * width + 1, PAGE, dense.kv_heads, dense.head_dim, dtype=BF16, device=DEVICE)
        self.layers = [one, *(one.clone() for _ in range(layers - 1))]
        self.inputs = DecodeAttention(self.table, self.lengths, 1, most)
        self.cos_sin = torch.randn(most, dense.head_dim, device=DEVICE)

    @property
    def positions(self) -> Tensor:
        return (self.lengths - 1).long()

    def slots(self, positions: Tensor) -> Tensor:
        return self.table.gather(1, (positions // PAGE)[:, None])[:, 0].long() * PAGE + positions % PAGE


ATTENTION_ROWS = (1, 4, 8, 16, 32, 64, 128, 256)


class AttentionBench:
    """Rotation, cache write and attention of one layer after another over distinct caches."""

    def __init__(self, kernels: NvidiaKernels, dense: Dense, rows: int, length: int, layers: int) -> None:
        self.kernels, self.dense = kernels, dense
        self.cache = Cache(dense, rows, length, MOST, layers)
        # One a (row, kv head); the kernels' own are enough only for the splits that they choose.
        self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
        self.qkv = torch.randn(rows, (dense.heads + 2 * dense.kv_heads) * dense.head_dim, dtype=BF16, device=DEVICE)
        norm = torch.ones(dense.head_dim, dtype=BF16, device=DEVICE)
        positions = self.cache.positions
        self.rotation = Rotation(norm, norm, 1e-6, self.cache.cos_sin, positions, self.cache.slots(positions))

    def rotate(self, kv: Tensor) -> Tensor:
        return self.kernels.rope_and_cache(self.qkv, self.dense.heads, kv, self.rotation)

    def own(self, config: tuple[int, ...], fused: bool) -> None:
        for kv in self.cache.layers:
            self.attend(self.qkv if fused else self.rotate(kv), kv, config, fused)

    def attend(self, q_TX: Tensor, kv: Tensor, config: tuple[int, ...], fused: bool) -> Tensor:
        """One layer; ``config`` as attention_candidates.Candidate, whose last field may be left out.

        ``fused``: q_TX is packed qkv, normed, rotated and cached on the way.
        """
        block_n, splits, stages, warps, *many = config
        rotation, scale = self.rotation if fused else None, self.dense.head_dim**-0.5
        if any(many):
            return decode_tma.attend_many(
                q_TX,
                self.dense.heads,
                kv,
                self.cache.inputs,
                scale,
                rotation=rotation,
                block_n=block_n,
                stages=stages,
                warps=warps,
                pdl=True,
            )
        return decode.decode_attention(
            q_TX,
            self.dense.heads,
            kv,
            self.cache.inputs,
            even_rule(block_n, splits),
            scale,
            self.kernels._attention_partial,
            self.counters,
            rotation=rotation,
            stages=stages,
            warps=warps,
            pdl=True,
        )


def bench_attention(models: list[str], lengths: list[int], out: Path) -> None:
    kernels = NvidiaKernels(DEVICE)
    print("attention, rotation and cache write: model B L | one launch us TB/s config | two launches", flush=True)
    for model in models:
        dense = MODELS[model]
        for rows in ATTENTION_ROWS:
            for length in lengths:
                bytes_read = 4 * rows * length * dense.kv_heads * dense.head_dim
                layers = max(2, min(16, (256 << 20) // bytes_read))
                bench = AttentionBench(kernels, dense, rows, length, layers)
                best: dict[bool, tuple[float, str]] = {True: (math.inf, ""), False: (math.inf, "")}
                for config in attention_configs(rows, dense.kv_heads, MOST):
                    for fused in (True, False):
                        try:
                            us = autotune.median_graph_us(partial(bench.own, config, fused), DEVICE, 6) / layers
                        except Exception as error:
                            print("refused", config, str(error)[:80].replace("\n", " "))
                            continue
                        with (out / "attention.jsonl").open("a") as log:
                            log.write(json.dumps([model, rows, length, fused, config, us]) + "\n")
                        best[fused] = min(best[fused], (us, str(config)))
                rate = bytes_read / 1e6
                print(
                    f"{model} B{rows} L{length} | "
                    + " | ".join(f"{us:.1f} {rate / us:.2f} {config}" for us, config in best.values()),
                    flush=True,
                )


def attention_configs(rows: int, kv_heads: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """(block_n, splits, stages, warps)"""
    for block_n, stages, warps in ((64, 3, 4), (64, 5, 4), (32, 5, 4), (32, 5, 2), (32, 3, 2), (128, 3, 4)):
        seen = set()
        for wanted in (H200.multiprocessors * each for each in (1, 2, 8)):
            splits = choose_splits(rows, kv_heads, most, block_n, wanted)
            if splits not in seen:
                seen.add(splits)
                yield block_n, splits, stages, warps


def bench_small() -> None:
    print("small kernels in a dependent chain: name rows | us with PDL | without", flush=True)
    kernels = NvidiaKernels(DEVICE)
    for model in ("8B", "0.6B"):
        dense = MODELS[model]
        for rows in (1, 8, 32, 128, 256):
            x = torch.randn(rows, dense.hidden, dtype=BF16, device=DEVICE)
            residual, weight = torch.randn_like(x), torch.ones(dense.hidden, dtype=BF16, device=DEVICE)
            wide = torch.randn(rows, 2 * dense.intermediate, dtype=BF16, device=DEVICE)
            cache = Cache(dense, rows, 500, 640, 1)
            qkv = torch.randn(rows, (dense.heads + 2 * dense.kv_heads) * dense.head_dim, dtype=BF16, device=DEVICE)
            norm = torch.ones(dense.head_dim, dtype=BF16, device=DEVICE)
            positions = cache.positions
            turn = Rotation(norm, norm, 1e-6, cache.cos_sin, positions, cache.slots(positions))
            runs: dict[str, Callable[[], Any]] = {
                "add+norm": partial(kernels.add_rms_norm, x, residual, weight, 1e-6),
                "silu-mul": partial(kernels.silu_mul, wide),
                "rope+cache": partial(kernels.rope_and_cache, qkv, dense.heads, cache.layers[0], turn),
            }
            for name, run in runs.items():
                times = []
                for pdl in (True, False):
                    kernels.pdl = pdl
                    times.append(autotune.median_graph_us(partial(_repeat, run, 100), DEVICE) / 100)
                kernels.pdl = True
                print(f"{model} {name} {rows} | {times[0]:.2f} | {times[1]:.2f}", flush=True)


def _repeat(run: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        run()


class StepBench:
    """A whole greedy decode step, token and lengths fed back on the device, 513 to 768 tokens a row."""

    def __init__(self, kernels: NvidiaKernels, dense: Dense) -> None:
        self.kernels, self.dense = kernels, dense
        self.layers = [
            {name: _random(*size) for name, size in dense.weights().items()}
            | {"norm1": _ones(dense.hidden), "norm2": _ones(dense.hidden), "q": _ones(128), "k": _ones(128)}
            for _ in range(dense.layers)
        ]
        self.embedding, self.head = _random(dense.vocab, dense.hidden), _random(dense.vocab, dense.hidden)
        self.final = _ones(dense.hidden)

    def step(self, cache: Cache, tokens: Tensor) -> None:
        x, residual = self.run_layers(cache, self.embedding[tokens])
        hidden, _ = self.kernels.add_rms_norm(x, residual, self.final, 1e-6)
        tokens.copy_(self.kernels.linear(hidden, self.head).argmax(-1))
        cache.lengths.add_(1)

    def run_layers(self, cache: Cache, x: Tensor) -> tuple[Tensor, Tensor]:
        """A rank of several makes no sum here: where its sum takes the norm along, a norm alone is in its place."""
        kernels, dense, residual = self.kernels, self.dense, None
        positions, apart = cache.positions, dense.norms_apart(x.shape[0])
        slots = cache.slots(positions)
        for w, kv in zip(self.layers, cache.layers, strict=True):
            if apart:
                x, residual = kernels._add_norm(x, residual, w["norm1"], 1e-6)
                qkv = kernels.linear(x, w["qkv"])
            else:
                qkv, residual = kernels.add_norm_linear(x, residual, w["norm1"], 1e-6, w["qkv"])
            turn = Rotation(w["q"], w["k"], 1e-6, cache.cos_sin, positions, slots)
            out = kernels.rope_cache_attend(qkv, dense.heads, kv, turn, cache.inputs, dense.head_dim**-0.5)
            x = kernels.linear(out.flatten(1), w["o"])
            if apart:
                x, residual = kernels._add_norm(x, residual, w["norm2"], 1e-6)
                x = kernels.gate_up(x, w["gate-up"])
            else:
                x, residual = kernels.add_norm_gate_up(x, residual, w["norm2"], 1e-6, w["gate-up"])
            x = kernels.linear(x, w["down"])
        assert residual is not None
        return x, residual

    def bytes_moved(self, batch: int) -> int:
        weights = sum(t.numel() for w in self.layers for t in w.values()) + self.head.numel()
        return 2 * weights + 4 * batch * 641 * self.dense.kv_heads * self.dense.head_dim * self.dense.layers


def _random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, dtype=BF16, device=DEVICE).mul_(columns**-0.5)


def _ones(width: int) -> Tensor:
    return torch.ones(width, dtype=BF16, device=DEVICE)


def bench_step(models: list[str], batches: list[int], choices: ChoiceTable | None, profile: bool) -> None:
    kernels = NvidiaKernels(DEVICE, choices=choices)
    stream: Any = torch.cuda.Stream  # untyped in some versions of torch
    event: Any = torch.cuda.Event
    for model in models:
        bench = StepBench(kernels, MODELS[model])
        for batch in batches:
            cache = Cache(bench.dense, batch, 513, 1024, bench.dense.layers)
            tokens = torch.randint(0, bench.dense.vocab, (batch,), device=DEVICE)
            side = stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                bench.step(cache, tokens)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                bench.step(cache, tokens)
            took = []
            for _ in range(3):
                cache.lengths.fill_(513)
                start, end = event(enable_timing=True), event(enable_timing=True)
                start.record()
                for _ in range(256):
                    graph.replay()
                end.record()
                torch.cuda.synchronize()
                took.append(start.elapsed_time(end) / 256)
            ms, moved = sorted(took)[1], bench.bytes_moved(batch) / 1e9
            print(f"step {model} B{batch}: {ms:.3f} ms, {moved / ms:.2f} TB/s of {moved:.2f} GB", flush=True)
            if profile:
                show_profile(graph)
            del graph, cache


def show_profile(graph: torch.cuda.CUDAGraph) -> None:
    """Kernels of one replay. Launches overlap, so a kernel's share is the time since the one before it ended."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    ran = sorted((e.time_range.end, e.time_range.start, e.name) for e in profiler.events() if e.device_time > 0)
    share: dict[str, list[float]] = {}
    for (before, _, _), (end, _, name) in itertools.pairwise(ran):
        share.setdefault(name, []).append(end - before)
    for name, times in sorted(share.items(), key=lambda item: -sum(item[1]))[:9]:
        print(f"    {sum(times):8.1f} us {len(times):4d} x {name[:70]}", flush=True)
    names = [name for _, _, name in ran]
    period = ran[len(ran) // 2 - 6 : len(ran) // 2 + 8]
    print(
        "   ",
        " ".join(f"{n[:12]}+{e - b:.1f}" for (b, _, _), (e, _, n) in itertools.pairwise(period)),
        len(names),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="+", default=["linear", "attention", "small", "step"])
    parser.add_argument("--models", nargs="+", default=["8B", "0.6B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[640])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--compile-workers", type=int, default=0)
    parser.add_argument(
        "--choices", type=Path, help="a table to use in the step (default: FOLDER/choices.json if there)"
    )
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.compile_workers:
        compile_all(compile_share, (args.models, args.rows, args.part), args.compile_workers)
    for part in args.part:
        start = time.time()
        if part == "linear":
            bench_linear(args.out, args.models, args.rows)
        elif part == "attention":
            bench_attention(args.models, args.lengths, args.out)
        elif part == "small":
            bench_small()
        elif part == "step":
            path = args.choices or args.out / "choices.json"
            bench_step(args.models, args.batches, choice_table.load(path), args.profile)
        print(f"-- {part}: {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
