"""Watts, clock and millijoules of each kernel of a decoder layer, and of the layer, each repeated for a second or so.

Run on one GPU:  python3 -m tests.bench.power --out FOLDER [--model 8B] [--rows 256 128] [--seconds 1.3]
Attention is measured in the form for few rows and in the one for many, beside a kernel that only reads as many bytes;
the layer with each of the two forms, and without its norms. FOLDER/power.json has every figure.

Knows: how long a GPU takes to settle at the clock that its power allows. Does not know: which kernel is chosen for a
product (choice_table.py). Weights and inputs are random: what data looks like changes watts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from models.kernels.bandwidth_probe import BLOCK, block_maxima
from models.kernels.matmul.autotune import captured, replay_for
from models.kernels.nvidia import NvidiaKernels
from tests.bench.attention_candidates import Attention, Candidate, choice_of_few, current_choice
from tests.bench.dense_shapes import BF16, MODELS, Dense
from tests.bench.kernels import DEVICE, MOST, AttentionBench

TOKENS = 640  # a row: the mean of the fixed-batch protocol
LAYERS = 6  # more weights and keys than the L2 holds
EPS = 1e-6
Sample = tuple[float, float, float]  # monotonic seconds, watts, MHz


class LayerOfRows:
    """LAYERS layers of one model for some rows; every method runs one kernel in each of them."""

    def __init__(self, kernels: NvidiaKernels, dense: Dense, rows: int) -> None:
        self.kernels, self.attention = kernels, AttentionBench(kernels, dense, rows, TOKENS, LAYERS)
        sizes = dense.weights()
        self.weights = {
            name: [torch.randn(*size, dtype=BF16, device=DEVICE).mul_(size[1] ** -0.5) for _ in range(LAYERS)]
            for name, size in sizes.items()
        }
        widths = {inner for _, inner in sizes.values()}
        self.inputs = {width: torch.randn(rows, width, dtype=BF16, device=DEVICE) for width in widths}
        self.hidden, self.residual = self.inputs[dense.hidden], torch.randn_like(self.inputs[dense.hidden])
        self.norm = torch.ones(dense.hidden, dtype=BF16, device=DEVICE)
        self.words = 4 * rows * TOKENS * dense.kv_heads * dense.head_dim // 4 // BLOCK * BLOCK

    def reads(self) -> None:
        for kv in self.attention.cache.layers:
            block_maxima(kv.view(-1).view(torch.int32)[: self.words])

    def attend(self, form: Candidate) -> None:
        self.attention.own(form, True)

    def product(self, name: str) -> None:
        for weight in self.weights[name]:
            self._product(name, self.inputs[weight.shape[1]], weight)

    def norms(self) -> None:
        for _ in range(LAYERS):
            self.kernels.add_rms_norm(self.hidden, self.residual, self.norm, EPS)

    def whole(self, form: Candidate, normed: bool = True) -> None:
        """The layers' kernels in their order. The residual grows from replay to replay; the norms take that out again,
        and what has none in front of it is given what never changes."""
        given = (self.residual, self.norm, EPS)
        for number, kv in enumerate(self.attention.cache.layers):
            weights = {name: of_layers[number] for name, of_layers in self.weights.items()}
            if normed:
                qkv = self.kernels.add_norm_linear(self.hidden, *given, weights["qkv"])[0]
            else:
                qkv = self._product("qkv", self.hidden, weights["qkv"])
            attended = self.attention.attend(qkv, kv, form, True)
            hidden = self._product("o", attended.flatten(1), weights["o"])
            if normed:
                gated = self.kernels.add_norm_gate_up(hidden, *given, weights["gate-up"])[0]
            else:
                gated = self._product("gate-up", self.hidden, weights["gate-up"])
            self._product("down", gated, weights["down"])

    def _product(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.gate_up(x, weight) if name == "gate-up" else self.kernels.linear(x, weight)


@contextmanager
def sampled(gpu: str) -> Iterator[list[Sample]]:
    """What nvidia-smi tells of a GPU some twenty times a second, as it comes."""
    query = ["nvidia-smi", "-i", gpu, "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits"]
    samples: list[Sample] = []
    with subprocess.Popen([*query, "-lms", "50"], stdout=subprocess.PIPE, text=True) as told:

        def read() -> None:
            for line in told.stdout or ():
                watts, mhz = line.split(",")
                samples.append((time.monotonic(), float(watts), float(mhz)))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield samples
        finally:
            told.terminate()
            reader.join()


def steady_means(samples: list[Sample], since: float, until: float) -> tuple[float, float]:
    """(watts, MHz), means over a stretch of time. Raises RuntimeError where nothing was told in it."""
    there = [(watts, mhz) for at, watts, mhz in samples if since <= at <= until]
    if not there:
        raise RuntimeError("nvidia-smi told nothing while the kernel ran: give more --seconds")
    watts, mhz = zip(*there, strict=True)
    return statistics.mean(watts), statistics.mean(mhz)


def measure(name: str, run: Callable[[], None], seconds: float, samples: list[Sample]) -> dict[str, float | str]:
    graph = captured(run)
    us = replay_for(graph, seconds) / LAYERS  # the second half of the time is what counts
    now = time.monotonic()
    watts, mhz = steady_means(samples, now - seconds / 2, now)
    print(f"| {name} | {us:.1f} | {watts:.0f} | {mhz:.0f} | {us * watts / 1e3:.1f} |", flush=True)
    return {"what": name, "us": us, "watts": watts, "mhz": mhz, "millijoules": us * watts / 1e3}


def runs(layer: LayerOfRows, dense: Dense, rows: int) -> dict[str, Callable[[], None]]:
    asked = Attention(rows, dense.heads, dense.kv_heads, dense.head_dim, TOKENS, MOST)
    few = choice_of_few(asked)
    current = current_choice(asked)
    forms = {"few": few, "many": current} if current.many else {"few": few}
    products = {name: partial(layer.product, name) for name in layer.weights}
    return {
        "reading as many bytes as attention": layer.reads,
        **{f"attention, for {which} rows": partial(layer.attend, form) for which, form in forms.items()},
        **products,
        "norm": layer.norms,
        **{f"layer, attention for {which} rows": partial(layer.whole, form) for which, form in forms.items()},
        "layer without norms": partial(layer.whole, few, False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for power.json")
    parser.add_argument("--model", default="8B", choices=sorted(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 128])
    parser.add_argument("--seconds", type=float, default=1.3, help="of each kernel")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    kernels, dense, found = NvidiaKernels(DEVICE), MODELS[args.model], []
    with sampled(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]) as samples:
        for rows in args.rows:
            layer = LayerOfRows(kernels, dense, rows)
            print(
                f"\n{args.model}, {rows} rows\n| | us | W | MHz | mJ |\n| --- | ---: | ---: | ---: | ---: |", flush=True
            )
            for name, run in runs(layer, dense, rows).items():
                found.append({"rows": rows, **measure(name, run, args.seconds, samples)})
                (args.out / "power.json").write_text(json.dumps(found, indent=1))
            del layer
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
