"""MTP layers under other names than Qwen3-Next's: DeepSeek-V3's, of a layer as the target has them, and Nemotron-H's
blocks.

Knows: their checkpoint names, and what a Nemotron-H layer consists of. Does not know: what an MTP layer computes
(mtp.py), which target has which (models/families).

    DeepSeek-V3   model.layers.L.{enorm, hnorm, eh_proj, shared_head.norm} with a decoder layer's own, L behind the
                  target's last; embed_tokens and shared_head.head repeat the target's
    Nemotron-H    mtp.layers.0.{enorm, hnorm, eh_proj}, mtp.layers.i.{norm, mixer.*} of block i, final_layernorm of the
                  last; the blocks' kinds stand in mtp_hybrid_override_pattern, or mtp_layers_block_type
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from models.drafters.draft_attention import DraftAttention
from models.drafters.draft_config import MTPConfig
from models.drafters.mtp import MakeNorm, MTPDraft
from models.families.nemotron_h import BLOCK_NAMES
from models.layers.checkpoint_parts import checkpoint_names_of
from models.layers.context import ModelContext
from models.layers.decoder import DecoderLayer
from models.layers.mlp import Relu2MLP
from models.layers.moe import SparseMLP
from models.layers.rope import unrotated_cache
from models.registry import ARCHITECTURES

LATENT_ATTENTION = "self_attn.kv_a_proj_with_mqa.weight"  # of DeepSeek's own layers


def nextn_prefix(layer: int) -> str:
    """Of the tensors of an MTP layer under DeepSeek-V3's names."""
    return f"model.layers.{layer}."


def repeated_tensors(layer: int) -> tuple[str, str]:
    """Those of them that repeat the target's embedding and head."""
    return f"{nextn_prefix(layer)}embed_tokens.weight", f"{nextn_prefix(layer)}shared_head.head.weight"


class NextNDraft(MTPDraft):
    """A layer of the target's kind under DeepSeek-V3's names."""

    def checkpoint_names_of(self, path: str) -> tuple[str, ...]:
        """A layer of a known family is named as the family's others."""
        of_layer, prefix = "mtp.layers.0.", nextn_prefix(self.config.layer or 0)
        if path.startswith("layers.0.") and self.config.model.architecture in ARCHITECTURES:
            names = ARCHITECTURES[self.config.model.architecture].checkpoint_names
            return checkpoint_names_of(names, path.replace("layers.0.", f"layers.{self.config.layer}.", 1))
        others = {
            "mtp.fc.weight": "eh_proj.weight",
            "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
            "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
            "mtp.norm.weight": "shared_head.norm.weight",
        }
        return tuple(
            prefix + (others[name] if name in others else name.removeprefix(of_layer))
            for name in super().checkpoint_names_of(path)
        )


class BlocksDraft(MTPDraft):
    """Blocks of one mixer or one MLP each, as Nemotron-H's: attention without positions, then MLPs and experts."""

    checkpoint_names: ClassVar = {
        "fc": "mtp.layers.0.eh_proj",
        "embedding_norm": "mtp.layers.0.enorm",
        "hidden_norm": "mtp.layers.0.hnorm",
        **{f"layers.{{}}.{part}": f"mtp.layers.{{}}.{name}" for part, name in BLOCK_NAMES.items()},
        "layers.{}.mixer.output": "mtp.layers.{}.mixer.o_proj",
    }

    def checkpoint_names_of(self, path: str) -> tuple[str, ...]:
        if path == "norm.weight":
            return (f"mtp.layers.{len(self.layers) - 1}.final_layernorm.weight",)
        return super().checkpoint_names_of(path)

    def _positions(self, config: MTPConfig) -> Tensor:
        return unrotated_cache(config.model.max_length)

    def _layers(self, config: MTPConfig, context: ModelContext, norm: MakeNorm) -> list[DecoderLayer]:
        sizes = config.model
        layers = [DecoderLayer(DraftAttention(sizes, context, self.cos_sin_LR, norm(sizes.hidden_size)), None)]
        for kind in config.blocks[1:]:
            mlp: SparseMLP | Relu2MLP
            if kind == "moe":  # its number is none of the target's layers, whose maps of experts are not for it
                mlp = SparseMLP(sizes, context, norm(sizes.hidden_size), layer=sizes.layers)
            else:
                mlp = Relu2MLP(sizes.hidden_size, sizes.intermediate_size, context, norm(sizes.hidden_size))
            layers.append(DecoderLayer(None, mlp))
        return layers
