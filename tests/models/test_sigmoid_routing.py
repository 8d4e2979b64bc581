"""Sigmoid routers with groups and a correction bias, against transformers' DeepSeek-V3 and Nemotron-H; configs of the
latter that ask for what is not there.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from models.block_pattern import Mamba2Shape
from models.config import ModelConfigError
from models.kernels.sigmoid_routing import SigmoidRouting
from models.layers.routed_experts import RoutedExperts
from models.registry import config_from_dict, config_from_folder
from parallel.layers.weight import Weight
from tests.models.tiny_checkpoint import build
from tests.models.tiny_nemotron import NEMOTRON
from tests.plant import Kernels, invariant_kernels, reference_kernels
from tests.runtime.engine.rig import TINY

EXPERTS, HIDDEN, TOKENS = 16, 20, 60
HERE = torch.arange(EXPERTS, dtype=torch.int32)


def their_router(family: str, routing: SigmoidRouting) -> Any:
    from transformers import DeepseekV3Config, NemotronHConfig  # takes seconds, so not at collection
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter

    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": routing.choices,
        "n_group": routing.groups,
        "topk_group": routing.top_groups,
        "norm_topk_prob": routing.renormalise,
        "routed_scaling_factor": routing.scale,
    }
    if family == "deepseek":
        made: Any = DeepseekV3TopkRouter(DeepseekV3Config(**settings))
    else:
        made = NemotronHTopkRouter(NemotronHConfig(layers_block_type=["moe"], **settings))
    torch.nn.init.normal_(made.weight)
    torch.nn.init.normal_(made.e_score_correction_bias, std=0.3)
    return made


@torch.inference_mode()
def test_a_softmax_with_a_bias_for_the_choice() -> None:
    from transformers import Ernie4_5_MoeConfig
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter

    torch.manual_seed(1)
    theirs = Ernie4_5_MoeTopKRouter(Ernie4_5_MoeConfig(hidden_size=HIDDEN, moe_num_experts=EXPERTS, moe_k=5))
    bias = theirs.moe_statics.e_score_correction_bias
    torch.nn.init.normal_(theirs.weight, std=0.3)
    torch.nn.init.normal_(bias, std=0.1)
    x, real, routing = torch.randn(TOKENS, HIDDEN), torch.ones(TOKENS, dtype=torch.bool), SigmoidRouting(5, True)
    _, expected, ids = theirs(x)
    logits = reference_kernels().router_logits(x, Weight.of(theirs.weight))
    found = reference_kernels().route_sigmoid(logits, bias[0], replace(routing, softmax=True), HERE, real)
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(found[1].long(), ids)
    plain = logits.topk(5).indices
    assert bool((plain.sort(-1).values != ids.sort(-1).values).any()), "the bias decides"


@pytest.mark.parametrize("family", ["deepseek", "nemotron"])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (8, 3), (2, 2)])
@pytest.mark.parametrize("renormalise", [True, False])
@torch.inference_mode()
def test_weights_and_choices_are_those_of_transformers(
    family: str, groups: int, top_groups: int, renormalise: bool
) -> None:
    torch.manual_seed(groups)
    routing = SigmoidRouting(5, renormalise, groups, top_groups, 2.5)
    theirs = their_router(family, routing)
    x, real = torch.randn(TOKENS, HIDDEN), torch.ones(TOKENS, dtype=torch.bool)
    _, expected, ids = theirs(x)
    kernels = reference_kernels()
    logits = kernels.router_logits(x, Weight.of(theirs.weight))
    weights, chosen = kernels.route_sigmoid(logits, theirs.e_score_correction_bias, routing, HERE, real)
    mine, order = chosen.long().argsort(-1), ids.argsort(-1)
    assert torch.equal(chosen.gather(1, mine).long(), ids.gather(1, order))
    torch.testing.assert_close(weights.gather(1, mine), expected.gather(1, order))
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int32)
    assert bool((weights.sort(-1, descending=True).values != weights).any()), "the bias decides the order"


def test_masked_tokens_and_other_ranks_experts() -> None:
    torch.manual_seed(0)
    routing, logits, bias = SigmoidRouting(3, True, 4, 2), torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS)
    real = torch.arange(TOKENS) % 4 != 1
    local, load = torch.where(HERE % 2 == 0, HERE // 2, -1), torch.zeros(EXPERTS, dtype=torch.int64)
    everything, nothing = reference_kernels(), torch.full_like(real, False)
    _, ids = everything.route_sigmoid(logits, bias, routing, HERE, ~nothing)
    logits[~real] = float("nan")
    _, chosen = everything.route_sigmoid(logits, bias, routing, local, real, load)
    assert torch.equal(chosen, torch.where(real[:, None], local[ids.long()], -1))
    assert torch.equal(load, torch.bincount(ids[real].flatten(), minlength=EXPERTS))


def test_equal_scores_choose_the_lower_ids() -> None:
    """Of groups and of experts: every rank chooses the same."""
    routing, real = SigmoidRouting(3, True, 4, 2), torch.ones(1, dtype=torch.bool)
    _, chosen = reference_kernels().route_sigmoid(torch.zeros(1, EXPERTS), torch.zeros(EXPERTS), routing, HERE, real)
    assert chosen.tolist() == [[0, 1, 2]]
    bias = torch.zeros(EXPERTS)
    bias[9] = 1.0
    _, chosen = reference_kernels().route_sigmoid(torch.zeros(1, EXPERTS), bias, routing, HERE, real)
    assert chosen.tolist() == [[9, 0, 1]]


def test_logits_are_not_rounded_to_the_dtype_of_activations() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(9, 64).bfloat16(), torch.randn(EXPERTS, 64).bfloat16()
    found = reference_kernels().router_logits(x, Weight.of(weight))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", [reference_kernels(), invariant_kernels()])
def test_experts_without_a_gate_follow_the_formula(kernels: Kernels) -> None:
    torch.manual_seed(2)
    x, up, down = torch.randn(5, 6), torch.randn(3, 8, 6), torch.randn(3, 6, 8)
    weights, chosen = torch.rand(5, 2), torch.tensor([[0, 1], [2, -1], [-1, -1], [1, 2], [2, 0]])
    expected = torch.zeros(5, 6)
    for t, c in product(range(5), range(2)):
        if (g := int(chosen[t, c])) >= 0:
            expected[t] += weights[t, c] * (down[g] @ (up[g] @ x[t]).clamp(min=0).square())
    found = kernels.expert_mlp(x, Weight.of(up), Weight.of(down), weights, chosen.int(), all_experts=3)
    torch.testing.assert_close(found, expected)


# -- what config.json says ----------------------------------------------------------------------------------------


def nemotron(**changes: object) -> dict[str, Any]:
    return {**TINY, **NEMOTRON, **changes}


def test_blocks_experts_and_mamba_are_read() -> None:
    config = config_from_dict(nemotron())
    assert config.blocks == ("mamba", "moe", "attention", "mamba", "mlp", "moe")
    assert config.mamba == Mamba2Shape(
        heads=4, head_dim=12, groups=2, state_size=10, taps=4, conv_bias=True, layers=(0, 3)
    )
    expected = RoutedExperts(
        count=8,
        per_token=3,
        intermediate_size=24,
        renormalise=True,
        layers=(1, 5),
        shared_size=48,
        activation="relu2",
        scoring="sigmoid",
        groups=4,
        top_groups=2,
        scale=1.5,
    )
    assert config.experts == expected
    words = ["mamba", "moe", "attention", "mamba", "mlp", "moe"]
    assert config_from_dict(nemotron(hybrid_override_pattern=None, layers_block_type=words)) == config
    of_transformers_5 = ["linear_attention", "moe", "full_attention", "linear_attention", "mlp", "moe"]
    assert config_from_dict(nemotron(hybrid_override_pattern=None, layers_block_type=of_transformers_5)) == config
    for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], [0.0, 1e30]):
        assert config_from_dict(nemotron(time_step_limit=limit)) == config
    assert config_from_dict(TINY).blocks == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid_override_pattern": "MEX*-E"}, ["'hybrid_override_pattern'", "'X' of block 2"]),
        ({"hybrid_override_pattern": None}, ["'hybrid_override_pattern' is missing"]),
        ({"hybrid_override_pattern": "ME*"}, ["'num_hidden_layers' is 6", "3 blocks"]),
        ({"hybrid_override_pattern": 7}, ["'hybrid_override_pattern'", "string"]),
        ({"hybrid_override_pattern": "E-E-EE"}, ["experts but neither attention nor Mamba-2"]),
        ({"mamba_num_heads": 5}, ["'mamba_num_heads' 5", "'n_groups' 2"]),
        ({"ssm_state_size": None}, ["'ssm_state_size' is missing"]),
        ({"mlp_hidden_act": "silu"}, ["'mlp_hidden_act' is 'silu'", "'relu2'"]),
        ({"mamba_ssm_cache_dtype": "bfloat16"}, ["'mamba_ssm_cache_dtype'", "'float32'"]),
        ({"time_step_limit": [0.001, 0.1]}, ["'time_step_limit'", "Infinity"]),
        ({"use_bias": True}, ["'use_bias' is True"]),
        ({"attention_bias": True}, ["'attention_bias' is True"]),
        ({"residual_in_fp32": True}, ["'residual_in_fp32' is True"]),
        ({"sliding_window": 128}, ["'sliding_window' is 128"]),
        ({"n_shared_experts": 2}, ["'n_shared_experts' is 2"]),
        ({"n_group": 3}, ["'n_group' is 3", "8 experts"]),
        ({"n_group": 8}, ["'n_group' is 8", "groups of two"]),
        ({"topk_group": 1}, ["'topk_group' is 1 of 'n_group' 4", "'num_experts_per_tok' 3"]),
        ({"topk_group": 5}, ["'topk_group' is 5"]),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(nemotron(**changes)))
    with pytest.raises(ModelConfigError) as caught:
        config_from_folder(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_group_sizes_are_named() -> None:
    config = config_from_dict(nemotron())
    assert {build(config, 0, size).config.layers for size in (1, 2, 4)} == {6}
    three = config_from_dict(nemotron(mamba_num_heads=6, n_groups=3))
    with pytest.raises(ValueError, match=r"Mamba-2 heads 6 .* over 2 .* out of \[1\]"):
        build(three, 0, 2)
