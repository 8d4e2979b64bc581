"""q/k norm, rotary embedding and the paged cache write for the many tokens of a prefill, in one Triton launch.

Knows: the same as rope_decode.py, for heads whose dims are all rotated and are a power of two.
Does not know: how few tokens are too few for it (rows_nvidia), or other head sizes (rope_decode.py).

A thread keeps to one token and to the same dims of both halves of its heads. So angles, norm weights and addresses are
loaded once for all heads; both dims of a rotation are the thread's own; each access moves 16 bytes; and nothing passes
through shared memory. A program takes some heads of one kind (q, k or v) of some tokens, and loads all before it stores
any. Programs of the same tokens are neighbours.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.attention.kv_element import as_element
from models.kernels.interface import Rotation

# Batch-invariant: any number of tokens runs the same code, a token by itself
_PIECE = 8  # dims of each half in a thread: 16 bytes of a 16-bit dtype


@dataclass(frozen=True, slots=True)
class Blocks:
    """``heads``: the most that a program takes, in a 16-bit dtype. ``warps`` of a program decide how many tokens it
    has: 4 a warp where a head has 128 dims.
    """

    heads: int
    warps: int


BLOCKS = Blocks(heads=2, warps=4)


@triton.jit
def _load_heads(row_ptr, mask, HEADS: tl.constexpr, HALF: tl.constexpr):
    """The halves of adjacent heads, [TOKENS, HALF] each, in a tuple: first and second of each head in turn.

    ``row_ptr`` [TOKENS, 1]: the first element of the first head.
    """
    halves = tl.tuple(())
    for half in tl.static_range(2 * HEADS):
        where = row_ptr + (half * HALF + tl.arange(0, HALF))[None, :]
        halves = halves + (tl.load(where, mask=mask, other=0.0),)  # noqa: RUF005 (Triton knows no unpacking)
    return halves


@triton.jit
def _piecewise(x, HALF: tl.constexpr, PIECE: tl.constexpr):
    """Sums [TOKENS, HALF / PIECE] of the squares of PIECE dims each."""
    return tl.sum(tl.reshape(x * x, (x.shape[0], HALF // PIECE, PIECE)), 2)


@triton.jit
def _store_rotated(
    to_ptr,  # [TOKENS, 1] pointers to where the first head goes
    halves, cos_sin_ptr,
    position,  # [TOKENS]
    mask,  # [TOKENS, 1]
    norm_first,  # [TOKENS, HALF] float32, if NORM
    norm_second, eps,
    factors_ptr,  # float32 [HEADS], when SCALED
    HEADS: tl.constexpr, HALF: tl.constexpr, PIECE: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Heads of ``_load_heads``: RMS-normed if NORM, rotated and stored. Sums are in the order of rope_decode.py."""
    dims = tl.arange(0, HALF)[None, :]
    angles_ptr = cos_sin_ptr + (position * (2 * HALF))[:, None] + dims
    cos, sin = tl.load(angles_ptr), tl.load(angles_ptr + HALF)
    compute: tl.constexpr = halves[0].dtype
    held: tl.constexpr = to_ptr.dtype.element_ty
    for head in tl.static_range(HEADS):
        x = halves[2 * head].to(tl.float32)
        y = halves[2 * head + 1].to(tl.float32)
        if NORM:
            squares = tl.sum(_piecewise(x, HALF, PIECE) + _piecewise(y, HALF, PIECE), 1)
            inverse = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
            x = x * inverse * norm_first
            y = y * inverse * norm_second
        where = to_ptr + (2 * head * HALF + dims)
        factor = 1.0
        if SCALED:
            factor = tl.load(factors_ptr + head)
        tl.store(where, as_element(x * cos + y * -sin, factor, compute, held, SCALED), mask=mask)
        tl.store(where + HALF, as_element(y * cos + x * sin, factor, compute, held, SCALED), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _rope_and_cache_many_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr,
    factors_ptr,  # float32 [2, K], when SCALED: Rotation.kv_factors_2K
    q_out_ptr, eps,
    value_offset,  # elements from the key pages to the value pages
    tokens,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    ROW: tl.constexpr,  # elements from a token's qkv to the next one's
    TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,  # of a program; divides H
    KV_HEADS: tl.constexpr,  # divides K
    PIECE: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, VALUE_NORM: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    q_blocks: tl.constexpr = H // Q_HEADS
    k_blocks: tl.constexpr = K // KV_HEADS
    D: tl.constexpr = 2 * HALF
    block = tl.program_id(0) % (q_blocks + 2 * k_blocks)
    token = tl.program_id(0) // (q_blocks + 2 * k_blocks) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    mask = here[:, None]
    token = token.to(tl.int64)
    dims = tl.arange(0, HALF)[None, :]
    first, second = 0.0, 0.0
    if NORM:
        norm_ptr = q_norm_ptr
        if block >= q_blocks:
            norm_ptr = k_norm_ptr
        # Broadcast to every token, so that a thread loads its own 16 bytes: of [1, HALF] most would be exchanged.
        norm_ptrs = norm_ptr + tl.broadcast_to(dims, (TOKENS, HALF))
        first = tl.load(norm_ptrs).to(tl.float32)
        second = tl.load(norm_ptrs + HALF).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row_ptr = qkv_ptr + (token * ROW)[:, None]
    # Heads are loaded before any position or slot is needed: whatever depends on one comes after.
    if block < q_blocks:
        position = tl.load(positions_ptr + token, mask=here, other=0)
        q = _load_heads(row_ptr + block * (Q_HEADS * D), mask, Q_HEADS, HALF)
        q_ptr = q_out_ptr + (token * (H * D))[:, None] + block * (Q_HEADS * D)
        _store_rotated(
            q_ptr, q, cos_sin_ptr, position, mask, first, second, eps, factors_ptr, Q_HEADS, HALF, PIECE, NORM, False
        )
    elif block < q_blocks + k_blocks:
        position = tl.load(positions_ptr + token, mask=here, other=0)
        first_head = (block - q_blocks) * KV_HEADS
        heads = first_head * D
        k = _load_heads(row_ptr + H * D + heads, mask, KV_HEADS, HALF)
        slot = tl.load(slots_ptr + token, mask=here, other=0)
        k_ptr = cache_ptr + (slot * (K * D))[:, None] + heads
        _store_rotated(
            k_ptr, k, cos_sin_ptr, position, mask, first, second, eps, factors_ptr + first_head, KV_HEADS, HALF, PIECE,
            NORM, SCALED,
        )  # fmt: skip
    else:
        first_head = (block - q_blocks - k_blocks) * KV_HEADS
        heads = first_head * D
        v = _load_heads(row_ptr + (H + K * (1 - VALUES_ARE_KEYS)) * D + heads, mask, KV_HEADS, HALF)
        slot = tl.load(slots_ptr + token, mask=here, other=0)
        v_ptr = cache_ptr + value_offset + (slot * (K * D))[:, None] + heads
        compute: tl.constexpr = qkv_ptr.dtype.element_ty
        held: tl.constexpr = cache_ptr.dtype.element_ty
        for half in tl.static_range(2 * KV_HEADS):
            value, factor = v[half], 1.0
            if VALUE_NORM:
                wide, other = value.to(tl.float32), v[half ^ 1].to(tl.float32)
                squares = tl.sum(_piecewise(wide, HALF, PIECE) + _piecewise(other, HALF, PIECE), 1)
                value = (wide * tl.rsqrt(squares / D + eps)[:, None]).to(compute)
            if SCALED:
                factor = tl.load(factors_ptr + K + first_head + half // 2)
            tl.store(v_ptr + (half * HALF + dims), as_element(value, factor, compute, held, SCALED), mask=mask)


def supports(head_dim: int, rotary: int) -> bool:
    """Whether a head is two halves of 8 to 256 dims, a power of two, all of them rotated."""
    return rotary == head_dim and 2 * _PIECE <= head_dim <= 512 and head_dim & (head_dim - 1) == 0


def rope_and_cache(
    qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation, pdl: bool, blocks: Blocks = BLOCKS
) -> Tensor:
    """See Ops.rope_and_cache; for what ``supports`` accepts."""
    tokens, (kv_heads, head_dim) = qkv_TX.shape[0], kv_layer.shape[3:]
    half = head_dim // 2
    q_THD = torch.empty(tokens, heads, head_dim, dtype=qkv_TX.dtype, device=qkv_TX.device)
    if tokens == 0:
        return q_THD
    most = max(1, blocks.heads * 2 // qkv_TX.element_size())  # more would spill in float32
    q_heads, k_heads = _divisor(heads, most), _divisor(kv_heads, most)
    a_program = max(1, blocks.warps * 32 * _PIECE // half)  # tokens
    grid = triton.cdiv(tokens, a_program) * (heads // q_heads + 2 * (kv_heads // k_heads))
    _rope_and_cache_many_kernel[(grid,)](
        qkv_TX, qkv_TX if rotation.q_norm_D is None else rotation.q_norm_D,
        qkv_TX if rotation.k_norm_D is None else rotation.k_norm_D, rotation.cos_sin_LR, rotation.positions_T,
        rotation.kv_slots_T, kv_layer,
        rotation.cos_sin_LR if rotation.kv_factors_2K is None else rotation.kv_factors_2K, q_THD, rotation.eps,
        kv_layer.stride(0), tokens,
        H=heads, K=kv_heads, HALF=half, ROW=qkv_TX.stride(0), TOKENS=a_program, Q_HEADS=q_heads, KV_HEADS=k_heads,
        PIECE=_PIECE, NORM=rotation.q_norm_D is not None, SCALED=rotation.kv_factors_2K is not None,
        VALUE_NORM=rotation.value_norm, VALUES_ARE_KEYS=rotation.values_are_keys, PDL=pdl, num_warps=blocks.warps,
        launch_pdl=pdl,
    )  # fmt: skip
    return q_THD


def _divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``; 1 of 0."""
    return next(divisor for divisor in range(max(1, min(number, most)), 0, -1) if number % divisor == 0)
