"""Rotation and cache write of a prefill on one GPU: microseconds and TB/s of every form, the best one last.

Run on one GPU:  python3 -m tests.bench.rotation --out FOLDER

Every figure is the median of graph replays over layers of their own, whose bytes are several times those of the L2;
TB/s are of qkv read and q, k and v written, nothing else. "copy" is torch's copy of as many bytes.
Behind each form stands whether it gives the bits of the first one. Every figure goes to FOLDER/rotation.jsonl, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from models.inputs import empty_kv_layer
from models.kernels.attention import rope_decode, rope_prefill
from models.kernels.attention.rope_prefill import Blocks
from models.kernels.interface import Rotation
from models.kernels.matmul import autotune

DEVICE = torch.device("cuda", 0)
PAGE = 64
PROMPT = 512  # tokens of a prompt
AT_LEAST = 400 << 20  # bytes that the layers of one measurement read and write: eight times the L2
SHAPES = {"8B": (32, 8), "0.6B": (16, 8)}  # q heads, kv heads
TOKENS = (8192, 2048, 512, 256)

Variant = Callable[..., Tensor]
VARIANTS: dict[str, Variant] = {"token by token": rope_decode.rope_and_cache} | {
    f"{heads} heads, {warps} warps": partial(rope_prefill.rope_and_cache, blocks=Blocks(heads, warps))
    for heads, warps in ((2, 4), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4))
}


@functools.cache
def _angles(dim: int) -> Tensor:
    """One table for all layers, as in a model."""
    return torch.randn(40960, dim, device=DEVICE)


class Prefill:
    """One layer's packed qkv of whole prompts, and the pages that their keys and values go to."""

    def __init__(
        self, shape: str, tokens: int, *, dim: int = 128, dtype: torch.dtype = torch.bfloat16, norm: bool = True
    ) -> None:
        self.heads, kv_heads = SHAPES[shape]
        self.qkv = torch.randn(tokens, (self.heads + 2 * kv_heads) * dim, dtype=dtype, device=DEVICE)
        q_norm, k_norm = (torch.rand(dim, dtype=dtype, device=DEVICE) if norm else None for _ in "qk")
        positions = torch.arange(tokens, device=DEVICE) % PROMPT
        pages = torch.randperm(tokens // PAGE, device=DEVICE) + 1
        slots = (pages[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()
        self.rotation = Rotation(q_norm, k_norm, 1e-6, _angles(dim), positions, slots)
        self.kv = empty_kv_layer(tokens // PAGE + 1, PAGE, kv_heads, dim, dtype, str(DEVICE)).zero_()
        self.bytes = 2 * self.qkv.nbytes

    def run(self, variant: Variant) -> Tensor:
        return variant(self.qkv, self.heads, self.kv, self.rotation, True)


def bench(shape: str, tokens: int) -> dict[str, tuple[float, str]]:
    """(microseconds, bits) of a layer by form.

    Raises AssertionError where a form is further from the first one than a rounding to 16 bits.
    """
    first = Prefill(shape, tokens)
    layers = [first, *(Prefill(shape, tokens) for _ in range(AT_LEAST // first.bytes))]
    expected, found = (first.run(VARIANTS["token by token"]), first.kv.clone()), dict[str, tuple[float, str]]()
    for name, variant in VARIANTS.items():
        first.kv.zero_()
        given = first.run(variant), first.kv
        for one, other in zip(given, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-5)
        same = all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))
        us = autotune.median_graph_us(partial(_every, layers, variant), DEVICE) / len(layers)
        found[name] = us, "same bits" if same else "other bits"
    sources = [layer.qkv for layer in layers]
    targets = [torch.empty_like(source) for source in sources]
    us = autotune.median_graph_us(partial(_copy, sources, targets), DEVICE) / len(layers)
    return found | {"copy": (us, "")}


def _every(layers: list[Prefill], variant: Variant) -> list[Tensor]:
    """The results are kept until the last one, so that each lies in memory of its own."""
    return [layer.run(variant) for layer in layers]


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for shape in SHAPES:
        for tokens in TOKENS:
            began, moved = time.time(), Prefill(shape, tokens).bytes
            found = bench(shape, tokens)
            print(f"{shape}, {tokens} tokens, {moved / 1e6:.0f} MB ({time.time() - began:.0f} s)", flush=True)
            for name, (us, bits) in sorted(found.items(), key=lambda entry: -entry[1][0]):
                print(f"  {name:16} {us:7.1f} us {moved / us / 1e6:5.2f} TB/s  {bits}", flush=True)
                with (out / "rotation.jsonl").open("a") as log:
                    log.write(json.dumps([shape, tokens, name, us, bits]) + "\n")


if __name__ == "__main__":
    main()
