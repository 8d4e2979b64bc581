"""Which kernel computes each product of a model, measured inside whole decoder layers and at the power a step draws.

Run on one GPU:  python3 -m tests.bench.tune --out FOLDER [--models 8B ...] [--rows 128 256 ...]
FOLDER gets choices.json, what was chosen and nothing else (merge_choices.py takes it over into models/kernels/tuned),
tune.jsonl with every time, and, with --sample, power.csv. Several run side by side, one a GPU.

Knows: how a choice is made. Two rounds: every candidate for some milliseconds, then the fastest of them again for most
of a second each, there and back. A step of many rows draws more than a GPU may: its clock falls until it does not, and
then the kernel that spends the least energy is the fastest, which no measurement of milliseconds can see.
Does not know: the candidates (models/kernels/matmul/candidates.py), the layers (bench/kernels.py), a rank's share of
them (dense_shapes.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from models.kernels.matmul import autotune
from models.kernels.matmul.choice_table import Choice, ChoiceTable, LinearShape
from models.kernels.nvidia import NvidiaKernels
from tests.bench.dense_shapes import BF16, MODELS
from tests.bench.kernels import DEVICE, Cache, StepBench, compile_all, compile_share, short_name

ORDER = ("gate-up", "down", "qkv", "o")  # the largest first: what is chosen stays for the others
CLOSE = 1.04  # times the fastest of the first round


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """``us``: of one decoder layer in the first round, ``lasting``: in the second, infinity for those left out."""

    choice: Choice
    us: float
    lasting: float = math.inf


class Tuner:
    """``found``: what was chosen so far, and nothing else."""

    def __init__(self, kernels: NvidiaKernels, seconds: float, finalists: int, log: Path) -> None:
        self.found = ChoiceTable()
        self._kernels, self._seconds, self._finalists, self._log = kernels, seconds, finalists, log

    def tune(self, model: str, rows: int) -> None:
        full = MODELS[model]
        count = max(4, (800 << 20) // full.layer_bytes)  # more weights than the L2 holds, several times
        bench = StepBench(self._kernels, dataclasses.replace(full, layers=count))
        cache = Cache(bench.dense, rows, 640, 1024, count)
        x = torch.randn(rows, full.hidden, dtype=BF16, device=DEVICE)
        run = partial(bench.run_layers, cache, x)
        products = full.products(rows)
        replay_for(captured(run), 1.0)  # warm, in both meanings
        before = self._lasting(run, count)
        for name in ORDER:
            self._choose(f"{model} {name} x{rows}", products[name], run, count)
        after = self._lasting(run, count)
        head = products["head"]
        best, us = autotune.fastest(
            head, self._kernels.matmul.candidates(head), self._kernels.matmul.runner(head), DEVICE
        )
        self._keep(head, best)
        print(
            f"{model} x{rows}: layer {before:.1f} -> {after:.1f} us lasting, head {us:.1f} us {short_name(best)}",
            flush=True,
        )

    def _choose(self, what: str, shape: LinearShape, run: Callable[[], Any], layers: int) -> None:
        current = self._kernels.matmul.choice(shape)
        timed = []
        for choice in [current, *(c for c in self._kernels.matmul.candidates(shape) if c != current)]:
            self._kernels.matmul.choose(shape, choice)
            try:
                timed.append(Timed(choice, autotune.median_graph_us(run, DEVICE, replays=8) / layers))
            except Exception as error:
                print("refused", shape.key, choice, str(error)[:80].replace("\n", " "), flush=True)
        timed = self._again(shape, timed, run, layers)
        best = min(timed, key=lambda one: (one.lasting, one.us))
        self._keep(shape, best.choice)
        with self._log.open("a") as log:
            for one in timed:
                log.write(json.dumps([what, str(one.choice), one.us, None if math.isinf(one.lasting) else one.lasting]))
                log.write("\n")
        shown = sorted(timed, key=lambda one: (one.lasting, one.us))[: self._finalists]
        was = next(one for one in timed if one.choice == current)
        print(
            f"{what}: {best.lasting:.1f} us a layer lasting (was {was.lasting:.1f}); "
            + ", ".join(f"{short_name(one.choice)} {one.us:.1f}/{one.lasting:.1f}" for one in shown),
            flush=True,
        )

    def _keep(self, shape: LinearShape, choice: Choice) -> None:
        self._kernels.matmul.choose(shape, choice)
        self.found.put(shape, choice)

    def _again(self, shape: LinearShape, timed: list[Timed], run: Callable[[], Any], layers: int) -> list[Timed]:
        """The second round: the current choice (the first of ``timed``), and the fastest few of the first round."""
        if not self._seconds:
            return [dataclasses.replace(one, lasting=one.us) for one in timed]
        ranked = sorted(timed, key=lambda one: one.us)
        close = [one for one in ranked[: self._finalists] if one.us <= CLOSE * ranked[0].us]
        tried = [*close, *(one for one in timed[:1] if one not in close)]
        times: dict[Choice, list[float]] = {one.choice: [] for one in tried}
        for one in [*tried, *reversed(tried)]:  # there and back: what drifts hits all of them alike
            self._kernels.matmul.choose(shape, one.choice)
            times[one.choice].append(self._lasting(run, layers))
        return [
            dataclasses.replace(one, lasting=statistics.mean(times[one.choice])) if one.choice in times else one
            for one in timed
        ]

    def _lasting(self, run: Callable[[], Any], layers: int) -> float:
        return replay_for(captured(run), max(0.1, self._seconds)) / layers


def captured(launch: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def replay_for(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Microseconds of a replay, over the second half of ``seconds`` of them."""
    event: Any = torch.cuda.Event  # untyped in some versions of torch
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    half = max(5, int(seconds / 2 / (start.elapsed_time(end) / 5e3)))
    for _ in range(half):
        graph.replay()
    start.record()
    for _ in range(half):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / half


@contextmanager
def sampled(path: Path | None) -> Iterator[None]:
    """Clocks, watts and why the clock is what it is, ten times a second, in ``path``; of this process's GPUs alone."""
    if path is None:
        yield
        return
    query = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", *(["-i", visible] if visible else []), f"--query-gpu={query}", "--format=csv"]
    with path.open("w") as out:
        sampler = subprocess.Popen([*command, "-lms", "100"], stdout=out)
        try:
            yield
        finally:
            sampler.terminate()
            sampler.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["8B"], choices=sorted(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--compile-workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.6, help="of a finalist's turn; 0: no second round")
    parser.add_argument("--finalists", type=int, default=6)
    parser.add_argument("--sample", action="store_true", help="write what the GPU draws to power.csv")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.compile_workers:
        compile_all(compile_share, (args.models, args.rows, ["tune"]), args.compile_workers)
    kernels = NvidiaKernels(DEVICE)
    tuner = Tuner(kernels, args.seconds, args.finalists, args.out / "tune.jsonl")
    with sampled(args.out / "power.csv" if args.sample else None):
        for model in args.models:
            for rows in args.rows:
                start = time.time()
                tuner.tune(model, rows)
                (args.out / "choices.json").write_text(tuner.found.to_json())
                print(f"-- {model} x{rows}: {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
