"""What an EAGLE-3 head's config says, and what of it is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.drafters.draft_config import Eagle3Config
from models.registry import config_from_dict, config_from_folder
from tests.models.drafters.test_drafters import TARGET
from tests.models.drafters.tiny_drafters import eagle3_config

KEY = "eagle_aux_hidden_state_layer_ids"


def test_layers_that_are_read_where_the_config_names_none() -> None:
    """SGLang and vLLM capture what goes into layers 2, 18 and 33 of 36."""
    config = Eagle3Config.from_folder(Path("models/shapes/qwen3-8b/eagle3"))
    assert (config.layers_of(36), config.features, config.draft_vocab_size) == ((1, 17, 32), 3, 32000)
    config.check_target(config_from_folder("models/shapes/qwen3-8b"))


def test_the_two_keys_of_layers_count_differently() -> None:
    assert Eagle3Config.from_dict(eagle3_config(eagle_config={KEY: [1, 17, 32]})).layer_ids == (1, 17, 32)
    published = {KEY: [1, 17, 32], "use_last_layernorm": True, "use_input_layernorm_in_first_layer": True}
    assert Eagle3Config.from_dict(eagle3_config(eagle_config=published)).layer_ids == (1, 17, 32)
    exported = published | {"parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1}
    assert Eagle3Config.from_dict(eagle3_config(eagle_config=exported)).layer_ids == (1, 17, 32)
    assert Eagle3Config.from_dict(eagle3_config(eagle_config=exported | {KEY: []})).layer_ids is None
    assert Eagle3Config.from_dict(eagle3_config(eagle_config=None, **{KEY: [2, 18, 33]})).layer_ids == (1, 17, 32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"must be \['LlamaForCausalLMEagle3'\].*LlamaForCausalLM"),
        ({"architectures": ["Eagle3Speculator"]}, "Eagle3Speculator"),
        ({"num_hidden_layers": 2}, "'num_hidden_layers' is 2"),
        ({"target_hidden_size": 48}, "'target_hidden_size' is 48, but 'hidden_size' 24"),
        ({"norm_before_fc": True}, "'norm_before_fc' is True"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is True"),
        ({"sliding_window": 512}, "'sliding_window' is 512"),
        ({"is_causal": False}, "'is_causal' is false"),
        ({"logit_scale": 0.5}, "'logit_scale' is 0.5"),
        ({"quantization_config": {"bits": 4}}, "'quant_method' None is not supported"),
        ({"draft_vocab_size": 38}, "'draft_vocab_size' is 38, but 'vocab_size' 37"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "'use_aux_hidden_state' is false"),
        ({"eagle_config": {"use_last_layernorm": False}}, "'use_last_layernorm' is false"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "'use_mtp_layernorm' is True"),
        ({"eagle_config": {"parallel_draft_step": 2}}, "'parallel_draft_step' is 2"),
        ({"eagle_config": {"wings": 2}}, "not understood: wings"),
        ({"eagle_config": {KEY: [1, 0]}}, "must ascend"),
        ({KEY: [1, 2]}, "stands at the top level"),
        ({"eagle_config": None, KEY: [0, 2]}, r"the embedding \(0\) as a feature"),
    ],
    ids=str,
)
def test_configurations_that_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Eagle3Config.from_dict(eagle3_config(**changes))


@pytest.mark.parametrize(
    ("changes", "of_target", "values"),
    [
        ({}, {"vocab_size": 40}, ["vocab_size", "37", "40"]),
        ({}, {"hidden_size": 32}, ["hidden_size", "24", "32"]),
        ({"eagle_config": {KEY: [0, 2]}}, {}, ["[0, 2]", "2 layers, 0 to 1"]),
        ({"eagle_config": None}, {"layers": 4}, ["[1, 1, 0]", "4 layers"]),
    ],
    ids=str,
)
def test_heads_of_other_targets_are_refused_with_both_values(
    changes: dict[str, Any], of_target: dict[str, Any], values: list[str]
) -> None:
    with pytest.raises(ValueError, match="made for this target") as error:
        Eagle3Config.from_dict(eagle3_config(**changes)).check_target(replace(config_from_dict(TARGET), **of_target))
    assert all(value in str(error.value) for value in values), str(error.value)
