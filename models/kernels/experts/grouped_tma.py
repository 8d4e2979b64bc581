"""The experts of a sparse layer for long lists of tokens: a persistent grouped GEMM with TMA, for Hopper.

Knows: the arithmetic of grouped.py, over its lists. Does not know: for which lists it is faster (tiles.py).

Tokens are first copied into list order, list after list, so that a block of a list is one TMA box, and so is the tile
of weights it meets; gate and up rows come as one box of three dimensions. The box of a list's last block also loads
tokens of the next list, or zeros past the end; the results for these are not stored. Tokens are the tall operand,
weights the narrow one: the other way around from grouped.py, whose blocks are short.

One program a multiprocessor loops over the tiles of all experts, and loads the first columns of its next tile while it
stores the last one.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from models.kernels.experts.grouped import block_and_tile, combined, most_programs
from models.kernels.experts.route import pairs_by_expert
from models.kernels.experts.streamed import activated
from models.kernels.experts.tiles import LongListTiles, Tiles
from parallel.layers.weight import Weight

_COPIED = 4  # tokens that a copying program has


@triton.jit(do_not_specialize_on_alignment=["capacity"])  # steps of any number of tokens run the same code
def _in_order_kernel(
    x_ptr,  # [T, N]
    order_ptr, counts_ptr,
    out_ptr,  # [T * C, N]
    G, capacity, N,
    CHOICES: tl.constexpr, BLOCK_G: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ids = tl.arange(0, BLOCK_G)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    counts = tl.load(counts_ptr + ids, mask=ids < G, other=0)
    ends = tl.cumsum(counts, 0)
    experts = tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), 1)
    firsts = tl.sum(tl.where(ids[None, :] == experts[:, None], (ends - counts)[None, :], 0), 1)
    asked = experts < G
    tokens = tl.load(order_ptr + experts.to(tl.int64) * capacity + rows - firsts, mask=asked, other=0) // CHOICES
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = asked[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + tokens.to(tl.int64)[:, None] * N + cols[None, :], mask=mask)
        tl.store(out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], x, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["capacity", "pairs"])
def _grouped_tma_kernel(
    in_desc,  # boxes of [BLOCK_M, BLOCK_K] of [T * C, K], in the order of the lists
    weight_desc,  # boxes of [BLOCK_O, BLOCK_K] of [G * O, K], or of [2, BLOCK_O / 2, BLOCK_K] of [2 * G, O, K]
    scale_ptr,  # [T * C] float32, without GATE_UP
    order_ptr, counts_ptr,
    out_ptr,  # [T * C, O] in the order of the lists with GATE_UP, otherwise [SPLIT, T * C, O] in that of pairs
    G, capacity,
    pairs,  # T * C
    outputs,  # O
    K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,  # weight rows a tile; half as many columns come out with GATED
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, GATE_UP: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    tiles = outputs // width
    inner: tl.constexpr = K // SPLIT
    ids = tl.arange(0, BLOCK_G)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    counts = tl.load(counts_ptr + ids, mask=ids < G, other=0)
    parts = (counts + BLOCK_M - 1) // BLOCK_M * tiles * SPLIT
    ends, firsts = tl.cumsum(parts, 0), tl.cumsum(counts, 0) - counts
    for part in tl.range(tl.program_id(0), tl.sum(parts, 0), tl.num_programs(0), flatten=True):
        expert = tl.sum((ends <= part).to(tl.int32), 0)
        number = part - tl.sum(tl.where(ids == expert, ends - parts, 0), 0)
        count = tl.sum(tl.where(ids == expert, counts, 0), 0)
        first = tl.sum(tl.where(ids == expert, firsts, 0), 0)
        block, piece = block_and_tile(number, count, tiles * SPLIT, BLOCK_M, GROUP)
        row, col, k = first + block * BLOCK_M, piece % tiles * width, piece // tiles * inner
        acc = tl.zeros((BLOCK_M, BLOCK_O), tl.float32)
        for step in range(inner // BLOCK_K):
            x = in_desc.load([row, k + step * BLOCK_K])
            if GATED:
                w = weight_desc.load([2 * expert, col, k + step * BLOCK_K]).reshape(BLOCK_O, BLOCK_K)
            else:
                w = weight_desc.load([expert * outputs + col, k + step * BLOCK_K])
            acc = tl.dot(x, tl.trans(w), acc)
        within = block * BLOCK_M + tl.arange(0, BLOCK_M)
        asked = within < count
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, width)), (0, 2, 1)))
            result, rows = activated(gate, up, 0.0, GATED, False, GELU), (first + within).to(tl.int64)
        elif GATE_UP:
            result, rows = activated(acc, acc, 0.0, GATED, False, GELU), (first + within).to(tl.int64)
        else:
            chosen = tl.load(order_ptr + expert.to(tl.int64) * capacity + within, mask=asked, other=0)
            result = acc * tl.load(scale_ptr + chosen, mask=asked, other=0.0)[:, None]
            rows = chosen.to(tl.int64) + (piece // tiles).to(tl.int64) * pairs
        where = rows[:, None] * outputs + col + tl.arange(0, width)[None, :]
        tl.store(out_ptr + where, result.to(out_ptr.dtype.element_ty), mask=asked[:, None])


def supports(gate_up_G2IN: Tensor, down_GNI: Tensor) -> bool:
    """Whether the kernels take these weights, beyond what grouped.py asks: a 16-bit dtype, contiguous, at addresses
    that TMA can load from.
    """
    weights = (gate_up_G2IN, down_GNI)
    return all(w.element_size() == 2 and w.is_contiguous() and w.data_ptr() % 16 == 0 for w in weights)


def expert_mlp(
    x_TN: Tensor, gate_up: Weight, down: Weight, weights_TC: Tensor, local_TC: Tensor, pdl: bool, tiles: LongListTiles,
) -> Tensor:  # fmt: skip
    """See models/ops/contract.py. Of weights without scales."""
    tokens, choices = local_TC.shape
    if tokens == 0:
        return torch.empty_like(x_TN)
    gate_up_G2IN, down_GNI = gate_up.data, down.data
    experts, hidden, inner = down_GNI.shape
    order_GT, counts_G = pairs_by_expert(local_TC, experts, pdl)
    ordered_PN = x_TN.new_empty(tokens * choices, hidden)
    _in_order_kernel[(triton.cdiv(tokens * choices, _COPIED),)](
        x_TN, order_GT, counts_G, ordered_PN, experts, tokens, hidden,
        CHOICES=choices, BLOCK_G=triton.next_power_of_2(experts), ROWS=_COPIED,
        BLOCK=min(2048, triton.next_power_of_2(hidden)), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    lists = (order_GT, counts_G, choices, pdl)
    hidden_PI = x_TN.new_empty(tokens * choices, inner)
    if gate_up_G2IN.shape[1] > inner:
        box = [2, tiles.gate_up.block_o // 2, tiles.gate_up.block_k]
        gate_up_desc = TensorDescriptor(gate_up_G2IN, [2 * experts, inner, hidden], [inner * hidden, hidden, 1], box)
    else:
        box = [tiles.gate_up.block_o, tiles.gate_up.block_k]
        gate_up_desc = TensorDescriptor(gate_up_G2IN, [experts * inner, hidden], [hidden, 1], box)
    _grouped(ordered_PN, gate_up_desc, None, hidden_PI, *lists, tiles.gate_up, tiles.programs, gelu=gate_up.gelu)
    del ordered_PN  # where down is not split, the terms reuse its memory, so that a step needs no more than grouped.py
    terms_SPN = x_TN.new_empty(tiles.split, tokens * choices, hidden)
    box = [tiles.down.block_o, tiles.down.block_k]
    down_desc = TensorDescriptor(down_GNI, [experts * hidden, inner], [inner, 1], box)
    _grouped(hidden_PI, down_desc, weights_TC, terms_SPN, *lists, tiles.down, tiles.programs, tiles.split)
    return combined(terms_SPN, local_TC, pdl)


def _grouped(
    in_PK: Tensor, weight: TensorDescriptor, scale: Tensor | None, out: Tensor, order_GT: Tensor, counts_G: Tensor,
    choices: int, pdl: bool, tiles: Tiles, most: int, split: int = 1, gelu: bool = False,
) -> None:  # fmt: skip
    (experts, capacity), (pairs, inner), outputs = order_GT.shape, in_PK.shape, out.shape[-1]
    gated = len(weight.shape) == 3
    weight_rows = 2 * outputs if gated else outputs
    rows = TensorDescriptor(in_PK, list(in_PK.shape), [inner, 1], [tiles.block_m, tiles.block_k])
    programs = split * most_programs(capacity, choices, experts, weight_rows, tiles)
    _grouped_tma_kernel[(min(most, programs),)](
        rows, weight, order_GT if scale is None else scale, order_GT, counts_G, out, experts, capacity, pairs, outputs,
        K=inner, BLOCK_G=triton.next_power_of_2(experts), BLOCK_M=tiles.block_m, BLOCK_O=tiles.block_o,
        BLOCK_K=tiles.block_k, GROUP=tiles.group, SPLIT=split, GATE_UP=scale is None, GATED=gated, GELU=gelu,
        PDL=pdl, num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=pdl,
    )  # fmt: skip
