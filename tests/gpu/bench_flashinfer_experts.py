"""Our expert kernels against FlashInfer's fused MoE (CUTLASS), a rank's share of a layer's experts, in one run.

Run on one GPU:  python3 -m tests.gpu.bench_flashinfer_experts [--shape 30b-a3b] [--rows 1 8 32 ...] [--ranks 2]
FlashInfer compiles its module first, once a machine, unless one lies in flashinfer/data/aot; how long that takes is
printed, since a user would wait for it. Then it chooses among its kernels by measurement, for each number of rows. Both
are given the same choices of experts and the same weights, and have to agree before they are timed.

Knows: FlashInfer 0.6.13's argument order, and that its first matrix holds up rows before gate rows.
Does not know: the kernels, or which of them an engine runs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from models.kernels.hopper import HopperKernels
from tests.gpu.bench_experts import LAYERS, microseconds
from tests.gpu.expert_cases import SHAPES, share_of

TOLERANCE = 0.02  # relative, of bfloat16 sums in another order


def up_first(gate_up_G2IN: Tensor) -> Tensor:
    gate, up = gate_up_G2IN.chunk(2, 1)
    return torch.cat((up, gate), 1)


def fused(x_TN: Tensor, ids_TC: Tensor, scores_TC: Tensor, weights: tuple[Tensor, Tensor], ranks: int) -> Tensor:
    """[T, N], the share of this rank's experts, the first of ``ranks`` parts of all."""
    from flashinfer.fused_moe import cutlass_fused_moe  # here: it is compiled when it is first called

    out: Any = cutlass_fused_moe(
        x_TN, ids_TC, scores_TC, *weights, output_dtype=x_TN.dtype, quant_scales=[], ep_size=ranks, ep_rank=0
    )
    shared: Tensor = out[0] if isinstance(out, list | tuple) else out
    return shared


def build() -> None:
    from flashinfer.fused_moe.core import get_cutlass_fused_moe_module

    start = time.monotonic()
    get_cutlass_fused_moe_module("90")
    print(f"FlashInfer's module: {time.monotonic() - start:.0f} s until it was compiled and loaded", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 256, 2048, 8192])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    build()
    torch.manual_seed(0)
    from flashinfer.autotuner import autotune

    layer = share_of(args.shape, args.ranks)
    kernels, ours = HopperKernels("cuda"), [layer.weights() for _ in range(LAYERS)]
    theirs = [(up_first(gate_up), down) for gate_up, down in ours]
    local = layer.local()
    print("| rows | ours, us | FlashInfer, us | FlashInfer / ours |\n| ---: | ---: | ---: | ---: |", flush=True)
    for rows in args.rows:
        x = layer.tokens(rows)
        picked = [torch.softmax(layer.logits(rows).float(), -1).topk(layer.choices) for _ in range(LAYERS)]
        scores = [(values / values.sum(-1, keepdim=True)).contiguous() for values, _ in picked]
        ids = [numbers.int().contiguous() for _, numbers in picked]
        here = [local[numbers.long()] for numbers in ids]

        def our_layer(number: int) -> Tensor:
            given = (x, *ours[number], scores[number], here[number])  # noqa: B023
            return kernels.expert_mlp(*given, all_experts=layer.experts)

        def their_layer(number: int) -> Tensor:
            return fused(x, ids[number], scores[number], theirs[number], args.ranks)  # noqa: B023

        with autotune(True, tuning_buckets=tuple(args.rows)):
            their_layer(0)
        expected, found = our_layer(0).float(), their_layer(0).float()
        error = float((found - expected).norm() / expected.norm())
        if not error < TOLERANCE:
            raise SystemExit(f"{rows} rows: FlashInfer's result differs from ours by {error:.3f} of its norm")
        with autotune(False, tuning_buckets=tuple(args.rows)):
            us, fused_us = microseconds(our_layer), microseconds(their_layer)
        print(f"| {rows} | {us:.1f} | {fused_us:.1f} | {fused_us / us:.2f} |", flush=True)


if __name__ == "__main__":
    main()
