"""Nemotron-H and Nemotron-3 (Blakeman et al. 2025): blocks of one mixer or one MLP each, Mamba-2 in most places.

Knows: the architecture's blocks and its checkpoint names, in the style of the published folders (``backbone.``) and in
that of transformers 5 (``model.``). Does not know: how a block computes, or how a stack runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from models.block_pattern import BLOCK_KEYS, BLOCK_NEUTRAL, block_kinds, mtp_kinds, read_mamba2, usual_block_keys
from models.config import FamilyConfig, ModelConfig, mtp_layers
from models.config_reader import ConfigReader
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer, MTPLayout
from models.layers.mamba2 import Mamba2
from models.layers.mlp import Relu2MLP
from models.layers.moe import SparseMLP
from models.layers.norm import RMSNorm
from models.layers.rope import unrotated_cache
from models.layers.routed_experts import EXPERT_KEYS, RoutedExperts, sigmoid_experts
from parallel.layers.embedding import LMHead, VocabParallelEmbedding

BLOCK_NAMES = {  # but for the output projections of mixers
    "mixer.norm": "norm",
    "mlp.norm": "norm",
    "mixer.in_proj": "mixer.in_proj",
    "mixer.conv": "mixer.conv1d",
    "mixer.ssm": "mixer",
    "mixer.gated_norm": "mixer.norm",
    "mixer.qkv.q": "mixer.q_proj",
    "mixer.qkv.k": "mixer.k_proj",
    "mixer.qkv.v": "mixer.v_proj",
    "mlp.up": "mixer.up_proj",
    "mlp.down": "mixer.down_proj",
    "mlp.router": "mixer.gate",
    "mlp.to_latent": "mixer.fc1_latent_proj",
    "mlp.from_latent": "mixer.fc2_latent_proj",
    "mlp.experts.{}.up": "mixer.experts.{}.up_proj",
    "mlp.experts.{}.down": "mixer.experts.{}.down_proj",
    "mlp.experts": "mixer.experts",  # fused: up_proj and down_proj
    "mlp.experts.shared.up": "mixer.shared_experts.up_proj",
    "mlp.experts.shared.down": "mixer.shared_experts.down_proj",
    "mlp.shared.up": "mixer.shared_experts.up_proj",
    "mlp.shared.down": "mixer.shared_experts.down_proj",
}


def _experts(config: Mapping[str, Any]) -> RoutedExperts | None:
    layers, read = (
        tuple(number for number, kind in enumerate(block_kinds(config)) if kind == "moe"),
        ConfigReader(config),
    )
    if not layers:
        return None
    latent = read.size("moe_latent_size") if config.get("moe_latent_size") is not None else 0
    shared = read.size("n_shared_experts", 1) if config.get("n_shared_experts") != 0 else 0
    if shared > 1:
        raise ValueError(f"'n_shared_experts' is {shared}, but only 0 and 1 are implemented")
    shared_size = read.size("moe_shared_expert_intermediate_size") if shared else 0
    size = read.size("moe_intermediate_size")
    return sigmoid_experts(config, layers, size, activation="relu2", shared_size=shared_size, latent_size=latent)


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    blocks = block_kinds(config)
    mamba = tuple(number for number, kind in enumerate(blocks) if kind == "mamba")
    return {
        "blocks": blocks,
        "mamba": read_mamba2(config, mamba) if mamba else None,
        "mtp_blocks": mtp_kinds(config) if mtp_layers(config) else (),
    }


def _both(name: str) -> tuple[str, str]:
    return f"backbone.{name}", f"model.{name}"


class NemotronH(Decoder):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        kv_heads=8,
        reads=f"{EXPERT_KEYS} {BLOCK_KEYS}",
        neutral=BLOCK_NEUTRAL,
        usual=usual_block_keys,
        experts=_experts,
        more=_more,
    )
    unused_tensors: ClassVar[tuple[str, ...]] = ("mtp.",)
    mtp_layout: ClassVar[MTPLayout | None] = "blocks"
    checkpoint_names: ClassVar = {
        "embedding": _both("embeddings"),
        **{f"layers.{{}}.{part}": _both(f"layers.{{}}.{name}") for part, name in BLOCK_NAMES.items()},
        # Attention and Mamba-2 both end in a projection, under different names.
        "layers.{}.mixer.output": _both("layers.{}.mixer.o_proj"),
        "layers.{}.mixer.out": _both("layers.{}.mixer.out_proj"),
        "final_norm": _both("norm_f"),
        "lm_head": "lm_head",
    }

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        hidden = config.hidden_size
        norm = partial(RMSNorm, eps=config.rms_norm_eps, context=context)
        self.cos_sin_LR = unrotated_cache(config.max_length)
        self.embedding = VocabParallelEmbedding(config.vocab_size, hidden, context)
        self.layers = nn.ModuleList(
            _block(config, context, norm(hidden), self.cos_sin_LR, number) for number in range(config.layers)
        )
        self.final_norm = norm(hidden)
        self.lm_head = LMHead(config.vocab_size, hidden, context, self.embedding if config.tied_embeddings else None)


def _block(config: ModelConfig, context: ModelContext, norm: RMSNorm, cos_sin_LR: Tensor, number: int) -> DecoderLayer:
    kind = config.blocks[number]
    if kind == "mamba":
        return DecoderLayer(Mamba2(config, context, norm), None)
    if kind == "attention":
        return DecoderLayer(Attention(config, context, cos_sin_LR, norm), None)
    if kind == "moe":
        return DecoderLayer(None, SparseMLP(config, context, norm, layer=number))
    return DecoderLayer(None, Relu2MLP(config.hidden_size, config.intermediate_size, context, norm))
