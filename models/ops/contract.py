"""The contract of every op that a model is written in: typed methods, without a body.

Knows: what each op computes. Does not know: which row serves it (table.py), or how (rows_nvidia, rows_reference).
All tensors of one call live on one device; weights and activations share a dtype; outputs are fresh unless said.
Shape letters as in models/inputs.py, plus N hidden size, I intermediate size (this rank's share), E experts of a layer,
G those of them that this rank holds (a share of), C experts that a token chooses. Of ops over slot state: S slots, C
channels of this rank, J taps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from models.inputs import DecodeAttention, MixedAttention, PrefillAttention, RepeatedPrefill, StateRows
from models.kernels.interface import PLAIN, AttentionKind, DeltaRule, Rotation
from models.kernels.recurrent.mamba2 import Mamba2Weights
from models.kernels.sigmoid_routing import SigmoidRouting
from models.kv_group import Planes
from parallel.comm.peer_buffers import PeerBuffers
from parallel.comm.quantised import Activations, Quantised
from parallel.layers.weight import Weight


class Ops:
    """The ops of one device and mode. For decode shapes each can be captured in a graph (no host sync).

    Some are compositions of others, and fused where one kernel is faster; models call them wherever the composition
    occurs.
    """

    name: str = ""
    slower: str | None = None  # why every operation is slower than it could be on its device; None where it is not
    fp8_activations: str = "auto"  # as EngineConfig has it; "auto" of plain torch multiplies them as they are
    expert_tile: int = 1  # a rank's features of an expert are padded with zeros to a multiple
    # What a model calls, or what its compositions come down to.
    operations: ClassVar[tuple[str, ...]] = (
        *("rms_norm", "silu_mul", "linear", "rope_and_cache", "decode_attention", "prefill_attention"),
        *("route_top_k", "router_logits", "route_sigmoid", "expert_mlp", "relu2"),
        *("causal_conv", "gated_delta", "mamba2", "sigmoid_mul", "gated_add", "vocab_rows"),
    )

    @property
    def batch_invariant(self) -> Mapping[str, bool]:
        """Of each of ``operations``: whether a token's result has the same bits in every batch.

        Whatever the number of tokens and rows, their order, their lengths, how a prompt is cut, what was found in the
        cache. Nothing that is not listed is. The deterministic mode refuses kernels that miss one.
        """
        return {}

    def tune_seen(self, folder: Path | None, share: Callable[[Callable[[], str]], str]) -> int:
        """Autotunes the matrix products seen so far; returns how many were measured.

        For start-up, after a rehearsal and before any capture. ``folder`` caches measurements for the next start.
        ``share(make)`` returns on every rank what ``make()`` returned on rank 0: a collective call, after which all
        ranks run the same kernels. Does nothing where there is nothing to choose from.
        """
        return 0

    def agree_on_kernels(self, agree_min: Callable[[int], int]) -> None:
        """Agrees with the other ranks on kernels that a machine may lack, so that all ranks run the same ones.

        For start-up, before the first prefill is planned; a collective call. ``agree_min`` returns the minimum of a
        number over ranks. Does nothing where there is nothing to choose from.
        """
        return

    @property
    def prefill_name(self) -> str:
        """The implementation of prefill attention, for records of measurements."""
        return self.name

    def longest_window(self, heads: int, planes: Planes) -> int | None:
        """The most tokens of a row that decode attention takes at once; None where any number is fine."""
        raise NotImplementedError

    @property
    def slower_prefill(self) -> str | None:
        """Why prefill attention runs in a slower implementation than the usual one; None where it does not."""
        return None

    @property
    def slower_kernels(self) -> Mapping[str, str]:
        """Why some of what was run may run in slower kernels than the usual ones, by the name of what takes their
        place."""
        return {}

    def quantised_for(
        self, weight: Weight, tokens: int, dtype: torch.dtype, *, gate_up: bool = False, numbers: bool = False
    ) -> Quantised | None:
        """Memory for so many activations as FP8 codes, where ``linear`` (or ``gate_up``) with ``weight`` reads codes;
        None where it reads numbers.

        For what makes the activations: ops with an ``into`` fill it, in their own launch where they can, and what they
        return is not to be read. But norms return numbers, which ``into`` keeps where ``numbers`` are asked for:
        something else reads them, too.
        """
        return None

    def vocab_rows(self, weight: Weight, ids_T: Tensor, first: int, held: int) -> Tensor:
        """Of a rank that holds the rows of ids [first, first + held): those of ``ids_T`` (int64), zeros for ids of
        other ranks, [T, N].
        """
        raise NotImplementedError

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float, into: Quantised | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) in float32, cast back, times weight (Zhang & Sennrich 2019)."""
        raise NotImplementedError

    def add_rms_norm(
        self, x_TN: Tensor, residual_TN: Tensor, weight_N: Tensor, eps: float, into: Quantised | None = None
    ) -> tuple[Tensor, Tensor]:
        """residual' = x + residual; returns (rms_norm(residual'), residual'). May overwrite both inputs."""
        raise NotImplementedError

    def joined_norms(self, x_TN: Tensor, x_norm_N: Tensor, y_TN: Tensor, y_norm_N: Tensor, eps: float) -> Tensor:
        """rms_norm of ``x`` and of ``y`` side by side, [T, 2N]."""
        raise NotImplementedError

    def silu_mul(self, gate_up_T2I: Tensor, *, gelu: bool = False, into: Quantised | None = None) -> Tensor:
        """silu(first half) * second half, [T, I]; with ``gelu`` GELU's approximation by tanh in the place of SiLU."""
        raise NotImplementedError

    def linear(self, x_TN: Activations, weight: Weight) -> Tensor:
        """x @ weight^T (+ bias), [T, O]."""
        raise NotImplementedError

    def linear_push(self, buffers: PeerBuffers, x_TN: Activations, weight: Weight) -> tuple[Tensor, bool]:
        """(``linear``, whether its kernel has also pushed the result into the peers' ``buffers``).

        Where it has not, the all-reduce that follows pushes it.
        """
        raise NotImplementedError

    def rope_and_cache(self, qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation) -> Tensor:
        """Splits packed qkv (H*D | K*D | K*D), RMS-norms q and k per head where weights are given, rotates both (NeoX
        halves over the first R dims), writes k and v into ``kv_layer`` [2, pages, S, K, D]; returns q [T, H, D].

        ``heads`` is H, this rank's query heads, or 0: packed keys and values alone. K and D are those of ``kv_layer``.
        ``qkv`` may be columns of a wider tensor.
        """
        raise NotImplementedError

    def plan_decode(
        self, inputs: DecodeAttention, heads: int, kv_layer: Tensor, kind: AttentionKind = PLAIN
    ) -> DecodeAttention:
        """What layers of the same ``heads``, planes and ``kind`` (but for the sinks' values) share in a decode step,
        made on the device; returns ``inputs`` with ``work`` set.

        ``kv_layer``: of the first of them. May be captured; the launch right before it may write the lengths. Between
        it and the first attention is at least one other launch: attention may read ``work`` before its predecessor
        ends.
        """
        raise NotImplementedError

    def decode_attention(
        self, q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float, out_THD: Tensor | None = None, *,
        into: Quantised | None = None, kind: AttentionKind = PLAIN,
    ) -> Tensor:  # fmt: skip
        """Causal attention of the last ``query_len`` tokens of each row over its pages, [T, H, D]; with
        ``inputs.tree_BQ`` of the nodes of a tree, each over its ancestors and all before the tree; not ``causal``, of
        a block, each over all that ``kv_lengths_B`` covers.

        The launch right before this one may write q, but not lengths or pages: these may be read before it ends (PDL).
        ``out_THD`` is written and returned where given; it and q may have more tokens than the rows, which come first.
        What it holds of the other tokens, and with ``skip_empty`` of rows of length 0, stays as it is. ``into`` (codes
        are [T, H * D]) takes its place.
        """
        raise NotImplementedError

    def window_attention(
        self, q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float, window: int
    ) -> Tensor:
        """``decode_attention``, but a token sees only those less than ``window`` positions away, [T, H, D].

        ``inputs`` without ``starts_B`` and ``tree_BQ``. May be captured.
        """
        raise NotImplementedError

    def splits_chunks(self, heads: int, kv_layer: Tensor) -> bool:
        """Whether ``decode_attention`` of rows with ``starts_B`` may be captured, with ``query_len`` PIECE."""
        raise NotImplementedError

    def prefill_wave(self, heads: int, head_dim: int) -> tuple[int, int]:
        """Of prefill attention: the tokens of a chunk that a program takes at once, and how many such tiles, of all of
        ``heads``, run at the same time. (0, 0) where it is not known, or where work is not dealt out like this.
        """
        raise NotImplementedError

    def plan_prefill(self, inputs: PrefillAttention, heads: int, kv_layer: Tensor) -> PrefillAttention:
        """The host-side work that all layers of one prefill step share; returns ``inputs`` with ``planned`` set."""
        raise NotImplementedError

    def repeat_prefill(
        self, page_table_BP: Tensor, max_tokens: int, heads: int, kv_layer: Tensor
    ) -> RepeatedPrefill | None:
        """``PrefillAttention.planned`` for launches that are captured once and replayed.

        ``page_table_BP`` keeps its address and is filled before the attention of each replay; ``max_tokens`` is the
        most that the rows of a step have together. None where prefill cannot be captured and is launched eagerly.
        """
        raise NotImplementedError

    def prefill_attention(
        self, q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, scale: float, kind: AttentionKind = PLAIN
    ) -> Tensor:
        """Causal attention of packed rows over their pages (their new KV is already written), [T, H, D]."""
        raise NotImplementedError

    def mixed_attention(
        self, q_THD: Tensor, kv_layer: Tensor, inputs: MixedAttention, scale: float, kind: AttentionKind = PLAIN
    ) -> Tensor:
        """prefill_attention, with decode_attention in the place of the decode rows, [T, H, D]."""
        raise NotImplementedError

    def route_top_k(
        self, logits_TE: Tensor, choices: int, renormalise: bool, local_E: Tensor, real_T: Tensor,
        load_E: Tensor | None = None, shared: int = 0, scale_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The top ``choices`` experts of each token: float32 weights [T, C] and int32 local expert numbers [T, C].

        Weights are the softmax over all E experts in float32, largest first (of equal ones the lower id first), scaled
        to a sum of 1 where ``renormalise``. ``local_E`` int32: each expert's number on this rank, -1 for experts of
        other ranks. Tokens that are not ``real_T`` (bool) are routed nowhere: all their local numbers are -1.
        ``load_E`` int64 counts in place the real tokens that chose each expert, whichever rank holds it. ``shared``: so
        many experts after the E, whose numbers ``local_E`` has too, serve every token as further choices, each with
        weight sigmoid(column E of the logits). Later columns are ignored. ``scale_E`` float32 multiplies the weights of
        each of the E experts, after they were scaled to a sum of 1.
        """
        raise NotImplementedError

    def router_logits(self, x_TN: Tensor, weight: Weight) -> Tensor:
        """x @ weight^T in float32 whatever the dtype of both, [T, E]: sigmoid routers compare scores that are close."""
        raise NotImplementedError

    def route_sigmoid(
        self, logits_TE: Tensor, bias_E: Tensor, routing: SigmoidRouting, local_E: Tensor, real_T: Tensor,
        load_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As route_top_k, of a router whose scores are sigmoid(logits), or a softmax as ``routing`` says: the experts
        with the largest score + ``bias`` (float32) are chosen, and weighed by their score alone.

        With several groups of E / groups consecutive experts, those of the groups count whose two best corrected scores
        have the largest sum. ``local_E`` is as long as there are experts, the shared ones after the others included;
        results have choices + shared columns.
        """
        raise NotImplementedError

    def relu2(self, x_TI: Tensor) -> Tensor:
        """max(x, 0)^2 (So et al. 2021, Primer)."""
        raise NotImplementedError

    def expert_mlp(
        self, x_TN: Tensor, gate_up: Weight, down: Weight, weights_TC: Tensor, local_TC: Tensor, *, all_experts: int,
        limit: float | None = None,
    ) -> Tensor:  # fmt: skip
        """sum over c of weights[t, c] * down[g] silu_mul(gate_up[g] x[t]) with g = local[t, c], [T, N].

        Where ``gate_up`` has I rows an expert, not 2 I, there is no gate: it is up alone, and relu2 takes the place of
        silu_mul. With a ``limit`` clamped_swiglu (rows_reference/experts.py) does; biases are added within each term.
        Terms with g = -1 are left out: a token with no other term gets zeros, whatever its x holds. Shapes are fixed:
        the routing stays on the device. ``all_experts`` is E, over all ranks: it gives the average load of an expert,
        by which tiles are chosen, and changes results only by rounding.
        """
        raise NotImplementedError

    def causal_conv(
        self, x_TC: Tensor, weight_CJ: Tensor, bias_C: Tensor | None, window_SJC: Tensor, rows: StateRows,
        positions_T: Tensor,
    ) -> Tensor:  # fmt: skip
        """silu(sum over j of weight[c, j] x[p - (J - 1) + j, c] (+ bias[c])) of each token at position p, [T, C].

        A depthwise causal convolution along each row's sequence. Inputs before the row's new tokens come from
        ``window_SJC``, in which the input at position p lies at tap p mod J; the last J of each row are written there.
        A window is zeroed when a sequence is seated. Rows without tokens leave theirs as it is; that of slot 0 is
        unused. Of padding anything may be returned. ``x_TC`` may be columns of a wider tensor.
        """
        raise NotImplementedError

    def gated_delta(
        self, qkv_TC: Tensor, z_TV: Tensor, b_TH: Tensor, a_TH: Tensor, rule: DeltaRule, state_SHVK: Tensor,
        rows: StateRows,
    ) -> Tensor:  # fmt: skip
        """The gated delta rule (Yang et al. 2025) along each row's sequence, normed and gated, [T, v_heads * v_dim].

        For each value head h, with q, k of its key head, l2-normed, and q scaled by 1 / sqrt(k_dim):

            S <- exp(-exp(decay_log[h]) softplus(a + decay_bias[h])) S
            S <- S + sigmoid(b) (v - S k) k^T
            result = rms_norm(S q) norm silu(z)

        in float32 inside. S [v_dim, k_dim] is the row's ``state_SHVK`` (float32), read before its new tokens and
        written after them. Rows without tokens leave theirs as it is; that of slot 0 is unused. Of padding anything
        may be returned. Operands may be columns of a wider tensor.
        """
        raise NotImplementedError

    def sigmoid_mul(self, x_TX: Tensor, gate_TX: Tensor, *, into: Quantised | None = None) -> Tensor:
        """x * sigmoid(gate), [T, X]."""
        raise NotImplementedError

    def gated_add(self, x_TN: Tensor, y_TN: Tensor, hidden_TN: Tensor, gate_N: Tensor) -> Tensor:
        """x + sigmoid(hidden . gate) y, one number a token, [T, N]. May overwrite x."""
        raise NotImplementedError

    def conv_gated_delta(
        self, projected_TX: Tensor, weight_CJ: Tensor, window_SJC: Tensor, rule: DeltaRule, state_SHVK: Tensor,
        rows: StateRows, positions_T: Tensor,
    ) -> Tensor:  # fmt: skip
        """gated_delta after causal_conv of q | k | v. ``projected``: q | k | v | z | b | a, as ``rule.widths``.

        Slots and positions must be older than the launch that made ``projected``.
        """
        raise NotImplementedError

    def mamba2(
        self, projected_TZ: Tensor, weights: Mamba2Weights, window_SJC: Tensor, state_SHPM: Tensor, rows: StateRows,
        positions_T: Tensor,
    ) -> Tensor:  # fmt: skip
        """What a Mamba-2 mixer does between its two projections, [T, Z] -> [T, X]; recurrent/mamba2.py has the formulas
        and the letters.

        ``window_SJC`` as in causal_conv; ``state_SHPM`` float32: each live row's state is read and advanced over its
        tokens. What padding and rows of slot 0 get is undefined.
        """
        raise NotImplementedError

    def add_norm_linear(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        """residual' = x + residual (x where None); returns (linear(rms_norm(residual'), weight), residual').

        May overwrite x and residual.
        """
        raise NotImplementedError

    def add_norm_logits(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight, *, wide: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of a router: (hidden, its product with ``weight``, residual'), where hidden is rms_norm(residual'), and
        residual' as in add_norm_linear. The product is ``linear``, or where ``wide`` ``router_logits``.

        May overwrite x and residual.
        """
        raise NotImplementedError

    def gate_up(self, x_TN: Activations, weight: Weight, into: Quantised | None = None) -> Tensor:
        """silu_mul(linear(x, weight), gelu=weight.gelu), [T, I]: ``weight`` has the rows of gate, then those of up."""
        raise NotImplementedError

    def add_norm_gate_up(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight,
        into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns (gate_up(rms_norm(residual'), weight) [T, I], residual'), the latter as in add_norm_linear.

        May overwrite x and residual.
        """
        raise NotImplementedError

    def gate_up_down(self, x_TN: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        """linear(gate_up(x), down), [T, N]. May overwrite x."""
        raise NotImplementedError

    def rope_cache_attend(
        self, qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation, inputs: DecodeAttention, scale: float,
        into: Quantised | None = None, kind: AttentionKind = PLAIN,
    ) -> Tensor:  # fmt: skip
        """decode_attention(rope_and_cache(...)), [T, H, D].

        Like lengths and pages in decode_attention, positions and slots must be older than the launch that made qkv.
        """
        raise NotImplementedError
