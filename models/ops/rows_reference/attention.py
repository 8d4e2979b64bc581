"""Rows of attention in plain torch, and those that are compositions of others on every device.

Knows: the arithmetic, in float32 inside whatever the dtype. Does not know: optimisations, except not to gather pages
that no row of a step reaches.
Shape letters as in models/inputs.py; Q new tokens a row, L is the longest KV length of a step.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import DecodeAttention, MixedAttention, PlanTable, PrefillAttention, RepeatedPrefill, seen_keys
from models.kernels.interface import PLAIN, AttentionKind, Rotation
from models.kv_group import FP8, bits_of
from models.ops.contract import Ops
from models.ops.rows_reference.dense import rms_norm
from models.ops.table import INVARIANT, Row, Run, composed, plain
from parallel.comm.quantised import Quantised


def window_attention(q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float, window: int) -> Tensor:
    """See Ops.window_attention. In float32 inside, whatever the dtype."""
    rows, new, (heads, head_dim) = inputs.kv_lengths_B.shape[0], inputs.query_len, q_THD.shape[1:]
    device, page_size = q_THD.device, kv_layer.shape[2]
    reach = min(window + new - 1, inputs.max_kv_length)
    lengths_B1 = inputs.kv_lengths_B.to(torch.int64)[:, None]
    key_BL = lengths_B1 - reach + torch.arange(reach, device=device)  # positions; those before 0 are none
    real_BL = key_BL >= 0
    pages_BL = inputs.page_table_BP.to(torch.int64).gather(1, key_BL.clamp(min=0) // page_size)
    slots_BL = pages_BL * page_size + key_BL.clamp(min=0) % page_size
    keys_values = bits_of(kv_layer).flatten(1, 2)[:, slots_BL].view(kv_layer.dtype).float()  # [2, B, L, K, D]
    # Unwritten memory may be NaN, which a weight of 0 would not mask.
    keys_values = keys_values.where(real_BL[:, :, None, None], 0)
    away_BWL = lengths_B1[:, :, None] - new + torch.arange(new, device=device)[:, None] - key_BL[:, None]
    seen_BWL = real_BL[:, None] & (away_BWL < window) & (away_BWL >= (0 if inputs.causal else 1 - window))
    q_BHWD = q_THD.view(rows, new, heads, head_dim).transpose(1, 2).float()
    keys, values = (x.transpose(1, 2) for x in keys_values)
    out = F.scaled_dot_product_attention(
        q_BHWD, keys, values, attn_mask=seen_BWL[:, None], scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(rows * new, heads, head_dim).to(q_THD.dtype)


class HostLengths:
    """A RepeatedPrefill for devices whose graph replays run host code: a replay reads these lengths."""

    def __init__(self) -> None:
        self.query_lengths: tuple[int, ...] = ()
        self.kv_lengths: tuple[int, ...] = ()
        self.first_token = 0

    @property
    def table(self) -> PlanTable | None:
        return None

    def plan(self, query_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], first_token: int = 0) -> None:
        self.query_lengths, self.kv_lengths, self.first_token = query_lengths, kv_lengths, first_token


def rope_and_cache(rms_norm: Run, qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation) -> Tensor:
    """``rms_norm``: of every query and key head."""
    kv_heads, head_dim = kv_layer.shape[3:]
    qkv_THD = qkv_TX.view(len(qkv_TX), -1, head_dim)
    q, k, *values = torch.split(qkv_THD, [heads, *[kv_heads] * (1 if rotation.values_are_keys else 2)], dim=1)
    (v,) = values or (k,)
    if rotation.value_norm:
        v = rms_norm(v, torch.ones_like(qkv_TX[0, :head_dim]), rotation.eps)
    if rotation.q_norm_D is not None:
        q = rms_norm(q, rotation.q_norm_D, rotation.eps)
    if rotation.k_norm_D is not None:
        k = rms_norm(k, rotation.k_norm_D, rotation.eps)
    cos_sin_TR = rotation.cos_sin_LR[rotation.positions_T]
    key_factors_K, value_factors_K = (None, None) if rotation.kv_factors_2K is None else rotation.kv_factors_2K
    keys, values = bits_of(kv_layer).flatten(1, 2)  # [pages * S, K, D] each, views
    keys.index_copy_(0, rotation.kv_slots_T, elements(_rotate(k, cos_sin_TR), kv_layer.dtype, key_factors_K))
    values.index_copy_(0, rotation.kv_slots_T, elements(v, kv_layer.dtype, value_factors_K))
    return _rotate(q, cos_sin_TR)


def elements(x_TKD: Tensor, dtype: torch.dtype, factors_K: Tensor | None) -> Tensor:
    """As kv_element.py: what a cache of ``dtype`` keeps of x, in bytes where it is float8."""
    if dtype != FP8:
        return x_TKD.to(dtype)
    scaled_TKD = x_TKD.float() if factors_K is None else x_TKD.float() * factors_K[:, None]
    most = torch.finfo(dtype).max  # a conversion in torch does not saturate
    return bits_of(scaled_TKD.clamp(-most, most).to(dtype))


def decode_attention(
    q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float, out_THD: Tensor | None = None, *,
    into: None = None, kind: AttentionKind = PLAIN,
) -> Tensor:  # fmt: skip
    rows, new = inputs.kv_lengths_B.shape[0], inputs.query_len
    if inputs.starts_B is not None and inputs.queries_B is not None:
        if out_THD is None:
            out_THD = torch.full_like(q_THD, float("nan"))  # of no row's token
        return _decode_ragged(q_THD, kv_layer, inputs, scale, out_THD, kind)
    if out_THD is not None:
        return written(out_THD, decode_attention(q_THD[: rows * new], kv_layer, inputs, scale, kind=kind), inputs)
    longest = inputs.max_kv_length
    if q_THD.device.type == "cpu":  # reading a length costs nothing here; on a GPU it would synchronise
        longest = max(1, int(inputs.kv_lengths_B.max()))
    keys_BLKD, values_BLKD = _gather(kv_layer, inputs.page_table_BP, longest)
    # Query i of a row with n tokens sees keys [0, n - new + i], or its ancestors in a tree. A row without tokens
    # sees key 0 of the trash page, so that its (ignored) result stays finite.
    positions_L = torch.arange(keys_BLKD.shape[1], device=q_THD.device)
    visible_BQL = seen_keys(inputs, positions_L, kind.window)
    # Memory past a row's end, or before its window, may be NaN, which a weight of 0 would not mask.
    known_BL = positions_L < inputs.kv_lengths_B.unsqueeze(1)
    known_BL11 = (known_BL if kind.window is None else known_BL & visible_BQL.any(1))[:, :, None, None]
    keys_BLKD, values_BLKD = keys_BLKD.where(known_BL11, 0), values_BLKD.where(known_BL11, 0)
    q_BQHD = q_THD.view(rows, new, *q_THD.shape[1:])
    return _attend(q_BQHD, keys_BLKD, values_BLKD, visible_BQL, scale, kind).flatten(0, 1)


def _decode_ragged(
    q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float, out_THD: Tensor, kind: AttentionKind
) -> Tensor:
    """Reads lengths on the host: for CPUs, and for what a GPU's tests compare with."""
    assert inputs.starts_B is not None
    assert inputs.queries_B is not None
    rows = zip(*(x.tolist() for x in (inputs.starts_B, inputs.queries_B, inputs.kv_lengths_B)), strict=True)
    for pages_P, (start, new, length) in zip(inputs.page_table_BP, rows, strict=True):
        if length or not inputs.skip_empty:
            q_QHD = q_THD[start : start + new]
            out_THD[start : start + new] = _prefill_row(q_QHD, kv_layer, pages_P, length, scale, kind)
    return out_THD


def splits_chunks(heads: int, kv_layer: Tensor) -> bool:
    return kv_layer.device.type == "cpu"  # a captured launch cannot read lengths on the host


def repeat_prefill(page_table_BP: Tensor, max_tokens: int, heads: int, kv_layer: Tensor) -> RepeatedPrefill | None:
    return HostLengths() if kv_layer.device.type == "cpu" else None  # a captured launch cannot read host values


def prefill_attention(
    q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, scale: float, kind: AttentionKind = PLAIN,
    prefill_row: Run | None = None,
) -> Tensor:  # fmt: skip
    """``prefill_row``: as the one below."""
    prefill_row = prefill_row or _prefill_row
    lengths = inputs.planned if isinstance(inputs.planned, HostLengths) else inputs
    out_THD = torch.full_like(q_THD, float("nan"))  # of no row's token: NaN shows a reader that should not be
    begin = lengths.first_token
    for pages_P, new, length in zip(inputs.page_table_BP, lengths.query_lengths, lengths.kv_lengths, strict=False):
        if new:
            here = slice(begin, begin + new)
            out_THD[here] = prefill_row(q_THD[here], kv_layer, pages_P, length, scale, kind)
            begin += new
    return out_THD


def _prefill_row(
    q_QHD: Tensor, kv_layer: Tensor, pages_P: Tensor, length: int, scale: float, kind: AttentionKind
) -> Tensor:
    """Causal attention of the last Q of one row's ``length`` tokens."""
    new, device, skipped = q_QHD.shape[0], q_QHD.device, 0
    if kind.window is not None:  # pages before the first query's window
        skipped = max(0, length - new - kind.window + 1) // kv_layer.shape[2]
        pages_P, length = pages_P[skipped:], length - skipped * kv_layer.shape[2]
    keys_BLKD, values_BLKD = _gather(kv_layer, pages_P.unsqueeze(0), length)
    visible_BQL = None
    if new < length or kind.window is not None:
        last_Q, places_L = torch.arange(length - new, length, device=device), torch.arange(length, device=device)
        visible_BQL = places_L <= last_Q[None, :, None]
        if kind.window is not None:
            visible_BQL &= places_L > last_Q[None, :, None] - kind.window
    return _attend(q_QHD.unsqueeze(0), keys_BLKD, values_BLKD, visible_BQL, scale, kind)[0]


def written(out_THD: Tensor, found_THD: Tensor, inputs: DecodeAttention) -> Tensor:
    """``out_THD`` with the rows' tokens copied from ``found_THD``; see Ops.decode_attention."""
    first_THD = out_THD[: found_THD.shape[0]]
    if inputs.skip_empty:
        taken_B = inputs.kv_lengths_B > 0
        found_THD = found_THD.where(taken_B.repeat_interleave(inputs.query_len)[:, None, None], first_THD)
    first_THD.copy_(found_THD)
    return out_THD


def _rotate(x_TKD: Tensor, cos_sin_TR: Tensor) -> Tensor:
    """Rotates the first R dims of each head by its token's angles (NeoX halves); the rest passes through."""
    cos, sin = cos_sin_TR.unsqueeze(1).chunk(2, dim=-1)
    rotary = cos_sin_TR.shape[-1]
    first, second = x_TKD[..., :rotary].float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_TKD.dtype)
    return torch.cat((turned, x_TKD[..., rotary:]), dim=-1) if rotary < x_TKD.shape[-1] else turned


def _gather(kv_layer: Tensor, page_table_BP: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first ``length`` keys and values of every row, [B, L, K, D] each."""
    pages = -(-length // kv_layer.shape[2])
    held = bits_of(kv_layer)[:, page_table_BP[:, :pages]].flatten(2, 3)[:, :, :length]
    keys, values = held.view(kv_layer.dtype).float() if held.dtype == torch.uint8 else held
    return keys, values


def _attend(
    q_BQHD: Tensor, keys_BLKD: Tensor, values_BLKD: Tensor, visible_BQL: Tensor | None, scale: float,
    kind: AttentionKind = PLAIN,
) -> Tensor:  # fmt: skip
    """softmax(scale * q k^T) v in float32 over the visible keys (None: causal, Q = L), [B, Q, H, D]."""
    if kind.softcap is not None or kind.sinks_H is not None:
        new = q_BQHD.shape[1]
        if visible_BQL is None:
            visible_BQL = torch.ones(1, new, new, dtype=torch.bool, device=q_BQHD.device).tril()
        q_BKGQD = (
            q_BQHD.float().reshape(*q_BQHD.shape[:2], keys_BLKD.shape[2], -1, q_BQHD.shape[3]).permute(0, 2, 3, 1, 4)
        )
        scores_BKGQL = q_BKGQD @ keys_BLKD.float().permute(0, 2, 3, 1).unsqueeze(2) * scale
        scores_BKGQL = soft_capped(scores_BKGQL, kind).masked_fill(~visible_BQL[:, None, None], -torch.inf)
        values_BKLD = values_BLKD.float().transpose(1, 2)
        sinks_KG11 = None if kind.sinks_H is None else kind.sinks_H.view(keys_BLKD.shape[2], -1, 1, 1)
        out_BKGQD = weighted_values(scores_BKGQL, values_BKLD.unsqueeze(2), sinks_KG11)
        return out_BKGQD.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q_BQHD.dtype)
    out_BHQD = F.scaled_dot_product_attention(
        q_BQHD.float().transpose(1, 2), keys_BLKD.float().transpose(1, 2), values_BLKD.float().transpose(1, 2),
        attn_mask=None if visible_BQL is None else visible_BQL.unsqueeze(1), is_causal=visible_BQL is None, scale=scale,
        enable_gqa=True,
    )  # fmt: skip
    return out_BHQD.transpose(1, 2).to(q_BQHD.dtype)


def soft_capped(scores: Tensor, kind: AttentionKind) -> Tensor:
    """softcap tanh(scores / softcap), where there is one."""
    return scores if kind.softcap is None else (scores / kind.softcap).tanh() * kind.softcap


def weighted_values(scores: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """softmax(scores) values, each query head's times sigmoid(logsumexp(scores) - sink); ``sinks`` broadcast."""
    out = scores.softmax(-1) @ values
    return out if sinks is None else out * (scores.logsumexp(-1, keepdim=True) - sinks).sigmoid()


# ---- compositions ----


def mixed_attention(
    ops: Ops, q_THD: Tensor, kv_layer: Tensor, inputs: MixedAttention, scale: float, kind: AttentionKind = PLAIN
) -> Tensor:
    if isinstance(inputs.prefill, DecodeAttention):
        out_THD = ops.decode_attention(q_THD, kv_layer, inputs.prefill, scale, kind=kind)
    else:
        out_THD = ops.prefill_attention(q_THD, kv_layer, inputs.prefill, scale, kind)
    return ops.decode_attention(q_THD, kv_layer, inputs.decode, scale, out_THD, kind=kind)


def rope_cache_attend(
    ops: Ops, qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation, inputs: DecodeAttention, scale: float,
    into: Quantised | None = None, kind: AttentionKind = PLAIN,
) -> Tensor:  # fmt: skip
    q_THD = ops.rope_and_cache(qkv_TX, heads, kv_layer, rotation)
    return ops.decode_attention(q_THD, kv_layer, inputs, scale, into=into, kind=kind)


ROWS: tuple[Row, ...] = (
    plain("rope_and_cache", partial(rope_and_cache, rms_norm)),
    plain("plan_decode", lambda inputs, heads, kv_layer, kind=PLAIN: inputs, INVARIANT),
    plain("decode_attention", decode_attention),
    plain("window_attention", window_attention, INVARIANT),
    plain("splits_chunks", splits_chunks, INVARIANT),
    plain("longest_window", lambda heads, planes: None, INVARIANT),
    plain("prefill_wave", lambda heads, head_dim: (0, 0), INVARIANT),
    plain("plan_prefill", lambda inputs, heads, kv_layer: inputs, INVARIANT),
    plain("repeat_prefill", repeat_prefill, INVARIANT),
    plain("prefill_attention", prefill_attention),
    composed("mixed_attention", mixed_attention),
    composed("rope_cache_attend", rope_cache_attend),
)
