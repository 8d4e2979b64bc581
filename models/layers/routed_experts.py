"""RoutedExperts: the sparse layers of a mixture of experts, and what families share in reading it from config.json.

Knows: the keys of softmax routers and of sigmoid routers. Does not know: which family has which (models/families), the
rest of the model (models/config.py), or how experts are placed on ranks (parallel/layers/experts.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from models.config_reader import ConfigReader

EXPERT_KEYS: Final = """decoder_sparse_step mlp_only_layers moe_intermediate_size n_group n_shared_experts
    norm_topk_prob num_experts num_experts_per_tok num_local_experts num_shared_experts routed_scaling_factor
    scoring_func shared_expert_intermediate_size topk_group topk_method use_routing_bias"""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """``count`` experts a sparse layer, ``per_token`` of which serve a token; each is an MLP of ``intermediate_size``,
    with a gate where ``activation`` is "swiglu". ``renormalise``: the weights of the chosen ones are scaled to a sum of
    1. ``layers``: numbers of the layers that have experts, ascending; the others have one dense MLP, or none.
    ``shared_size``: intermediate size of an expert that serves every token; 0 for none. ``shared_gate``: its output is
    scaled by sigmoid(x w).

    ``scoring``: what the router makes of its logits. With "sigmoid" (DeepSeek-V3, Liu et al. 2024) a bias corrects the
    scores for the choice only, which is among the experts of the best ``top_groups`` of ``groups`` groups, and weights
    are multiplied by ``scale``; "corrected": likewise, with a softmax for the sigmoid (ERNIE 4.5).
    ``latent_size``: routed experts read and write vectors of this size, between two projections; 0: hidden states
    themselves.

    ``activation`` "geglu": gelu_mul in the place of silu_mul. ``beside_mlp``: next to a dense MLP, as Gemma 4's: its
    router norms the residual stream itself, and has a scale for each expert.

    ``limit``: gpt-oss's form of "swiglu", (clamp(up, -limit, limit) + 1) g sigmoid(1.702 g) with g = min(gate, limit).
    Experts and router have biases then.
    """

    count: int
    per_token: int
    intermediate_size: int
    renormalise: bool
    layers: tuple[int, ...]
    shared_size: int = 0
    shared_gate: bool = False
    activation: Literal["swiglu", "geglu", "relu2"] = "swiglu"
    scoring: Literal["softmax", "sigmoid", "corrected"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    latent_size: int = 0
    limit: float | None = None
    beside_mlp: bool = False


def softmax_experts(
    config: Mapping[str, Any], layers: tuple[int, ...], intermediate_size: int, *, count: str = "num_experts",
    per_token: int | None = None, renormalise: bool, shared_size: int = 0,
) -> RoutedExperts:  # fmt: skip
    """Of a router that takes a softmax over all experts. ``count``: the key that counts them; ``per_token``: where
    config.json does not say. A shared expert, if any, is gated. Raises ValueError naming the key, also for options of
    other routers."""
    read = ConfigReader(config)
    refuse_other_routers(config, {"shared_expert_intermediate_size"} if shared_size else set())
    return RoutedExperts(
        count=_count(config, read, count), per_token=read.size("num_experts_per_tok", per_token),
        intermediate_size=intermediate_size, renormalise=renormalise, layers=layers, shared_size=shared_size,
        shared_gate=shared_size > 0,
    )  # fmt: skip


def sigmoid_experts(
    config: Mapping[str, Any], layers: tuple[int, ...], intermediate_size: int, *, count: str = "n_routed_experts",
    activation: Literal["swiglu", "relu2"] = "swiglu", shared_size: int = 0, latent_size: int = 0,
) -> RoutedExperts:  # fmt: skip
    """Of a router as DeepSeek-V3's; a shared expert has no gate. Raises ValueError naming the key."""
    read = ConfigReader(config)
    experts, per_token = _count(config, read, count), read.size("num_experts_per_tok")
    groups, top_groups = read.size("n_group", 1), read.size("topk_group", 1)
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise ValueError(
            f"'n_group' is {groups}, but {experts} experts do not make so many groups of two (group-limited top-k)"
        )
    if top_groups > groups or top_groups * (experts // groups) < per_token:
        raise ValueError(
            f"'topk_group' is {top_groups} of 'n_group' {groups} groups of {experts // groups} experts, among which "
            f"'num_experts_per_tok' {per_token} cannot be chosen"
        )
    return RoutedExperts(
        count=experts, per_token=per_token, intermediate_size=intermediate_size,
        renormalise=read.flag("norm_topk_prob", default=True), layers=layers, activation=activation, scoring="sigmoid",
        groups=groups, top_groups=top_groups, scale=read.number("routed_scaling_factor", 1.0), shared_size=shared_size,
        latent_size=latent_size,
    )  # fmt: skip


def _count(config: Mapping[str, Any], read: ConfigReader, key: str) -> int:
    """transformers 5 writes 'num_local_experts' for every family, transformers 4 each family's own key."""
    names = (key, *(other for other in ("num_local_experts", "num_experts") if other != key))
    return read.size(next((name for name in names if config.get(name) is not None), key))


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


def refuse_other_routers(config: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Options of other routers than a plain softmax. ``known``: keys that the family's reader reads."""
    for key, (neutral, meaning) in _NEUTRAL.items():
        value = config.get(key)
        if key not in known and value is not None and value not in neutral:
            groups = f" (with 'topk_group' {config.get('topk_group')})" if key == "n_group" else ""
            raise ValueError(
                f"{key!r} is {value!r}{groups}, which asks for {meaning}; this is not implemented, only "
                f"{neutral[-1]!r} is: type --model with the folder of a checkpoint without it"
            )
