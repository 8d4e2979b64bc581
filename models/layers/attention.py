"""Grouped-query attention over a paged KV cache, with the norm before it.

Knows: projections, head shapes of this rank, and which kernel serves which kind of step.
Does not know: how pages are assigned or how attention is computed.
Shape letters as in models/inputs.py; X is the packed width (H + 2K) * D.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from models.attention_spec import AttentionSpec
from models.config import ModelConfig
from models.inputs import DecodeAttention, MixedAttention, PrefillAttention, StepInputs
from models.kernels.interface import PLAIN, AttentionKind, Rotation
from models.kv_group import Planes, keys_and_values
from models.layers.context import ModelContext
from models.layers.mixer import Mixer, Part
from models.layers.norm import ResidualAdd, RMSNorm
from models.layers.qkv_edit import NormsOverHeads
from parallel.comm.collectives import PendingAllReduce
from parallel.comm.quantised import Activations, Quantised
from parallel.layers.linear import GatedQKVParallel, QKVParallel, RowParallel
from parallel.layers.shard import HeadShard, Shard, ShardedModule, along_rows
from parallel.layers.weight import Weight


class Sinks(ShardedModule):
    """One number a query head of this rank, float32 (float64 where parameters are)."""

    def __init__(self, heads: HeadShard, context: ModelContext) -> None:
        super().__init__()
        self.heads = heads
        self.sinks_H = context.parameter(heads.local_heads, wide=True)

    def shards(self) -> dict[str, Shard]:
        return {"sinks": along_rows(self.sinks_H, self.heads.heads, self.heads.first_head)}


class Attention(Mixer[Tensor]):
    """softmax(q k^T / sqrt(D)) v of the normed input with rotary positions, the angles of which ``cos_sin_LR`` holds.

    Optional: biases, an RMSNorm of every query and key head before the rotation, and an output gate: the result of each
    head times sigmoid(gate x), before the output projection. ``spec``: by default that of the config's first layer.
    ``edit`` (qkv_edit.py) changes packed queries and keys before they are rotated.
    """

    batch_invariant = True

    def __init__(
        self, config: ModelConfig, context: ModelContext, cos_sin_LR: Tensor, norm: RMSNorm | ResidualAdd, *,
        q_norm: RMSNorm | None = None, k_norm: RMSNorm | None = None, qkv_bias: bool = False, output_bias: bool = False,
        output_gate: bool = False, spec: AttentionSpec | None = None, edit: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        spec = spec or config.attention_of(0)
        hidden, dim = config.hidden_size, spec.head_dim
        self.kernels = context.kernels
        self.cos_sin_LR, self.rotary_dim = cos_sin_LR, cos_sin_LR.shape[1]
        self.head_dim, self.kv_dtype = dim, context.kv_dtype or context.dtype
        self.scale, self.window = spec.scale, spec.window
        self.norm, self.output_gate = norm, output_gate
        packed = GatedQKVParallel if output_gate else partial(QKVParallel, values=not spec.values_are_keys)
        self.qkv = packed(hidden, config.heads, spec.kv_heads, dim, context, bias=qkv_bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.edit = edit
        self.value_norm, self.values_are_keys = spec.value_norm, spec.values_are_keys
        self.interleaved = config.rope_interleaved
        self.output = RowParallel(
            config.heads * dim, hidden, context, bias=output_bias, what="attention outputs (heads * head_dim)"
        )
        self.heads = self.qkv.heads.local_heads
        self.kv_heads = self.qkv.heads.local_kv_heads
        self.kv_factors_2K: Tensor | None = None
        self.sinks = Sinks(self.qkv.heads, context) if spec.sinks else None
        self.kind = PLAIN
        if spec.window is not None or spec.softcap is not None or self.sinks is not None:
            self.kind = AttentionKind(spec.window, spec.softcap, None if self.sinks is None else self.sinks.sinks_H)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(query heads, kv heads) of this rank, head_dim"""
        return self.heads, self.kv_heads, self.head_dim

    @property
    def cache(self) -> Planes:
        return keys_and_values(self.kv_heads, self.head_dim, self.kv_dtype, self.window)

    def row_orders(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(tensor, order of its rows on the CPU) of all that has rows for channels of queries and keys, where the
        checkpoint rotates pairs (2i, 2i + 1): they become (i, i + R / 2), which changes no score. Raises ValueError."""
        if not self.interleaved:
            return
        order_D = torch.arange(self.head_dim, device="cpu")
        order_D[: self.rotary_dim] = order_D[: self.rotary_dim].view(-1, 2).mT.flatten()
        first = 0
        for heads, norm, plane in ((self.heads, self.q_norm, "q_norm"), (self.kv_heads, self.k_norm, "k_norm")):
            order_O = (torch.arange(heads, device="cpu")[:, None] * self.head_dim + order_D).flatten()
            try:
                found = list(self.qkv.weight.rows(first, len(order_O)).moved_by(order_O))
            except ValueError as error:
                what = f"{self.rotary_dim} of {self.head_dim} channels of a head are rotated in pairs of neighbours"
                raise ValueError(f"{what}, which lie in several blocks: {error}") from error
            yield from ((tensor, order_O) for tensor in found)
            if norm is not None:
                yield norm.weight, order_D
            if isinstance(self.edit, NormsOverHeads):
                yield getattr(self.edit, plane), order_O
            first += len(order_O)

    def hold_scales(self, keys_K: Tensor, values_K: Tensor) -> None:
        """Scales of a float8 cache, float32 of this rank's heads. Where all are 1 nothing is multiplied by them."""
        scales_2K = torch.stack((keys_K, values_K)).to(self.qkv.weight.data.device)
        if not bool((scales_2K == 1).all()):
            by_query = scales_2K.repeat_interleave(self.heads // self.kv_heads, 1)[:, :, None]
            self.kv_factors_2K, (self.key_scales_H1, self.value_scales_H1) = scales_2K.reciprocal(), by_query

    def parts(self, inputs: StepInputs, kv_layer: Tensor, wanted_R: Tensor | None = None) -> Iterator[Part]:
        last = inputs.last_attention
        if wanted_R is not None and last is not None and self.edit is None:
            yield lambda x, residual: self._forward_wanted(x, residual, inputs, kv_layer, wanted_R, last)
            return
        yield lambda x, residual: self.norm.add_linear(x, residual, self.qkv.weight)
        attention = inputs.attention
        if self.output_gate or isinstance(attention, DecodeAttention):
            yield lambda qkv, residual: (self._attend(qkv, inputs, kv_layer, codes=wanted_R is None), residual)
        else:
            yield lambda qkv, residual: (
                self._rotate(self._edited(qkv, inputs), kv_layer, self._of_step(inputs)),
                residual,
            )
            yield lambda q, residual: (self._attend_chunks(q, attention, kv_layer).flatten(1), residual)
        if wanted_R is not None:
            yield lambda out, residual: (out.index_select(0, wanted_R), residual.index_select(0, wanted_R))
        yield lambda out, residual: (self.output(out), residual)

    def _attend(self, qkv_TX: Tensor, inputs: StepInputs, kv_layer: Tensor, *, codes: bool) -> Activations:
        """[T, H * D], of decode rows, or with a gate; ``codes``: as the output projection reads them."""
        qkv_TX, gate_TX = self._without_gate(qkv_TX)
        qkv_TX, rotation, attention = self._edited(qkv_TX, inputs), self._of_step(inputs), inputs.attention
        into = self._room_for_codes(len(qkv_TX), qkv_TX.dtype) if codes else None
        if isinstance(attention, DecodeAttention):
            out_THD = self._attend_rows(qkv_TX, rotation, attention, kv_layer, None if gate_TX is not None else into)
        else:
            out_THD = self._attend_chunks(self._rotate(qkv_TX, kv_layer, rotation), attention, kv_layer)
        if gate_TX is not None:
            out_THD = self.kernels.sigmoid_mul(out_THD.flatten(1), gate_TX, into=into)
        return into or out_THD.flatten(1)

    def _edited(self, qkv_TX: Tensor, inputs: StepInputs) -> Tensor:
        return qkv_TX if self.edit is None else self.edit(qkv_TX, inputs.positions_T)

    def _without_gate(self, qkv_TX: Tensor) -> tuple[Tensor, Tensor | None]:
        """(packed q | k | v, gates), columns of what the projection made; None where there are no gates."""
        if not self.output_gate:
            return qkv_TX, None
        packed = (self.heads + 2 * self.kv_heads) * self.head_dim
        return qkv_TX[:, :packed], qkv_TX[:, packed:]

    def _forward_wanted(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, inputs: StepInputs, kv_layer: Tensor,
        wanted_R: Tensor, attention: DecodeAttention,
    ) -> tuple[Tensor | PendingAllReduce, Tensor]:  # fmt: skip
        """``forward`` where only the wanted tokens ask: keys and values of all tokens, queries of these."""
        kernels, weight = self.kernels, self.qkv.weight
        hidden_TN, residual_TN = self.norm.add(x_TN, residual_TN)
        # Few and small: before the products, so that none is the launch right before one that may begin early.
        hidden_RN, residual_RN = hidden_TN.index_select(0, wanted_R), residual_TN.index_select(0, wanted_R)
        everywhere = self._of_step(inputs)
        positions_R = inputs.positions_T.index_select(0, wanted_R)
        if kernels.batch_invariant.get("linear", False):  # promised of whole weights: some rows may be summed otherwise
            qkv_TX, gate_RX = self._without_gate(kernels.linear(hidden_TN, weight))
            gate_RX = None if gate_RX is None else gate_RX.index_select(0, wanted_R)
            q_RHD = self._rotate(qkv_TX, kv_layer, everywhere).index_select(0, wanted_R)
        else:
            kv_TX = kernels.linear(hidden_TN, self.entry_rows)
            kernels.rope_and_cache(kv_TX, 0, kv_layer, everywhere)
            # Packed with keys and values once more, as kernels take it; these go to the trash page.
            nowhere = self._rotation(positions_R, torch.zeros_like(positions_R))
            qkv_RX, gate_RX = self._without_gate(kernels.linear(hidden_RN, weight))
            q_RHD = self._rotate(qkv_RX, kv_layer, nowhere)
        out_RX = self._scaled(kernels.decode_attention(q_RHD, kv_layer, attention, self.scale, kind=self.kind)).flatten(
            1
        )
        if gate_RX is not None:
            out_RX = kernels.sigmoid_mul(out_RX, gate_RX)
        return self.output(out_RX), residual_RN

    @property
    def entry_rows(self) -> Weight:
        """Of keys and values, packed k | v: what ``qkv`` has after the queries' rows."""
        queries, weight = self.heads * self.head_dim, self.qkv.weight
        return weight.rows(queries, weight.outputs - (2 if self.output_gate else 1) * queries)

    def _room_for_codes(self, tokens: int, dtype: torch.dtype) -> Quantised | None:
        """Of what the last product reads; None where values have scales, which are multiplied before it."""
        return None if self.kv_factors_2K is not None else self.kernels.quantised_for(self.output.own, tokens, dtype)

    def _attend_rows(
        self, qkv_TX: Tensor, rotation: Rotation, attention: DecodeAttention, kv_layer: Tensor,
        into: Quantised | None = None,
    ) -> Tensor:  # fmt: skip
        """Rotates, writes the cache, attends; [T, H, D], or what ``into`` holds then."""
        if self.kv_factors_2K is None:
            return self.kernels.rope_cache_attend(
                qkv_TX, self.heads, kv_layer, rotation, attention, self.scale, into, self.kind
            )
        q_THD = self._rotate(qkv_TX, kv_layer, rotation)
        return self._scaled(self.kernels.decode_attention(q_THD, kv_layer, attention, self.scale, kind=self.kind))

    def _attend_chunks(self, q_THD: Tensor, attention: PrefillAttention | MixedAttention, kv_layer: Tensor) -> Tensor:
        """[T, H, D], of rotated queries over keys and values that are in the cache."""
        if isinstance(attention, MixedAttention):
            return self._scaled(self.kernels.mixed_attention(q_THD, kv_layer, attention, self.scale, self.kind))
        return self._scaled(self.kernels.prefill_attention(q_THD, kv_layer, attention, self.scale, self.kind))

    def _rotate(self, qkv_TX: Tensor, kv_layer: Tensor, rotation: Rotation) -> Tensor:
        """Writes the cache; rotated queries, times the scale of the keys that they meet, [T, H, D]."""
        q_THD = self.kernels.rope_and_cache(qkv_TX, self.heads, kv_layer, rotation)
        return q_THD if self.kv_factors_2K is None else (q_THD * self.key_scales_H1).to(q_THD.dtype)

    def _scaled(self, out_THD: Tensor) -> Tensor:
        """Sums of values, times the values' scale."""
        return out_THD if self.kv_factors_2K is None else (out_THD * self.value_scales_H1).to(out_THD.dtype)

    def _of_step(self, inputs: StepInputs) -> Rotation:
        return self._rotation(inputs.positions_T, inputs.kv_slots_T)

    def _rotation(self, positions_T: Tensor, kv_slots_T: Tensor) -> Rotation:
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        given = self.cos_sin_LR, positions_T, kv_slots_T, self.kv_factors_2K
        return Rotation(q_norm, k_norm, self.norm.eps, *given, self.value_norm, self.values_are_keys)
