"""Decode attention over draft windows and trees, between the GEMMs of a layer: what the kernels choose, and the best of
a grid around it.

Run on one GPU:  python3 -m tests.bench.window_attention [--lengths 1024 16384] [--ragged] [--absent 48] --out FOLDER
Single tokens of Qwen3-30B-A3B:  ... --heads 4 8 --shapes 1x1 8x1 --lengths 640 4096
A tree of 32:  ... --tree --shapes 1x32

Prints microseconds of a layer's attention; FOLDER/window-attention.jsonl has the whole grid. o, norm, qkv and the
rotation run between two launches of attention, and their time is taken away: so attention begins and ends as in a step,
at the clock that GEMMs leave. decode_choice.py's launches are chosen by these figures.

Knows: Qwen3-8B's heads, the widths of its drafters' windows. Does not know: which launch an engine makes
(decode_choice.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.inputs import DecodeAttention
from models.kernels.attention import decode, decode_list, decode_window
from models.kernels.attention.decode_choice import window_programs
from models.kernels.attention.decode_work import DecodeWork, choose_rule, plan_decode, workspace_floats
from models.kernels.interface import Rotation
from models.kernels.matmul.autotune import captured, replay_for
from parallel.layers.weight import Weight
from tests.models.kernels.nvidia_kernels import Nvidia, nvidia_kernels

DEVICE = torch.device("cuda", 0)
PAGE, MOST = 64, 8192
HEADS = (8, 4)  # key heads, query heads of each
LAYERS = 16  # in turns: keys of one layer of few rows would stay in the L2
SHAPES = ("1x4", "8x4", "1x16", "8x16")  # rows, new tokens of each
MOST_SPLITS = 32
SECONDS = 0.15  # the clock has fallen by then to what the products' power allows
HIDDEN = 4096
BLOCK = 64  # keys
TALL = 128  # query rows from which a program has eight warps

Attend = Callable[[Tensor, Tensor], Tensor]  # queries, a layer's keys and values -> what is attended


class Form(NamedTuple):
    """A launch of the grid. ``kernel``: "windows" (decode_window.py), "list" (decode_list.py by pointers) or
    "every split" (decode.py, ``programs`` 0). ``apart``: merged in a launch of its own."""

    kernel: str
    stages: int
    warps: int
    fewest: int
    longest: int
    programs: int
    apart: bool = False


def forms(pairs: int, query_rows: int) -> Iterator[Form]:
    """Around what an H200 was found to be fastest with; at most some 500 programs at once."""
    warps = 8 if query_rows >= TALL else 4
    for fewest in (n for n in (1, 2, 3, 4, 8, 16) if pairs >= 256 or 64 <= pairs * n <= 520 or n == 4):
        for longest, each in product((768, 1024, 2048) if pairs >= 256 else (1024, 2048), (1, 2)):
            for stages in (3, 4, 5):
                yield Form("windows", stages, warps, fewest, longest, each)
            yield Form("list", 5, warps, fewest, longest, each)
        yield Form("every split", 5, warps, fewest, 4096 // fewest, 0)
        yield Form("every split", 5, warps, fewest, 4096 // fewest, 0, apart=True)


class Windows:
    """``rows`` rows of ``length`` tokens in pages at random, the ``new`` latest of them with queries. ``tree``: each of
    these sees every second one before it, instead of all."""

    def __init__(self, rows: int, new: int, length: int, kv_heads: int, group: int, dim: int, tree: bool) -> None:
        self.scale = dim**-0.5
        pages = -(-length // PAGE)
        used = rows * pages
        table = torch.zeros(rows, max(pages, MOST // PAGE), dtype=torch.int32, device=DEVICE)
        table[:, :pages] = torch.randperm(used, device=DEVICE).view(rows, pages)
        lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
        seen = [sum(1 << bit for bit in range(node - 1, -1, -2)) for node in range(new)]
        nodes = torch.tensor(seen, dtype=torch.int64, device=DEVICE).int().expand(rows, new).contiguous()
        self.inputs = DecodeAttention(table, lengths, new, max(length, MOST), tree_BQ=nodes if tree else None)
        self.layers = torch.randn(LAYERS, 2, used, PAGE, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
        self.kv_heads, self.heads = kv_heads, kv_heads * group
        self.q = torch.randn(rows * new, self.heads, dim, dtype=torch.bfloat16, device=DEVICE)
        self.partial = torch.zeros(workspace_floats(rows, kv_heads, new * group, dim, MOST_SPLITS), device=DEVICE)
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=DEVICE)

    def make_ragged(self, most: int) -> None:
        """Lengths around 800, lognormal, up to ``most``."""
        pick, lengths_B = random.Random(6), self.inputs.kv_lengths_B
        drawn = [max(self.inputs.query_len, int(pick.lognormvariate(math.log(800), 0.8))) for _ in lengths_B]
        lengths_B.copy_(torch.tensor([min(most, length) for length in drawn]))

    def leave_out(self, absent: int) -> None:
        """The last ``absent`` rows have no tokens, as in steps with chunks of prompts."""
        self.inputs.kv_lengths_B[len(self.inputs.kv_lengths_B) - absent :] = 0
        self.inputs = dataclasses.replace(self.inputs, skip_empty=True)

    def form(self, one: Form, multiprocessors: int) -> Attend:
        """One layer's attention. Makes the list."""
        rows, new, group = len(self.inputs.kv_lengths_B), self.inputs.query_len, self.heads // self.kv_heads
        shape = rows, self.kv_heads, new * group, self.q.shape[-1], self.inputs.max_kv_length
        limits: dict[str, int] = {
            "block": BLOCK,
            "longest": one.longest,
            "fewest": one.fewest,
            "room": self.partial.numel(),
        }
        rule = choose_rule(*shape, **limits)
        rest = self.scale, self.partial, self.counters
        if one.kernel == "every split":
            run = partial(decode.decode_attention, stages=one.stages, warps=one.warps, pdl=True, apart=one.apart)
            return lambda q, layer: run(q, self.heads, layer, self.inputs, rule, *rest)
        work: DecodeWork = plan_decode(self.inputs, rule, True)
        torch.cuda.synchronize()  # attention may read the list before its predecessor ends
        programs = window_programs(one.programs, self.kv_heads, multiprocessors)
        how: dict[str, Any] = {"stages": one.stages, "warps": one.warps, "programs": programs, "pdl": True}
        if one.kernel == "windows":
            return lambda q, layer: decode_window.attend_windows(q, layer, self.inputs, work, *rest, **how)
        return lambda q, layer: decode_list.attend_list(
            q, self.heads, layer, self.inputs, work, *rest, tma=False, block_n=BLOCK, **how
        )


class InLayer:
    """``windows`` between the GEMMs of ``kernels``: o, norm, qkv, rotation and cache write, layer after layer."""

    def __init__(self, kernels: Nvidia, windows: Windows) -> None:
        self.kernels, self.windows = kernels, windows
        inputs, new, dim = windows.inputs, windows.inputs.query_len, windows.q.shape[-1]
        width, packed = windows.heads * dim, (windows.heads + 2 * windows.kv_heads) * dim
        self.weights = [(_weight(HIDDEN, width), _weight(packed, HIDDEN)) for _ in range(LAYERS)]
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.x = torch.randn(len(windows.q), HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        ends_B = inputs.kv_lengths_B.long().clamp(min=new)
        at = (ends_B[:, None] - new + torch.arange(new, device=DEVICE)).flatten()
        pages = inputs.page_table_BP.long().repeat_interleave(new, 0).gather(1, (at // PAGE)[:, None])[:, 0]
        angles = torch.ones(inputs.max_kv_length + 1, dim, device=DEVICE)
        self.rotation = Rotation(self.norm[:dim], self.norm[:dim], 1e-6, angles, at, pages * PAGE + at % PAGE)

    def us(self, attend: Attend | None) -> float:
        """Of a layer; None leaves attention out."""
        return replay_for(captured(partial(self._layers, attend)), SECONDS) / LAYERS

    def _layers(self, attend: Attend | None) -> None:
        kernels, x, residual = self.kernels, self.x, self.x
        for layer, (o, qkv) in zip(self.windows.layers, self.weights, strict=True):
            packed, residual = kernels.add_norm_linear(x, residual, self.norm, 1e-6, qkv)
            q = kernels.rope_and_cache(packed, self.windows.heads, layer, self.rotation)
            x = kernels.linear((q if attend is None else attend(q, layer)).flatten(1), o)

    def found(self) -> Iterator[dict[str, Any]]:
        """What the kernels choose, then the grid; microseconds of a layer's attention alone."""
        windows, beside = self.windows, self.us(None)
        planned = self.kernels.plan_decode(windows.inputs, windows.heads, windows.layers[0])
        torch.cuda.synchronize()

        def chosen(q: Tensor, layer: Tensor) -> Tensor:
            return self.kernels.decode_attention(q, layer, planned, windows.scale)

        self.us(chosen)  # once before: the GPU is cold
        yield {"us": round(self.us(chosen) - beside, 2), "chosen": True, "beside_us": round(beside, 2)}
        group = windows.heads // windows.kv_heads
        pairs = len(windows.inputs.kv_lengths_B) * windows.kv_heads
        for one in forms(pairs, group * windows.inputs.query_len):
            try:
                yield {
                    "us": round(self.us(windows.form(one, self.kernels.traits.multiprocessors)) - beside, 2),
                    **one._asdict(),
                }
            except Exception as error:  # too much shared memory, for one: the others are worth a measurement still
                yield {**one._asdict(), "failed": str(error)[:80]}


def _weight(outputs: int, inner: int) -> Weight:
    return Weight.of(torch.randn(outputs, inner, dtype=torch.bfloat16, device=DEVICE).mul_(inner**-0.5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 16384])
    parser.add_argument("--heads", type=int, nargs=2, default=HEADS, help="key heads, and query heads of each")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="rows x new tokens of each")
    parser.add_argument("--tree", action="store_true", help="new tokens are a tree, up to 32")
    parser.add_argument("--ragged", action="store_true", help="lengths around 800, at most --lengths")
    parser.add_argument("--absent", type=int, default=0, help="rows of these without tokens")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kernels = nvidia_kernels(DEVICE)
    with (options.out / "window-attention.jsonl").open("w", encoding="utf-8") as file:
        for length, wanted in product(options.lengths, options.shapes):
            rows, new = map(int, wanted.split("x"))
            case = {"rows": rows, "new": new, "length": length, "heads": options.heads, "dim": options.head_dim}
            case |= {"tree": options.tree, "ragged": options.ragged, "absent": options.absent}
            kv_heads, group = options.heads
            windows = Windows(rows, new, length, kv_heads, group, options.head_dim, options.tree)
            if options.ragged:
                windows.make_ragged(length)
            if options.absent:
                windows.leave_out(options.absent)
            found = list(InLayer(kernels, windows).found())
            file.write("".join(json.dumps(case | one) + "\n" for one in found))
            best = sorted((one for one in found if "us" in one), key=lambda one: one["us"])
            print(json.dumps(case | {"chosen": found[0]["us"], "best": best[:4]}), flush=True)


if __name__ == "__main__":
    main()
