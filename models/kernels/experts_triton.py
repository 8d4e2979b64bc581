"""The experts of a layer as Triton kernels: grouped products over lists of tokens, and a path for a token or two.

Knows: the arithmetic of gate-up, SiLU-mul, down and weighted sum over a fixed grid. Does not know: who chose what
(route_triton.py makes choices and lists). Shape letters as in interface.py; a pair is t * C + c, a choice of a token.

Grouped: a list of pairs is cut into blocks of BLOCK_M. The grid has room for the most blocks that the shapes allow; a
program finds its block from the counts alone and leaves if there is none, so a captured graph serves every routing.
Weights are the tall operand of each product and the tokens of a block the narrow one, as in skinny_triton.py.

Streamed: with a handful of pairs every pair reads its expert's weights for itself: no lists, two launches. The second
adds up a token's experts in the order of its choices, as the grouped path does: no atomics, the same bits every run.
``pdl``: see dependent_launch.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.route_triton import pairs_by_expert

STREAMED_TOKENS = 4  # at most so many take the streamed path


@triton.jit
def _block_of(counts_ptr, block, G, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first place in its list, length of its list) of a block; the expert is G or more past the last block."""
    ids = tl.arange(0, BLOCK_G)
    counts = tl.load(counts_ptr + ids, mask=ids < G, other=0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    before = tl.sum(tl.where(ids == expert, ends - blocks, 0), 0)
    count = tl.sum(tl.where(ids == expert, counts, 0), 0)
    return expert, (block - before) * BLOCK_M, count


@triton.jit(do_not_specialize_on_alignment=["capacity"])  # steps of any number of tokens run the same code
def _grouped_kernel(
    in_ptr,  # [T, K] tokens, or [T * C, K] pairs
    weight_ptr,  # [G, O or 2 * O, K]
    scale_ptr,  # [T * C] float32, with SCALE
    order_ptr,
    counts_ptr,
    out_ptr,  # [T * C, O]
    G,
    capacity,
    outputs,  # O
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,  # weight rows a tile; half as many columns come out with GATE_UP
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATE_UP: tl.constexpr,  # inputs are tokens, gate's rows come first, SiLU-mul; otherwise inputs are pairs
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    width: tl.constexpr = BLOCK_O // 2 if GATE_UP else BLOCK_O
    tile = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, first, count = _block_of(counts_ptr, tl.program_id(1), G, BLOCK_G, BLOCK_M)
    if expert < G:
        places = first + tl.arange(0, BLOCK_M)
        asked = places < count
        pairs = tl.load(order_ptr + expert.to(tl.int64) * capacity + places, mask=asked, other=0)
        rows = pairs // CHOICES if GATE_UP else pairs
        tile_rows = tl.arange(0, BLOCK_O)
        if GATE_UP:  # tile rows 2j and 2j+1 are gate row j and up row j
            weight_rows = expert.to(tl.int64) * 2 * outputs + tile * width + tile_rows // 2 + (tile_rows % 2) * outputs
        else:
            weight_rows = expert.to(tl.int64) * outputs + tile * width + tile_rows
        cols = tl.arange(0, BLOCK_K)
        weights = weight_ptr + weight_rows[:, None] * K + cols[None, :]
        inputs = in_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :]
        acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
        for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
            w = tl.load(weights + step * BLOCK_K)
            x = tl.load(inputs + step * BLOCK_K, mask=asked[:, None], other=0.0)
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
        result = tl.trans(acc)
        if GATE_UP:
            gate, up = tl.split(tl.reshape(result, (BLOCK_M, width, 2)))
            result = gate * tl.sigmoid(gate) * up
        else:
            result = result * tl.load(scale_ptr + pairs, mask=asked, other=0.0)[:, None]
        where = pairs.to(tl.int64)[:, None] * outputs + tile * width + tl.arange(0, width)[None, :]
        tl.store(out_ptr + where, result.to(out_ptr.dtype.element_ty), mask=asked[:, None])


@triton.jit
def _combine_kernel(
    pairs_ptr,  # [T * C, N], written where chosen
    chosen_ptr,
    out_ptr,
    N,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        here = tl.load(chosen_ptr + pair) >= 0
        acc += tl.load(pairs_ptr + pair.to(tl.int64) * N + cols, mask=here & (cols < N), other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * N + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _streamed_gate_up_kernel(
    x_ptr,
    weight_ptr,
    chosen_ptr,
    hidden_ptr,  # [T * C, I]
    inner,  # I
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_I: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    outs = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    pair = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(chosen_ptr + pair)
    if expert >= 0:
        cols = tl.arange(0, CHUNK)
        gates = weight_ptr + (expert.to(tl.int64) * 2 * inner + outs)[:, None] * K + cols[None, :]
        x_row = x_ptr + (pair // CHOICES).to(tl.int64) * K + cols
        gate = tl.zeros((BLOCK_I, CHUNK), tl.float32)
        up = tl.zeros((BLOCK_I, CHUNK), tl.float32)
        for chunk in tl.static_range(K // CHUNK):
            x = tl.load(x_row + chunk * CHUNK).to(tl.float32)[None, :]
            gate += x * tl.load(gates + chunk * CHUNK, eviction_policy="evict_first").to(tl.float32)
            up += x * tl.load(gates + inner * K + chunk * CHUNK, eviction_policy="evict_first").to(tl.float32)
        gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
        result = gate_sum * tl.sigmoid(gate_sum) * up_sum
        tl.store(hidden_ptr + pair.to(tl.int64) * inner + outs, result.to(hidden_ptr.dtype.element_ty))


@triton.jit
def _streamed_down_kernel(
    hidden_ptr,  # [T * C, K]
    weight_ptr,  # [G, N, K]
    scale_ptr,
    chosen_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1)
    cols = tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        expert = tl.load(chosen_ptr + pair)
        if expert >= 0:
            weights = weight_ptr + (expert.to(tl.int64) * N + outs)[:, None] * K + cols[None, :]
            acc = tl.zeros((BLOCK_N, CHUNK), tl.float32)
            for chunk in tl.static_range(K // CHUNK):
                h = tl.load(hidden_ptr + pair.to(tl.int64) * K + chunk * CHUNK + cols).to(tl.float32)
                acc += h[None, :] * tl.load(weights + chunk * CHUNK, eviction_policy="evict_first").to(tl.float32)
            total += tl.sum(acc, 1) * tl.load(scale_ptr + pair)
    tl.store(out_ptr + token.to(tl.int64) * N + outs, total.to(out_ptr.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of one grouped product: tokens a block, weight rows and columns a tile, loads in flight, warps."""

    block_m: int
    block_o: int
    block_k: int
    stages: int
    warps: int


def default_tiles(
    tokens: int, choices: int, experts: int, outputs: int, inner: int, dtype: torch.dtype = torch.bfloat16
) -> Tiles:
    """For weights [experts, outputs, inner]: blocks about as long as an expert's list is on average, up to 128.

    In float32, which the tensor cores do not multiply, at most 64: larger tiles find neither registers nor memory.
    """
    mean = tokens * choices / experts
    if dtype == torch.float32:
        block_m = 16 if mean <= 24 else 32 if mean <= 48 else 64
        block_o, block_k = min(_largest_power(outputs), 64), min(_largest_power(inner), 32)
        return Tiles(block_m, block_o, block_k, 3, 4 if block_m <= 32 else 8)
    block_m = 16 if mean <= 24 else 32 if mean <= 48 else 64 if mean <= 128 else 128
    block_o = min(_largest_power(outputs), 128)
    block_k = min(_largest_power(inner), 128 if block_m <= 32 else 64)
    return Tiles(block_m, block_o, block_k, 4 if block_m <= 64 else 3, 4 if block_m <= 64 else 8)


def supports(gate_up_G2IN: Tensor, down_GNI: Tensor) -> bool:
    """Whether the kernels take weights of these shapes: tensor cores want multiples of 16."""
    return gate_up_G2IN.shape[2] % 16 == 0 and down_GNI.shape[2] % 16 == 0


def expert_mlp(
    x_TN: Tensor,
    gate_up_G2IN: Tensor,
    down_GNI: Tensor,
    weights_TC: Tensor,
    local_TC: Tensor,
    pdl: bool,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> Tensor:
    """See the Kernels protocol. ``tiles`` are those of gate-up and of down; given, they ask for the grouped path."""
    tokens, choices = local_TC.shape
    if tokens == 0:
        return torch.empty_like(x_TN)
    if tiles is None and tokens <= STREAMED_TOKENS:
        return _streamed(x_TN, gate_up_G2IN, down_GNI, weights_TC, local_TC, pdl)
    experts, hidden, inner = down_GNI.shape
    order_GT, counts_G = pairs_by_expert(local_TC, experts, pdl)
    lists = (order_GT, counts_G, choices, pdl)
    up_tiles, down_tiles = tiles or (
        default_tiles(tokens, choices, experts, 2 * inner, hidden, x_TN.dtype),
        default_tiles(tokens, choices, experts, hidden, inner, x_TN.dtype),
    )
    hidden_PI = x_TN.new_empty(tokens * choices, inner)
    _grouped(x_TN, gate_up_G2IN, None, hidden_PI, *lists, up_tiles)
    terms_PN = x_TN.new_empty(tokens * choices, hidden)
    _grouped(hidden_PI, down_GNI, weights_TC, terms_PN, *lists, down_tiles)
    out_TN = torch.empty_like(x_TN)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(tokens, triton.cdiv(hidden, block))](
        terms_PN,
        local_TC,
        out_TN,
        hidden,
        CHOICES=choices,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(1, block // 256),
        launch_pdl=pdl,
    )
    return out_TN


def _grouped(
    in_RK: Tensor,
    weight_GOK: Tensor,
    scale: Tensor | None,
    out_PO: Tensor,
    order_GT: Tensor,
    counts_G: Tensor,
    choices: int,
    pdl: bool,
    tiles: Tiles,
) -> None:
    experts, weight_rows, inner = weight_GOK.shape
    capacity = order_GT.shape[1]
    _grouped_kernel[(weight_rows // tiles.block_o, most_blocks(capacity, choices, experts, tiles.block_m))](
        in_RK,
        weight_GOK,
        order_GT if scale is None else scale,
        order_GT,
        counts_G,
        out_PO,
        experts,
        capacity,
        out_PO.shape[1],
        K=inner,
        CHOICES=choices,
        BLOCK_G=triton.next_power_of_2(experts),
        BLOCK_M=tiles.block_m,
        BLOCK_O=tiles.block_o,
        BLOCK_K=tiles.block_k,
        STAGES=tiles.stages,
        GATE_UP=scale is None,
        PRECISION="ieee" if in_RK.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=tiles.warps,
        launch_pdl=pdl,
    )


def most_blocks(tokens: int, choices: int, experts: int, block_m: int) -> int:
    """The most blocks that lists of ``tokens * choices`` pairs over ``experts`` can have, a token once in each list."""
    pairs = tokens * choices
    begun = min(experts, pairs)  # lists with anything in them: each may end in a block that is not full
    return min(experts * -(-tokens // block_m), begun + (pairs - begun) // block_m)


def _streamed(
    x_TN: Tensor, gate_up_G2IN: Tensor, down_GNI: Tensor, weights_TC: Tensor, local_TC: Tensor, pdl: bool
) -> Tensor:
    _, hidden, inner = down_GNI.shape
    tokens, choices = local_TC.shape
    hidden_PI = x_TN.new_empty(tokens * choices, inner)
    block_i, block_n = min(_largest_power(inner), 4), min(_largest_power(hidden), 8)
    _streamed_gate_up_kernel[(inner // block_i, tokens * choices)](
        x_TN,
        gate_up_G2IN,
        local_TC,
        hidden_PI,
        inner,
        K=hidden,
        CHOICES=choices,
        BLOCK_I=block_i,
        CHUNK=min(_largest_power(hidden), 512),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    out_TN = torch.empty_like(x_TN)
    _streamed_down_kernel[(hidden // block_n, tokens)](
        hidden_PI,
        down_GNI,
        weights_TC,
        local_TC,
        out_TN,
        hidden,
        K=inner,
        CHOICES=choices,
        BLOCK_N=block_n,
        CHUNK=min(_largest_power(inner), 256),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out_TN


def _largest_power(number: int) -> int:
    """The largest power of two that divides ``number``."""
    return number & -number
