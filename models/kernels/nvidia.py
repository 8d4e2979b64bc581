"""The Kernels protocol on NVIDIA GPUs: Triton kernels, FlashInfer prefill attention, cuBLAS; tuned for Hopper (sm_90).

Knows: which kernel of norm, rotation, attention and experts serves which shape, and their workspaces; it has a
MatmulDispatch for matrix products and a Prefill for prefill attention. Does not know: models, steps or graphs.

One object serves one stream: its kernels share workspaces that are safe only in stream order. Everything that a decode
step calls can be captured after one warm-up call of the same shape outside a capture, on a stream that waited for the
current one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from models.inputs import PIECE, DecodeAttention, PrefillAttention, RepeatedPrefill, StateRows
from models.kernels import embedding
from models.kernels.attention import (
    decode,
    decode_balanced,
    decode_balanced_tma,
    decode_tma,
    decode_window,
    decode_work,
    rope_decode,
    rope_prefill,
)
from models.kernels.attention.decode_choice import (
    DecodeChoice,
    longest_window,
    programs_each,
    programs_of,
    window_programs,
)
from models.kernels.attention.decode_work import DecodeWork, SplitRule
from models.kernels.attention.prefill_choice import Prefill
from models.kernels.experts import grouped, grouped_tma, route, streamed
from models.kernels.experts.tiles import long_list_tiles, without_lists
from models.kernels.interface import NO_SWITCHES, DeltaRule, FlashInferSwitches, Kernels, PrefillWanted, Rotation
from models.kernels.matmul import norm
from models.kernels.matmul.choice_table import ChoiceTable
from models.kernels.matmul.dispatch import MatmulDispatch
from models.kernels.recurrent import conv, delta_chunk, delta_step, delta_tree, gates, mamba2_tree, mamba2_triton
from models.kernels.recurrent.mamba2 import Mamba2Weights
from models.kernels.reference import ReferenceKernels
from models.kernels.sigmoid_routing import SigmoidRouting
from models.kernels.traits import traits_of
from parallel.comm.peer_buffers import PeerBuffers
from parallel.layers.weight import Weight

_MOST_STEPS = 16  # tokens of a row that go through the recurrence one by one; longer rows go in chunks
_ATTENTION_BYTES = 128 << 20  # of partial results of splits
_MOST_FLOAT32_ROWS = 32  # query rows of a kv head; above, the float32 kernel spills and takes minutes to compile
_MOST_FEW = 255  # tokens for rope_decode.py; from 256 rope_prefill.py was faster on an H200, fewer were not tried


class NvidiaKernels(Kernels):
    """See the module. ``choices`` overrules the shipped choice table. ``prefill``: which prefill attention to run.
    ``flashinfer``: FlashInfer's environment variables. ``balanced``: decode attention takes splits from a work list;
    without, every row of a step is split alike, to compare the two. ``depth``: steps in flight beside the one that
    lands next, for which FlashInfer's plans have places.

    Takes about 0.6 GiB of device memory for workspaces. Raises RuntimeError on a device ``unsupported`` refuses.
    """

    name = "hopper"
    expert_tile = 16  # of tensor cores

    def __init__(
        self,
        device: torch.device | str,
        *,
        choices: ChoiceTable | None = None,
        prefill: PrefillWanted = "auto",
        flashinfer: FlashInferSwitches = NO_SWITCHES,
        balanced: bool = True,
        depth: int = 2,
    ) -> None:
        device = torch.device(device)
        reason = unsupported(device)
        if reason is not None:
            raise RuntimeError(f"NvidiaKernels cannot run on {device}: {reason}")
        self.device = device
        self.traits = traits = traits_of(device)
        self.pdl = traits.dependent_launch
        self.matmul = MatmulDispatch(device, traits, choices)
        self._reference = ReferenceKernels()
        self._prefill = Prefill(device, prefill, traits, flashinfer, depth)
        self._attention_partial = torch.empty(_ATTENTION_BYTES // 4, dtype=torch.float32, device=device)
        self._attention_counters = torch.zeros(decode_work.COUNTERS, dtype=torch.int32, device=device)
        self.balanced = balanced
        self._in_torch: dict[str, str] = {}  # kernels that torch stands in for, and why

    # -- embedding, norms and matrix products --------------------------------------------------------------------------

    def vocab_rows(self, weight: Weight, ids_T: Tensor, first: int, held: int) -> Tensor:
        return embedding.vocab_rows(weight.data, ids_T.contiguous(), first, held, self.pdl)

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x_TN.contiguous(), None, weight_N, eps, self.pdl)

    def add_rms_norm(self, x_TN: Tensor, residual_TN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm.rms_norm(x_TN.contiguous(), residual_TN, weight_N, eps, self.pdl), residual_TN

    def joined_norms(self, x_TN: Tensor, x_norm_N: Tensor, y_TN: Tensor, y_norm_N: Tensor, eps: float) -> Tensor:
        return norm.joined_norms(x_TN.contiguous(), x_norm_N, y_TN.contiguous(), y_norm_N, eps, self.pdl)

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        return norm.silu_mul(gate_up_T2I, self.pdl)

    def linear(self, x_TN: Tensor, weight: Weight) -> Tensor:
        return self.matmul.linear(x_TN, weight)

    def linear_push(self, buffers: PeerBuffers, x_TN: Tensor, weight: Weight) -> tuple[Tensor, bool]:
        return self.matmul.linear_push(buffers, x_TN, weight)

    def add_norm_linear(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        return self.matmul.add_norm_linear(x_TN, residual_TN, norm_N, eps, weight)

    def gate_up(self, x_TN: Tensor, weight: Weight) -> Tensor:
        return self.matmul.gate_up(x_TN, weight)

    def add_norm_gate_up(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        return self.matmul.add_norm_gate_up(x_TN, residual_TN, norm_N, eps, weight)

    def gate_up_down(self, x_TN: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        return self.matmul.gate_up_down(x_TN, gate_up, down)

    def tune_seen(self, folder: Path | None, share: Callable[[Callable[[], str]], str]) -> int:
        return self.matmul.tune_seen(folder, share)

    # -- experts ------------------------------------------------------------------------------------------------------

    def route_top_k(
        self,
        logits_TE: Tensor,
        choices: int,
        renormalise: bool,
        local_E: Tensor,
        real_T: Tensor,
        load_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return route.route_top_k(logits_TE, choices, renormalise, local_E, real_T, load_E, self.pdl)

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
        if not grouped.supports(gate_up.data, down.data):
            self._in_torch["torch_experts"] = f"a hidden size of {down.outputs} is no multiple of 16"
            return self._reference.expert_mlp(x_TN, gate_up, down, weights_TC, local_TC, all_experts=all_experts)
        tokens, choices = local_TC.shape
        if without_lists(tokens, choices, all_experts):
            multiprocessors = self.traits.multiprocessors
            return streamed.expert_mlp(
                x_TN, gate_up.data, down.data, weights_TC, local_TC, self.pdl, multiprocessors=multiprocessors
            )
        if self.traits.hopper and grouped_tma.supports(gate_up.data, down.data):
            mean, (experts, hidden, inner) = tokens * choices / all_experts, down.data.shape
            tiles = long_list_tiles(mean, experts, hidden, inner, self.traits, gate_up.outputs)
            if tiles is not None:
                return grouped_tma.expert_mlp(x_TN, gate_up.data, down.data, weights_TC, local_TC, self.pdl, tiles)
        return grouped.expert_mlp(
            x_TN,
            gate_up.data,
            down.data,
            weights_TC,
            local_TC,
            self.pdl,
            all_experts=all_experts,
            shared_bytes=self.traits.shared_bytes,
        )

    def router_logits(self, x_TN: Tensor, weight: Weight) -> Tensor:
        if x_TN.dtype == torch.float32:
            return super().router_logits(x_TN, weight)
        return torch.mm(x_TN, weight.data.t(), out_dtype=torch.float32)

    def route_sigmoid(
        self,
        logits_TE: Tensor,
        bias_E: Tensor,
        routing: SigmoidRouting,
        local_E: Tensor,
        real_T: Tensor,
        load_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return route.route_sigmoid(logits_TE, bias_E, routing, local_E, real_T, load_E, self.pdl)

    def relu2(self, x_TI: Tensor) -> Tensor:
        return norm.relu2(x_TI, self.pdl)

    # -- slot state ---------------------------------------------------------------------------------------------------

    def causal_conv(
        self,
        x_TC: Tensor,
        weight_CJ: Tensor,
        bias_C: Tensor | None,
        window_SJC: Tensor,
        rows: StateRows,
        positions_T: Tensor,
    ) -> Tensor:
        return conv.causal_conv(x_TC, weight_CJ, bias_C, window_SJC, rows, positions_T, self.pdl)

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
        z_TV, b_TH, a_TH = delta_step.aligned_gates(z_TV, b_TH, a_TH)
        out_TV = torch.empty(z_TV.shape, dtype=z_TV.dtype, device=z_TV.device)
        rest = (b_TH, a_TH, rule, state_SHVK, rows, out_TV, self.pdl)
        if rows.frozen and rows.tree is not None:
            delta_tree.delta_tree(qkv_TC, *rest)
        elif rows.frozen or rows.kept_B is not None:  # windows: a few tokens a row, of which state may take in a part
            delta_step.delta_steps(qkv_TC, *rest, most=len(qkv_TC))
        else:
            most = max(_MOST_STEPS, rows.window)
            delta_step.delta_steps(qkv_TC, *rest, most=most)
            delta_chunk.delta_chunks(qkv_TC, *rest, most=most, shared_bytes=self.traits.shared_bytes)
        if rows.replays:
            return out_TV
        return gates.gated_norm_(out_TV, z_TV, rule.norm_V, rule.eps, self.pdl)

    def conv_gated_delta(
        self,
        projected_TX: Tensor,
        weight_CJ: Tensor,
        window_SJC: Tensor,
        rule: DeltaRule,
        state_SHVK: Tensor,
        rows: StateRows,
        positions_T: Tensor,
    ) -> Tensor:
        if not delta_step.one_token_a_row(rows, len(projected_TX)):
            return super().conv_gated_delta(projected_TX, weight_CJ, window_SJC, rule, state_SHVK, rows, positions_T)
        return delta_step.conv_delta_step(
            projected_TX, weight_CJ, window_SJC, rule, state_SHVK, rows, positions_T, self.pdl
        )

    def sigmoid_mul(self, x_TX: Tensor, gate_TX: Tensor) -> Tensor:
        return gates.sigmoid_mul(x_TX, gate_TX, self.pdl)

    def gated_add(self, x_TN: Tensor, y_TN: Tensor, hidden_TN: Tensor, gate_N: Tensor) -> Tensor:
        return gates.gated_add(x_TN, y_TN, hidden_TN, gate_N, self.pdl)

    def mamba2(
        self,
        projected_TZ: Tensor,
        weights: Mamba2Weights,
        window_SJC: Tensor,
        state_SHPM: Tensor,
        rows: StateRows,
        positions_T: Tensor,
    ) -> Tensor:
        if not mamba2_triton.supports(weights, state_SHPM):
            return super().mamba2(projected_TZ, weights, window_SJC, state_SHPM, rows, positions_T)
        if delta_step.one_token_a_row(rows, len(projected_TZ)):
            return mamba2_triton.step(projected_TZ, weights, window_SJC, state_SHPM, rows, positions_T, self.pdl)
        _, xbc_TC, _ = weights.split(projected_TZ)
        xbc_TC = self.causal_conv(xbc_TC, weights.conv_CJ, weights.conv_bias_C, window_SJC, rows, positions_T)
        if rows.frozen and rows.tree is not None:
            return mamba2_tree.scan_tree(projected_TZ, xbc_TC, weights, state_SHPM, rows, self.pdl)
        return mamba2_triton.scan(projected_TZ, xbc_TC, weights, state_SHPM, rows, self.pdl)

    # -- attention ----------------------------------------------------------------------------------------------------

    def rope_and_cache(self, qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation) -> Tensor:
        if not _norms_both_or_neither(rotation):
            return self._reference.rope_and_cache(qkv_TX, heads, kv_layer, rotation)
        head_dim, rotary = kv_layer.shape[4], rotation.cos_sin_LR.shape[1]
        if qkv_TX.shape[0] > _MOST_FEW and rope_prefill.supports(head_dim, rotary):
            return rope_prefill.rope_and_cache(qkv_TX, heads, kv_layer, rotation, self.pdl)
        return rope_decode.rope_and_cache(qkv_TX, heads, kv_layer, rotation, self.pdl)

    def plan_decode(self, inputs: DecodeAttention, heads: int, kv_layer: Tensor) -> DecodeAttention:
        if not self.balanced:
            return inputs
        rule = self._decode.rule(inputs, heads, kv_layer)
        if self._decode.without_list(inputs, heads, kv_layer):
            return dataclasses.replace(inputs, work=rule)
        return dataclasses.replace(inputs, work=decode_work.plan_decode(inputs, rule, self.pdl))

    def decode_attention(
        self,
        q_THD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeAttention,
        scale: float,
        out_THD: Tensor | None = None,
    ) -> Tensor:
        heads, kv_heads = q_THD.shape[1], kv_layer.shape[3]
        if q_THD.dtype == torch.float32 and (rows := heads // kv_heads * inputs.query_len) > _MOST_FLOAT32_ROWS:
            reason = f"in float32 {rows} query rows of a key head are more than {_MOST_FLOAT32_ROWS}"
            self._in_torch["torch_attention"] = f"{reason}: --dtype bfloat16 has more"
            return self._reference.decode_attention(q_THD, kv_layer, inputs, scale, out_THD)
        return self._triton_attention(q_THD, heads, kv_layer, inputs, scale, None, out_THD)

    def splits_chunks(self, heads: int, kv_layer: Tensor) -> bool:
        few = heads // kv_layer.shape[3] * PIECE <= _MOST_FLOAT32_ROWS
        return self.balanced and (kv_layer.dtype != torch.float32 or few)

    def rope_cache_attend(
        self,
        qkv_TX: Tensor,
        heads: int,
        kv_layer: Tensor,
        rotation: Rotation,
        inputs: DecodeAttention,
        scale: float,
    ) -> Tensor:
        float32_fits = qkv_TX.dtype != torch.float32 or heads // kv_layer.shape[3] <= _MOST_FLOAT32_ROWS
        if inputs.query_len == 1 and _norms_both_or_neither(rotation) and float32_fits:
            return self._triton_attention(qkv_TX, heads, kv_layer, inputs, scale, rotation)
        q_THD = self.rope_and_cache(qkv_TX, heads, kv_layer, rotation)
        return self.decode_attention(q_THD, kv_layer, inputs, scale)

    def prepare_prefill(self, dtype: torch.dtype, head_dim: int) -> None:
        """Starts loading what prefill of this dtype and head size needs; ``agree_on_kernels`` waits for it."""
        self._prefill.prepare(dtype, head_dim)

    def agree_on_kernels(self, agree_min: Callable[[int], int]) -> None:
        self._prefill.agree(agree_min)

    @property
    def prefill_name(self) -> str:
        return self._prefill.name

    def longest_window(self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int | None:
        return None if dtype == torch.float32 else longest_window(heads, kv_heads, head_dim)

    @property
    def slower_prefill(self) -> str | None:
        return self._prefill.slower

    @property
    def slower_kernels(self) -> Mapping[str, str]:
        return {**self.matmul.slower, **self._in_torch}

    def prefill_wave(self, heads: int, head_dim: int) -> tuple[int, int]:
        return self._prefill.wave(heads, head_dim)

    def plan_prefill(
        self, inputs: PrefillAttention, heads: int, kv_heads: int, head_dim: int, kv_layer: Tensor
    ) -> PrefillAttention:
        if not self._prefill.supports(head_dim):
            return inputs
        return self._prefill.plan(inputs, heads, kv_heads, head_dim, kv_layer)

    def repeat_prefill(
        self, page_table_BP: Tensor, max_tokens: int, heads: int, kv_heads: int, kv_layer: Tensor
    ) -> RepeatedPrefill | None:
        if not self._prefill.supports(kv_layer.shape[-1]):
            return None
        return self._prefill.repeated(page_table_BP, max_tokens, heads, kv_heads, kv_layer)

    def prefill_attention(self, q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, scale: float) -> Tensor:
        if inputs.planned is None:
            return self._reference.prefill_attention(q_THD, kv_layer, inputs, scale)
        return self._prefill.run(q_THD, kv_layer, inputs, scale)

    @property
    def _decode(self) -> DecodeChoice:
        return DecodeChoice(
            self.traits, self.pdl, self.balanced, self.matmul.choices.attention, self._attention_partial.numel()
        )

    def _triton_attention(
        self,
        q_TX: Tensor,
        heads: int,
        kv_layer: Tensor,
        inputs: DecodeAttention,
        scale: float,
        rotation: Rotation | None,
        out_THD: Tensor | None = None,
    ) -> Tensor:
        rows, (_, _, _, kv_heads, head_dim) = inputs.kv_lengths_B.shape[0], kv_layer.shape
        query_rows = heads // kv_heads * inputs.query_len
        by_tma, (block_n, stages, warps) = self._decode.variant(inputs, heads, kv_layer)
        work = inputs.work
        listed = work if isinstance(work, DecodeWork) else None
        if listed is not None and not self._decode.fits(listed.rule, rows, kv_heads, query_rows, head_dim):
            listed = None
        window = None if rotation is not None else self._decode.window(inputs, heads, kv_layer)
        if listed is not None and window is not None and window.tma:
            return decode_window.attend_windows(
                q_TX,
                kv_layer,
                inputs,
                listed,
                scale,
                self._attention_partial,
                self._attention_counters,
                out_THD=out_THD,
                stages=window.stages,
                warps=window.warps,
                programs=window_programs(window.programs, kv_heads, self.traits.multiprocessors),
                pdl=self.pdl,
            )
        if listed is not None:
            attend = decode_balanced_tma.attend_list_tma if by_tma else decode_balanced.attend_list
            multiprocessors = self.traits.multiprocessors
            if window is not None:
                programs = window_programs(window.programs, kv_heads, multiprocessors)
            else:
                each = programs_each(inputs, kv_heads, by_tma)
                programs = programs_of(inputs, kv_heads, listed.rule, multiprocessors, each)
            return attend(
                q_TX,
                heads,
                kv_layer,
                inputs,
                listed,
                scale,
                self._attention_partial,
                self._attention_counters,
                rotation=rotation,
                out_THD=out_THD,
                block_n=min(block_n, listed.rule.block),
                stages=stages,
                warps=warps,
                programs=programs,
                pdl=self.pdl,
            )
        if inputs.starts_B is not None:
            return self._reference.decode_attention(q_TX, kv_layer, inputs, scale, out_THD)
        if by_tma and out_THD is None and work is None:
            return decode_tma.attend_many(
                q_TX,
                heads,
                kv_layer,
                inputs,
                scale,
                rotation=rotation,
                block_n=block_n,
                stages=stages,
                warps=warps,
                pdl=self.pdl,
            )
        rule = work if isinstance(work, SplitRule) else None
        if rule is None or not self._decode.fits(rule, rows, kv_heads, query_rows, head_dim):
            rule = self._decode.rule(inputs, heads, kv_layer)
        return decode.decode_attention(
            q_TX,
            heads,
            kv_layer,
            inputs,
            rule,
            scale,
            self._attention_partial,
            self._attention_counters,
            rotation=rotation,
            out_THD=out_THD,
            stages=stages,
            warps=warps,
            pdl=self.pdl,
            apart=self._decode.merges_apart(rows * kv_heads, query_rows, head_dim),
        )


def _norms_both_or_neither(rotation: Rotation) -> bool:
    """What our kernels take; no known architecture norms only queries or only keys."""
    return (rotation.q_norm_D is None) == (rotation.k_norm_D is None)


def unsupported(device: torch.device) -> str | None:
    """Why NvidiaKernels cannot run on ``device``; None where it can."""
    if device.type != "cuda":
        return f"it is a {device.type} device; these kernels need an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return (
            f"its compute capability is {major}.{minor}; the Triton kernels need bfloat16 tensor cores (8.0 or later)"
        )
    return None
