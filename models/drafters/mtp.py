"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): one layer that drafts the next token.

It reads a token and the target's final hidden state of the token before it. Its attention sees everything, also where
the target's layers are recurrent; its MLP is dense or has experts, as the target's.

Knows: the layer, its checkpoint names, its two passes: entries of tokens whose successors are known, and one draft a
row. Entry p is of the target's hidden state at position p and of the token at p + 1. Does not know: the target (its
embedding and head are used by the caller), rounds, slots.
Shape letters as in models/inputs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar, cast

from torch import Tensor, nn

from models.cache_layout import CacheLayout
from models.drafters.dflash import LAYER_NAMES
from models.drafters.draft_config import MTPConfig
from models.drafters.draft_head import DraftAttention, SplitProjection
from models.inputs import DecodeAttention, StepInputs
from models.layers.checkpoint_parts import CheckpointParts
from models.layers.context import ModelContext
from models.layers.decoder import DecoderLayer
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP, shared_expert_names
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from parallel.comm.collectives import PendingAllReduce

MakeNorm = Callable[[int], RMSNorm]

SPARSE_NAMES = {
    "mlp.router": "mlp.gate",
    "mlp.experts.{}.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up": "mlp.experts.{}.up_proj",
    "mlp.experts.{}.down": "mlp.experts.{}.down_proj",
    "mlp.experts": "mlp.experts",  # fused: gate_up_proj and down_proj
    **shared_expert_names("mlp", "mlp.shared_expert", "mlp.shared_expert_gate"),
}


class MTPDraft(CheckpointParts):
    """One layer, split over ranks as its layers are, and ``fc`` by its inputs, which every rank has whole. Under other
    names, and of other blocks: load.py."""

    checkpoint_names: ClassVar = {
        "fc": "mtp.fc",
        "embedding_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "norm": "mtp.norm",
        **{f"layers.{{}}.{part}": f"mtp.layers.{{}}.{name}" for part, name in (LAYER_NAMES | SPARSE_NAMES).items()},
    }

    def __init__(self, config: MTPConfig, context: ModelContext) -> None:
        super().__init__()
        sizes = config.model
        hidden = sizes.hidden_size
        norm: MakeNorm = partial(RMSNorm, eps=sizes.rms_norm_eps, context=context, zero_centred=config.zero_centred)
        self.config = config
        self.dtype = context.dtype
        self.kernels = context.kernels
        self.cos_sin_LR = self._positions(config)
        self.embedding_norm = norm(hidden)
        self.hidden_norm = norm(hidden)
        self.fc = SplitProjection(2 * hidden, hidden, context, "inputs of fc (2 * hidden_size)")
        self.layers = nn.ModuleList(self._layers(config, context, norm))
        self.norm = norm(hidden)

    def _positions(self, config: MTPConfig) -> Tensor:
        """Angles of rotary positions, as ``cos_sin_LR``."""
        sizes = config.model
        return cos_sin_cache(sizes.rope, sizes.rotary_dim, sizes.max_length)

    def _layers(self, config: MTPConfig, context: ModelContext, norm: MakeNorm) -> list[DecoderLayer]:
        """What runs after ``fc``: the first has the attention, and no other one has."""
        sizes = config.model
        hidden = sizes.hidden_size
        attention = DraftAttention(
            sizes, context, self.cos_sin_LR, norm(hidden),
            q_norm=norm(sizes.head_dim) if config.qk_norms else None,
            k_norm=norm(sizes.head_dim) if config.qk_norms else None, qkv_bias=sizes.attention_bias,
            output_bias=sizes.output_bias, output_gate=config.output_gate,
        )  # fmt: skip
        mlp: GatedMLP | SparseMLP
        if sizes.experts is None:
            mlp = GatedMLP(sizes, context, norm(hidden))
        else:  # its number is none of the target's layers, whose maps of experts are not for it
            mlp = SparseMLP(sizes, context, norm(hidden), layer=sizes.layers)
        return [DecoderLayer(attention, mlp)]

    @property
    def cache_layout(self) -> CacheLayout:
        """What this rank keeps of a sequence: an entry a token whose successor is known."""
        return CacheLayout((self._attention.cache,))

    def append(
        self, embedded_TN: Tensor, hidden_TN: Tensor, positions_T: Tensor, kv_slots_T: Tensor, kv_layer: Tensor
    ) -> None:
        """Writes the entries of tokens with the target's hidden states ``hidden``, followed by tokens ``embedded``."""
        attention = self._attention
        x_TN = attention.norm.add(self._joined(embedded_TN, hidden_TN), None)[0]
        attention.append(x_TN, positions_T, kv_slots_T, kv_layer)

    def forward(self, embedded_TN: Tensor, hidden_TN: Tensor, inputs: StepInputs, kv_layer: Tensor) -> Tensor:
        """Final-normed hidden states [T, N] of one token a row: for the target's head, and as the next draft's
        ``hidden``. ``embedded``: of the newest token; ``hidden``: the target's of the token before it, or what this
        method returned for it. ``inputs.positions_T`` and its lengths are those of the token before it; an MLP with
        experts needs ``inputs.real_T``, and of tokens that it leaves out the result is undefined.
        """
        attention = inputs.attention
        assert isinstance(attention, DecodeAttention)
        attention = self.kernels.plan_decode(attention, self._attention.heads, kv_layer)
        step = replace(inputs, attention=attention)
        x_TN, residual_TN = self.layers[0](self._joined(embedded_TN, hidden_TN), None, step, kv_layer)
        for layer in self.layers[1:]:
            x_TN, residual_TN = layer(x_TN, residual_TN, step, None)
        return self.norm.add(x_TN, residual_TN)[0]

    def step(
        self, embedded_TN: Tensor, hidden_TN: Tensor, inputs: StepInputs, kv_layer: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(hidden states for the head, states for the next draft): twice what ``forward`` returns."""
        found_TN = self(embedded_TN, hidden_TN, inputs, kv_layer)
        return found_TN, found_TN

    def _joined(self, embedded_TN: Tensor, hidden_TN: Tensor) -> Tensor | PendingAllReduce:
        """The embedding first, the hidden state second, as in every known checkpoint."""
        first, second = self.embedding_norm, self.hidden_norm
        pairs_TX = self.kernels.joined_norms(embedded_TN, first.weight, hidden_TN, second.weight, first.eps)
        joined_TN: Tensor | PendingAllReduce = self.fc(pairs_TX)
        return joined_TN

    @property
    def _attention(self) -> DraftAttention:
        return cast(DraftAttention, cast(DecoderLayer, self.layers[0]).mixer)
