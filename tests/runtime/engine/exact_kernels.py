"""The operations of a model in float64, one row at a time: what a step computes no longer depends on who shares it.

A product's last bits depend on how many rows it has, so two engines that batch differently differ in the last bits of
float32, and a test of them would have to say how much is too much. In float64 the difference is gone by the time
logits are rounded to float32, so any two engines can be compared bit for bit.

Knows: the contract of models/kernels/interface.py. Does not know: speed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import DecodeAttention, PrefillAttention, seen_keys
from models.kernels.interface import PLAIN, AttentionKind, Rotation
from models.kv_group import bits_of
from models.ops.rows_reference.attention import elements, written
from parallel.layers.weight import Weight
from tests.plant import Kernels, Op, kernels_with


def exact_kernels(*, tables: bool = False) -> Kernels:
    """For activations in float64, weights and a cache as wide or of FP8 codes. ``tables``: where Triton is there, plans
    of prefill attention are tables, as on a GPU (tiled_kernels.py)."""
    exact = kernels_with(
        name="exact",
        rms_norm=rms_norm,
        silu_mul=silu_mul,
        rope_and_cache=rope_and_cache,
        decode_attention=decode_attention,
        prefill_attention=prefill_attention,
        expert_mlp=expert_mlp,
    )
    if not tables or importlib.util.find_spec("triton") is None:
        return exact
    made: Kernels = importlib.import_module("tests.runtime.engine.tiled_kernels").tiled_kernels(exact)
    return made


def rms_norm(_: Op, x_TN: Tensor, weight_N: Tensor, eps: float, into: None = None) -> Tensor:
    return F.rms_norm(x_TN, weight_N.shape, weight_N, eps)


def silu_mul(_: Op, gate_up_T2I: Tensor, *, gelu: bool = False, into: None = None) -> Tensor:
    assert not gelu, "GELU is not exact here"
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_and_cache(_: Op, qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation) -> Tensor:
    kv_heads, head_dim = kv_layer.shape[3:]
    qkv_THD = qkv_TX.view(-1, heads + 2 * kv_heads, head_dim)
    q, k, v = torch.split(qkv_THD, [heads, kv_heads, kv_heads], dim=1)
    if rotation.q_norm_D is not None:
        q = F.rms_norm(q, rotation.q_norm_D.shape, rotation.q_norm_D, rotation.eps)
    if rotation.k_norm_D is not None:
        k = F.rms_norm(k, rotation.k_norm_D.shape, rotation.k_norm_D, rotation.eps)
    cos_sin_TR = rotation.cos_sin_LR[rotation.positions_T].double()
    keys, values = bits_of(kv_layer).flatten(1, 2)
    keys.index_copy_(0, rotation.kv_slots_T, elements(_rotate(k, cos_sin_TR), kv_layer.dtype, None))
    values.index_copy_(0, rotation.kv_slots_T, elements(v, kv_layer.dtype, None))
    return _rotate(q, cos_sin_TR)


def decode_attention(
    _: Op,
    q_THD: Tensor,
    kv_layer: Tensor,
    inputs: DecodeAttention,
    scale: float,
    out_THD: Tensor | None = None,
    into: None = None,
    kind: AttentionKind = PLAIN,
) -> Tensor:
    assert kind == AttentionKind(kind.window), "sinks and soft caps are not exact here"
    if inputs.starts_B is not None and inputs.queries_B is not None:
        rows = [*zip(*(x.tolist() for x in (inputs.starts_B, inputs.queries_B, inputs.kv_lengths_B)), strict=True)]
        rows = [(start, new if length or not inputs.skip_empty else 0, length) for start, new, length in rows]
        return _attend_by_row(q_THD, kv_layer, inputs.page_table_BP, rows, scale, kind.window, out_THD)
    tokens = len(inputs.kv_lengths_B) * inputs.query_len
    q_BQHD = q_THD[:tokens].view(-1, inputs.query_len, *q_THD.shape[1:])
    found_THD = _attend(q_BQHD, kv_layer, inputs, scale, kind.window).flatten(0, 1)
    return found_THD if out_THD is None else written(out_THD, found_THD, inputs)


def prefill_attention(
    _: Op, q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, scale: float, kind: AttentionKind = PLAIN
) -> Tensor:
    assert kind == AttentionKind(kind.window), "sinks and soft caps are not exact here"
    lengths: Any = inputs.planned or inputs
    starts = accumulate(lengths.query_lengths, initial=lengths.first_token)
    rows = [*zip(starts, lengths.query_lengths, lengths.kv_lengths, strict=False)]
    return _attend_by_row(q_THD, kv_layer, inputs.page_table_BP, rows, scale, kind.window)


def expert_mlp(
    _: Op,
    x_TN: Tensor,
    gate_up: Weight,
    down: Weight,
    weights_TC: Tensor,
    local_TC: Tensor,
    *,
    all_experts: int,
) -> Tensor:
    chosen_GTC = local_TC == torch.arange(len(down.data))[:, None, None]
    weight_GT1 = weights_TC.where(chosen_GTC, 0).sum(-1, keepdim=True)
    up_GTX = x_TN @ gate_up.plain(x_TN.dtype).mT
    gated = up_GTX.shape[2] > down.inner
    inner_GTI = silu_mul(_, up_GTX) if gated else up_GTX.relu().square()
    term_GTN = inner_GTI @ down.plain(x_TN.dtype).mT * weight_GT1
    return term_GTN.where(chosen_GTC.any(-1, keepdim=True), 0).sum(0)


def _rotate(x_TKD: Tensor, cos_sin_TR: Tensor) -> Tensor:
    cos, sin = cos_sin_TR.unsqueeze(1).chunk(2, dim=-1)
    rotary = cos_sin_TR.shape[-1]
    first, second = x_TKD[..., :rotary].chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x_TKD[..., rotary:]), dim=-1)


def _attend_by_row(
    q_THD: Tensor,
    kv_layer: Tensor,
    page_table_BP: Tensor,
    rows: Sequence[tuple[int, int, int]],
    scale: float,
    window: int | None = None,
    out_THD: Tensor | None = None,
) -> Tensor:
    """Of each row (where its tokens begin, how many are new, its length): its new tokens, over its pages."""
    if out_THD is None:
        out_THD = torch.full_like(q_THD, float("nan"))  # of no row's token: NaN shows a reader that should not be
    for pages_P, (start, new, length) in zip(page_table_BP, rows, strict=False):
        if new:
            q_QHD = q_THD[start : start + new]  # fewer where a bucket is larger than any step
            inputs = DecodeAttention(pages_P[None], torch.tensor([length]), len(q_QHD), length)
            out_THD[start : start + new] = _attend(q_QHD[None], kv_layer, inputs, scale, window)[0]
    return out_THD


def _attend(
    q_BQHD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float, window: int | None = None
) -> Tensor:
    """The last Q of each row's tokens, each over itself and those before it, or its ancestors in a tree. What lies
    after a row's length, or before all its windows, may be NaN.
    """
    _, _, size, kv_heads, head_dim = kv_layer.shape
    rows, new, heads, _ = q_BQHD.shape
    group = heads // kv_heads
    pages_BP, lengths_B = inputs.page_table_BP, inputs.kv_lengths_B
    pages = -(-int(lengths_B.max()) // size)
    read = bits_of(kv_layer)[:, pages_BP[:, :pages].long()].view(kv_layer.dtype)
    keys_BLKD, values_BLKD = read.to(q_BQHD.dtype).flatten(2, 3)
    place_L = torch.arange(pages * size)
    behind_BL = place_L >= lengths_B.unsqueeze(1)
    seen_BQL = seen_keys(inputs, place_L, window)
    unseen_BL = behind_BL if window is None else behind_BL | ~seen_BQL.any(1)
    values_BLKD = values_BLKD.masked_fill(unseen_BL[:, :, None, None], 0.0)
    later_BQL = ~seen_BQL
    q_BKXD = (
        q_BQHD.view(rows, new, kv_heads, group, head_dim).transpose(1, 2).flatten(2, 3)
    )  # X: query, head of a group
    scores_BKXL = (q_BKXD @ keys_BLKD.permute(0, 2, 3, 1)) * scale
    later_BKXL = later_BQL.repeat_interleave(group, 1).unsqueeze(1)
    shares_BKXL = scores_BKXL.masked_fill(later_BKXL, float("-inf")).softmax(-1)
    out_BKXD: Tensor = shares_BKXL @ values_BLKD.transpose(1, 2)
    return out_BKXD.view(rows, kv_heads, new, group, head_dim).transpose(1, 2).reshape(rows, new, heads, head_dim)
