"""OLMo 2 and 3 (OLMo team 2025): norms after attention and MLP and none before them, norms of queries and keys over
all heads; in OLMo 3 sliding windows in three of four layers, which have another rotation.

Knows: its config and its checkpoint names. Does not know: layers (llama.py).
Reference: Olmo2ForCausalLM and Olmo3ForCausalLM of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from models.attention_spec import AttentionSpec
from models.config import FamilyConfig, ModelConfig, Specs
from models.families.llama import Llama
from models.layers.context import ModelContext
from models.layers.qkv_edit import NormsOverHeads
from models.layers.rope import given_parameters, nested_parameters, rope_from_parameters
from parallel.layers.shard import HeadShard

_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETA = 5e5  # of the rotation, where config.json does not say


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qk_norms": False}  # not of single heads


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the rotation of full layers where others have theirs; that of sliding layers under '_sliding_rope'."""
    given, nested = given_parameters(config), nested_parameters(config, (_SLIDING, _FULL))
    theta, usual = config.get("rope_theta") or _THETA, {"rope_type": "default", "rope_theta": _THETA}
    if theta != _THETA and "rope_theta" not in nested.get(_SLIDING, {}):
        raise ValueError(
            f"'rope_theta' is {theta!r}, which transformers 5 takes for full layers and 4 for all; put what you mean "
            f"into 'rope_parameters', an object for {_SLIDING!r} and {_FULL!r} each"
        )
    found = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
    found["rope_parameters"] = {**usual, "rope_theta": theta, **(nested.get(_FULL, {}) if nested else given)}
    found["_sliding_rope"] = {**usual, **nested.get(_SLIDING, {})}
    return found


def _attention(config: Mapping[str, Any], specs: Specs) -> Specs:
    """A window, even one that hides nothing, goes with the other rotation."""
    kinds = config.get("layer_types") or [_FULL if (n + 1) % 4 == 0 else _SLIDING for n in range(len(specs))]
    pairs = zip(specs, kinds, strict=True)
    return tuple(replace(spec, rope=int(kind == _SLIDING)) for spec, kind in pairs)


def _two_ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    local = rope_from_parameters(config["_sliding_rope"], config["max_position_embeddings"])
    return {**_more(config), "more_ropes": (local,)}


class Olmo2(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(eps=1e-5, qk_norms=True, more=_more)
    pre_norms: ClassVar[bool] = False
    post_norms: ClassVar[bool] = True
    checkpoint_names: ClassVar = {
        **Llama.checkpoint_names,
        "layers.{}.mixer.edit.q_norm": "model.layers.{}.self_attn.q_norm",
        "layers.{}.mixer.edit.k_norm": "model.layers.{}.self_attn.k_norm",
        "layers.{}.mixer_post": "model.layers.{}.post_attention_layernorm",
        "layers.{}.mlp_post": "model.layers.{}.post_feedforward_layernorm",
    }

    def _edit(
        self, config: ModelConfig, context: ModelContext, heads: HeadShard, spec: AttentionSpec
    ) -> nn.Module | None:
        return NormsOverHeads(heads, config.head_dim, config.rms_norm_eps, context)


class Olmo3(Olmo2):
    family_config: ClassVar[FamilyConfig] = replace(
        Olmo2.family_config,
        theta=_THETA,
        window=4096,
        full_every=4,
        layer_types=(_FULL, _SLIDING),
        usual=_usual,
        attention=_attention,
        more=_two_ropes,
    )
