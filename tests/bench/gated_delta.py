"""Micro-benchmark of gated delta nets: a layer's convolution, recurrence and gated norm, for steps of every kind.

Run on one GPU:  python3 -m tests.bench.gated_delta [--heads 16,32] [--out FOLDER]
Decode: one token a row, one launch; bytes are those of the state, read and written. Prefill: a prompt alone, several,
and chunks beside rows that decode. ``--heads`` K,V: heads of one rank (16,32: Qwen3-Next or Qwen3.5-35B-A3B whole;
8,16 on two ranks; 16,48: Qwen3.5-27B). FOLDER gets gated-delta.json. ``--apart``: only the two launches of long rows,
each alone and one behind the other.

Knows: which loads a delta net has to serve. Does not know: the projections around it.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from models.inputs import StateRows
from models.kernels.interface import DeltaRule
from models.kernels.matmul import autotune
from models.kernels.nvidia import NvidiaKernels
from models.kernels.recurrent import delta_chunk

DEVICE = torch.device("cuda", 0)
DIM, TAPS, LAYERS = 128, 4, 6
BF16 = torch.bfloat16
DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILL: dict[str, tuple[int, ...]] = {
    "512": (512,),
    "2048": (2048,),
    "8192": (8192,),
    "8 x 1024": (1024,) * 8,
    "32 x 64": (64,) * 32,
    "64 that decode + 448": (1,) * 64 + (448,),
    "255 that decode + 1793": (1,) * 255 + (1793,),
    "16 x 16": (16,) * 16,
}


class Layer:
    """One layer's weights, and a pool of ``slots`` states."""

    def __init__(self, k_heads: int, v_heads: int, slots: int) -> None:
        self.channels = (2 * k_heads + v_heads) * DIM
        decay, bias = torch.rand(v_heads, device=DEVICE), torch.rand(v_heads, device=DEVICE)
        self.rule = DeltaRule(k_heads, v_heads, DIM, DIM, decay, bias, torch.ones(DIM, device=DEVICE), 1e-6)
        self.filters = torch.randn(self.channels, TAPS, dtype=BF16, device=DEVICE)
        self.window = torch.zeros(1 + slots, TAPS, self.channels, dtype=BF16, device=DEVICE)
        self.state = torch.zeros(1 + slots, v_heads, DIM, DIM, device=DEVICE)

    def run(self, kernels: NvidiaKernels, projected: torch.Tensor, rows: StateRows, positions: torch.Tensor) -> None:
        kernels.conv_gated_delta(projected, self.filters, self.window, self.rule, self.state, rows, positions)


def microseconds(kernels: NvidiaKernels, layers: list[Layer], lengths: tuple[int, ...], *, decode: bool) -> float:
    """Of one layer."""
    tokens, rule = sum(lengths), layers[0].rule
    projected = torch.randn(tokens, sum(rule.widths), dtype=BF16, device=DEVICE)
    slots = torch.randperm(len(layers[0].state) - 1, device=DEVICE)[: len(lengths)] + 1
    ends = torch.tensor(lengths, device=DEVICE).cumsum(0)
    positions = torch.cat([torch.arange(length, device=DEVICE) for length in lengths]) + 100
    rows = StateRows(slots, None if decode else ends)

    def every_layer() -> None:
        for layer in layers:
            layer.run(kernels, projected, rows, positions)

    return autotune.median_graph_us(every_layer, DEVICE, 20) / len(layers)


def apart(kernels: NvidiaKernels, layers: list[Layer], tokens: int) -> None:
    """Microseconds of a layer for a prompt alone. What a launch by itself reads is what lies in memory."""
    rule = layers[0].rule
    projected = torch.randn(tokens, sum(rule.widths), dtype=BF16, device=DEVICE)
    qkv = projected[:, : layers[0].channels].contiguous()
    b, a = projected[:, -2 * rule.v_heads : -rule.v_heads], projected[:, -rule.v_heads :]
    out = torch.empty(tokens, rule.v_heads * DIM, dtype=BF16, device=DEVICE)
    ends = torch.tensor([tokens], device=DEVICE)
    rows = StateRows(torch.ones_like(ends), ends)

    def every_layer() -> None:
        for layer in layers:
            delta_chunk.delta_chunks(qkv, b, a, rule, layer.state, rows, out, kernels.pdl, most=16)

    def us() -> float:
        return autotune.median_graph_us(every_layer, DEVICE, 20) / len(layers)

    def us_without(launch: str) -> float:
        with patch.object(delta_chunk, launch, defaultdict(lambda: lambda *_, **__: None)):  # a kernel, by grid
            return us()

    prepare, scan = us_without("_scan_kernel"), us_without("_prepare_kernel")
    print(f"{tokens:5d} tokens: both {us():8.2f} us, prepare {prepare:8.2f} us, scan {scan:8.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="16,32", help="key and value heads of one rank (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for gated-delta.json")
    parser.add_argument("--apart", action="store_true", help="time the launches of long rows one by one")
    options = parser.parse_args()
    k_heads, v_heads = (int(part) for part in options.heads.split(","))
    kernels = NvidiaKernels(DEVICE)
    layers = [Layer(k_heads, v_heads, 260) for _ in range(LAYERS)]
    if options.apart:
        for tokens in (512, 2048, 8192):
            apart(kernels, layers, tokens)
        return
    time_of = partial(microseconds, kernels, layers)
    found: list[dict[str, object]] = []
    print(f"{k_heads} key heads, {v_heads} value heads of {DIM}")
    for rows in DECODE:
        us = time_of((1,) * rows, decode=True)
        moved = rows * v_heads * DIM * DIM * 4 * 2
        found.append({"load": f"decode {rows}", "us": us, "state_bytes": moved})
        print(f"decode {rows:4d} rows: {us:8.2f} us, {moved / us / 1e6:6.2f} TB/s of state read and written")
    for name, lengths in PREFILL.items():
        us = time_of(lengths, decode=False)
        found.append({"load": name, "us": us, "tokens": sum(lengths)})
        print(f"prefill {name:24s}: {us:9.2f} us, {us * 1e3 / sum(lengths):7.1f} ns a token")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gated-delta.json").write_text(json.dumps({"heads": [k_heads, v_heads], "found": found}))


if __name__ == "__main__":
    main()
