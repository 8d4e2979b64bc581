"""Whether sums between GPUs cost less beside the products of other tokens: layers of 8B's shapes, both ways.

Run: python3 -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.bench.sums_beside_products 8192 2048

Knows: a layer's products and its two sums, one after the other, or a step's tokens in parts whose sums run on a second
stream while the next part's products run. Does not know: a model or its attention, for which torch's of 512 keys
stands in. Prints microseconds a layer by the tokens of a step: without sums, by NCCL and by the own kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from models.kernels.matmul import norm as norm_kernels
from models.kernels.matmul.autotune import median_graph_us
from parallel.comm import all_reduce_triton
from parallel.comm.collectives import GroupCollectives
from parallel.comm.symmetric_all_reduce import SymmetricCollectives
from tests.bench.all_reduce import EPS, leave, ranks_of_torchrun, show

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 32, 8, 128
LAYERS = 6
PROMPT = 512  # tokens
PARTS = (2, 4)
PROGRAMS = (32, 64, 128, 256)  # of the own kernel

Sum = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (part, residual) to (normed sum, residual of the next)


class Layers:
    """One rank's share of so many layers, with random weights. ``normed``: a sum, the residual and the norm."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) * 0.02

        self.heads = HEADS // ranks
        packed, inner = (HEADS + 2 * KV_HEADS) * HEAD_DIM // ranks, INTERMEDIATE // ranks
        self.qkv, self.o = (
            [weight(*shape) for _ in range(LAYERS)] for shape in ((packed, HIDDEN), (HIDDEN, HIDDEN // ranks))
        )
        self.gate_up, self.down = (
            [weight(*shape) for _ in range(LAYERS)] for shape in ((2 * inner, HIDDEN), (HIDDEN, inner))
        )
        self.side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def attend(self, qkv: Tensor) -> Tensor:
        queries = qkv[:, : self.heads * HEAD_DIM].reshape(-1, PROMPT, self.heads, HEAD_DIM).transpose(1, 2)
        found = F.scaled_dot_product_attention(queries, queries, queries, is_causal=True)
        return found.transpose(1, 2).reshape(len(qkv), self.heads * HEAD_DIM)

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        return norm_kernels.silu_mul(x @ self.gate_up[layer].t(), True) @ self.down[layer].t()

    def one_after_the_other(self, x: Tensor, residual: Tensor, normed: Sum) -> None:
        for layer in range(LAYERS):
            hidden, residual = normed(x, residual)
            x = self.attend(hidden @ self.qkv[layer].t()) @ self.o[layer].t()
            hidden, residual = normed(x, residual)
            x = self.mlp(hidden, layer)
        normed(x, residual)

    def in_parts(self, x: Tensor, residual: Tensor, normed: Sum, parts: int) -> None:
        main: Any = torch.cuda.current_stream()

        def begin(part: Tensor, before: Tensor) -> tuple[tuple[Tensor, Tensor], Any]:
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                found = normed(part, before)
                return found, self.side.record_event()

        def end(begun: tuple[tuple[Tensor, Tensor], Any]) -> tuple[Tensor, Tensor]:
            main.wait_event(begun[1])
            return begun[0]

        size = len(x) // parts
        cuts = [slice(at * size, (at + 1) * size) for at in range(parts)]
        begun, kept = [begin(x[cut], residual[cut]) for cut in cuts], []
        for layer in range(LAYERS):
            qkv, befores = x.new_empty(len(x), len(self.qkv[layer])), []
            for cut, one in zip(cuts, begun, strict=True):
                hidden, before = end(one)
                torch.mm(hidden, self.qkv[layer].t(), out=qkv[cut])
                befores.append(before)
            attended = self.attend(qkv)
            kept.append((qkv, attended))  # the other stream's memory is not to be reused meanwhile
            begun = [begin(attended[cut] @ self.o[layer].t(), one) for cut, one in zip(cuts, befores, strict=True)]
            ended = (end(one) for one in begun)
            begun = [begin(self.mlp(hidden, layer), before) for hidden, before in ended]
        for one in begun:
            end(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int, nargs="+", help=f"of a step; multiples of {PROMPT}")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for sums-beside-products.json")
    options = parser.parse_args()
    group, device = ranks_of_torchrun()
    made, nccl = SymmetricCollectives(group, device), GroupCollectives(group)
    own = made.dispatch.one_shot if made.size == 2 else made.dispatch.two_shot
    layers, norm = Layers(made.size, device), torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)

    def without(part: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return norm_kernels.rms_norm(part, residual, norm, EPS, True), residual

    def by_nccl(part: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return without(nccl.all_reduce(part), residual)

    def by_own(part: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return own(part, residual_TN=residual, norm_N=norm, eps=EPS)

    def us(work: Callable[[], None]) -> float:
        dist.barrier()
        return median_graph_us(work, device, replays=8) / LAYERS

    found = []
    for tokens in options.tokens:
        x, residual = (torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2))
        row: dict[str, Any] = {"tokens": tokens}
        for name, way in {"without": without, "NCCL": by_nccl}.items():
            row[name] = us(partial(layers.one_after_the_other, x, residual, way))
        for parts in PARTS:
            row[f"NCCL in {parts}"] = us(partial(layers.in_parts, x, residual, by_nccl, parts))
        for programs in PROGRAMS:
            all_reduce_triton.PROGRAMS_OF_MANY = all_reduce_triton.PROGRAMS_OF_TWO_SHOTS = programs
            row[f"own, {programs}"] = us(partial(layers.one_after_the_other, x, residual, by_own))
            for parts in PARTS:
                row[f"own, {programs}, in {parts}"] = us(partial(layers.in_parts, x, residual, by_own, parts))
        found.append(row)
        show(row)
    leave(found, options.out / "sums-beside-products.json")


if __name__ == "__main__":
    main()
