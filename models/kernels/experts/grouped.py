"""The experts of a sparse layer as grouped GEMM in Triton: one product over each expert's list of tokens.

Knows: the arithmetic of gate-up, SiLU-mul (or of up and relu2), down and weighted sum over a fixed grid. Does not
know: routing and lists (route.py), which tiles are fast, for which lists streamed.py or grouped_tma.py is faster
(tiles.py).
Shape letters as in interface.py; a pair is t * C + c, one expert choice of one token.

A list of pairs is cut into blocks of BLOCK_M. The grid has room for the most blocks that the shapes allow. A program
finds its block from the counts on the device and exits if there is none, so one captured graph serves every routing. Up
to GROUP blocks of an expert use a tile of its weights in neighbouring programs: all but the first find it in L2.
Weights are the tall operand of each product and the tokens of a block the narrow one, as in matmul/skinny.py.

A token's experts are summed in the order of its choices, without atomics: the same bits every run. ``pdl``: see
dependent_launch.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.experts.route import pairs_by_expert
from models.kernels.experts.streamed import activated, expert_scales
from models.kernels.experts.tiles import Tiles, default_tiles
from models.kernels.matmul.codes import as_float, quantised_by, readable
from models.kernels.matmul.four_bits import EXPERT_COLUMNS, constants_of, four_bit_sums
from models.kernels.matmul.four_bits import memory_of as four_bits_memory_of
from models.kernels.traits import H200
from parallel.comm.quantised import Activations, Quantised, memory_of
from parallel.layers.weight import Weight

_FEWEST_CODES = 32  # columns of a tensor core's product of codes
_MOST_SUMS = 128 * 128  # of a tile of codes

# Batch-invariant: in a tile of any size a sum is one accumulator over K in ascending order, never split


@triton.jit
def _expert_of(counts_ptr, program, tiles, G, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, the program's index among the expert's, length of its list); expert >= G: nothing to do."""
    ids = tl.arange(0, BLOCK_G)
    counts = tl.load(counts_ptr + ids, mask=ids < G, other=0)
    programs = (counts + BLOCK_M - 1) // BLOCK_M * tiles
    ends = tl.cumsum(programs, 0)
    expert = tl.sum((ends <= program).to(tl.int32), 0)
    before = tl.sum(tl.where(ids == expert, ends - programs, 0), 0)
    count = tl.sum(tl.where(ids == expert, counts, 0), 0)
    return expert, program - before, count


@triton.jit
def block_and_tile(number, count, tiles, BLOCK_M: tl.constexpr, GROUP: tl.constexpr):
    """(block, tile) of an expert's program: GROUP blocks at a time; on each tile, one block after the other."""
    first = number // (GROUP * tiles) * GROUP
    together = tl.minimum((count + BLOCK_M - 1) // BLOCK_M - first, GROUP)
    within = number - first * tiles
    return first + within % together, within // together


@triton.jit(do_not_specialize_on_alignment=["capacity"])  # steps of any number of tokens run the same code
def _grouped_kernel(
    in_ptr,  # [T, K] tokens, or [T * C, K] pairs
    in_scale_ptr,  # where NARROW: float32 [K / SCALE_COLUMNS, in_pitch]
    in_pitch,
    weight_ptr,  # [G, O or 2 * O with GATED, K]
    scales_ptr,  # [G, grid], one a block of SCALE_ROWS x SCALE_COLUMNS weights
    zeros_ptr,  # of four-bit weights, as the next
    factors_ptr,
    bias_ptr,  # [G, rows of the weight], with BIAS
    limit,  # with CLAMPED
    share_ptr,  # [T * C] float32, without GATE_UP
    order_ptr, counts_ptr,
    out_ptr,  # [T * C, O]
    G, capacity,
    outputs,  # O
    K: tl.constexpr, CHOICES: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,  # weight rows a tile; half as many columns come out with GATED
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # 0: weights have no scales
    SCALE_COLUMNS: tl.constexpr,  # a multiple of BLOCK_K, or all columns
    CODES: tl.constexpr,  # of four-bit weights (matmul/four_bits.py), else 0
    ZEROS: tl.constexpr, FACTORS: tl.constexpr, LIFT: tl.constexpr,
    NARROW: tl.constexpr,  # inputs are codes, too
    GATE_UP: tl.constexpr,  # inputs are tokens, and an activation follows; otherwise inputs are pairs
    GATED: tl.constexpr,  # with GATE_UP: gate's rows come first, SiLU-mul; otherwise relu2
    CLAMPED: tl.constexpr,  # with GATED: clamped_swiglu
    GELU: tl.constexpr,  # with GATED: GELU-mul
    BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    tiles = outputs // width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, number, count = _expert_of(counts_ptr, tl.program_id(0), tiles, G, BLOCK_G, BLOCK_M)
    if expert < G:
        block, tile = block_and_tile(number, count, tiles, BLOCK_M, GROUP)
        within = block * BLOCK_M + tl.arange(0, BLOCK_M)
        asked = within < count
        pairs = tl.load(order_ptr + expert.to(tl.int64) * capacity + within, mask=asked, other=0)
        rows = pairs // CHOICES if GATE_UP else pairs
        tile_rows = tl.arange(0, BLOCK_O)
        all_rows = 2 * outputs if GATED else outputs
        if GATED:  # tile rows 2j and 2j+1 are gate row j and up row j
            own_rows = tile * width + tile_rows // 2 + (tile_rows % 2) * outputs
        else:
            own_rows = tile * width + tile_rows
        weight_rows = expert.to(tl.int64) * all_rows + own_rows
        if CODES > 0:
            steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
            acc = four_bit_sums(
                in_ptr + rows.to(tl.int64) * K, asked, weight_ptr, scales_ptr, zeros_ptr, factors_ptr, weight_rows, 0,
                K, steps, K % BLOCK_K == 0, SCALE_COLUMNS, CODES, ZEROS, FACTORS, LIFT, BLOCK_K, 1, STAGES,
            )  # fmt: skip
        else:
            scales = expert_scales(scales_ptr, expert, all_rows, K, SCALE_ROWS, SCALE_COLUMNS)
            if SCALE_ROWS > 0:
                scales += own_rows // SCALE_ROWS * tl.cdiv(K, SCALE_COLUMNS)
            cols = tl.arange(0, BLOCK_K)
            weights = weight_ptr + weight_rows[:, None] * K + cols[None, :]
            inputs = in_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :]
            acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
            for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
                w = tl.load(weights + step * BLOCK_K)
                x = tl.load(inputs + step * BLOCK_K, mask=asked[:, None], other=0.0)
                if SCALE_ROWS == 0:
                    acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
                else:
                    factor = tl.load(scales + step * BLOCK_K // SCALE_COLUMNS)[:, None]
                    if NARROW:
                        at = step * BLOCK_K // SCALE_COLUMNS * in_pitch
                        x_scale = tl.load(in_scale_ptr + at + rows, mask=asked, other=0.0)
                        acc += tl.dot(w, tl.trans(x)) * (factor * x_scale[None, :])
                    else:
                        acc += tl.dot(as_float(w).to(x.dtype), tl.trans(x), input_precision=PRECISION) * factor
        result = tl.trans(acc)
        if BIAS:
            result += tl.load(bias_ptr + weight_rows).to(tl.float32)[None, :]
        if GATED:
            gate, up = tl.split(tl.reshape(result, (BLOCK_M, width, 2)))
            result = activated(gate, up, limit, GATED, CLAMPED, GELU)
        elif GATE_UP:
            result = activated(result, result, limit, GATED, CLAMPED, GELU)
        else:
            result = result * tl.load(share_ptr + pairs, mask=asked, other=0.0)[:, None]
        where = pairs.to(tl.int64)[:, None] * outputs + tile * width + tl.arange(0, width)[None, :]
        tl.store(out_ptr + where, result.to(out_ptr.dtype.element_ty), mask=asked[:, None])


@triton.jit
def _combine_kernel(
    pairs_ptr,  # [SPLIT, T * C, N], written where chosen
    chosen_ptr, out_ptr, N,
    CHOICES: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        mask = (tl.load(chosen_ptr + pair) >= 0) & (cols < N)
        for part in tl.static_range(SPLIT):
            row = pair.to(tl.int64) + part * tl.num_programs(0).to(tl.int64) * CHOICES
            acc += tl.load(pairs_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * N + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < N)


def supports(gate_up_G2IN: Tensor, down_GNI: Tensor) -> bool:
    """Whether the kernels take weights of these shapes: tensor cores need multiples of 16."""
    return gate_up_G2IN.shape[2] % 16 == 0 and down_GNI.shape[2] % 16 == 0


def expert_mlp(
    x_TN: Tensor, gate_up: Weight, down: Weight, weights_TC: Tensor, local_TC: Tensor, pdl: bool,
    tiles: tuple[Tiles, Tiles] | None = None, *, all_experts: int, shared_bytes: int = H200.shared_bytes,
    narrow: bool = False, limit: float | None = None,
) -> Tensor:  # fmt: skip
    """See the contract (models/ops). ``tiles``: of gate-up and of down; by default those of tiles.py that fit a
    program's ``shared_bytes`` (DeviceTraits). ``narrow``: of 8-bit weights, quantises bfloat16 activations, too, once
    for all experts."""
    tokens, choices = local_TC.shape
    if tokens == 0:
        return torch.empty_like(x_TN)
    experts, hidden, inner = down.cells.shape
    order_GT, counts_G = pairs_by_expert(local_TC, experts, pdl)
    lists = (order_GT, counts_G, choices, pdl)
    mean = tokens * choices / all_experts  # average length of a list, over all ranks' experts
    up_rows = gate_up.outputs
    up_tiles, down_tiles = tiles or default_tiles(mean, hidden, inner, x_TN.dtype, up_rows, shared_bytes=shared_bytes)
    coded = gate_up.format.code is not None or down.format.code is not None
    narrow = narrow and x_TN.dtype == torch.bfloat16 and not coded
    if narrow or coded:
        up_tiles, down_tiles = _of_codes(up_tiles), _of_codes(down_tiles)
    x = quantised_by(gate_up, x_TN, pdl) if narrow and reads_codes(gate_up) else x_TN
    hidden_PI = x_TN.new_empty(tokens * choices, inner)
    _grouped(x, gate_up, None, hidden_PI, *lists, up_tiles, limit)
    inputs = quantised_by(down, hidden_PI, pdl) if narrow and reads_codes(down) else hidden_PI
    terms_PN = x_TN.new_empty(tokens * choices, hidden)
    _grouped(inputs, down, weights_TC, terms_PN, *lists, down_tiles)
    return combined(terms_PN[None], local_TC, pdl)


def reads_codes(weight: Weight) -> bool:
    """Whether a matrix takes activations as codes: whole groups of what tensor cores take."""
    columns = weight.format.block[1] or weight.inner if weight.format.block else 0
    return columns >= _FEWEST_CODES and weight.inner % columns == 0 and _codes_at_once(weight) >= _FEWEST_CODES


def _codes_at_once(weight: Weight) -> int:
    """Columns of a step: always the same, so that sums are."""
    assert weight.format.block is not None
    return weight.format.block[1] or math.gcd(128, weight.inner)


def _of_codes(tiles: Tiles) -> Tiles:
    """A step's sums may be apart from the others until they are scaled, so a tile takes twice the registers."""
    return tiles if tiles.block_m * tiles.block_o <= _MOST_SUMS else replace(tiles, block_o=128)


def combined(terms_SPN: Tensor, local_TC: Tensor, pdl: bool) -> Tensor:
    """Sums for each token the terms of its choices on this rank, each in S parts: [S, T * C, N] -> [T, N]."""
    (tokens, choices), (split, _, hidden) = local_TC.shape, terms_SPN.shape
    out_TN = terms_SPN.new_empty(tokens, hidden)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(tokens, triton.cdiv(hidden, block))](
        terms_SPN, local_TC, out_TN, hidden,
        CHOICES=choices, SPLIT=split, BLOCK=block, PDL=pdl, num_warps=max(1, block // 256), launch_pdl=pdl,
    )  # fmt: skip
    return out_TN


def _grouped(
    x: Activations, weight: Weight, share_TC: Tensor | None, out_PO: Tensor, order_GT: Tensor, counts_G: Tensor,
    choices: int, pdl: bool, tiles: Tiles, limit: float | None = None,
) -> None:  # fmt: skip
    experts, weight_rows, inner = weight.cells.shape
    scale_rows, scale_columns = weight.format.block or (0, 0)
    narrow, four_bits = isinstance(x, Quantised), weight.format.code is not None
    block_k = _codes_at_once(weight) if narrow else math.gcd(tiles.block_k, scale_columns or tiles.block_k)
    codes = {"SCALE_COLUMNS": scale_columns or inner, "CODES": 0, "ZEROS": False, "FACTORS": False, "LIFT": 1.0}
    stored = readable(weight.data), *(order_GT if weight.scale is None else weight.scale, order_GT, order_GT)
    if four_bits:
        block_k, codes, stored = EXPERT_COLUMNS, constants_of(weight, x.dtype), four_bits_memory_of(weight)
    stages = tiles.stages if block_k <= tiles.block_k else max(2, tiles.stages * tiles.block_k // block_k)
    if four_bits and tiles.block_m <= 32:  # a step is few bytes
        stages = 4
    capacity, outputs = order_GT.shape[1], out_PO.shape[1]
    _grouped_kernel[(most_programs(capacity, choices, experts, weight_rows, tiles),)](
        *memory_of(x), *stored, order_GT if weight.bias is None else weight.bias, limit or 0.0,
        order_GT if share_TC is None else share_TC, order_GT, counts_G, out_PO, experts, capacity, outputs,
        K=inner, CHOICES=choices, BLOCK_G=triton.next_power_of_2(experts), BLOCK_M=tiles.block_m, BLOCK_O=tiles.block_o,
        BLOCK_K=block_k, STAGES=stages, GROUP=tiles.group, SCALE_ROWS=scale_rows,
        **codes,
        NARROW=narrow, GATE_UP=share_TC is None, GATED=weight_rows > outputs, CLAMPED=limit is not None,
        GELU=weight.gelu, BIAS=weight.bias is not None, PDL=pdl,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, launch_pdl=pdl,
    )  # fmt: skip


def most_programs(tokens: int, choices: int, experts: int, weight_rows: int, tiles: Tiles) -> int:
    """The most programs that a launch can need: one for every tile of every possible block."""
    return weight_rows // tiles.block_o * most_blocks(tokens, choices, experts, tiles.block_m)


def most_blocks(tokens: int, choices: int, experts: int, block_m: int) -> int:
    """The most blocks that ``tokens * choices`` pairs over ``experts`` can make, each token at most once in a list."""
    pairs = tokens * choices
    begun = min(experts, pairs)  # lists that are not empty: each may end in a partly filled block
    return min(experts * -(-tokens // block_m), begun + (pairs - begun) // block_m)
