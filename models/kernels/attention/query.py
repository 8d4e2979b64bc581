"""The front of both decode attention kernels: a program's queries, and the cache write of the newest key and value.

Knows: packed qkv (q heads | k heads | v heads), norm and rotation of its heads (rope_decode.py), the NHD pages
[2, pages, S, K, D], and what the predecessor launch did not write. Does not know: scores, how keys are divided between
programs (decode.py, decode_list.py).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from models.kernels.attention.kv_element import as_element, as_query
from models.kernels.attention.rope_decode import angles, norm_weights, normed_and_rotated
from models.kernels.dependent_launch import prefetch_to_l2
from models.kernels.interface import AttentionKind, Rotation
from models.row_buckets import power_of_two_from

LOG2_E = 1.4426950408889634


@triton.jit
def steady_of_rotation(
    cos_sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, row, head, K,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr,
    there=True,
):  # fmt: skip
    """What ``query`` may read before the wait: the predecessor wrote q, but never a position or a slot.

    Nothing is loaded unless ``there``, a scalar.
    """
    cos, sin, slot = 0.0, 0.0, 0
    q_norm, q_partner_norm, k_norm, k_partner_norm = 0.0, 0.0, 0.0, 0.0
    if ROPE:
        position = tl.load(positions_ptr + row, mask=there, other=0, cache_modifier=".cg")
        cos, sin = angles(cos_sin_ptr + position * ROTARY, BLOCK_D, ROTARY, there)
        slot = (tl.load(slots_ptr + row, mask=there, other=0, cache_modifier=".cg") * K + head) * D
        if NORM:
            q_norm, q_partner_norm = norm_weights(q_norm_ptr, D, BLOCK_D, ROTARY, there)
            k_norm, k_partner_norm = norm_weights(k_norm_ptr, D, BLOCK_D, ROTARY, there)
    return cos, sin, slot, q_norm, q_partner_norm, k_norm, k_partner_norm


@triton.jit
def query(
    q_ptr,  # q [T, H, D], or packed qkv [T, (H + 2K) * D], columns of a wider tensor, when ROPE
    keys_ptr, values_ptr, steady, eps,
    first,  # the row's first token, the only one when ROPE
    count,  # its tokens
    head,
    rows,  # indices of the program's query rows: token by token, the heads of the group
    newest,  # whether this program writes the row's newest key and value, when ROPE
    PITCH: tl.constexpr,  # elements from a token's qkv to the next one's, when ROPE
    K,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, ROPE: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """The queries of one row and kv head [rows, BLOCK_D], ``as_query``; zeros beyond GROUP * count."""
    dims = tl.arange(0, BLOCK_D)
    token = first + rows // GROUP
    q_head = head * GROUP + rows % GROUP
    row_mask = rows < GROUP * count
    if ROPE:
        cos, sin, slot, q_norm, q_partner_norm, k_norm, k_partner_norm = steady
        qkv_row = q_ptr + first * PITCH
        if newest:
            one = tl.arange(0, 1)
            heads = qkv_row + (K * GROUP + head + one) * D
            key = normed_and_rotated(heads, one < 1, k_norm, k_partner_norm, cos, sin, eps, D, BLOCK_D, ROTARY, NORM)
            value = tl.load(heads[:, None] + K * D + dims[None, :], mask=(dims < D)[None, :], other=0.0)
            written = slot + one[:, None] * D + dims[None, :]
            compute: tl.constexpr = q_ptr.dtype.element_ty
            held: tl.constexpr = keys_ptr.dtype.element_ty
            tl.store(keys_ptr + written, as_element(key, 1.0, compute, held, False), mask=(dims < D)[None, :])
            tl.store(values_ptr + written, as_element(value, 1.0, compute, held, False), mask=(dims < D)[None, :])
            tl.debug_barrier()
        q = normed_and_rotated(
            qkv_row + q_head * D, row_mask, q_norm, q_partner_norm, cos, sin, eps, D, BLOCK_D, ROTARY, NORM
        ).to(q_ptr.dtype.element_ty)
    else:
        q_where = (token * K * GROUP + q_head)[:, None] * D + dims[None, :]
        q = tl.load(q_ptr + q_where, mask=row_mask[:, None] & (dims < D)[None, :], other=0.0)
    return as_query(q, keys_ptr.dtype.element_ty)


@triton.jit
def block_to_l2(
    keys_ptr, values_ptr, table_row, block, length, head, K,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    LINES: tl.constexpr,  # 128-byte lines of a head
):  # fmt: skip
    """Prefetches a block of one head's keys and values to L2. Before the wait all but the newest are already there."""
    ahead = block * BLOCK_N + tl.arange(0, BLOCK_N)
    held = tl.load(table_row + ahead // PAGE, mask=ahead < length, other=0, cache_modifier=".cg").to(tl.int64)
    starts = ((held * PAGE + ahead % PAGE) * K + head)[:, None] * D
    lines = starts + (tl.arange(0, LINES) * (BLOCK_D // LINES))[None, :]
    prefetch_to_l2(keys_ptr + lines)
    prefetch_to_l2(values_ptr + lines)


@triton.jit
def nodes_seen(tree_ptr, row, rows, GROUP: tl.constexpr, QUERY_LEN: tl.constexpr):
    """int32 of each query row: the nodes that its token sees (DecodeAttention.tree_BQ)."""
    token = rows // GROUP
    return tl.load(tree_ptr + row * QUERY_LEN + token, mask=token < QUERY_LEN, other=0)


@triton.jit
def seen_in_tree(nodes, keys, length, QUERY_LEN: tl.constexpr):
    """bool [rows, keys]: all keys before the tree, its root, and the nodes whose bits are set."""
    node = keys - (length - QUERY_LEN)
    bit = tl.minimum(tl.maximum(node - 1, 0), 31)
    mine = (nodes[:, None] >> bit[None, :]) & 1
    return (node <= 0)[None, :] | ((mine == 1) & (keys < length)[None, :])


@triton.jit
def depth_in_tree(nodes, QUERY_LEN: tl.constexpr):
    """int32 of each query row: the depth of its node below the root."""
    depth = nodes & 0
    for node in tl.static_range(QUERY_LEN - 1):
        depth += (nodes >> node) & 1
    return depth


@triton.jit
def first_key(length, QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr, block):
    """Where a row's keys begin: the first that any of its last QUERY_LEN tokens may see, in whole blocks."""
    if WINDOW:
        first = tl.maximum(length - QUERY_LEN + 1 - WINDOW, 0) // block * block
    else:
        first = 0
    return first


@triton.jit
def capped(scores, cap):
    """cap tanh(x), of scores that are 2 log2(e) x; fused alike in every kernel."""
    return tl.fma(-2.0 * cap, 1.0 / (1.0 + tl.exp2(scores)), cap)


@triton.jit
def weights_of_keys(scores, peak, AXIS: tl.constexpr):
    """Online softmax of scores whose keys lie along ``AXIS``: (weights, the queries' new maximum, the factor of older
    sums)."""
    new_peak = tl.maximum(peak, tl.max(scores, AXIS))
    # A query that has seen no key yet keeps -inf; subtracting it would make NaN of its weights.
    shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    return tl.exp2(scores - tl.expand_dims(shift, AXIS)), new_peak, tl.exp2(peak - shift)


@triton.jit
def with_sinks(total, peak, sinks_ptr, heads):
    """The rows' sums of weights relative to ``peak``, and those of their ``heads``' sinks: divided by it, weighted
    values are scaled by sigmoid(logsumexp - sink)."""
    sinks = tl.load(sinks_ptr + heads)
    return total + tl.exp2(tl.fma(sinks, 1.4426950408889634, -peak))


def kind_arguments(kind: AttentionKind, scale: float, unused: Tensor) -> tuple[float, float, Tensor]:
    """Kernel arguments (scale, cap, sinks): scores are exponents of two."""
    sinks_H = unused if kind.sinks_H is None else kind.sinks_H
    if kind.softcap is None:
        return scale * LOG2_E, 0.0, sinks_H
    return 2 * LOG2_E * scale / kind.softcap, kind.softcap * LOG2_E, sinks_H


def kind_constants(kind: AttentionKind) -> dict[str, int | bool]:
    """Constants of kernels that take every kind."""
    return {"WINDOW": kind.window or 0, "CAP": kind.softcap is not None, "SINKS": kind.sinks_H is not None}


def padded_dim(head_dim: int) -> int:
    """The width of a head in a tile."""
    return max(16, power_of_two_from(head_dim))


def rotation_arguments(
    rotation: Rotation | None, unused: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Kernel arguments (q norm, k norm, cos and sin, positions, slots, eps); ``unused`` stands for absent tensors."""
    if rotation is None:
        return unused, unused, unused, unused, unused, 0.0
    return (
        unused if rotation.q_norm_D is None else rotation.q_norm_D,
        unused if rotation.k_norm_D is None else rotation.k_norm_D,
        rotation.cos_sin_LR,
        rotation.positions_T,
        rotation.kv_slots_T,
        rotation.eps,
    )
