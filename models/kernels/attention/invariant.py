"""Paged attention whose reduction depends on a query's own position only: decode, windows, mixed steps and prefill.

Knows: one order of additions for every query (below), a kernel for rows whose lengths are on the device, and one for
tiles that the host lists, both over the NHD pages [2, pages, S, K, D]. Does not know: the fastest attention
(decode.py, prefill.py), rotation, what else the deterministic mode takes (docs/determinism.md).

Keys are cut into chunks of CHUNK at fixed positions, beginning with position 0, and a chunk into blocks of keys. Within
a chunk: online softmax over its blocks in ascending order (``_chunk``). Then the chunks' results are merged in
ascending order by one formula (``_merged``). The keys of a draft tree's node are those of the path down to it, in this
order, wherever they lie. Queries fill a tile of the same shape everywhere: a few tokens of a row,
for the query heads that share a key and value head, and zeros. So all kinds of steps run the same instructions on a
query, and a key that it may not see adds an exact zero: its bits do not depend on the tile's other queries, nor on
whether a program takes all chunks in turn or each chunk has a program.
Sums that a compiler may fuse or not are written as fused multiply-adds, so that every kernel rounds alike.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.inputs import DecodeAttention, PrefillAttention
from models.kernels.attention.kv_element import as_query
from models.kernels.attention.prefill import Blocks, heads_of_a_tile, launch_over_tiles
from models.kernels.attention.prefill_tiles import RepeatedTiles, Tiles
from models.kernels.attention.query import capped, kind_arguments, kind_constants, padded_dim, with_sinks
from models.kernels.interface import PLAIN, AttentionKind
from models.row_buckets import power_of_two_from

CHUNK = 512  # keys; changes bits, so it is not tuned by shape
COUNTERS = 1 << 16  # int32 counters that merging has
_PROGRAMS_EACH = 4  # of a multiprocessor, below which a row's chunks are programs


@triton.jit
def _chunk(
    q,  # [BLOCK_M, BLOCK_D]
    last,  # int32 [BLOCK_M]: the last key that each query sees
    keys_ptr, values_ptr,  # of the kv head
    table_row, begin, end,
    keys,  # that the tile's last query sees
    scale_log2e, cap, K,
    root, seen,  # with NODES: where the tree's entries begin, and the bits of the one node that the tile has
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    NODES: tl.constexpr,  # of a tree; 0: keys lie in the order of their positions
    WINDOW: tl.constexpr,  # keys that a query sees, or 0: all
    CAP: tl.constexpr,
):  # fmt: skip
    """(weighted values relative to the maximum, maximum, sum of weights) of keys [begin, end) of one chunk."""
    within, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    offsets = within[:, None] * (K * D) + dims[None, :]
    if WINDOW:  # blocks before it would add exact zeros, and may be another request's by now
        lowest = tl.min(last, 0) + 1 - WINDOW
        begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + within
        there = position < keys
        if WINDOW:
            there = there & (position >= lowest)
        if NODES:
            place = position
            deep = root + 0
            for node in range(1, tl.where(start + BLOCK_N > root, NODES, 1)):  # keys before the root lie in order
                of_path = (seen >> (node - 1)) & 1
                deep += of_path
                place = tl.where((position == deep) & (of_path == 1), root + node, place)
            pages = tl.load(table_row + place // PAGE, mask=there, other=0).to(tl.int64)
            where = (pages * PAGE + place % PAGE)[:, None] * (K * D) + dims[None, :]
        elif PAGE % BLOCK_N == 0:
            page = tl.load(table_row + start // PAGE).to(tl.int64)
            where = (page * PAGE + start % PAGE) * (K * D) + offsets
        else:
            pages = tl.load(table_row + position // PAGE, mask=there, other=0).to(tl.int64)
            where = (pages * PAGE + position % PAGE)[:, None] * (K * D) + dims[None, :]
        mask = there[:, None]  # memory after the last key is uninitialised, maybe NaN
        if D != BLOCK_D:
            mask = mask & (dims < D)[None, :]
        k = tl.load(keys_ptr + where, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(values_ptr + where, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAP:
            scores = capped(scores * scale_log2e, cap)
            factor = 1.0
        else:
            factor = scale_log2e
        visible = position[None, :] <= last[:, None]
        if WINDOW:
            visible = visible & (position[None, :] > last[:, None] - WINDOW)
        scores = tl.where(visible, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        # A query that has seen no key yet keeps -inf; subtracting it would make NaN of its weights.
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(tl.fma(scores, factor, -shift[:, None]))
        decay = tl.exp2(peak - shift)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def _merged(acc, peak, total, more_acc, more_peak, more_total):
    """What was merged so far with the next chunk. Merging with nothing, on either side, changes no bit."""
    new_peak = tl.maximum(peak, more_peak)
    shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    kept, added = tl.exp2(peak - shift), tl.exp2(more_peak - shift)
    total = tl.fma(total, kept, more_total * added)
    acc = tl.fma(acc, kept[:, None], more_acc * added[:, None])
    return acc, new_peak, total


@triton.jit
def _all_chunks(
    q, last, keys_ptr, values_ptr, table_row, keys, scale_log2e, cap, K, root, seen,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LENGTH: tl.constexpr, STAGES: tl.constexpr, NODES: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """(weighted values relative to the maximum, maximum, sum of weights) over all keys, chunk after chunk."""
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    first = _first_chunk(tl.min(last, 0), LENGTH, WINDOW) * LENGTH
    for begin in tl.range(first, keys, LENGTH, num_stages=1, disable_licm=True):
        more_acc, more_peak, more_total = _chunk(
            q, last, keys_ptr, values_ptr, table_row, begin, tl.minimum(begin + LENGTH, keys), keys, scale_log2e, cap,
            K, root, seen, D, BLOCK_D, PAGE, BLOCK_M, BLOCK_N, STAGES, NODES, WINDOW, CAP,
        )  # fmt: skip
        acc, peak, total = _merged(acc, peak, total, more_acc, more_peak, more_total)
    return acc, peak, total


@triton.jit
def _first_chunk(position, LENGTH: tl.constexpr, WINDOW: tl.constexpr):
    """The first that the query at ``position``, the lowest of its tile, sees keys of."""
    if WINDOW:
        chunk = tl.maximum(position + 1 - WINDOW, 0) // LENGTH
    else:
        chunk = 0
    return chunk


@triton.jit
def _write(out_ptr, acc, total, query, head, count, H, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of tokens below ``count``; ``query`` and ``head`` [ROWS] of each row, from the tile's first on."""
    dims = tl.arange(0, BLOCK_D)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    where = (query * H + head)[:, None] * D + dims[None, :]
    mask = (query < count)[:, None] & (dims < D)[None, :]
    tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_queries(
    q_ptr, count, H, PACK: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    held: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_M, BLOCK_D]: PACK heads of each of ``count`` tokens, ``as_query``, zeros after them."""
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = rows // PACK
    where = (query * H + rows % PACK)[:, None] * D + dims[None, :]
    return as_query(tl.load(q_ptr + where, mask=(query < count)[:, None] & (dims < D)[None, :], other=0.0), held)


@triton.jit(do_not_specialize=["items"])
def _invariant_prefill_kernel(
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
    LENGTH: tl.constexpr,  # keys of a chunk
    STAGES: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    parts = K * (GROUP // PACK)
    programs = tl.num_programs(0)
    for turn in tl.range(0, (items + programs - 1) // programs, num_stages=1, disable_licm=True):
        # Boustrophedon: the program with the longest tile of one turn gets the shortest of the next.
        place = tl.where(turn % 2 == 0, tl.program_id(0), programs - 1 - tl.program_id(0))
        item = turn * programs + place
        tile = tiles_ptr + item // parts * 4
        count = tl.load(tile + 1, mask=item < items, other=0)
        if count > 0:
            part = item % parts
            position = tl.load(tile + 2)
            table_row = page_table_ptr + tl.load(tile + 3).to(tl.int64) * table_width
            query, head = tl.arange(0, BLOCK_M) // PACK, tl.arange(0, BLOCK_M) % PACK
            first = (tl.load(tile).to(tl.int64) * K * GROUP + part * PACK) * D
            q = _load_queries(q_ptr + first, count, K * GROUP, PACK, BLOCK_M, D, BLOCK_D, keys_ptr.dtype.element_ty)
            kv = part * PACK // GROUP * D
            acc, peak, total = _all_chunks(
                q, position + query, keys_ptr + kv, values_ptr + kv, table_row, position + count, scale_log2e, cap, K,
                0, 0, D, BLOCK_D, PAGE, BLOCK_M, BLOCK_N, LENGTH, STAGES, 0, WINDOW, CAP,
            )  # fmt: skip
            if SINKS:
                total = with_sinks(total, peak, sinks_ptr, part * PACK + head)
            _write(out_ptr + first, acc, total, query, head, count, K * GROUP, BLOCK_M, D, BLOCK_D)


@triton.jit(do_not_specialize=["most"])
def _invariant_decode_kernel(
    q_ptr,  # [T, H, D]
    keys_ptr, values_ptr, page_table_ptr, lengths_ptr,
    starts_ptr,  # int32 [B], when RAGGED: each row's first token, and how many it has, at most QUERY_LEN
    queries_ptr,
    seen_ptr,  # int32 [B, NODES], with NODES: what each node sees; it is a row by itself then
    out_ptr,
    partial_ptr,  # float32 [units, most, REAL_ROWS, BLOCK_D]; a unit is a row's tile of queries
    stats_ptr,  # float32 [units, most, 2, REAL_ROWS]: maximum and sum
    counter_ptr,  # int32 [units]
    scale_log2e, cap, sinks_ptr, table_width, K,
    most,  # chunks of a row
    GROUP: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    QUERY_LEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    REAL_ROWS: tl.constexpr,  # rows of a tile that can be queries, padded to a power of two
    LENGTH: tl.constexpr, STAGES: tl.constexpr,
    APART: tl.constexpr,  # a row's chunks are shared by several programs
    RAGGED: tl.constexpr, SKIP_EMPTY: tl.constexpr, CAUSAL: tl.constexpr, NODES: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    parts = K * (GROUP // PACK)
    root = 0
    seen = 0
    tokens: tl.constexpr = BLOCK_M // PACK  # of a tile
    part, tile = tl.program_id(0) % parts, tl.program_id(0) // parts
    row = tl.program_id(1).to(tl.int64)
    unit = row * tl.num_programs(0) + tl.program_id(0)
    first_token = row * QUERY_LEN
    if NODES:
        seen = tl.load(seen_ptr + row)
        row = row // NODES
    length = tl.load(lengths_ptr + row)
    if NODES:  # from here on a decode step after the path down to the node
        root = length - NODES
        length = root + 1
        for node in range(1, NODES):
            length += (seen >> (node - 1)) & 1
    new = QUERY_LEN
    if RAGGED:
        first_token = tl.load(starts_ptr + row).to(tl.int64)
        new = tl.load(queries_ptr + row)
    count = tl.minimum(new - tile * tokens, tokens)
    position = length - new + tile * tokens  # of the tile's first query
    keys = tl.maximum(position + count, 0)
    if not CAUSAL:
        keys = tl.maximum(length, 0)
    chunks = tl.maximum((keys + LENGTH - 1) // LENGTH, 1)
    begun = _first_chunk(position, LENGTH, WINDOW)
    wanted = count > 0
    if SKIP_EMPTY:
        wanted = wanted & (length > 0)
    if APART:
        wanted = wanted & (begun + tl.program_id(2) < chunks)
    if wanted:
        table_row = page_table_ptr + row * table_width
        query, head = tl.arange(0, BLOCK_M) // PACK, tl.arange(0, BLOCK_M) % PACK
        last = position + query
        if not CAUSAL:
            last = tl.full((BLOCK_M,), -1, tl.int32) + length
        first = ((first_token + tile * tokens) * K * GROUP + part * PACK) * D
        q = _load_queries(q_ptr + first, count, K * GROUP, PACK, BLOCK_M, D, BLOCK_D, keys_ptr.dtype.element_ty)
        kv = part * PACK // GROUP * D
        if APART:
            partial = partial_ptr + unit * most * (REAL_ROWS * BLOCK_D)
            stats = stats_ptr + unit * most * (2 * REAL_ROWS)
            rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
            real = rows < REAL_ROWS
            within = rows[:, None] * BLOCK_D + dims[None, :]
            first_of_mine = begun + tl.program_id(2)
            for chunk in tl.range(first_of_mine, chunks, tl.num_programs(2), num_stages=1, disable_licm=True):
                begin = chunk * LENGTH
                acc, peak, total = _chunk(
                    q, last, keys_ptr + kv, values_ptr + kv, table_row, begin,
                    tl.minimum(begin + LENGTH, keys), keys, scale_log2e, cap, K, root, seen, D, BLOCK_D, PAGE, BLOCK_M,
                    BLOCK_N, STAGES, NODES, WINDOW, CAP,
                )  # fmt: skip
                tl.store(partial + chunk * (REAL_ROWS * BLOCK_D) + within, acc, mask=real[:, None])
                tl.store(stats + chunk * (2 * REAL_ROWS) + rows, peak, mask=real)
                tl.store(stats + (chunk * 2 + 1) * REAL_ROWS + rows, total, mask=real)
            tl.debug_barrier()  # every thread's results are written before one thread counts them
            sharing = tl.minimum(chunks - begun, tl.num_programs(2))
            if tl.atomic_add(counter_ptr + unit, 1, sem="acq_rel", scope="gpu") == sharing - 1:
                tl.store(counter_ptr + unit, 0)
                real_rows = tl.arange(0, REAL_ROWS)
                real_within = real_rows[:, None] * BLOCK_D + dims[None, :]
                every = tl.zeros((REAL_ROWS, BLOCK_D), tl.float32)
                every_total = tl.zeros((REAL_ROWS,), tl.float32)
                every_peak = tl.full((REAL_ROWS,), -float("inf"), tl.float32)
                for chunk in tl.range(begun, chunks, num_stages=3):
                    theirs = stats + chunk * (2 * REAL_ROWS) + real_rows
                    more_peak = tl.load(theirs, cache_modifier=".cg")
                    more_total = tl.load(theirs + REAL_ROWS, cache_modifier=".cg")
                    more = tl.load(partial + chunk * (REAL_ROWS * BLOCK_D) + real_within, cache_modifier=".cg")
                    every, every_peak, every_total = _merged(
                        every, every_peak, every_total, more, more_peak, more_total
                    )
                real_query, real_head = real_rows // PACK, real_rows % PACK
                if SINKS:
                    every_total = with_sinks(every_total, every_peak, sinks_ptr, part * PACK + real_head)
                _write(
                    out_ptr + first, every, every_total, real_query, real_head, count, K * GROUP, REAL_ROWS, D, BLOCK_D
                )
        else:
            acc, peak, total = _all_chunks(
                q, last, keys_ptr + kv, values_ptr + kv, table_row, keys, scale_log2e, cap, K, root, seen, D,
                BLOCK_D, PAGE, BLOCK_M, BLOCK_N, LENGTH, STAGES, NODES, WINDOW, CAP,
            )  # fmt: skip
            if SINKS:
                total = with_sinks(total, peak, sinks_ptr, part * PACK + head)
            _write(out_ptr + first, acc, total, query, head, count, K * GROUP, BLOCK_M, D, BLOCK_D)


def blocks_for(dtype: torch.dtype, head_dim: int) -> Blocks:
    """Of both kernels, or queries would meet other instructions in decode than in prefill. None spills on an H200: two
    sets of sums, of this chunk and of those before, leave no registers for blocks of 64 keys, with heads of 512 dims
    also not for 64 queries.
    """
    if head_dim > 256:
        return Blocks(16, 16, 1, 8) if dtype == torch.float32 else Blocks(32, 16, 2, 8)
    if dtype == torch.float32:  # no tensor cores: the operands of tl.dot stay in registers
        return Blocks(32, 32, 3, 4) if head_dim <= 128 else Blocks(16, 32, 2, 8)
    return Blocks(64, 32, 5, 4) if head_dim <= 128 else Blocks(64, 32, 3, 8)


def supports(head_dim: int) -> bool:
    """Whether both kernels take heads of this size."""
    return padded_dim(head_dim) <= 512


def tokens_of_a_tile(heads: int, kv_layer: Tensor) -> int:
    """Of prefill, as its tiles are listed."""
    *_, kv_heads, head_dim = kv_layer.shape
    rows = blocks_for(kv_layer.dtype, head_dim).m  # the same of all 16-bit dtypes and float8
    return rows // heads_of_a_tile(heads // kv_heads, rows)


def listed_tiles(inputs: PrefillAttention, heads: int, kv_layer: Tensor) -> Tiles:
    """The tiles of one step; their copy to the device is asynchronous."""
    return Tiles.of(inputs, tokens_of_a_tile(heads, kv_layer), kv_layer.device)


def prefill_attention(
    q_THD: Tensor, kv_layer: Tensor, page_table_BP: Tensor, planned: Tiles | RepeatedTiles, scale: float, *,
    programs: int, chunk: int = CHUNK, pdl: bool, kind: AttentionKind = PLAIN,
) -> Tensor:  # fmt: skip
    """prefill.launch_over_tiles, in chunks of ``chunk`` keys."""
    return launch_over_tiles(
        _invariant_prefill_kernel, q_THD, kv_layer, page_table_BP, planned, scale,
        blocks=blocks_for(q_THD.dtype, q_THD.shape[2]), programs=programs, pdl=pdl, kind=kind, LENGTH=chunk,
    )  # fmt: skip


def decode_attention(
    q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float, workspace: Tensor, counters: Tensor, *,
    out_THD: Tensor | None = None, multiprocessors: int, sharing: int | None = None, chunk: int = CHUNK, pdl: bool,
    kind: AttentionKind = PLAIN,
) -> Tensor:  # fmt: skip
    """See Ops.decode_attention. ``sharing``: programs that share a row's chunks, by default as many as are likely
    fast; no bit depends on it. ``workspace`` float32 has room for the results of all chunks, or a program takes all of
    a row's; ``counters`` int32 are zero and left zero; both are for one stream.
    """
    heads, head_dim = q_THD.shape[1:]
    _, _, page, kv_heads, _ = kv_layer.shape
    rows, query_len = inputs.kv_lengths_B.shape[0], inputs.query_len
    nodes = 0
    if inputs.tree_BQ is not None:  # each node has its keys, and so is a row
        nodes, rows, query_len = query_len, rows * query_len, 1
    blocks = blocks_for(q_THD.dtype, head_dim)
    pack = heads_of_a_tile(heads // kv_heads, blocks.m)
    a_tile = blocks.m // pack
    real_rows = min(blocks.m, power_of_two_from(pack * min(query_len, a_tile)))
    block_d = padded_dim(head_dim)
    if out_THD is None:
        tokens = rows * query_len if inputs.starts_B is None else q_THD.shape[0]
        out_THD = torch.empty(tokens, heads, head_dim, dtype=q_THD.dtype, device=q_THD.device)
    units = -(-query_len // a_tile) * (heads // pack)  # of a row
    most = max(1, -(-inputs.max_kv_length // chunk))
    if sharing is None:
        sharing = max(1, _PROGRAMS_EACH * multiprocessors // (rows * units))
    sharing = min(sharing, most)
    slots = rows * units * most * real_rows
    if slots * (block_d + 2) > workspace.numel() or rows * units > counters.numel():
        sharing = 1
    _invariant_decode_kernel[(units, rows, sharing)](
        q_THD.contiguous(), kv_layer[0], kv_layer[1], inputs.page_table_BP, inputs.kv_lengths_B,
        inputs.kv_lengths_B if inputs.starts_B is None else inputs.starts_B,
        inputs.kv_lengths_B if inputs.queries_B is None else inputs.queries_B,
        inputs.kv_lengths_B if inputs.tree_BQ is None else inputs.tree_BQ, out_THD, workspace,
        workspace[slots * block_d :] if sharing > 1 else workspace, counters, *kind_arguments(kind, scale, q_THD),
        inputs.page_table_BP.stride(0), kv_heads, most,
        GROUP=heads // kv_heads, PACK=pack, D=head_dim, BLOCK_D=block_d, PAGE=page, QUERY_LEN=query_len,
        BLOCK_M=blocks.m, BLOCK_N=blocks.n, REAL_ROWS=real_rows, LENGTH=chunk, STAGES=blocks.stages, APART=sharing > 1,
        RAGGED=inputs.starts_B is not None, SKIP_EMPTY=inputs.skip_empty, CAUSAL=inputs.causal, NODES=nodes,
        **kind_constants(kind),
        PDL=pdl, num_warps=blocks.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_THD
