"""Our expert kernels against FlashInfer's fused MoE (CUTLASS), a rank's share of a layer's experts, in one run.

Run on one GPU:  python3 -m tests.bench.flashinfer_experts --out FOLDER [--shape 30b-a3b] [--rows 1 8] [--ranks 2]
FlashInfer compiles its module first, once a machine, unless one lies in flashinfer/data/aot; how long that takes is
printed, since a user would wait for it. Then it chooses among its kernels by measurement, for each number of rows. Both
are given the same choices of experts and the same weights, and have to agree; then both are captured, which holds
FlashInfer's choice, and timed in turns.

FOLDER gets flashinfer-experts-SHAPE.json, every round of each, and flashinfer-tactics-SHAPE.json, which kernels
FlashInfer chose: its tuner times each for a moment, so two runs may choose differently.

Knows: FlashInfer 0.6.13's argument order, and that its first matrix holds up rows before gate rows.
Does not know: the kernels, or which of them an engine runs.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.kernels.nvidia import NvidiaKernels
from tests.bench.expert_timing import LAYERS, Run, agree, in_turns
from tests.bench.kernels import DEVICE
from tests.gpu.expert_cases import SHAPES, Layer, share_of


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


class Experts:
    """The same experts of LAYERS layers, held as our kernels and as FlashInfer's want them."""

    def __init__(self, layer: Layer, ranks: int) -> None:
        self._layer, self._ranks, self._kernels = layer, ranks, NvidiaKernels(DEVICE)
        self._ours = [layer.weights() for _ in range(LAYERS)]
        self._theirs = [(up_first(gate_up), down) for gate_up, down in self._ours]

    def before(self, rows: int) -> tuple[Run, Run]:
        """Ours and FlashInfer's, for random tokens that have chosen experts in each layer."""
        layer, x = self._layer, self._layer.tokens(rows)
        picked = [torch.softmax(layer.logits(rows).float(), -1).topk(layer.choices) for _ in range(LAYERS)]
        scores = [(values / values.sum(-1, keepdim=True)).contiguous() for values, _ in picked]
        ids = [numbers.int().contiguous() for _, numbers in picked]
        here = [layer.local()[numbers.long()] for numbers in ids]

        def ours(number: int) -> Tensor:
            given = (x, *self._ours[number], scores[number], here[number])
            return self._kernels.expert_mlp(*given, all_experts=layer.experts)

        def theirs(number: int) -> Tensor:
            return fused(x, ids[number], scores[number], self._theirs[number], self._ranks)

        return ours, theirs


def compare(rows: int, ours: Run, theirs: Run) -> dict[str, Any]:
    agree(f"{rows} rows: FlashInfer's result differs from ours", theirs, ours)
    found = in_turns({"ours": ours, "flashinfer": theirs})
    us, other = found["ours"].us, found["flashinfer"]
    print(
        f"| {rows} | {us:.1f} | {other.us:.1f} | {other.ratio:.2f} | {other.least:.2f} to {other.most:.2f} |",
        flush=True,
    )
    return {"rows": rows, **{name: asdict(one) for name, one in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for times and FlashInfer's choices")
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 256, 2048, 8192])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    build()
    torch.manual_seed(0)
    from flashinfer.autotuner import AutoTuner, autotune

    experts, buckets = Experts(share_of(args.shape, args.ranks), args.ranks), tuple(args.rows)
    found: dict[str, Any] = {"shape": args.shape, "ranks": args.ranks, "gpu": torch.cuda.get_device_name(), "rows": []}
    print("| rows | ours, us | FlashInfer, us | FlashInfer / ours | least to most of a round |", flush=True)
    print("| ---: | ---: | ---: | ---: | --- |", flush=True)
    for rows in args.rows:
        ours, theirs = experts.before(rows)
        with autotune(True, tuning_buckets=buckets):
            theirs(0)
        AutoTuner.get().save_configs(str(args.out / f"flashinfer-tactics-{args.shape}.json"))
        with autotune(False, tuning_buckets=buckets):  # what was chosen, and nothing new
            found["rows"].append(compare(rows, ours, theirs))
        (args.out / f"flashinfer-experts-{args.shape}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
