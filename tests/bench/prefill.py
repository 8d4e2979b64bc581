"""Micro-benchmark of prefill attention at the sizes of an 8B model: FlashInfer's, ours, and ours with other tiles.

Run on one GPU:  python3 -m tests.bench.prefill --out FOLDER
Median of graph replays over layers with keys and values of their own. FlashInfer's is timed where it is built, or with
--build; its plan is not part of what is timed, nor is ours. Chunks of a long prompt, without other tiles:
--chunks 512@16384 640@16384 740@16384 1024@16384. A tile whose output differs from the default one's is named
and left out. FOLDER/prefill-attention.json has all.

Knows: how a step's attention is timed alone. Does not know: what surrounds it (launch bench latency --profile).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.inputs import PrefillAttention
from models.kernels.attention import prefill as prefill_kernel
from models.kernels.attention.prefill import Blocks, blocks_for
from models.kernels.attention.prefill_tiles import Tiles, list_tiles
from models.kernels.matmul import autotune
from models.kernels.traits import H200
from tests.models.kernels.nvidia_kernels import Nvidia, nvidia_kernels
from tests.models.kv_layers import empty_kv_layer

BF16, DEVICE = torch.bfloat16, torch.device("cuda", 0)
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
LAYERS = 4
TILES = (
    Blocks(128, 64, 2, 8),
    Blocks(128, 64, 4, 8),
    Blocks(128, 128, 2, 8),
    Blocks(128, 32, 3, 8),
    Blocks(64, 64, 2, 4),
    Blocks(128, 64, 3, 8),
    Blocks(128, 128, 3, 8),
)


@dataclass(frozen=True)
class Shape:
    name: str
    prompts: int
    new: int  # tokens of each
    prefix: int = 0

    @property
    def flop(self) -> float:
        """Of both products, what the mask leaves."""
        return 4.0 * HEADS * DIM * self.prompts * (self.new * self.prefix + self.new * (self.new + 1) / 2)


SHAPES = (
    Shape("16 prompts x 512", 16, 512),
    Shape("1 prompt x 8192", 1, 8192),
    Shape("512 behind 4096", 1, 512, 4096),
    Shape("1 prompt x 512", 1, 512),
    Shape("64 prompts x 128", 64, 128),
)


class Case:
    """Queries, and caches of several layers, of one shape."""

    def __init__(self, shape: Shape) -> None:
        length = shape.new + shape.prefix
        pages = -(-length // PAGE)
        self.queries, self.lengths = (shape.new,) * shape.prompts, (length,) * shape.prompts
        self.table = (torch.randperm(shape.prompts * pages, device=DEVICE) + 1).to(torch.int32)
        self.table = self.table.view(shape.prompts, pages)
        self.layers = [
            empty_kv_layer(shape.prompts * pages + 1, PAGE, KV_HEADS, DIM, BF16, str(DEVICE)).normal_()
            for _ in range(LAYERS)
        ]
        self.q = torch.randn(shape.prompts * shape.new, HEADS, DIM, dtype=BF16, device=DEVICE)

    @property
    def inputs(self) -> PrefillAttention:
        return PrefillAttention(self.table, self.queries, self.lengths)

    def by(self, kernels: Nvidia) -> Callable[[Tensor], Tensor]:
        planned = kernels.plan_prefill(self.inputs, HEADS, self.layers[0])
        return lambda kv: kernels.prefill_attention(self.q, kv, planned, DIM**-0.5)

    def with_tiles(self, blocks: Blocks) -> Callable[[Tensor], Tensor]:
        listed = list_tiles(self.queries, self.lengths, blocks.m // (HEADS // KV_HEADS))
        tiles = Tiles(torch.tensor(listed, dtype=torch.int32, device=DEVICE))
        return lambda kv: prefill_kernel.prefill_attention(
            self.q, kv, self.table, tiles, DIM**-0.5, blocks=blocks, programs=4 * H200.multiprocessors, pdl=True
        )

    def microseconds(self, attend: Callable[[Tensor], Tensor]) -> float:
        """A layer's."""

        def layers() -> None:
            for kv in self.layers:
                attend(kv)

        return autotune.median_graph_us(layers, DEVICE) / LAYERS


def chunk(text: str) -> Shape:
    """NEW@PREFIX: so many tokens behind so many."""
    new, _, prefix = text.partition("@")
    return Shape(f"{new} behind {prefix or 0}", 1, int(new), int(prefix or 0))


def measure(shape: Shape, flashinfer: Nvidia | None, ours: Nvidia, tiles: tuple[Blocks, ...]) -> dict[str, Any]:
    """Microseconds of each, printed as they come."""
    case = Case(shape)
    found: dict[str, Any] = {"shape": shape.name, "us": {}, "left_out": {}}
    expected = case.by(ours)(case.layers[0])

    def one(name: str, attend: Callable[[Tensor], Tensor]) -> None:
        try:
            error = float((attend(case.layers[0]) - expected).float().norm() / expected.float().norm())
            if not error < 1e-2:
                raise ValueError(f"its output differs by {error:.1e}")
            us = found["us"][name] = case.microseconds(attend)
        except Exception as error_of_it:  # the compiler's and the launcher's have no common class
            found["left_out"][name] = str(error_of_it)[:200]
            print(f"| {shape.name} | {name} | left out: {str(error_of_it)[:100]} | | |", flush=True)
            return
        base = found["us"].get("flashinfer")
        times = f"{us / base:.2f}" if base else ""
        print(f"| {shape.name} | {name} | {us:.1f} | {shape.flop / us / 1e6:.0f} | {times} |", flush=True)

    if flashinfer is not None:
        one("flashinfer", case.by(flashinfer))
    one(f"ours {blocks_for(BF16, DIM)}", case.by(ours))
    for blocks in tiles:
        one(f"tile {blocks}", case.with_tiles(blocks))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--build", action="store_true", help="wait for FlashInfer's, where it is not built")
    parser.add_argument(
        "--chunks", type=chunk, nargs="*", metavar="NEW@PREFIX", help="these instead of the usual shapes"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    flashinfer: Nvidia | None = nvidia_kernels(DEVICE, prefill="flashinfer" if args.build else "auto")
    assert flashinfer is not None
    flashinfer.prepare_prefill(BF16, DIM)
    if flashinfer.prefill_name != "flashinfer":  # before it is settled, so that no build runs beside what is timed
        print("FlashInfer's prefill is not built here: --build waits for it")
        flashinfer = None
    ours, found = nvidia_kernels(DEVICE, prefill="triton"), []
    print(f"\n{HEADS} heads, {KV_HEADS} of keys, head_dim {DIM}, bf16, pages of {PAGE}; tiles: queries x heads, keys\n")
    print("| rows | kernel | us a layer | TFLOP/s | times FlashInfer's |\n| --- | --- | ---: | ---: | ---: |")
    for shape in args.chunks or SHAPES:
        found.append(measure(shape, flashinfer, ours, () if args.chunks else TILES))
        (args.out / "prefill-attention.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
