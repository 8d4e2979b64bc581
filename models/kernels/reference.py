"""Every operation in plain torch: what runs on CPUs, and what the GPU kernels are tested against.

Knows: the arithmetic, in float32 inside whatever the dtype. Does not know: optimisations, except not to gather pages
that no row of a step reaches.
Shape letters as in models/inputs.py; Q new tokens a row, L is the longest KV length of a step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import DecodeAttention, PlanTable, PrefillAttention, RepeatedPrefill, StateRows, seen_keys
from models.kernels.interface import DeltaRule, Kernels, Rotation
from models.kernels.recurrent import reference as recurrent
from parallel.layers.weight import Weight


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


class ReferenceKernels(Kernels):
    """The Kernels protocol in plain torch, for any device and float dtype."""

    name = "reference"

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float) -> Tensor:
        x = x_TN.float()
        normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(x_TN.dtype)
        return (normed * weight_N).to(x_TN.dtype)  # the weight of a zero-centred norm is wider than x

    def add_rms_norm(self, x_TN: Tensor, residual_TN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual_TN = x_TN + residual_TN
        return self.rms_norm(residual_TN, weight_N, eps), residual_TN

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate, up = gate_up_T2I.chunk(2, dim=-1)
        return F.silu(gate.float()).to(gate.dtype) * up

    def linear(self, x_TN: Tensor, weight: Weight) -> Tensor:
        return F.linear(x_TN, weight.data, weight.bias)

    def rope_and_cache(self, qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation) -> Tensor:
        kv_heads, head_dim = kv_layer.shape[3:]
        qkv_THD = qkv_TX.view(-1, heads + 2 * kv_heads, head_dim)
        q, k, v = torch.split(qkv_THD, [heads, kv_heads, kv_heads], dim=1)
        if rotation.q_norm_D is not None:
            q = self.rms_norm(q, rotation.q_norm_D, rotation.eps)
        if rotation.k_norm_D is not None:
            k = self.rms_norm(k, rotation.k_norm_D, rotation.eps)
        cos_sin_TR = rotation.cos_sin_LR[rotation.positions_T]
        keys, values = kv_layer.flatten(1, 2)  # [pages * S, K, D] each, views
        keys.index_copy_(0, rotation.kv_slots_T, _rotate(k, cos_sin_TR))
        values.index_copy_(0, rotation.kv_slots_T, v)
        return _rotate(q, cos_sin_TR)

    def decode_attention(
        self,
        q_THD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeAttention,
        scale: float,
        out_THD: Tensor | None = None,
    ) -> Tensor:
        rows, new = inputs.kv_lengths_B.shape[0], inputs.query_len
        if inputs.starts_B is not None and inputs.queries_B is not None:
            if out_THD is None:
                out_THD = torch.full_like(q_THD, float("nan"))  # of no row's token
            return self._decode_ragged(q_THD, kv_layer, inputs, scale, out_THD)
        if out_THD is not None:
            return into(out_THD, self.decode_attention(q_THD[: rows * new], kv_layer, inputs, scale), inputs)
        longest = inputs.max_kv_length
        if q_THD.device.type == "cpu":  # reading a length costs nothing here; on a GPU it would synchronise
            longest = max(1, int(inputs.kv_lengths_B.max()))
        keys_BLKD, values_BLKD = _gather(kv_layer, inputs.page_table_BP, longest)
        # Query i of a row with n tokens sees keys [0, n - new + i], or its ancestors in a tree. A row without tokens
        # sees key 0 of the trash page, so that its (ignored) result stays finite.
        positions_L = torch.arange(keys_BLKD.shape[1], device=q_THD.device)
        visible_BQL = seen_keys(inputs, positions_L)
        # Memory past a row's end is uninitialised and may be NaN, which a weight of 0 would not mask.
        known_BL11 = (positions_L < inputs.kv_lengths_B.unsqueeze(1))[:, :, None, None]
        keys_BLKD, values_BLKD = keys_BLKD.where(known_BL11, 0), values_BLKD.where(known_BL11, 0)
        q_BQHD = q_THD.view(rows, new, *q_THD.shape[1:])
        return _attend(q_BQHD, keys_BLKD, values_BLKD, visible_BQL, scale).flatten(0, 1)

    def _decode_ragged(
        self, q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float, out_THD: Tensor
    ) -> Tensor:
        """Reads lengths on the host: for CPUs, and for what a GPU's tests compare with."""
        assert inputs.starts_B is not None
        assert inputs.queries_B is not None
        rows = zip(*(x.tolist() for x in (inputs.starts_B, inputs.queries_B, inputs.kv_lengths_B)), strict=True)
        for pages_P, (start, new, length) in zip(inputs.page_table_BP, rows, strict=True):
            if length or not inputs.skip_empty:
                q_QHD = q_THD[start : start + new]
                out_THD[start : start + new] = self._prefill_row(q_QHD, kv_layer, pages_P, length, scale)
        return out_THD

    def splits_chunks(self, heads: int, kv_layer: Tensor) -> bool:
        return kv_layer.device.type == "cpu"  # a captured launch cannot read lengths on the host

    def plan_prefill(
        self, inputs: PrefillAttention, heads: int, kv_heads: int, head_dim: int, kv_layer: Tensor
    ) -> PrefillAttention:
        return inputs

    def repeat_prefill(
        self, page_table_BP: Tensor, max_tokens: int, heads: int, kv_heads: int, kv_layer: Tensor
    ) -> RepeatedPrefill | None:
        return HostLengths() if kv_layer.device.type == "cpu" else None  # a captured launch cannot read host values

    def prefill_attention(self, q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, scale: float) -> Tensor:
        lengths = inputs.planned if isinstance(inputs.planned, HostLengths) else inputs
        out_THD = torch.full_like(q_THD, float("nan"))  # of no row's token: NaN shows a reader that should not be
        begin = lengths.first_token
        for pages_P, new, length in zip(inputs.page_table_BP, lengths.query_lengths, lengths.kv_lengths, strict=False):
            if new:
                here = slice(begin, begin + new)
                out_THD[here] = self._prefill_row(q_THD[here], kv_layer, pages_P, length, scale)
                begin += new
        return out_THD

    def _prefill_row(self, q_QHD: Tensor, kv_layer: Tensor, pages_P: Tensor, length: int, scale: float) -> Tensor:
        """Causal attention of the last Q of one row's ``length`` tokens."""
        keys_BLKD, values_BLKD = _gather(kv_layer, pages_P.unsqueeze(0), length)
        new = q_QHD.shape[0]
        visible_BQL = None
        if new < length:
            last_Q = torch.arange(length - new, length, device=q_QHD.device)
            visible_BQL = torch.arange(length, device=q_QHD.device) <= last_Q[None, :, None]
        return _attend(q_QHD.unsqueeze(0), keys_BLKD, values_BLKD, visible_BQL, scale)[0]

    def route_top_k(
        self,
        logits_TE: Tensor,
        choices: int,
        renormalise: bool,
        local_E: Tensor,
        real_T: Tensor,
        load_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        scores_TE = logits_TE.to(_wide(logits_TE)).softmax(-1)
        ordered_TE, experts_TE = scores_TE.sort(stable=True, dim=-1, descending=True)
        weights_TC, experts_TC = ordered_TE[:, :choices], experts_TE[:, :choices]
        if renormalise:
            weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
        if load_E is not None:
            load_E.scatter_add_(0, experts_TC.flatten(), real_T.to(load_E.dtype).repeat_interleave(choices))
        return weights_TC, torch.where(real_T[:, None], local_E[experts_TC], -1)

    def expert_mlp(
        self,
        x_TN: Tensor,
        gate_up: Weight,
        down: Weight,
        weights_TC: Tensor,
        local_TC: Tensor,
        *,
        all_experts: int,
    ) -> Tensor:
        # Every expert computes every token, and unrouted terms are masked: shapes do not depend on the routing.
        out_TN = torch.zeros(x_TN.shape, dtype=_wide(x_TN), device=x_TN.device)
        for g, (gate_up_2IN, down_NI) in enumerate(zip(gate_up.data, down.data, strict=True)):
            chosen_TC = local_TC == g
            weight_T1 = weights_TC.where(chosen_TC, 0).sum(-1, keepdim=True)
            up_TX = F.linear(x_TN, gate_up_2IN)
            inner_TI = self.silu_mul(up_TX) if up_TX.shape[1] > down_NI.shape[1] else self.relu2(up_TX)
            term_TN = F.linear(inner_TI, down_NI) * weight_T1
            out_TN += term_TN.where(chosen_TC.any(-1, keepdim=True), 0)
        return out_TN.to(x_TN.dtype)

    def causal_conv(
        self,
        x_TC: Tensor,
        weight_CJ: Tensor,
        bias_C: Tensor | None,
        window_SJC: Tensor,
        rows: StateRows,
        positions_T: Tensor,
    ) -> Tensor:
        return recurrent.causal_conv(x_TC, weight_CJ, bias_C, window_SJC, rows, positions_T)

    def gated_delta(
        self,
        qkv_TC: Tensor,
        z_TV: Tensor,
        b_TH: Tensor,
        a_TH: Tensor,
        rule: DeltaRule,
        state_SHVK: Tensor,
        rows: StateRows,
    ) -> Tensor:
        return recurrent.gated_delta(qkv_TC, z_TV, b_TH, a_TH, rule, state_SHVK, rows)


def into(out_THD: Tensor, found_THD: Tensor, inputs: DecodeAttention) -> Tensor:
    """``out_THD`` with the rows' tokens copied from ``found_THD``; see Kernels.decode_attention."""
    first_THD = out_THD[: found_THD.shape[0]]
    if inputs.skip_empty:
        taken_B = inputs.kv_lengths_B > 0
        found_THD = found_THD.where(taken_B.repeat_interleave(inputs.query_len)[:, None, None], first_THD)
    first_THD.copy_(found_THD)
    return out_THD


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of sums and scores: float32, or float64 where x is."""
    return torch.promote_types(x.dtype, torch.float32)


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
    keys_values = kv_layer[:, page_table_BP[:, :pages]].flatten(2, 3)[:, :, :length]
    return keys_values[0], keys_values[1]


def _attend(q_BQHD: Tensor, keys_BLKD: Tensor, values_BLKD: Tensor, visible_BQL: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * q k^T) v in float32 over the visible keys (None: causal, Q = L), [B, Q, H, D]."""
    out_BHQD = F.scaled_dot_product_attention(
        q_BQHD.float().transpose(1, 2),
        keys_BLKD.float().transpose(1, 2),
        values_BLKD.float().transpose(1, 2),
        attn_mask=None if visible_BQL is None else visible_BQL.unsqueeze(1),
        is_causal=visible_BQL is None,
        scale=scale,
        enable_gqa=True,
    )
    return out_BHQD.transpose(1, 2).to(q_BQHD.dtype)
