"""RoutedExperts: the sparse layers of a mixture of experts, read from config.json; unknown routers are refused by name.

Knows: how Qwen3-MoE, Mixtral, Qwen3-Next, Qwen3.5 and Nemotron-H spell their experts, and the router options of other
families that are not implemented.
Does not know: the rest of the model (models/config.py), or how experts are placed on ranks
(parallel/layers/experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from models.block_pattern import block_kinds
from models.config_reader import ConfigReader


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """``count`` experts a sparse layer, ``per_token`` of which serve a token; each is an MLP of ``intermediate_size``,
    with a gate where ``activation`` is "swiglu". ``renormalise``: the weights of the chosen ones are scaled to a sum of
    1. ``layers``: numbers of the layers that have experts, ascending; the others have one dense MLP, or none.
    ``shared_size``: intermediate size of an expert that serves every token; 0 for none. ``shared_gate``: its output is
    scaled by sigmoid(x w).

    ``scoring``: what the router makes of its logits. With "sigmoid" (DeepSeek-V3, Liu et al. 2024) a bias corrects the
    scores for the choice only, which is among the experts of the best ``top_groups`` of ``groups`` groups, and weights
    are multiplied by ``scale``.
    """

    count: int
    per_token: int
    intermediate_size: int
    renormalise: bool
    layers: tuple[int, ...]
    shared_size: int = 0
    shared_gate: bool = False
    activation: Literal["swiglu", "relu2"] = "swiglu"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


def read_routed_experts(architecture: str, config: Mapping[str, Any]) -> RoutedExperts | None:
    """The experts of config.json's ``architecture``; None where it has none. Raises ValueError naming the key."""
    if architecture not in _FAMILIES:
        return None
    if architecture != "NemotronHForCausalLM":  # which reads all of these keys
        shared = architecture in _WITH_SHARED_EXPERT
        _refuse_other_routers(config, frozenset({"shared_expert_intermediate_size"}) if shared else frozenset())
    found = _FAMILIES[architecture](config, ConfigReader(config))
    if found is None:
        return None
    if found.per_token > found.count:
        raise ValueError(f"'num_experts_per_tok' is {found.per_token}, but a layer has only {found.count} experts")
    return found


def _qwen3_moe(config: Mapping[str, Any], read: ConfigReader) -> RoutedExperts:
    layers = read.size("num_hidden_layers")
    step, dense = read.size("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in dense):
        raise ValueError(f"'mlp_only_layers' must list layer numbers from 0 to {layers - 1}, not {dense!r}")
    return RoutedExperts(
        count=_count(config, read, "num_experts"),
        per_token=read.size("num_experts_per_tok"),
        intermediate_size=read.size("moe_intermediate_size"),
        renormalise=read.flag("norm_topk_prob"),
        layers=tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0),
    )


def _qwen3_next(config: Mapping[str, Any], read: ConfigReader) -> RoutedExperts:
    """Qwen3-MoE's keys, and those of a shared expert. Weights are renormalised unless the config says otherwise."""
    shared = config.get("shared_expert_intermediate_size")
    return replace(
        _qwen3_moe(config, read),
        renormalise=config.get("norm_topk_prob") is None or read.flag("norm_topk_prob"),
        shared_size=0 if shared == 0 else read.size("shared_expert_intermediate_size"),
        shared_gate=shared != 0,
    )


def _qwen3_5_moe(config: Mapping[str, Any], read: ConfigReader) -> RoutedExperts:
    """Every layer is sparse, and weights are always renormalised."""
    if config.get("norm_topk_prob") is False:
        raise ValueError("'norm_topk_prob' is False, but this family always renormalises: only True is implemented")
    return _qwen3_next({**config, "mlp_only_layers": [], "decoder_sparse_step": 1}, read)


def _mixtral(config: Mapping[str, Any], read: ConfigReader) -> RoutedExperts:
    return RoutedExperts(
        count=_count(config, read, "num_local_experts"),
        per_token=read.size("num_experts_per_tok", 2),
        intermediate_size=read.size("intermediate_size"),
        renormalise=True,
        layers=tuple(range(read.size("num_hidden_layers"))),
    )


def _nemotron_h(config: Mapping[str, Any], read: ConfigReader) -> RoutedExperts | None:
    layers = tuple(number for number, kind in enumerate(block_kinds(config)) if kind == "moe")
    if not layers:
        return None
    if config.get("moe_latent_size") is not None:
        raise ValueError(
            f"'moe_latent_size' is {config['moe_latent_size']!r}, which asks for experts between latent projections "
            "(fc1_latent_proj, fc2_latent_proj); this is not implemented, only null is"
        )
    shared = read.size("n_shared_experts", 1) if config.get("n_shared_experts") != 0 else 0
    if shared > 1:
        raise ValueError(f"'n_shared_experts' is {shared}, but only 0 and 1 are implemented")
    count = read.size("n_routed_experts" if config.get("num_local_experts") is None else "num_local_experts")
    per_token = read.size("num_experts_per_tok")
    groups, top_groups = read.size("n_group", 1), read.size("topk_group", 1)
    if count % groups or (groups > 1 and count // groups < 2):
        raise ValueError(
            f"'n_group' is {groups}, but {count} experts do not make so many groups of two (group-limited top-k)"
        )
    if top_groups > groups or top_groups * (count // groups) < per_token:
        raise ValueError(
            f"'topk_group' is {top_groups} of 'n_group' {groups} groups of {count // groups} experts, among which "
            f"'num_experts_per_tok' {per_token} cannot be chosen"
        )
    return RoutedExperts(
        count=count,
        per_token=per_token,
        intermediate_size=read.size("moe_intermediate_size"),
        renormalise=True if config.get("norm_topk_prob") is None else read.flag("norm_topk_prob"),
        layers=layers,
        activation="relu2",
        scoring="sigmoid",
        groups=groups,
        top_groups=top_groups,
        scale=read.number("routed_scaling_factor", 1.0),
        shared_size=read.size("moe_shared_expert_intermediate_size") if shared else 0,
    )


_FAMILIES: dict[str, Callable[[Mapping[str, Any], ConfigReader], RoutedExperts | None]] = {
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_moe,
    "NemotronHForCausalLM": _nemotron_h,
}
_WITH_SHARED_EXPERT = frozenset(name for name in _FAMILIES if name.startswith(("Qwen3Next", "Qwen3_5Moe")))


def _count(config: Mapping[str, Any], read: ConfigReader, key: str) -> int:
    """transformers 5 writes 'num_local_experts' for every family, transformers 4 each family's own key."""
    other = "num_local_experts" if key == "num_experts" else "num_experts"
    return read.size(other if config.get(key) is None and config.get(other) is not None else key)


# Router option -> the values under which it changes nothing, and what it would ask for otherwise.
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "n_group": ((0, 1), "choosing experts from the best groups only (group-limited top-k)"),
    "topk_group": ((0, 1), "choosing experts from the best groups only (group-limited top-k)"),
    "n_shared_experts": ((0,), "experts that serve every token (shared experts)"),
    "num_shared_experts": ((0,), "experts that serve every token (shared experts)"),
    "shared_expert_intermediate_size": ((0,), "an expert that serves every token (shared expert)"),
    "routed_scaling_factor": ((1, 1.0), "scaling the sum of the experts"),
    "scoring_func": (("softmax",), "scores of another kind than softmax"),
    "topk_method": (("greedy",), "a choice by corrected scores (e_score_correction_bias) or by groups"),
    "use_routing_bias": ((False,), "a bias on the router's scores (e_score_correction_bias)"),
}


def _refuse_other_routers(config: Mapping[str, Any], known: frozenset[str]) -> None:
    """``known``: keys that the family's reader reads."""
    for key, (neutral, meaning) in _NEUTRAL.items():
        value = config.get(key)
        if key not in known and value is not None and value not in neutral:
            groups = f" (with 'topk_group' {config.get('topk_group')})" if key == "n_group" else ""
            raise ValueError(
                f"{key!r} is {value!r}{groups}, which asks for {meaning}; this is not implemented, only "
                f"{neutral[-1]!r} is: type --model with the folder of a checkpoint without it"
            )
