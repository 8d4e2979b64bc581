"""Gemma 4 (Gemma team 2026), the part that reads and writes text: Gemma 3 with heads of another size in full layers,
which may have keys alone, norms of values, a scalar a layer and soft-capped logits; 26B-A4B has experts beside its MLP.

Knows: its checkpoint names, the defaults of a config that says little, and how MLP and experts add up. Does not know:
other layers (llama.py), images, audio, the embeddings and shared caches of E2B and E4B.
Reference: Gemma4ForCausalLM of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from models.config import INTERLEAVED, MOST_LAYERS, FamilyConfig, ModelConfig, Specs, architecture_of
from models.config_reader import ConfigReader, text_part
from models.families.gemma3 import NAMES, Gemma3, spellings
from models.layers.context import ModelContext
from models.layers.decoder import DecoderLayer, LayerScalar
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP
from models.layers.norm import RMSNorm
from models.layers.rope import rope_from_parameters
from models.layers.routed_experts import RoutedExperts, softmax_experts
from parallel.comm.collectives import PendingAllReduce
from parallel.layers.shard import Shard, whole

_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        _FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
_UNIFIED = {"max_position_embeddings": 262144, "hidden_size_per_layer_input": 0, "sliding_window": 1024}  # 12B
_OTHERS = "as of E2B and E4B (12B, 26B-A4B and 31B open)"


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the oracle's defaults, the kind of each layer, the rope of full layers where others have theirs and that of
    sliding layers under '_sliding_rope', and sizes of full layers in two keys."""
    if architecture_of(config).endswith("ForConditionalGeneration"):
        config = text_part(config)
    usual = _DEFAULTS | (_UNIFIED if architecture_of(config).startswith("Gemma4Unified") else {})
    given = {**usual, **{key: value for key, value in config.items() if value is not None}}
    layers = ConfigReader(given).size("num_hidden_layers", most=MOST_LAYERS)
    kinds = given.setdefault("layer_types", [_FULL if (n + 1) % 6 == 0 else _SLIDING for n in range(layers)])
    if isinstance(kinds, list) and kinds:
        given["layer_types"] = [*kinds[:-1], _FULL]  # as the oracle, whatever it says
    ropes = given["rope_parameters"]
    if not isinstance(ropes, dict) or not all(isinstance(ropes.get(kind), dict) for kind in (_SLIDING, _FULL)):
        raise ValueError(f"'rope_parameters' must have an object for {_SLIDING!r} and {_FULL!r}, not {ropes!r}")
    given["rope_parameters"], given["_sliding_rope"] = ropes[_FULL], {"rope_theta": 1e4, **ropes[_SLIDING]}
    return {**given, **_sizes_of_full_layers(given)}


def _sizes_of_full_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers writes 'per_layer_config', by the layer's number; published folders have the two keys."""
    said = config.get("per_layer_config")
    if said is None:
        own = {} if config.get("attention_k_eq_v") else {"num_global_key_value_heads": None}
        return {"global_head_dim": config.get("global_head_dim", 512), **own}
    numbers = [str(n) for n, kind in enumerate(config["layer_types"]) if kind == _FULL]
    if isinstance(said, dict):  # "05" of thirty layers
        said = {str(int(n)) if n.isdecimal() else n: sizes for n, sizes in said.items()}
    if not isinstance(said, dict) or sorted(said) != sorted(numbers) or any(said[n] != said[numbers[0]] for n in said):
        raise ValueError(f"'per_layer_config' must say the same of all full layers {numbers}, and no others: {said!r}")
    sizes = said[numbers[0]]
    if not isinstance(sizes, dict) or sizes.keys() - {"head_dim", "num_key_value_heads"}:
        raise ValueError(f"'per_layer_config' has {sizes!r}; only 'head_dim' and 'num_key_value_heads' are implemented")
    return {
        "global_head_dim": sizes.get("head_dim", config.get("head_dim", 256)),
        "num_global_key_value_heads": sizes.get("num_key_value_heads"),
    }


def _attention(config: Mapping[str, Any], specs: Specs) -> Specs:
    read = ConfigReader(config)
    heads, dim = read.size("num_attention_heads"), read.size("global_head_dim")
    kv_heads = read.size("num_global_key_value_heads", specs[0].kv_heads)
    if heads % kv_heads or dim % 2:
        raise ValueError(
            f"'num_attention_heads' {heads} is no multiple of 'num_global_key_value_heads' {kv_heads}, or "
            f"'global_head_dim' {dim} is odd"
        )
    keys_alone = read.flag("attention_k_eq_v")
    kinds = zip(specs, config["layer_types"], strict=True)
    return tuple(
        replace(spec, scale=1.0, value_norm=True, kv_heads=kv_heads, head_dim=dim, values_are_keys=keys_alone)
        if kind == _FULL
        else replace(spec, scale=1.0, value_norm=True, rope=1)
        for spec, kind in kinds
    )


def _experts(config: Mapping[str, Any]) -> RoutedExperts | None:
    read = ConfigReader(config)
    if not read.flag("enable_moe_block"):
        return None
    given = {**config, "num_experts_per_tok": read.size("top_k_experts")}
    layers, size = tuple(range(read.size("num_hidden_layers"))), read.size("moe_intermediate_size")
    return replace(softmax_experts(given, layers, size, renormalise=True), activation="geglu", beside_mlp=True)


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    local = rope_from_parameters(config["_sliding_rope"], config["max_position_embeddings"])
    softcap = ConfigReader(config).number("final_logit_softcapping", 0.0)
    if softcap < 0:
        raise ValueError(f"'final_logit_softcapping' must be a positive number, not {softcap!r}")
    return {"more_ropes": (local,), "logits_softcap": softcap or None}


class RouterNorm(RMSNorm):
    """Of what the router reads: x / sqrt(mean(x^2) + eps) * scale / sqrt(size)."""

    def __init__(self, size: int, eps: float, context: ModelContext) -> None:
        super().__init__(size, eps, context)
        self.weight, self.factor = context.parameter(size, wide=True), size**-0.5

    def shards(self) -> dict[str, Shard]:
        return {"scale": replace(whole(self.weight, centre=1.0), factor=self.factor)}


class DenseAndSparseMLP(SparseMLP):
    """post(dense_post(dense(x)) + sparse_post(experts(x))), each after a norm of its own."""

    def __init__(self, config: ModelConfig, context: ModelContext, layer: int) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, context, RMSNorm(size, eps, context), layer=layer)
        self.router_norm = RouterNorm(size, eps, context)
        self.dense = GatedMLP(config, context, RMSNorm(size, eps, context), gelu=True)
        self.dense_post, self.sparse_post, self.post = (RMSNorm(size, eps, context) for _ in range(3))

    def forward(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, real_T: Tensor,
        exchange_rows: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert residual_TN is not None  # of the mixer before it
        dense_TN, residual_TN = self.dense(x_TN, residual_TN)
        dense_TN = self.dense_post.add(dense_TN, None)[0]
        sparse_TN, residual_TN = super().forward(residual_TN, None, real_T, exchange_rows)
        sparse_TN = self.sparse_post.add(sparse_TN, None)[0]
        return self.post.add(sparse_TN, dense_TN)[0], residual_TN


_SPARSE = {
    "mlp.post": "post_feedforward_layernorm",
    "mlp.dense.norm": "pre_feedforward_layernorm",
    "mlp.dense_post": "post_feedforward_layernorm_1",
    "mlp.dense.gate_up.gate": "mlp.gate_proj",
    "mlp.dense.gate_up.up": "mlp.up_proj",
    "mlp.dense.down": "mlp.down_proj",
    "mlp.sparse_norm": "pre_feedforward_layernorm_2",
    "mlp.sparse_post": "post_feedforward_layernorm_2",
    "mlp.router_norm": "router",  # scale
    "mlp.router": "router.proj",
    "mlp.router.per_expert_scale": "router.per_expert_scale",
    "mlp.experts": "experts",  # gate_up_proj and down_proj
    **{f"mlp.experts.{{}}.{part}": f"experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}
_NAMES = {
    **NAMES,
    "layers.{}.scalar": "model.layers.{}",
    **{f"layers.{{}}.{part}": f"model.layers.{{}}.{name}" for part, name in _SPARSE.items()},
}


class Gemma4(Gemma3):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        theta=1e6,
        head_dim=256,
        kv_heads=4,
        window=512,
        tied=True,
        full_every=6,
        qk_norms=True,
        layer_types=(_FULL, _SLIDING),
        reads=f"{' '.join(_DEFAULTS)} attention_k_eq_v final_logit_softcapping global_head_dim per_layer_config "
        "num_global_key_value_heads use_double_wide_mlp vocab_size_per_layer_input enable_moe_block num_experts "
        "num_local_experts moe_intermediate_size top_k_experts",
        neutral={
            "hidden_activation": (("gelu_pytorch_tanh",), "another activation"),
            "hidden_size_per_layer_input": ((0,), f"embeddings of each layer, {_OTHERS}"),
            "num_kv_shared_layers": ((0,), f"layers that read the KV cache of another one, {_OTHERS}"),
            **dict.fromkeys(INTERLEAVED, ((False,), "another order of keys, which are values too")),
            "use_bidirectional_attention": (("vision",), "attention to later tokens"),
        },
        usual=_usual,
        attention=_attention,
        experts=_experts,
        more=_more,
    )
    unused_tensors: ClassVar[tuple[str, ...]] = tuple(
        f"{prefix}{part}."
        for prefix in ("", "model.")
        for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
    )
    checkpoint_names: ClassVar = {part: spellings(name) for part, name in _NAMES.items()}
    zero_centred: ClassVar[bool] = False

    def checkpoint_names_of(self, path: str) -> tuple[str, ...]:
        """With experts 'mlp.norm' is that before them."""
        sparse = self.config.experts is not None
        return super().checkpoint_names_of(path.replace(".mlp.norm.", ".mlp.sparse_norm.") if sparse else path)

    def _layer(self, config: ModelConfig, context: ModelContext, number: int) -> DecoderLayer:
        layer = super()._layer(config, context, number)
        layer.scalar = LayerScalar(context)
        if config.has_experts(number):
            layer.mlp_post = None
        return layer

    def _mlp(self, config: ModelConfig, context: ModelContext, number: int) -> GatedMLP | SparseMLP:
        if config.has_experts(number):
            return DenseAndSparseMLP(config, context, number)
        return super()._mlp(config, context, number)
