"""EAGLE-3 (arXiv 2503.01840): one decoder layer that drafts the next token from a token and from what the target's
lower, middle and upper layers made of the token before it.

Knows: the layer, its checkpoint names (SGLang's and SpecForge's ``midlayer.*``, vLLM's ``layers.0.*``), its two passes:
entries of tokens whose successors are known, and one draft a row. Attention reads the normed embedding and the normed
state side by side; the state alone is what the layer adds to. Entry p is of the state of position p and of the token at
p + 1. Does not know: the target, the draft vocabulary and its head (draft_head.py), rounds, slots.
Shape letters as in models/inputs.py; F width of the features (layers read * N).
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from models.cache_layout import CacheLayout
from models.drafters.draft_config import Eagle3Config
from models.drafters.draft_head import DraftAttention, Projection
from models.inputs import DecodeAttention, StepInputs
from models.layers.checkpoint_parts import CheckpointParts
from models.layers.context import ModelContext
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from parallel.comm.collectives import PendingAllReduce
from parallel.layers.embedding import VocabParallelEmbedding
from parallel.layers.linear import QKVParallel

_LAYER_NAMES = {
    "embedding_norm": "input_layernorm",
    "attention.norm": "hidden_norm",
    "attention.qkv.q": "self_attn.q_proj",
    "attention.qkv.k": "self_attn.k_proj",
    "attention.qkv.v": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate_up.gate": "mlp.gate_proj",
    "mlp.gate_up.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


class PairAttention(DraftAttention):
    """Whose input is twice as wide: a normed embedding and a state. ``norm``: of the state."""

    norm: RMSNorm

    def __init__(self, config: Eagle3Config, context: ModelContext, cos_sin_LR: Tensor, norm: RMSNorm) -> None:
        sizes = config.model
        super().__init__(sizes, context, cos_sin_LR, norm, output_bias=sizes.attention_bias)
        heads = sizes.heads, sizes.kv_heads, sizes.head_dim
        self.qkv = QKVParallel(2 * sizes.hidden_size, *heads, context, bias=sizes.attention_bias)

    def of_pairs(self, pairs_TX: Tensor, inputs: StepInputs, kv_layer: Tensor) -> Tensor | PendingAllReduce:
        """[T, N], not yet added to the stream, of pairs [T, 2N]; as ``forward`` otherwise."""
        out_TX = self.attend(self.qkv(pairs_TX), inputs, kv_layer).flatten(1)
        part_TN: Tensor | PendingAllReduce = self.output(out_TX)
        return part_TN


class Eagle3Draft(CheckpointParts):
    """One layer, split over ranks as a target's layers are; ``fc`` is whole on each. ``own_embedding``: the checkpoint
    has an embedding; otherwise the target's is meant."""

    checkpoint_names: ClassVar = {
        "fc": ("fc", "model.fc"),
        "norm": ("norm", "model.norm"),
        "embedding": ("embed_tokens", "model.embed_tokens"),
        **{
            part: tuple(f"{layer}.{name}" for layer in ("midlayer", "layers.0", "model.midlayer", "model.layers.0"))
            for part, name in _LAYER_NAMES.items()
        },
    }

    def __init__(self, config: Eagle3Config, context: ModelContext, *, own_embedding: bool) -> None:
        super().__init__()
        sizes = config.model
        hidden = sizes.hidden_size
        norm = partial(RMSNorm, eps=sizes.rms_norm_eps, context=context)
        self.config = config
        self.dtype = context.dtype
        self.kernels = context.kernels
        self.cos_sin_LR = cos_sin_cache(sizes.rope, sizes.rotary_dim, sizes.max_length)
        self.fc = Projection(config.features * hidden, hidden, context)
        self.embedding = VocabParallelEmbedding(sizes.vocab_size, hidden, context) if own_embedding else None
        self.embedding_norm = norm(hidden)
        self.attention = PairAttention(config, context, self.cos_sin_LR, norm(hidden))
        self.mlp = GatedMLP(sizes, context, norm(hidden), bias=sizes.mlp_bias)
        self.norm = norm(hidden)

    @property
    def cache_layout(self) -> CacheLayout:
        """What this rank keeps of a sequence: an entry a token whose successor is known."""
        return CacheLayout((self.attention.cache,))

    def states(self, features_TF: Tensor) -> Tensor:
        """[T, N]: what the layer reads of tokens with such features, side by side in the order of the layers."""
        states_TN: Tensor = self.fc(features_TF)
        return states_TN

    def append(
        self, embedded_TN: Tensor, hidden_TN: Tensor, positions_T: Tensor, kv_slots_T: Tensor, kv_layer: Tensor
    ) -> None:
        """Writes the entries of tokens with the states ``hidden``, followed by tokens ``embedded``."""
        pairs_TX, _ = self._pairs(embedded_TN, hidden_TN)
        self.attention.append(pairs_TX, positions_T, kv_slots_T, kv_layer)

    def step(
        self, embedded_TN: Tensor, hidden_TN: Tensor, inputs: StepInputs, kv_layer: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(hidden states for the head, states for the next draft), each [T, N], of one token a row; the second are the
        first before the final norm. ``embedded``: of the newest token; ``hidden``: the state of the token before it, or
        the second result for it. ``inputs`` as for ``MTPDraft.forward``.
        """
        attention = inputs.attention
        assert isinstance(attention, DecodeAttention)
        planned = self.kernels.plan_decode(attention, self.attention.heads, kv_layer)
        step = StepInputs(inputs.token_ids_T, inputs.positions_T, inputs.kv_slots_T, planned)
        pairs_TX, residual_TN = self._pairs(embedded_TN, hidden_TN)
        x_TN, residual_TN = self.mlp(self.attention.of_pairs(pairs_TX, step, kv_layer), residual_TN)
        return self.norm.add(x_TN, residual_TN)

    def _pairs(self, embedded_TN: Tensor, hidden_TN: Tensor) -> tuple[Tensor, Tensor]:
        """(both normed, the embedding first [T, 2N]; the stream that the layer adds to [T, N], a new tensor)."""
        first, second = self.embedding_norm, self.attention.norm
        pairs_TX = self.kernels.joined_norms(embedded_TN, first.weight, hidden_TN, second.weight, first.eps)
        stream_TN = pairs_TX[:, hidden_TN.shape[1] :] if self.config.norm_before_residual else hidden_TN
        return pairs_TX, stream_TN.clone(memory_format=torch.contiguous_format)
