"""Micro-benchmark of Mamba-2 over slot state: a token a row, and prompts of any length, in several forms.

Run on one GPU:  python3 -m tests.bench.mamba [--ranks 1] [--rows 1 8 32 128 256] [--tokens 512 2048 8192] --out FOLDER
Prints microseconds of a layer and, of steps, the bandwidth of what a row's state needs; FOLDER gets mamba.jsonl.

Knows: the sizes of Nemotron-3-Nano, and which forms of the kernels are worth a try. Does not know: which of them an
engine runs (mamba2_triton.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from models.inputs import StateRows
from models.kernels.matmul.autotune import captured, replay_for
from models.kernels.nvidia import NvidiaKernels
from models.kernels.recurrent import mamba2_triton
from tests.bench.kernels import DEVICE
from tests.models.kernels.recurrent.mamba_cases import random_weights, width

LAYERS = 4  # of state, in turns: with few rows one layer's would stay in the L2
SECONDS = 0.2


class MambaBench:
    """``ranks`` share Nemotron-3-Nano's 64 heads of 64 in 8 groups, with states of 128."""

    def __init__(self, ranks: int, slots: int) -> None:
        self.weights = random_weights(64 // ranks, 64, max(1, 8 // ranks), 128, 4, torch.bfloat16, device="cuda")
        weights = self.weights
        channels, state = len(weights.conv_CJ), (weights.heads, weights.head_dim, weights.state_size)
        self.banks = [
            (
                torch.zeros(1 + slots, 4, channels, dtype=torch.bfloat16, device=DEVICE),
                torch.zeros(1 + slots, *state, device=DEVICE),
            )
            for _ in range(LAYERS)
        ]
        self.kernels = NvidiaKernels(DEVICE)

    def us(self, run: Callable[[Tensor, Tensor], object]) -> float:
        """Of one layer."""

        def layers() -> None:
            for window, state in self.banks:
                run(window, state)

        return replay_for(captured(layers), SECONDS) / LAYERS

    def step(self, rows: int, block_p: int, warps: int) -> tuple[float, float]:
        """(microseconds, bytes of state and window) of ``rows`` rows of one token."""
        weights = self.weights
        projected = torch.randn(rows, width(weights), device=DEVICE).to(torch.bfloat16)
        slots, positions = torch.arange(1, rows + 1, device=DEVICE), torch.full((rows,), 100, device=DEVICE)
        given = StateRows(slots), positions, True

        def run(window: Tensor, state: Tensor) -> None:
            mamba2_triton.step(projected, weights, window, state, *given, block_p, warps)

        moved = rows * (2 * 4 * weights.inner * weights.state_size + 2 * 4 * len(weights.conv_CJ))
        return self.us(run), moved

    def scan(self, tokens: int, rows: int, block_p: int, chunk: int, warps: int) -> float:
        """Microseconds of ``rows`` rows that have ``tokens`` together, the convolution left out."""
        weights = self.weights
        projected = torch.randn(tokens, width(weights), device=DEVICE).to(torch.bfloat16)
        xbc = torch.randn(tokens, len(weights.conv_CJ), device=DEVICE).to(torch.bfloat16)
        slots = torch.arange(1, rows + 1, device=DEVICE)
        ends = slots * (tokens // rows)
        return self.us(
            lambda _, state: mamba2_triton.scan(
                projected, xbc, weights, state, StateRows(slots, ends), True, block_p=block_p, chunk=chunk, warps=warps
            )
        )

    def whole(self, tokens: int) -> float:
        """Microseconds of all that a prefill of one row does between the two projections."""
        weights, kernels = self.weights, self.kernels
        projected = torch.randn(tokens, width(weights), device=DEVICE).to(torch.bfloat16)
        positions = torch.arange(tokens, device=DEVICE)
        rows = StateRows(torch.tensor([1], device=DEVICE), torch.tensor([tokens], device=DEVICE))
        return self.us(lambda window, state: kernels.mamba2(projected, weights, window, state, rows, positions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16, 32, 128, 256])
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = MambaBench(options.ranks, max([8, *options.rows]))
    with (options.out / "mamba.jsonl").open("w", encoding="utf-8") as file:

        def tell(**found: object) -> None:
            print(json.dumps(found), flush=True)
            file.write(json.dumps({"ranks": options.ranks, **found}) + "\n")

        for rows in options.rows:
            for block_p, warps in product((8, 16, 32, 64), (1, 2, 4, 8)):
                us, moved = bench.step(rows, block_p, warps)
                tell(
                    part="step", rows=rows, block_p=block_p, warps=warps, us=round(us, 2), gb_s=round(moved / us / 1e3)
                )
        for tokens, rows in product(options.tokens, (1, 8)):
            for block_p, chunk, warps in product((16, 32, 64), (16, 32, 64), (4, 8)):
                us = bench.scan(tokens, rows, block_p, chunk, warps)
                form = {"block_p": block_p, "chunk": chunk, "warps": warps}
                tell(part="scan", tokens=tokens, rows=rows, **form, us=round(us, 1))
        for tokens in options.tokens:
            tell(part="mixer", tokens=tokens, us=round(bench.whole(tokens), 1))


if __name__ == "__main__":
    main()
