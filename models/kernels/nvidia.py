"""The Kernels protocol on NVIDIA GPUs: Triton kernels, FlashInfer prefill attention, cuBLAS; tuned for Hopper (sm_90).

Knows: which kernel of norm, rotation, attention and experts serves which shape, and their workspaces; it has a
MatmulDispatch for matrix products and a Prefill for prefill attention. Does not know: models, steps or graphs.

One object serves one stream: its kernels share workspaces that are safe only in stream order. Everything that a decode
step calls can be captured after one warm-up call of the same shape outside a capture, on a stream that waited for the
current one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from models.inputs import PIECE, DecodeAttention, PrefillAttention, RepeatedPrefill, StateRows
from models.kernels.attention import (
    decode,
    decode_balanced,
    decode_balanced_tma,
    decode_tma,
    decode_work,
    rope_decode,
    rope_prefill,
)
from models.kernels.attention.decode_form import DecodeForm, DecodeShape, nearest_form
from models.kernels.attention.decode_work import ANY_LENGTH, MOST_SPLITS, DecodeWork, SplitRule, choose_splits
from models.kernels.attention.prefill_choice import Prefill
from models.kernels.attention.query import padded_dim, power_of_two_above
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

_MANY_PAIRS = 1024  # (row, kv head) pairs; from here on a step on an H200 reached the power limit
_MOST_STEPS = 16  # tokens of a row that go through the recurrence one by one; longer rows go in chunks
_LIST_PAIRS = 256  # (row, kv head) pairs; with fewer, every split that a row could have is a program
_FEW_PAIRS = 8  # of a single token's pairs: 64 keys a block and a split, as for the windows of few rows
_WINDOW_PAIRS = 16  # up to so many, and from 16 query rows on: the launches of _few_windows
_WINDOW_SPLITS = 8  # of their rows; long ones have more
_LONGEST_OF_WINDOW = 1024  # keys of such a split, where ``most`` allows it
_TALL_BLOCKS = range(17, 65)  # pairs for which 64 keys a block, and splits by choose_splits, were faster
_ATTENTION_BYTES = 128 << 20  # of partial results of splits
_LONGEST_SPLIT = 1024  # keys of a split, where ``most`` allows it
_LONGEST_BY_POINTERS = 512  # the same where keys do not come by TMA
_LONGEST_OF_MIXED = 256  # the same where most rows may be absent
_PROGRAMS_OF_MIXED = 8  # the same, where most rows may be absent
_PROGRAMS_EACH = 32  # of a multiprocessor: programs of balanced attention where the rows need fewer
_SHARED_RESERVE = 27 << 10  # bytes of shared memory that decode attention leaves unused
_MOST_FLOAT32_ROWS = 32  # query rows of a kv head; above, the float32 kernel spills and takes minutes to compile
_MOST_FEW = 255  # tokens for rope_decode.py; from 256 rope_prefill.py was faster on an H200, fewer were not tried


class NvidiaKernels(Kernels):
    """See the module. ``choices`` overrules the shipped choice table. ``prefill``: which prefill attention to run.
    ``flashinfer``: FlashInfer's environment variables. ``balanced``: decode attention takes splits from a work list;
    without, every row of a step is split alike, to compare the two. ``depth``: steps in flight beside the one that
    lands next, for which plans made on the host have places.

    Takes about 0.6 GiB of device memory for workspaces. Raises RuntimeError on a device ``unsupported`` refuses.
    """

    name = "hopper"

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

    # -- norms and matrix products ------------------------------------------------------------------------------------

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x_TN.contiguous(), None, weight_N, eps, self.pdl)

    def add_rms_norm(self, x_TN: Tensor, residual_TN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm.rms_norm(x_TN.contiguous(), residual_TN, weight_N, eps, self.pdl), residual_TN

    def joined_norms(self, x_TN: Tensor, x_norm_N: Tensor, y_TN: Tensor, y_norm_N: Tensor, eps: float) -> Tensor:
        return norm.joined_norms(x_TN.contiguous(), x_norm_N, y_TN.contiguous(), y_norm_N, eps, self.pdl)

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        return norm.silu_mul(gate_up_T2I, self.pdl)

    def linear(self, x_TN: Tensor, weight_ON: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return self.matmul.linear(x_TN, weight_ON, bias_O)

    def linear_push(
        self, buffers: PeerBuffers, x_TN: Tensor, weight_ON: Tensor, bias_O: Tensor | None = None
    ) -> tuple[Tensor, bool]:
        return self.matmul.linear_push(buffers, x_TN, weight_ON, bias_O)

    def add_norm_linear(
        self,
        x_TN: Tensor,
        residual_TN: Tensor | None,
        norm_N: Tensor,
        eps: float,
        weight_ON: Tensor,
        bias_O: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.matmul.add_norm_linear(x_TN, residual_TN, norm_N, eps, weight_ON, bias_O)

    def gate_up(self, x_TN: Tensor, gate_up_2IN: Tensor) -> Tensor:
        return self.matmul.gate_up(x_TN, gate_up_2IN)

    def add_norm_gate_up(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, gate_up_2IN: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.matmul.add_norm_gate_up(x_TN, residual_TN, norm_N, eps, gate_up_2IN)

    def gate_up_down(self, x_TN: Tensor, gate_up_2IN: Tensor, down_NI: Tensor, bias_N: Tensor | None = None) -> Tensor:
        return self.matmul.gate_up_down(x_TN, gate_up_2IN, down_NI, bias_N)

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
        gate_up_G2IN: Tensor,
        down_GNI: Tensor,
        weights_TC: Tensor,
        local_TC: Tensor,
        *,
        all_experts: int,
    ) -> Tensor:
        if not grouped.supports(gate_up_G2IN, down_GNI):
            return self._reference.expert_mlp(
                x_TN, gate_up_G2IN, down_GNI, weights_TC, local_TC, all_experts=all_experts
            )
        tokens, choices = local_TC.shape
        if without_lists(tokens, choices, all_experts):
            multiprocessors = self.traits.multiprocessors
            return streamed.expert_mlp(
                x_TN, gate_up_G2IN, down_GNI, weights_TC, local_TC, self.pdl, multiprocessors=multiprocessors
            )
        if self.traits.hopper and grouped_tma.supports(gate_up_G2IN, down_GNI):
            mean, (experts, hidden, inner) = tokens * choices / all_experts, down_GNI.shape
            tiles = long_list_tiles(mean, experts, hidden, inner, self.traits, gate_up_G2IN.shape[1])
            if tiles is not None:
                return grouped_tma.expert_mlp(x_TN, gate_up_G2IN, down_GNI, weights_TC, local_TC, self.pdl, tiles)
        return grouped.expert_mlp(x_TN, gate_up_G2IN, down_GNI, weights_TC, local_TC, self.pdl, all_experts=all_experts)

    def router_logits(self, x_TN: Tensor, weight_EN: Tensor) -> Tensor:
        if x_TN.dtype == torch.float32:
            return super().router_logits(x_TN, weight_EN)
        return torch.mm(x_TN, weight_EN.t(), out_dtype=torch.float32)

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
            delta_step.delta_steps(qkv_TC, *rest, most=_MOST_STEPS)
            delta_chunk.delta_chunks(qkv_TC, *rest, most=_MOST_STEPS)
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
        rule = self._split_rule(inputs, heads, kv_layer)
        if self._without_list(inputs, kv_layer):
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
        if q_THD.dtype == torch.float32 and heads // kv_heads * inputs.query_len > _MOST_FLOAT32_ROWS:
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

    @property
    def slower_prefill(self) -> str | None:
        return self._prefill.slower

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
        by_tma, (block_n, stages, warps) = self._decode_form(inputs, heads, kv_layer)
        work = inputs.work
        if isinstance(work, DecodeWork) and self._fits(work.rule, rows, kv_heads, query_rows, head_dim):
            attend = decode_balanced_tma.attend_list_tma if by_tma else decode_balanced.attend_list
            return attend(
                q_TX,
                heads,
                kv_layer,
                inputs,
                work,
                scale,
                self._attention_partial,
                self._attention_counters,
                rotation=rotation,
                out_THD=out_THD,
                block_n=min(block_n, work.rule.block),
                stages=stages,
                warps=warps,
                programs=programs_of(inputs, kv_heads, work.rule, self.traits.multiprocessors),
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
        if rule is None or not self._fits(rule, rows, kv_heads, query_rows, head_dim):
            rule = self._split_rule(inputs, heads, kv_layer)
        apart = self.balanced and _merged_apart(rows * kv_heads, power_of_two_above(query_rows), head_dim)
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
            apart=apart,
        )

    def _decode_form(self, inputs: DecodeAttention, heads: int, kv_layer: Tensor) -> tuple[bool, tuple[int, int, int]]:
        """Whether TMA serves these best, and (keys a block, stages, warps)."""
        rows, (_, _, _, kv_heads, head_dim) = inputs.kv_lengths_B.shape[0], kv_layer.shape
        query_rows = heads // kv_heads * inputs.query_len
        tuned = self._tuned_form(DecodeShape(rows * kv_heads, query_rows, head_dim, kv_layer.dtype))
        pairs = rows * kv_heads
        every_split = self.balanced and self._without_list(inputs, kv_layer)
        by_tma = _by_tma(pairs, self.balanced) if tuned is None else tuned.tma
        by_tma = by_tma and inputs.tree_BQ is None  # those kernels mask by position alone
        if self.pdl and by_tma and not every_split:  # the same GPUs have TMA and dependent launches
            blocks = _many_blocks(query_rows) if tuned is None else tuned.blocks
            if decode_tma.supports(heads, kv_layer, inputs, blocks[0]):
                return True, blocks
        row_bytes = padded_dim(head_dim) * kv_layer.element_size()
        shared = self.traits.shared_bytes - _SHARED_RESERVE
        tall = power_of_two_above(query_rows)
        blocks = _attention_blocks(pairs, tall, row_bytes, shared, every_split=every_split)
        if tuned is not None and not tuned.tma:
            needed = _attention_shared(tuned.block_n, tuned.stages, tall, row_bytes)
            blocks = tuned.blocks if needed <= shared else blocks
        if kv_layer.dtype == torch.float32:  # no tensor cores: the operands of tl.dot stay in registers
            blocks = min(blocks[0], 32), 3, 8
        return False, blocks

    def _tuned_form(self, shape: DecodeShape) -> DecodeForm | None:
        return nearest_form(self.matmul.choices.attention, shape)

    def _without_list(self, inputs: DecodeAttention, kv_layer: Tensor) -> bool:
        """Whether every split that a row could have is a program. So few that none need be looked up are faster."""
        few = inputs.kv_lengths_B.shape[0] * kv_layer.shape[3] < _LIST_PAIRS
        return few and inputs.starts_B is None and not inputs.skip_empty

    def _split_rule(self, inputs: DecodeAttention, heads: int, kv_layer: Tensor) -> SplitRule:
        rows, (_, _, _, kv_heads, head_dim) = inputs.kv_lengths_B.shape[0], kv_layer.shape
        by_tma, (block_n, _, _) = self._decode_form(inputs, heads, kv_layer)
        most, pairs, splits = inputs.max_kv_length, rows * kv_heads, MOST_SPLITS
        query_rows = heads // kv_heads * inputs.query_len
        tall = power_of_two_above(query_rows)
        fewest = choose_splits(rows, kv_heads, most, block_n, 0 if by_tma else self.traits.multiprocessors)
        if not self.balanced:
            longest = ANY_LENGTH
        elif self._without_list(inputs, kv_layer) and _few_windows(pairs, tall, head_dim):
            fewest, longest = _WINDOW_SPLITS, _LONGEST_OF_WINDOW
            splits = _most_of_window(pairs, _merged_apart(pairs, tall, head_dim))
        elif self._without_list(inputs, kv_layer):
            if pairs not in _TALL_BLOCKS:
                fewest = _fewest_splits(pairs, query_rows, self.traits.multiprocessors)
            # Programs of splits that no row has cost time, too: a long row gets twice as many as the others, and where
            # few pairs have a program for each multiprocessor already, no more.
            enough = pairs <= _FEW_PAIRS and pairs * fewest >= self.traits.multiprocessors
            longest = ANY_LENGTH if enough else max(block_n, -(-most // (2 * fewest)))
        elif inputs.skip_empty:
            longest = _LONGEST_OF_MIXED
        else:
            longest = _LONGEST_SPLIT if by_tma else _LONGEST_BY_POINTERS
        return decode_work.choose_rule(
            rows,
            kv_heads,
            query_rows,
            head_dim,
            inputs.max_kv_length,
            block=block_n,
            longest=longest,
            fewest=fewest,
            most=splits,
            room=self._attention_partial.numel(),
        )

    def _fits(self, rule: SplitRule, rows: int, kv_heads: int, query_rows: int, head_dim: int) -> bool:
        """Whether there is room for the partial results of this layer, which may not be that of the rule."""
        floats = decode_work.workspace_floats(rows, kv_heads, query_rows, head_dim, rule.most)
        counters = decode_work.counters_of(rows, kv_heads, rule.most)
        return floats <= self._attention_partial.numel() and counters <= self._attention_counters.numel()


def programs_of(
    inputs: DecodeAttention, kv_heads: int, rule: SplitRule, multiprocessors: int, each: int | None = None
) -> int:
    """Programs of balanced attention: for the splits that all rows have, or ``each`` a multiprocessor if more.

    Where rows may be absent, most of them usually are: programs that do nothing take time, too.
    """
    if each is None:
        each = _PROGRAMS_OF_MIXED if inputs.skip_empty else _PROGRAMS_EACH
    rows, full = inputs.kv_lengths_B.shape[0], -(-each * multiprocessors // kv_heads)
    return kv_heads * min(rows * rule.most, full if inputs.skip_empty else max(rows * rule.fewest, full))


def _few_windows(pairs: int, query_rows: int, head_dim: int) -> bool:
    """Whether windows of few rows, or many query heads of a key head, have launches that were measured for them
    (docs/measurements/attention.md)."""
    return pairs <= _WINDOW_PAIRS and 16 <= query_rows <= 128 and padded_dim(head_dim) <= 256


def _merged_apart(pairs: int, query_rows: int, head_dim: int) -> bool:
    """Whether their splits are merged by a launch of its own, since one program of a pair would take longer."""
    tall = query_rows * padded_dim(head_dim) >= 32 * 128
    return tall and pairs <= _FEW_PAIRS and _few_windows(pairs, query_rows, head_dim)


def _most_of_window(pairs: int, apart: bool) -> int:
    """Splits of a row of such a window, however long it is."""
    if pairs > _FEW_PAIRS:
        return _WINDOW_SPLITS
    return 4 * _WINDOW_SPLITS if pairs <= _FEW_PAIRS // 2 and not apart else 2 * _WINDOW_SPLITS


def _fewest_splits(pairs: int, query_rows: int, multiprocessors: int) -> int:
    """Splits of a row of decode.py, where there are as many blocks: two programs a multiprocessor, or some more.

    More than 16 are merged in two levels, which is worth it for the very fewest pairs and short tiles only; more than 8
    of tall tiles take longer to merge than their keys to read.
    """
    if pairs <= _FEW_PAIRS and query_rows < 16:
        return 64
    wanted = 1 << (max(1, 2 * multiprocessors // pairs).bit_length() - 1)
    return min(max(wanted, 4), 64 if pairs < 8 else 16 if query_rows < 64 else 8)


def _by_tma(pairs: int, listed: bool) -> bool:
    """From where on TMA was faster on an H200, or drew less power."""
    return pairs >= _MANY_PAIRS or (listed and _LIST_PAIRS <= pairs < 2 * _LIST_PAIRS)


def _many_blocks(query_rows: int) -> tuple[int, int, int]:
    """(keys a block, stages, warps) of decode_tma.py: the fastest layers on an H200."""
    return 32, 3, 1 if query_rows <= 8 else 2


def _attention_blocks(
    pairs: int, query_rows: int, row_bytes: int, shared_bytes: int, *, every_split: bool = False
) -> tuple[int, int, int]:
    """(keys a block, stages, warps): the fastest on an H200 for ``pairs`` of row and kv head, cut to fit.
    ``every_split``: each split that a row could have is a program."""
    block_n, stages, warps = 64, 5, 4
    few_windows = every_split and _few_windows(pairs, query_rows, row_bytes // 2)
    if few_windows:
        block_n = 64 if query_rows * row_bytes <= 64 * 256 else 32
        warps = max(4, query_rows * row_bytes // (64 * 256) * 2)  # at most 128 sums a thread
    elif pairs >= 1024:
        stages, warps = 3, 2
    elif every_split and pairs <= _FEW_PAIRS and query_rows < 16 and row_bytes <= 256:
        stages = 3
    elif pairs >= 256 or (every_split and pairs not in _TALL_BLOCKS):
        block_n, warps = 32, 2
    if query_rows >= 64 and not few_windows:
        warps = max(4, query_rows // 16)  # fewer warps would spill so tall a tile
    while block_n > 16 and _attention_shared(block_n, stages, query_rows, row_bytes) > shared_bytes:
        block_n //= 2
    return block_n, stages, warps


def _attention_shared(block_n: int, stages: int, query_rows: int, row_bytes: int) -> int:
    """An estimate of a program's shared memory in bytes; what Triton 3.6 compiles has up to 6 KiB more.

    Keys and values of a block are buffered (stages - 1) / 2 times, beside about three tiles of query rows.
    """
    return row_bytes * (block_n * (stages - 1) + 3 * query_rows)


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
