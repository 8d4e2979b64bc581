"""--speculative-config: what is taken, and what is refused by name with what to type instead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.config import ConfigError, EngineConfig, require_real_texts
from runtime.speculative_config import (
    METHODS,
    MISSING_METHODS,
    SpeculativeConfigError,
    merged_speculation,
    rates_of_length,
    speculative_config,
)

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SEVEN: dict[str, Any] = {**NGRAM, "num_speculative_tokens": 7}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
SCRIPTED = {"method": "synthetic", "num_speculative_tokens": 3, "synthetic_acceptance_rates": [0.9, 0.5, 0.5]}


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 4}, 1, 4),
    ],
)
def test_lookup_lengths_default_as_in_vllm(given: dict[str, int], low: int, high: int) -> None:
    config = speculative_config({**NGRAM, **given})
    assert (config.prompt_lookup_min, config.prompt_lookup_max, config.width) == (low, high, 5)
    assert speculative_config(str(config)) == config, "it prints as one may type it"


def test_rates_follow_from_a_length() -> None:
    assert rates_of_length(1, 3) == (0, 0, 0)
    assert rates_of_length(4, 3) == (1, 1, 1)
    assert rates_of_length(2.25, 3) == (1, 0.25, 0)
    config = speculative_config({**SCRIPTED, "synthetic_acceptance_rates": None, "synthetic_acceptance_length": 2.25})
    assert list(config.synthetic_acceptance_rates or ()) == [1, 0.25, 0]
    assert speculative_config(str(config)) == config
    assert config.label == "synthetic"
    both = {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}
    assert speculative_config(both).label == "ngram (synthetic)"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "is not JSON"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "method": "mtp"}', "has 'method' twice, 'ngram' and 'mtp'"),
        ("[1]", "must be a JSON object"),
        ({"num_speculative_tokens": 3}, 'names no method: type "method": "ngram"'),
        ({"model": "drafter", "num_speculative_tokens": 3}, 'no method: type "method": one of mtp, dflash, eagle3'),
        ({**NGRAM, "method": ["ngram"]}, "method is ['ngram'], but must be one of ngram, mtp"),
        (
            {**NGRAM, "num_spec_tokens": 3},
            "has 'num_spec_tokens', which is not known: there are method, model",
        ),
        ({**NGRAM, "num_speculative_tokens": 0}, 'is 0, but must be at least 1: type "num_speculative_tokens": 1'),
        ({**NGRAM, "num_speculative_tokens": 256}, "is 256, but must be at most 255"),
        ({**NGRAM, "num_speculative_tokens": True}, "is True, but must be a whole number"),
        ({**NGRAM, "num_speculative_tokens": "4"}, 'must be a whole number: type "num_speculative_tokens": 4'),
        ({**NGRAM, "num_speculative_tokens": 4.0}, 'must be a whole number: type "num_speculative_tokens": 4'),
        ({**NGRAM, "mixed_step_percent": "half"}, 'must be a whole number: type "mixed_step_percent": 0'),
        ({"method": "ngram"}, 'names no num_speculative_tokens: type "num_speculative_tokens": 4 in it, or'),
        ({**NGRAM, "method": "grep"}, f"method is 'grep', but must be one of {', '.join(METHODS)}"),
        ({**NGRAM, "token_map": 100}, "token_map is 100, but method 'ngram' has no head to make smaller"),
        ({**MTP, "token_map": 0}, "token_map is 0, but must be at least 1"),
        ({**MTP, "token_map": ""}, "token_map is '', but must be a file of token ids, or how many"),
        ({**MTP, "token_map": True}, "token_map is True, but must be a file of token ids"),
        ({**MTP, "token_map": [1]}, 'type "token_map": 32768'),
        ({**MTP, "model": 3}, "model is 3, but must be a text, the folder of your drafter"),
        ({**MTP, "model": ["drafter"]}, "model is ['drafter'], but must be a text"),
        ({**MTP, "model": ""}, "model is '', but must be a text"),
        ({**NGRAM, "model": "drafter"}, "method 'ngram' has no weights: leave model out"),
        (
            {**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "prompt_lookup_min is 4, but prompt_lookup_max is",
        ),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min is 0, but must be at least 1"),
        ({**SCRIPTED, "prompt_lookup_min": 1}, "method 'synthetic' looks nothing up"),
        ({**NGRAM, "disable_by_batch_size": -1}, "disable_by_batch_size is -1, but must be at least 0"),
        ({**SEVEN, "fewer_speculative_tokens": 2}, "is 2, but must be a list of whole numbers"),
        ({**SEVEN, "fewer_speculative_tokens": 2}, '(7): type "fewer_speculative_tokens": [3]'),
        ({**SEVEN, "fewer_speculative_tokens": [0]}, "is [0], but must be a list of whole numbers from 1 on"),
        ({**SEVEN, "fewer_speculative_tokens": [7, 3]}, '(7): type "fewer_speculative_tokens": [3]'),
        ({**SEVEN, "fewer_speculative_tokens": [2, 3, 3]}, '(7): type "fewer_speculative_tokens": [3, 2]'),
        ({**SEVEN, "fewer_speculative_tokens": [3, True]}, '(7): type "fewer_speculative_tokens": [3]'),
        ({**SEVEN, "num_speculative_tokens": 1, "fewer_speculative_tokens": [1]}, "(1): leave it out"),
        (
            {**NGRAM, "fewer_speculative_tokens": [1], "disable_by_batch_size": 4},
            "which goes by rows alone: leave one of them out",
        ),
        (
            {**MTP, "fewer_speculative_tokens": [1], "tree_size": 8},
            "trees have one size: leave one of them out",
        ),
        ({**NGRAM, "mixed_step_percent": 101}, "mixed_step_percent is 101, but must be at most 100"),
        ({**NGRAM, "synthetic_acceptance_length": 2}, "proposals are kept where the target draws them"),
        ({**MTP, "draft_sample_method": "gumbel"}, "is 'gumbel', but must be one of greedy, probabilistic"),
        ({**NGRAM, "draft_sample_method": "probabilistic"}, "method 'ngram' has no probabilities to draw from"),
        (
            {
                **MTP,
                "draft_sample_method": "probabilistic",
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 2,
            },
            "but rejection_sample_method 'synthetic'",
        ),
        ({**NGRAM, "rejection_sample_method": "typical"}, "must be one of standard, synthetic"),
        ({**SCRIPTED, "synthetic_acceptance_rates": None}, "and neither is given"),
        ({**SCRIPTED, "synthetic_acceptance_length": 2}, "and both are given"),
        ({**SCRIPTED, "synthetic_acceptance_rates": [0.5, 0.4]}, "type a list of 3"),
        ({**SCRIPTED, "synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "none larger"),
        ({**SCRIPTED, "synthetic_acceptance_rates": [1.5, 0.6, 0.1]}, "from 0 to 1"),
        (
            {**SCRIPTED, "synthetic_acceptance_rates": None, "synthetic_acceptance_length": 4.1},
            "is 4.1, but num_speculative_tokens is 3: type a number from 1 to 4",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(SpeculativeConfigError) as refused:
        speculative_config(given)
    assert said in str(refused.value)
    with pytest.raises(ConfigError):
        EngineConfig(model="m", device="cpu", speculative_config=given)


@pytest.mark.parametrize("method", MISSING_METHODS)
def test_methods_that_are_not_built_in_are_named(method: str) -> None:
    with pytest.raises(SpeculativeConfigError, match=rf"method '{method}' is not built in: there are ngram"):
        speculative_config({"method": method, "num_speculative_tokens": 3})


def test_plain_options_fill_in_and_may_not_contradict() -> None:
    plain = {"method": "ngram", "model": None, "num_speculative_tokens": None}
    assert merged_speculation('{"num_speculative_tokens": 4}', plain) == speculative_config(NGRAM)
    assert merged_speculation(None, dict.fromkeys(plain)) is None
    with pytest.raises(SpeculativeConfigError, match="says method 'ngram', but --speculative-method 'synthetic'"):
        merged_speculation(json.dumps(NGRAM), {**plain, "method": "synthetic"})


def test_drawn_proposals_and_deterministic_exclude_each_other() -> None:
    drawn = {**MTP, "draft_sample_method": "probabilistic"}
    assert str(speculative_config(drawn)).count("probabilistic") == 1
    with pytest.raises(ConfigError, match=r"deterministic is on.*leave out --deterministic, or draft_sample_method"):
        EngineConfig(model="m", device="cpu", speculative_config=drawn, deterministic=True)
    EngineConfig(model="m", device="cpu", speculative_config=drawn)


def test_scripted_acceptance_gives_nobody_a_text() -> None:
    config = EngineConfig(model="m", device="cpu", speculative_config=SCRIPTED)
    with pytest.raises(ConfigError, match=r"texts mean nothing, so generate refuses it: type '\{.*\}', or measure"):
        require_real_texts(config, "generate")
    require_real_texts(EngineConfig(model="m", device="cpu", speculative_config=NGRAM), "generate")


def test_who_scripts_the_acceptance_of_another_method_is_told_what_to_leave_out() -> None:
    scripted = {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}
    config = EngineConfig(model="m", device="cpu", speculative_config=scripted)
    with pytest.raises(ConfigError, match="serve refuses it: leave rejection_sample_method and the synthetic_ key"):
        require_real_texts(config, "serve")
