"""q/k norm, rotary embedding (Su et al. 2021, RoFormer) and the paged cache write of packed qkv, in one Triton launch.

Knows: the packed layout (q heads | k heads | v heads), the NHD page layout [2, pages, S, K, D].
Does not know: attention, how slots are chosen, when rope_prefill.py is faster (rows_nvidia).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.attention.kv_element import as_element
from models.kernels.interface import Rotation

# Batch-invariant: with ``heads_a_program``: a token by itself, by code that depends on its heads only


@triton.jit
def partners(BLOCK_D: tl.constexpr, ROTARY: tl.constexpr):
    """The dim that each dim is rotated with: NeoX halves of the first ROTARY dims, itself beyond them."""
    dims = tl.arange(0, BLOCK_D)
    half: tl.constexpr = ROTARY // 2
    return tl.where(dims < half, dims + half, tl.where(dims < ROTARY, dims - half, dims))


@triton.jit
def angles(cos_sin_row_ptr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, there=True):
    """cos and signed sin of every dim at one position: the rotation is x * cos + x[partner] * sin.

    Nothing is loaded unless ``there``, a scalar.
    """
    dims = tl.arange(0, BLOCK_D)
    half: tl.constexpr = ROTARY // 2
    mask = (dims < ROTARY) & there
    cos = tl.load(cos_sin_row_ptr + dims % half, mask=mask, other=1.0)
    sin = tl.load(cos_sin_row_ptr + half + dims % half, mask=mask, other=0.0)
    return cos, tl.where(dims < half, -sin, sin)


@triton.jit
def normed_and_rotated(
    base_ptr,  # [rows] pointers to the first element of each head
    row_mask,
    norm,  # [BLOCK_D] float32, and the same at each dim's partner
    partner_norm, cos, sin, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads [rows, BLOCK_D] in float32: RMS-normed if NORM, then the first ROTARY dims rotated."""
    dims = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (dims < D)[None, :]
    # Each element's partner is loaded again, from L1: cheaper than shuffling the tile.
    x = tl.load(base_ptr[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(base_ptr[:, None] + partners(BLOCK_D, ROTARY)[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * inverse * norm[None, :]
        y = y * inverse * partner_norm[None, :]
    return x * cos[None, :] + y * sin[None, :]


@triton.jit
def norm_weights(norm_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, there=True):
    """A head norm's weights [BLOCK_D] in float32, of each dim and of its partner; not loaded unless ``there``."""
    dims = tl.arange(0, BLOCK_D)
    mask = (dims < D) & there
    own = tl.load(norm_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(norm_ptr + partners(BLOCK_D, ROTARY), mask=mask, other=0.0).to(tl.float32)
    return own, other


@triton.jit
def _rope_and_cache_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr,
    factors_ptr,  # float32 [2, K], when SCALED: Rotation.kv_factors_2K
    q_out_ptr, eps,
    value_offset,  # elements from the key pages to the value pages
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    ROW: tl.constexpr,  # elements from a token's qkv to the next one's
    BLOCK_D: tl.constexpr, ROTARY: tl.constexpr,
    HEADS: tl.constexpr,  # heads of one kind that a program takes
    NORM: tl.constexpr, SCALED: tl.constexpr, VALUE_NORM: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (H + HEADS - 1) // HEADS
    k_blocks: tl.constexpr = (K + HEADS - 1) // HEADS
    dims = tl.arange(0, BLOCK_D)
    q_norm, q_partner_norm, k_norm, k_partner_norm = 0.0, 0.0, 0.0, 0.0
    if NORM:
        q_norm, q_partner_norm = norm_weights(q_norm_ptr, D, BLOCK_D, ROTARY)
        k_norm, k_partner_norm = norm_weights(k_norm_ptr, D, BLOCK_D, ROTARY)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    qkv_row = qkv_ptr + token * ROW
    cos, sin = angles(cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY, BLOCK_D, ROTARY)
    if block < q_blocks:
        q_heads = block * HEADS + tl.arange(0, HEADS)
        q = normed_and_rotated(
            qkv_row + q_heads * D, q_heads < H, q_norm, q_partner_norm, cos, sin, eps, D, BLOCK_D, ROTARY, NORM
        )
        q_mask = (q_heads < H)[:, None] & (dims < D)[None, :]
        q_where = (token * H + q_heads)[:, None] * D + dims[None, :]
        tl.store(q_out_ptr + q_where, q.to(q_out_ptr.dtype.element_ty), mask=q_mask)
    else:
        slot = tl.load(slots_ptr + token) * K * D
        compute: tl.constexpr = qkv_ptr.dtype.element_ty
        held: tl.constexpr = cache_ptr.dtype.element_ty
        if block < q_blocks + k_blocks:
            heads = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
            k_row = qkv_row + (H + heads) * D
            k = normed_and_rotated(k_row, heads < K, k_norm, k_partner_norm, cos, sin, eps, D, BLOCK_D, ROTARY, NORM)
            mask = (heads < K)[:, None] & (dims < D)[None, :]
            where = heads[:, None] * D + dims[None, :]
            k_factor = 1.0
            if SCALED:
                k_factor = tl.load(factors_ptr + heads, mask=heads < K, other=1.0)[:, None]
            tl.store(cache_ptr + slot + where, as_element(k, k_factor, compute, held, SCALED), mask=mask)
        else:
            v_heads = (block - q_blocks - k_blocks) * HEADS + tl.arange(0, HEADS)
            mask = (v_heads < K)[:, None] & (dims < D)[None, :]
            where = v_heads[:, None] * D + dims[None, :]
            v = tl.load(qkv_row + (H + K * (1 - VALUES_ARE_KEYS)) * D + where, mask=mask, other=0.0)
            if VALUE_NORM:
                wide = v.to(tl.float32)
                v = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]).to(compute)
            v_factor = 1.0
            if SCALED:
                v_factor = tl.load(factors_ptr + K + v_heads, mask=v_heads < K, other=1.0)[:, None]
            v = as_element(v, v_factor, compute, held, SCALED)
            tl.store(cache_ptr + value_offset + slot + where, v, mask=mask)


def rope_and_cache(
    qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation, pdl: bool, heads_a_program: int | None = None
) -> Tensor:
    """See Ops.rope_and_cache; takes heads of any size. A program has ``heads_a_program`` of one token, by default
    as many as are fast for so many tokens. Returns q [T, H, D].
    """
    tokens, (kv_heads, head_dim) = qkv_TX.shape[0], kv_layer.shape[3:]
    q_THD = torch.empty(tokens, heads, head_dim, dtype=qkv_TX.dtype, device=qkv_TX.device)
    if tokens == 0:
        return q_THD
    if heads_a_program is None:  # few tokens: many small programs, for latency; many tokens: fewer, larger ones
        heads_a_program = 4 if tokens <= 64 else 8
    blocks = triton.cdiv(heads, heads_a_program) + 2 * triton.cdiv(kv_heads, heads_a_program)
    _rope_and_cache_kernel[(tokens, blocks)](
        qkv_TX, qkv_TX if rotation.q_norm_D is None else rotation.q_norm_D,
        qkv_TX if rotation.k_norm_D is None else rotation.k_norm_D, rotation.cos_sin_LR, rotation.positions_T,
        rotation.kv_slots_T, kv_layer,
        rotation.cos_sin_LR if rotation.kv_factors_2K is None else rotation.kv_factors_2K, q_THD, rotation.eps,
        kv_layer.stride(0),
        H=heads, K=kv_heads, D=head_dim, ROW=qkv_TX.stride(0), BLOCK_D=triton.next_power_of_2(head_dim),
        ROTARY=rotation.cos_sin_LR.shape[1], HEADS=heads_a_program, NORM=rotation.q_norm_D is not None,
        SCALED=rotation.kv_factors_2K is not None, VALUE_NORM=rotation.value_norm,
        VALUES_ARE_KEYS=rotation.values_are_keys, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return q_THD
