"""DFlash (arXiv 2602.06036): a small decoder that drafts a block of tokens at once, from what the target made of all
tokens before it.

Knows: its layers, its checkpoint names, and its two passes: context entries from the target's features, and a block of
one known token and mask tokens over these. Mask tokens stand for their own position: there is no shift by one.
Does not know: the target (its embedding and head are used by the caller), rounds, slots.
Shape letters as in models/inputs.py; F width of the features (layers read * N), W tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, cast

from torch import Tensor, nn

from models.cache_layout import CacheLayout
from models.drafters.draft_config import DFlashConfig
from models.drafters.draft_head import DraftAttention, SplitProjection
from models.inputs import DecodeAttention, StepInputs
from models.layers.checkpoint_parts import CheckpointParts
from models.layers.context import ModelContext
from models.layers.decoder import DecoderLayer
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from parallel.comm.collectives import PendingAllReduce
from parallel.layers.weight import Weight

LAYER_NAMES = {
    "mixer.norm": "input_layernorm",
    "mixer.qkv.q": "self_attn.q_proj",
    "mixer.qkv.k": "self_attn.k_proj",
    "mixer.qkv.v": "self_attn.v_proj",
    "mixer.output": "self_attn.o_proj",
    "mixer.q_norm": "self_attn.q_norm",
    "mixer.k_norm": "self_attn.k_norm",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate_up.gate": "mlp.gate_proj",
    "mlp.gate_up.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


class DFlashDraft(CheckpointParts):
    """Attention heads and MLPs are split over ranks as the target's are, and ``fc`` by features, which every rank holds
    whole. Call ``gather_entry_rows`` when the parameters are filled."""

    checkpoint_names: ClassVar = {
        "fc": ("fc", "model.fc", "encoder.fc"),
        "hidden_norm": ("hidden_norm", "model.hidden_norm", "encoder.output_norm_enc"),
        "norm": ("norm", "model.norm"),
        **{
            f"layers.{{}}.{part}": (f"layers.{{}}.{name}", f"model.layers.{{}}.{name}")
            for part, name in LAYER_NAMES.items()
        },
    }

    def __init__(self, config: DFlashConfig, context: ModelContext) -> None:
        super().__init__()
        sizes = config.model
        hidden = sizes.hidden_size
        norm = partial(RMSNorm, eps=sizes.rms_norm_eps, context=context)
        self.config = config
        self.dtype = context.dtype
        self.kernels = context.kernels
        self.cos_sin_LR = cos_sin_cache(sizes.rope, sizes.rotary_dim, sizes.max_length)
        features = len(config.target_layer_ids) * hidden
        self.fc = SplitProjection(features, hidden, context, "features (layers read * hidden_size)")
        self.hidden_norm = norm(hidden)
        self.layers = nn.ModuleList(
            DecoderLayer(
                DraftAttention(
                    sizes,
                    context,
                    self.cos_sin_LR,
                    norm(hidden),
                    q_norm=norm(sizes.head_dim),
                    k_norm=norm(sizes.head_dim),
                    qkv_bias=sizes.attention_bias,
                    output_bias=sizes.attention_bias,
                    view=view,
                ),
                GatedMLP(sizes, context, norm(hidden)),
            )
            for view in config.views
        )
        self.norm = norm(hidden)
        self.entries: Weight | None = None  # of every layer's keys and values

    def gather_entry_rows(self) -> None:
        """Copies the weights of every layer's keys and values, one layer after the other, so that one product makes the
        entries of all layers."""
        self.entries = Weight.stacked([attention.entry_rows for attention in self._attention])

    @property
    def cache_layout(self) -> CacheLayout:
        """What this rank keeps of a sequence: context entries of every layer."""
        return CacheLayout(tuple(attention.cache for attention in self._attention))

    def append_context(
        self, features_TF: Tensor, positions_T: Tensor, kv_slots_T: Tensor, caches: Sequence[Tensor]
    ) -> None:
        """Writes every layer's entries of tokens with such features, at their positions (int64, as in StepInputs)."""
        assert self.entries is not None, "gather_entry_rows was not called"
        context_TN = self.hidden_norm.add(self.fc(features_TF), None)[0]
        kv_TX = self.kernels.linear(context_TN, self.entries)
        of_layers = kv_TX.chunk(len(self.layers), 1)
        for attention, kv_layer, own_TX in zip(self._attention, caches, of_layers, strict=True):
            attention.write(own_TX, positions_T, kv_slots_T, kv_layer)

    def forward(self, embedded_TN: Tensor, inputs: StepInputs, caches: Sequence[Tensor]) -> Tensor:
        """Final-normed hidden states [T, N] of blocks of W tokens a row, for the target's head.

        ``inputs.attention``: DecodeAttention with query_len W, whose lengths include the block; ``embedded``: of its
        first token, which is known, and of mask tokens. Entries of the block are written where ``inputs.kv_slots_T``
        says, after the context, and mean nothing afterwards.
        """
        attention = inputs.attention
        assert isinstance(attention, DecodeAttention)
        whole = next((number for number, view in enumerate(self.config.views) if view.window is None), None)
        if whole is not None:  # causal or not, a layer of all positions splits its keys alike
            attention = self.kernels.plan_decode(attention, self._attention[whole].heads, caches[whole])
        step = StepInputs(inputs.token_ids_T, inputs.positions_T, inputs.kv_slots_T, attention)
        x_TN: Tensor | PendingAllReduce = embedded_TN
        residual_TN: Tensor | None = None
        for layer, kv_layer in zip(self.layers, caches, strict=True):
            x_TN, residual_TN = layer(x_TN, residual_TN, step, kv_layer)
        return self.norm.add(x_TN, residual_TN)[0]

    @property
    def _attention(self) -> list[DraftAttention]:
        return [cast(DraftAttention, cast(DecoderLayer, layer).mixer) for layer in self.layers]

    def checkpoint_names_of(self, path: str) -> tuple[str, ...]:
        """A drafter of one layer may call it ``midlayer``."""
        names = super().checkpoint_names_of(path)
        if len(self.layers) > 1 or not path.startswith("layers."):
            return names
        return (*names, names[0].replace("layers.0.", "midlayer."))
