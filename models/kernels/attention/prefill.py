"""Paged causal prefill attention in Triton: for what FlashInfer does not take, and until FlashInfer is built.

Knows: the kernel over the NHD pages [2, pages, S, K, D]: online softmax (Milakov & Gimelshein 2018) over tiles (Dao
2023, "FlashAttention-2"), and its launch. Does not know: how tiles are listed (prefill_tiles.py), when it is the best
choice (prefill_choice.py), decode (decode.py).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.inputs import PrefillAttention
from models.kernels.attention.kv_element import as_query
from models.kernels.attention.prefill_tiles import RepeatedTiles, Tiles
from models.kernels.attention.query import capped, kind_arguments, kind_constants, padded_dim, with_sinks
from models.kernels.interface import PLAIN, AttentionKind
from models.kernels.traits import H200, DeviceTraits

_PROGRAMS_A_MULTIPROCESSOR = 4  # at most: each takes long tiles and short ones in turn
_SHARED_OF_TALL_TILES = 192 << 10  # bytes, of 64 queries and 32 keys of 512 dims in two stages
_SHARED_OF_WIDE_HEADS = 104 << 10  # bytes, of 64 keys of 256 dims on GPUs without wgmma


@dataclass(frozen=True, slots=True)
class Blocks:
    """``m`` rows (tokens times heads) and ``n`` keys of a tile, pipeline stages, warps of a program."""

    m: int
    n: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["items"])
def _prefill_attention_kernel(
    q_ptr,  # [T, H, D]
    keys_ptr, values_ptr, page_table_ptr,
    tiles_ptr,  # int32 [tiles, 4]: first token, tokens (0: nothing to do), the first's position, row of the page table
    out_ptr, scale_log2e,
    cap,  # query.kind_arguments
    sinks_ptr,  # float32 [H], when SINKS
    table_width,
    items,  # tiles times the parts that the heads are cut into
    K,
    GROUP: tl.constexpr,  # query heads of a key and value head
    PACK: tl.constexpr,  # of these, how many share a tile; divides GROUP
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,  # keys that a query sees, or 0: all
    CAP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    parts = K * (GROUP // PACK)
    programs = tl.num_programs(0)
    for turn in tl.range(0, (items + programs - 1) // programs, disable_licm=True):
        # Boustrophedon: the program with the longest tile of one turn gets the shortest of the next.
        place = tl.where(turn % 2 == 0, tl.program_id(0), programs - 1 - tl.program_id(0))
        item = turn * programs + place
        tile = tiles_ptr + item // parts * 4
        count = tl.load(tile + 1, mask=item < items, other=0)
        if count > 0:
            part = item % parts
            token = tl.load(tile).to(tl.int64)
            position = tl.load(tile + 2)
            table_row = page_table_ptr + tl.load(tile + 3).to(tl.int64) * table_width
            rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
            query = rows // PACK
            mask = (query < count)[:, None] & (dims < D)[None, :]
            first = (token * K * GROUP + part * PACK) * D
            where = (query * K * GROUP + rows % PACK)[:, None] * D + dims[None, :]
            q = as_query(tl.load(q_ptr + first + where, mask=mask, other=0.0), keys_ptr.dtype.element_ty)
            head = part * PACK // GROUP * D
            last = position + query  # the last key that each row of the tile sees
            keys = position + count  # of the tile
            full = (position + 1) // BLOCK_N * BLOCK_N  # keys that all rows see, in whole blocks
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            begin = 0
            if WINDOW:  # blocks in which the windows of the tile's rows begin
                low = tl.maximum(position + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
                begin = (tl.maximum(keys - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
                begin = tl.minimum(begin, tl.maximum(full, low))
                full = tl.maximum(full, begin)
                acc, total, peak = _attend(
                    q, acc, total, peak, last, keys_ptr + head, values_ptr + head, table_row, low, begin, keys,
                    scale_log2e, cap, K, D, BLOCK_D, PAGE, BLOCK_N, STAGES, True, WINDOW, CAP,
                )  # fmt: skip
            acc, total, peak = _attend(
                q, acc, total, peak, last, keys_ptr + head, values_ptr + head, table_row, begin, full, keys,
                scale_log2e, cap, K, D, BLOCK_D, PAGE, BLOCK_N, STAGES, False, 0, CAP,
            )  # fmt: skip
            acc, total, peak = _attend(
                q, acc, total, peak, last, keys_ptr + head, values_ptr + head, table_row, full, keys, keys,
                scale_log2e, cap, K, D, BLOCK_D, PAGE, BLOCK_N, STAGES, True, WINDOW, CAP,
            )  # fmt: skip
            if SINKS:
                total = with_sinks(total, peak, sinks_ptr, part * PACK + rows % PACK)
            out = acc / total[:, None]
            tl.store(out_ptr + first + where, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    q, acc, total, peak, last, keys_ptr, values_ptr, table_row, begin, end, keys, scale_log2e, cap, K,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,  # rows may see only a part of a block, and keys may end in it
    WINDOW: tl.constexpr,  # when MASKED
    CAP: tl.constexpr,
):  # fmt: skip
    """Attention over keys [begin, end), ``begin`` a multiple of BLOCK_N; without WINDOW every row sees or saw a key."""
    within, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    offsets = within[:, None] * (K * D) + dims[None, :]
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        there = start + within < keys
        if WINDOW:  # pages before the window may be another request's by now
            there = there & (start + within > tl.min(last, 0) - WINDOW)
        if PAGE % BLOCK_N == 0:
            page = tl.load(table_row + start // PAGE).to(tl.int64)
            block = (page * PAGE + start % PAGE) * (K * D)  # added first: the offsets are the same for every block
            key_ptrs, value_ptrs = keys_ptr + block + offsets, values_ptr + block + offsets
        else:
            position = start + within
            pages = tl.load(table_row + position // PAGE, mask=there, other=0).to(tl.int64)
            where = (pages * PAGE + position % PAGE)[:, None] * (K * D) + dims[None, :]
            key_ptrs, value_ptrs = keys_ptr + where, values_ptr + where
        if MASKED:  # memory after the last key is uninitialised, maybe NaN
            mask = there[:, None] & (dims < D)[None, :]
            k = tl.load(key_ptrs, mask=mask, other=0.0)
            v = tl.load(value_ptrs, mask=mask, other=0.0)
        elif D == BLOCK_D:
            k = tl.load(key_ptrs)
            v = tl.load(value_ptrs)
        else:
            k = tl.load(key_ptrs, mask=(dims < D)[None, :], other=0.0)
            v = tl.load(value_ptrs, mask=(dims < D)[None, :], other=0.0)
        k, v = k.to(q.dtype), v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAP:
            scores = capped(scores * scale_log2e, cap)
            factor = 1.0
        else:
            factor = scale_log2e
        if MASKED:
            seen = start + within[None, :] <= last[:, None]
            if WINDOW:
                seen = seen & (start + within[None, :] > last[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        shift = new_peak
        if WINDOW:  # a row that has seen no key yet keeps -inf; subtracting it would make NaN of its weights
            shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(scores * factor - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, total, peak


def blocks_for(dtype: torch.dtype, head_dim: int, shared_bytes: int = H200.shared_bytes) -> Blocks:
    """Blocks that fit an H100 or H200, and a program's ``shared_bytes`` (DeviceTraits). 64 query rows of 512
    dims alone spill."""
    if head_dim > 256:  # full layers of Gemma 4
        if dtype == torch.float32:
            return Blocks(16, 16, 1, 8)
        # With 64 rows a thread spills 22 words, and yet they take 0.52 of the time of 32 on an H200, by wgmma.
        return Blocks(64, 32, 2, 8) if shared_bytes >= _SHARED_OF_TALL_TILES else Blocks(32, 32, 2, 8)
    if dtype == torch.float32:  # no tensor cores: the operands of tl.dot stay in registers
        return Blocks(32, 32, 3, 4) if head_dim <= 128 else Blocks(16, 32, 2, 8)
    if head_dim <= 128:
        return Blocks(64, 64, 3, 4)
    return Blocks(64, 64 if shared_bytes >= _SHARED_OF_WIDE_HEADS else 32, 2, 8)


def heads_of_a_tile(group: int, block_m: int) -> int:
    """The most query heads that divide ``group`` and fit a tile of ``block_m`` rows."""
    return max(heads for heads in range(1, min(group, block_m) + 1) if group % heads == 0)


class TiledPrefill:
    """Packed causal prefill for 16-bit dtypes and float32, heads of up to 512 dims."""

    def __init__(self, device: torch.device, traits: DeviceTraits) -> None:
        self._device, self._pdl, self._shared_bytes = device, traits.dependent_launch, traits.shared_bytes
        self._programs = _PROGRAMS_A_MULTIPROCESSOR * traits.multiprocessors

    @staticmethod
    def supports(head_dim: int) -> bool:
        return padded_dim(head_dim) <= 512

    def plan(self, inputs: PrefillAttention, heads: int, kv_layer: Tensor) -> Tiles:
        """The tiles of these rows; their copy to the device is asynchronous."""
        a_tile = self._tokens_of_a_tile(heads, kv_layer)
        return Tiles.of(inputs, a_tile, self._device)

    def repeated(self, page_table_BP: Tensor, max_tokens: int, heads: int, kv_layer: Tensor) -> RepeatedTiles:
        """The planned tiles of launches that are captured."""
        return RepeatedTiles(self._device, len(page_table_BP), max_tokens, self._tokens_of_a_tile(heads, kv_layer))

    def run(
        self, q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, planned: Tiles | RepeatedTiles, scale: float,
        kind: AttentionKind = PLAIN,
    ) -> Tensor:  # fmt: skip
        """See Ops.prefill_attention. ``planned`` must be of the same shapes."""
        blocks = blocks_for(q_THD.dtype, q_THD.shape[-1], self._shared_bytes)
        return prefill_attention(
            q_THD, kv_layer, inputs.page_table_BP, planned, scale,
            blocks=blocks, programs=self._programs, pdl=self._pdl, kind=kind,
        )  # fmt: skip

    def _tokens_of_a_tile(self, heads: int, kv_layer: Tensor) -> int:
        *_, kv_heads, head_dim = kv_layer.shape
        block_m = blocks_for(kv_layer.dtype, head_dim, self._shared_bytes).m
        return block_m // heads_of_a_tile(heads // kv_heads, block_m)


def launch_over_tiles(
    kernel: Any, q_THD: Tensor, kv_layer: Tensor, page_table_BP: Tensor, planned: Tiles | RepeatedTiles, scale: float,
    *, blocks: Blocks, programs: int, pdl: bool, kind: AttentionKind = PLAIN, **constants: int,
) -> Tensor:  # fmt: skip
    """See Ops.prefill_attention. Output outside the tiles of ``planned`` is undefined; ``programs`` at most run."""
    tokens, heads, head_dim = q_THD.shape
    _, _, page, kv_heads, _ = kv_layer.shape
    pack = heads_of_a_tile(heads // kv_heads, blocks.m)
    q_THD, out_THD = q_THD.contiguous(), torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    items = planned.count(tokens) * (heads // pack)
    kernel[(max(1, min(items, programs)),)](
        q_THD, kv_layer[0], kv_layer[1], page_table_BP, planned.tiles, out_THD, *kind_arguments(kind, scale, q_THD),
        page_table_BP.stride(0), items, kv_heads,
        GROUP=heads // kv_heads, PACK=pack, D=head_dim, BLOCK_D=padded_dim(head_dim), PAGE=page, BLOCK_M=blocks.m,
        BLOCK_N=blocks.n, STAGES=blocks.stages,
        **constants, **kind_constants(kind),
        PDL=pdl, num_warps=blocks.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_THD


prefill_attention = partial(launch_over_tiles, _prefill_attention_kernel)
