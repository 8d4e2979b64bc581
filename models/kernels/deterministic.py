"""The Kernels protocol on NVIDIA GPUs for the deterministic mode: no result depends on who shares a step.

Knows: one kernel an operation, whatever the number of tokens, and what each of them declares (BATCH_INVARIANT).
Does not know: how a kernel keeps its promise (matmul/invariant.py, attention/invariant.py), models, or who asks for the
mode. docs/determinism.md says what the mode promises, and which tests show it.

One object serves one stream, and steps can be captured, as with NvidiaKernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from models.inputs import DecodeAttention, PrefillAttention, RepeatedPrefill, StateRows, nodes_of_paths
from models.kernels import embedding
from models.kernels.attention import invariant as attention
from models.kernels.attention import rope_decode, rope_prefill
from models.kernels.attention.prefill import RepeatedTiles, Tiles
from models.kernels.experts import grouped, route
from models.kernels.interface import DeltaRule, Kernels, Rotation
from models.kernels.matmul import invariant as matmul
from models.kernels.matmul import norm
from models.kernels.nvidia import unsupported
from models.kernels.recurrent import conv, delta_step, gates, mamba2_triton
from models.kernels.recurrent.mamba2 import Mamba2Weights
from models.kernels.sigmoid_routing import SigmoidRouting
from models.kernels.traits import DeviceTraits, traits_of
from parallel.layers.weight import Weight

_PRODUCT_BYTES = 64 << 20  # of sums of segments
_ATTENTION_BYTES = 128 << 20  # of results of chunks
_PROGRAMS_A_MULTIPROCESSOR = 4  # of prefill attention


class DeterministicKernels(Kernels):
    """See the module. Takes 0.2 GiB of device memory for workspaces.

    Raises RuntimeError on a device that ``unsupported`` of nvidia.py refuses, and for shapes without such a kernel.
    """

    expert_tile = 16
    name = "deterministic"

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        reason = unsupported(device)
        if reason is not None:
            raise RuntimeError(f"DeterministicKernels cannot run on {device}: {reason}")
        self._open(device, traits_of(device))

    def _open(self, device: torch.device, traits: DeviceTraits) -> None:
        self.device, self.traits, self.pdl = device, traits, traits.dependent_launch
        self._sums = torch.empty(_PRODUCT_BYTES // 4, dtype=torch.float32, device=device)
        self._counters = torch.zeros(matmul.COUNTERS, dtype=torch.int32, device=device)
        self._chunks = torch.empty(_ATTENTION_BYTES // 4, dtype=torch.float32, device=device)
        self._chunk_counters = torch.zeros(attention.COUNTERS, dtype=torch.int32, device=device)

    @property
    def batch_invariant(self) -> Mapping[str, bool]:
        return {
            name: all(getattr(module, "BATCH_INVARIANT", False) for module in modules)
            for name, modules in _MODULES.items()
        }

    # -- embedding, norms and matrix products --------------------------------------------------------------------------

    def vocab_rows(self, weight: Weight, ids_T: Tensor, first: int, held: int) -> Tensor:
        return embedding.vocab_rows(weight.data, ids_T.contiguous(), first, held, self.pdl)

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x_TN.contiguous(), None, weight_N, eps, self.pdl)

    def add_rms_norm(self, x_TN: Tensor, residual_TN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm.rms_norm(x_TN.contiguous(), residual_TN, weight_N, eps, self.pdl), residual_TN

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        return norm.silu_mul(gate_up_T2I, self.pdl)

    def linear(self, x_TN: Tensor, weight: Weight) -> Tensor:
        return self._linear(x_TN, weight)

    def gate_up(self, x_TN: Tensor, weight: Weight) -> Tensor:
        return self._linear(x_TN, weight, gate_up=True)

    def _linear(self, x_TN: Tensor, weight: Weight, *, gate_up: bool = False) -> Tensor:
        return matmul.linear(
            x_TN,
            weight.data,
            weight.bias,
            self._sums,
            self._counters,
            gate_up=gate_up,
            shared_bytes=self.traits.shared_bytes,
            pdl=self.pdl,
        )

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

    def router_logits(self, x_TN: Tensor, weight: Weight) -> Tensor:
        return self.linear(x_TN.float(), Weight.of(weight.data.float()))

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
        """Always the grouped kernels: a list of any length, in tiles of any size, takes each sum in the same order."""
        if not grouped.supports(gate_up.data, down.data):
            shapes = f"{tuple(gate_up.data.shape)} and {tuple(down.data.shape)}"
            raise RuntimeError(f"experts of {shapes} have no batch-invariant kernel: tensor cores need multiples of 16")
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

    # -- attention ----------------------------------------------------------------------------------------------------

    def rope_and_cache(self, qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation) -> Tensor:
        """By one kernel for any number of tokens; which one is up to the shape of a head."""
        if (rotation.q_norm_D is None) != (rotation.k_norm_D is None):
            raise RuntimeError("a norm of only queries or only keys has no batch-invariant kernel")
        if rope_prefill.supports(kv_layer.shape[4], rotation.cos_sin_LR.shape[1]):
            return rope_prefill.rope_and_cache(qkv_TX, heads, kv_layer, rotation, self.pdl)
        return rope_decode.rope_and_cache(qkv_TX, heads, kv_layer, rotation, self.pdl, heads_a_program=8)

    def decode_attention(
        self,
        q_THD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeAttention,
        scale: float,
        out_THD: Tensor | None = None,
    ) -> Tensor:
        _require_head_dim(kv_layer)
        return attention.decode_attention(
            q_THD,
            kv_layer,
            inputs,
            scale,
            self._chunks,
            self._chunk_counters,
            out_THD=out_THD,
            multiprocessors=self.traits.multiprocessors,
            pdl=self.pdl,
        )

    def plan_prefill(
        self, inputs: PrefillAttention, heads: int, kv_heads: int, head_dim: int, kv_layer: Tensor
    ) -> PrefillAttention:
        _require_head_dim(kv_layer)
        tiles = attention.listed_tiles(inputs, heads, kv_layer)
        return PrefillAttention(
            inputs.page_table_BP, inputs.query_lengths, inputs.kv_lengths, tiles, inputs.first_token
        )

    def repeat_prefill(
        self, page_table_BP: Tensor, max_tokens: int, heads: int, kv_heads: int, kv_layer: Tensor
    ) -> RepeatedPrefill | None:
        _require_head_dim(kv_layer)
        a_tile = attention.tokens_of_a_tile(heads, kv_layer)
        return RepeatedTiles(self.device, len(page_table_BP), max_tokens, a_tile)

    def prefill_attention(self, q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, scale: float) -> Tensor:
        if not isinstance(inputs.planned, Tiles | RepeatedTiles):
            raise TypeError("prefill attention is planned first (plan_prefill, repeat_prefill)")
        programs = _PROGRAMS_A_MULTIPROCESSOR * self.traits.multiprocessors
        return attention.prefill_attention(
            q_THD, kv_layer, inputs.page_table_BP, inputs.planned, scale, programs=programs, pdl=self.pdl
        )

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
        """Token by token, however many a row has: chunks would round by where a prompt was cut. A node of a tree is the
        last token of the path down to it."""
        out_TV = torch.empty(z_TV.shape, dtype=z_TV.dtype, device=z_TV.device)
        z_TV, b_TH, a_TH = delta_step.aligned_gates(z_TV, b_TH, a_TH)
        each, tree = None, rows.tree
        if tree is not None and rows.frozen:
            rows, each = _paths(rows.slots_B, tree.seen_BN), tree.seen_BN.shape[1]
        given = qkv_TC, b_TH, a_TH, rule, state_SHVK, rows, out_TV, self.pdl
        delta_step.delta_steps(*given, most=len(qkv_TC), each=each)
        if rows.replays:
            return out_TV
        return gates.gated_norm_(out_TV, z_TV, rule.norm_V, rule.eps, self.pdl)

    def mamba2(
        self,
        projected_TZ: Tensor,
        weights: Mamba2Weights,
        window_SJC: Tensor,
        state_SHPM: Tensor,
        rows: StateRows,
        positions_T: Tensor,
    ) -> Tensor:
        """Token by token, and by paths, as gated_delta."""
        if not mamba2_triton.supports(weights, state_SHPM):
            shape, dtype = tuple(state_SHPM.shape), state_SHPM.dtype
            raise RuntimeError(f"Mamba-2 with states of {shape} in {dtype} has no batch-invariant kernel")
        _, xbc_TC, _ = weights.split(projected_TZ)
        xbc_TC = self.causal_conv(xbc_TC, weights.conv_CJ, weights.conv_bias_C, window_SJC, rows, positions_T)
        each, tree = None, rows.tree
        if tree is not None and rows.frozen:
            rows, each = _paths(rows.slots_B, tree.seen_BN), tree.seen_BN.shape[1]
        return mamba2_triton.scan(projected_TZ, xbc_TC, weights, state_SHPM, rows, self.pdl, one_by_one=0, each=each)

    def sigmoid_mul(self, x_TX: Tensor, gate_TX: Tensor) -> Tensor:
        return gates.sigmoid_mul(x_TX, gate_TX, self.pdl)

    def gated_add(self, x_TN: Tensor, y_TN: Tensor, hidden_TN: Tensor, gate_N: Tensor) -> Tensor:
        return gates.gated_add(x_TN, y_TN, hidden_TN, gate_N, self.pdl)


# Operation -> the modules with its kernels, each of which declares BATCH_INVARIANT.
_MODULES: dict[str, tuple[ModuleType, ...]] = {
    "rms_norm": (norm,),
    "silu_mul": (norm,),
    "linear": (matmul,),
    "rope_and_cache": (rope_prefill, rope_decode),
    "decode_attention": (attention,),
    "prefill_attention": (attention,),
    "route_top_k": (route,),
    "router_logits": (matmul,),
    "route_sigmoid": (route,),
    "expert_mlp": (grouped,),
    "relu2": (norm,),
    "causal_conv": (conv,),
    "gated_delta": (delta_step, gates),
    "mamba2": (conv, mamba2_triton),
    "sigmoid_mul": (gates,),
    "gated_add": (gates,),
    "vocab_rows": (embedding,),
}


def _paths(slots_B: Tensor, seen_BN: Tensor) -> StateRows:
    """Every node as a row of N tokens, of which those on its path count, by their distance from the row's first one."""
    rows, nodes = seen_BN.shape
    path_BNN, length_BN = nodes_of_paths(seen_BN)
    node_N11 = torch.arange(nodes, device=seen_BN.device)[:, None]
    first_B11 = torch.arange(rows, device=seen_BN.device)[:, None, None] * nodes
    path_BNN = first_B11 + path_BNN - (first_B11 + node_N11) * nodes
    return StateRows(
        slots_B.repeat_interleave(nodes),
        frozen=True,
        kept_B=length_BN.reshape(-1),
        path_BW=path_BNN.reshape(rows * nodes, nodes),
    )


def _require_head_dim(kv_layer: Tensor) -> None:
    if not attention.supports(kv_layer.shape[-1]):
        raise RuntimeError(
            f"attention with heads of {kv_layer.shape[-1]} dims has no batch-invariant kernel (256 at most)"
        )
