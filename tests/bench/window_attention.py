"""Micro-benchmark of decode attention over windows and trees: how rows of several new tokens are split and merged.

Run on one GPU:  python3 -m tests.bench.window_attention [--lengths 1024 16384] --out FOLDER
Single tokens of Qwen3-30B-A3B:  ... --heads 4 8 --shapes 1x1 8x1 --lengths 640 4096
Prints microseconds of a layer for what the kernels choose, and the best of a grid around it; FOLDER gets
window-attention.jsonl with all of it.

Knows: Qwen3-8B's heads, the widths of its drafters' windows. Does not know: which launch an engine makes (nvidia.py).
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from models.inputs import DecodeAttention
from models.kernels.attention import decode
from models.kernels.attention.decode_work import SplitRule
from models.kernels.matmul.autotune import captured, replay_for
from models.kernels.nvidia import NvidiaKernels
from tests.bench.kernels import DEVICE

DIM, PAGE, MOST = 128, 64, 8192
HEADS = (8, 4)  # key heads, query heads of each
LAYERS = 16  # in turns: keys of one layer of few rows would stay in the L2
SHAPES = ("1x4", "8x4", "1x16", "8x16")  # rows, new tokens of each
SECONDS = 0.04


class Windows:
    """``rows`` rows of ``length`` tokens, the ``new`` latest of them with queries."""

    def __init__(self, rows: int, new: int, length: int, kv_heads: int, group: int) -> None:
        pages = -(-length // PAGE)
        table = torch.randperm(rows * pages, device=DEVICE).view(rows, pages).int()
        room = max(pages, MOST // PAGE)
        padded = torch.zeros(rows, room, dtype=torch.int32, device=DEVICE)
        padded[:, :pages] = table
        lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
        self.inputs = DecodeAttention(padded, lengths, new, max(length, MOST))
        shape = (LAYERS, 2, rows * pages, PAGE, kv_heads, DIM)
        self.layers = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
        self.heads = kv_heads * group
        self.q = torch.randn(rows * new, self.heads, DIM, dtype=torch.bfloat16, device=DEVICE)
        self.partial = torch.zeros(32 << 20, device=DEVICE)
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=DEVICE)

    def chosen(self, kernels: NvidiaKernels) -> float:
        def layers() -> None:
            for layer in self.layers:
                kernels.decode_attention(self.q, layer, self.inputs, DIM**-0.5)

        return replay_for(captured(layers), SECONDS) / LAYERS

    def us(self, rule: SplitRule, stages: int, warps: int, merged: int) -> float:
        run = partial(decode.decode_attention, stages=stages, warps=warps, pdl=True, merged=merged)

        def layers() -> None:
            for layer in self.layers:
                run(self.q, self.heads, layer, self.inputs, rule, DIM**-0.5, self.partial, self.counters)

        return replay_for(captured(layers), SECONDS) / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 16384])
    parser.add_argument("--heads", type=int, nargs=2, default=HEADS, help="key heads, and query heads of each")
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="rows x new tokens of each")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kernels = NvidiaKernels(DEVICE)
    with (options.out / "window-attention.jsonl").open("w", encoding="utf-8") as file:
        for length, wanted in product(options.lengths, options.shapes):
            rows, new = map(int, wanted.split("x"))
            case = {"rows": rows, "new": new, "length": length}
            windows = Windows(rows, new, length, *options.heads)
            found: list[dict[str, Any]] = [{"us": round(windows.chosen(kernels), 2), "chosen": True}]
            for splits, (block, stages, warps), merged in product(
                (4, 8, 16, 32, 64), ((32, 5, 2), (32, 5, 4), (64, 3, 4)), (1, 2, 4, 8)
            ):
                if merged * max(16, new * options.heads[1]) > 32 * warps:  # registers
                    continue
                rule = SplitRule(block, splits, 1 << 30, splits)
                try:
                    us = windows.us(rule, stages, warps, merged)
                except Exception as error:  # too much shared memory, for one: the others are worth a measurement still
                    found.append({"splits": splits, "failed": str(error)[:80]})
                    continue
                how = {"splits": splits, "block": block, "stages": stages, "warps": warps, "merged": merged}
                found.append({"us": round(us, 2), **how})
            for one in found:
                file.write(json.dumps(case | one) + "\n")
            best = sorted((one for one in found if "us" in one), key=lambda one: one["us"])
            print(json.dumps(case | {"chosen": found[0]["us"], "best": best[:4]}), flush=True)


if __name__ == "__main__":
    main()
