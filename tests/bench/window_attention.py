"""Micro-benchmark of decode attention over windows and trees: how rows of several new tokens are split and merged.

Run on one GPU:  python3 -m tests.bench.window_attention [--lengths 1024 16384] --out FOLDER
Single tokens of Qwen3-30B-A3B:  ... --heads 4 8 --shapes 1x1 8x1 --lengths 640 4096
A tree of 32:  ... --tree --shapes 1x32
As in an engine with 100 GiB of KV:  ... --in-order --most 33000 --blocks 25600
Prints microseconds of a layer for what the kernels choose, and the best of a grid around it, merged by the last program
or in a launch of its own (apart). FOLDER gets window-attention.jsonl with all of it.

Knows: Qwen3-8B's heads, the widths of its drafters' windows. Does not know: which launch an engine
makes (decode_choice.py).
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
from models.kernels.attention.decode_work import SplitRule, workspace_floats
from models.kernels.matmul.autotune import captured, replay_for
from models.kernels.nvidia import NvidiaKernels
from tests.bench.kernels import DEVICE

PAGE, MOST = 64, 8192
HEADS = (8, 4)  # key heads, query heads of each
LAYERS = 16  # in turns: keys of one layer of few rows would stay in the L2
SHAPES = ("1x4", "8x4", "1x16", "8x16")  # rows, new tokens of each
SPLITS = (4, 8, 16, 32)
BLOCKS = ((32, 5, 4), (64, 3, 4), (64, 5, 4), (128, 3, 4))  # keys, stages, warps
TALL_BLOCKS = ((32, 5, 8), (64, 3, 8), (64, 5, 8), (128, 3, 8))  # the same of _TALL query rows or more, too
SECONDS = 0.03
_TALL = 64


class Windows:
    """``rows`` rows of ``length`` tokens, the ``new`` latest of them with queries. ``tree``: each of these sees every
    second one before it, instead of all. ``in_order``: a row's pages follow each other, as those of a prompt alone do.
    ``most``: tokens that a page table has room for. ``blocks``: of each layer's cache, 0 for as many as the rows have;
    whether layers that lie far from each other are slower is to be measured."""

    def __init__(
        self,
        rows: int,
        new: int,
        length: int,
        kv_heads: int,
        group: int,
        dim: int,
        *,
        tree: bool = False,
        in_order: bool = False,
        most: int = MOST,
        blocks: int = 0,
    ) -> None:
        self.scale = dim**-0.5
        pages = -(-length // PAGE)
        used, blocks = rows * pages, max(blocks, rows * pages)
        numbers = torch.arange(used, device=DEVICE) if in_order else torch.randperm(blocks, device=DEVICE)[:used]
        table = numbers.view(rows, pages).int()
        room = max(pages, -(-most // PAGE))
        padded = torch.zeros(rows, room, dtype=torch.int32, device=DEVICE)
        padded[:, :pages] = table
        lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
        seen = [sum(1 << bit for bit in range(node - 1, -1, -2)) for node in range(new)]
        nodes = torch.tensor(seen, dtype=torch.int64, device=DEVICE).int().expand(rows, new).contiguous()
        self.inputs = DecodeAttention(padded, lengths, new, max(length, most), tree_BQ=nodes if tree else None)
        self.layers = torch.empty(LAYERS, 2, blocks, PAGE, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
        for layer in self.layers:
            for part in layer:
                part[numbers] = torch.randn(used, PAGE, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
        self.heads = kv_heads * group
        self.q = torch.randn(rows * new, self.heads, dim, dtype=torch.bfloat16, device=DEVICE)
        floats = workspace_floats(rows, kv_heads, new * group, dim, max(SPLITS))
        self.partial = torch.zeros(floats, device=DEVICE)
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=DEVICE)

    def chosen(self, kernels: NvidiaKernels) -> float:
        """As an engine launches it: rows are split once for all layers."""
        inputs = kernels.plan_decode(self.inputs, self.heads, self.layers[0])
        torch.cuda.synchronize()  # the launch right behind a plan may not read it: here no other lies between

        def layers() -> None:
            for layer in self.layers:
                kernels.decode_attention(self.q, layer, inputs, self.scale)

        return replay_for(captured(layers), SECONDS) / LAYERS

    def us(self, rule: SplitRule, stages: int, warps: int, apart: bool) -> float:
        run = partial(decode.decode_attention, stages=stages, warps=warps, pdl=True, merged=1, apart=apart)

        def layers() -> None:
            for layer in self.layers:
                run(self.q, self.heads, layer, self.inputs, rule, self.scale, self.partial, self.counters)

        return replay_for(captured(layers), SECONDS) / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 16384])
    parser.add_argument("--heads", type=int, nargs=2, default=HEADS, help="key heads, and query heads of each")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="rows x new tokens of each")
    parser.add_argument("--tree", action="store_true", help="new tokens are a tree, up to 32")
    parser.add_argument("--in-order", action="store_true", help="a row's pages follow each other; else at random")
    parser.add_argument("--most", type=int, default=MOST, help="tokens a page table has room for, --max-model-len")
    parser.add_argument("--blocks", type=int, default=0, help="of each of 16 layers' caches (default: what rows need)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kernels = NvidiaKernels(DEVICE)
    with (options.out / "window-attention.jsonl").open("w", encoding="utf-8") as file:
        for length, wanted in product(options.lengths, options.shapes):
            rows, new = map(int, wanted.split("x"))
            case = {"rows": rows, "new": new, "length": length, "heads": options.heads, "dim": options.head_dim}
            case |= {"tree": options.tree, "in_order": options.in_order, "most": options.most}
            case |= {"blocks": options.blocks}
            kv_heads, group = options.heads
            windows = Windows(
                rows,
                new,
                length,
                kv_heads,
                group,
                options.head_dim,
                tree=options.tree,
                in_order=options.in_order,
                most=options.most,
                blocks=options.blocks,
            )
            blocks = BLOCKS + TALL_BLOCKS * (new * options.heads[1] >= _TALL)
            found: list[dict[str, Any]] = [{"us": round(windows.chosen(kernels), 2), "chosen": True}]
            for splits, (block, stages, warps), apart in product(SPLITS, blocks, (False, True)):
                rule = SplitRule(block, splits, 1 << 30, splits)
                try:
                    us = windows.us(rule, stages, warps, apart)
                except Exception as error:  # too much shared memory, for one: the others are worth a measurement still
                    found.append({"splits": splits, "failed": str(error)[:80]})
                    continue
                how = {"splits": splits, "block": block, "stages": stages, "warps": warps, "apart": apart}
                found.append({"us": round(us, 2), **how})
            for one in found:
                file.write(json.dumps(case | one) + "\n")
            best = sorted((one for one in found if "us" in one), key=lambda one: one["us"])
            print(json.dumps(case | {"chosen": found[0]["us"], "best": best[:4]}), flush=True)


if __name__ == "__main__":
    main()
