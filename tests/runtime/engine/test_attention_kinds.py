"""Windows, sinks and experts of their families on the CPU twin: no bit of an answer depends on how it was computed.

In chunks, after prefix hits and evictions, from draft tokens and trees; by kernels of the deterministic mode. Windows
are shorter than prompts, and than a tree.
"""

from __future__ import annotations

from typing import Any

import pytest

from models.kv_group import FP8
from runtime.schedule.speculation import Speculation
from runtime.speculate.tree import branching
from tests.plant import invariant_kernels
from tests.runtime.engine.conftest import long
from tests.runtime.engine.replay_proposer import script_of
from tests.runtime.engine.rig import rig
from tests.runtime.engine.same_bits import CONDITIONS, answers, difference, plainly, questions
from tests.runtime.engine.test_trees import KnownAnswers

KINDS = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], "sliding_window": 6, "swiglu_limit": 0.5}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma 3": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 6, "layer_types": KINDS}
    | {"query_pre_attn_scalar": 20, "rope_parameters": None},
    "gemma 4": {"architectures": ["Gemma4ForCausalLM"], "sliding_window": 6, "layer_types": KINDS}
    | {"hidden_size_per_layer_input": 0, "rope_parameters": None, "global_head_dim": 32}
    | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 5.0},
}


def exact(model: str) -> dict[str, Any]:
    return {"kernels": invariant_kernels(), "shape": MODELS[model]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "conditions"),
    [
        ("gpt-oss", (2,)),
        ("gemma 4", (4,)),
        *(long(model, (2, 3, 4)) for model in MODELS),
    ],
)
def test_chunks_prefix_hits_and_evictions_change_no_bit(model: str, conditions: tuple[int, ...]) -> None:
    requests = questions(1)
    expected = plainly(rig, requests, **exact(model))
    for name, limits, counter in (CONDITIONS[condition] for condition in conditions):
        with rig(**(limits | exact(model))) as engine:
            found = answers(engine, requests)
            assert engine.counters[counter] > 0, f"{name}: nothing was tried"
        told = difference(found, expected)
        assert (told.flips, told.bits) == (0, 0), f"{name}: {told}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "condition"), [("gpt-oss", 3), *(long(model, n) for model in MODELS for n in (2, 4))]
)
def test_a_float8_cache_changes_no_bit_either(model: str, condition: int) -> None:
    requests, given = questions(1), exact(model) | {"kv_dtype": FP8}
    expected = plainly(rig, requests, **given)
    name, limits, counter = CONDITIONS[condition]
    with rig(**(limits | given)) as engine:
        assert {layer.dtype for layer in engine.executor.pool.paged} == {FP8}
        found = answers(engine, requests)
        assert engine.counters[counter] > 0, f"{name}: nothing was tried"
    told = difference(found, expected)
    assert (told.flips, told.bits) == (0, 0), f"{name}: {told}"


@pytest.mark.slow
@pytest.mark.parametrize("model", [*map(long, ("mistral", "gemma 3", "gemma 4")), "gpt-oss"])
def test_answers_from_trees_are_plain_answers(model: str) -> None:
    requests = questions(1, count=3, longest=20)
    expected = plainly(rig, requests, **exact(model))
    script = script_of(requests, expected.tokens)
    how: dict[str, Any] = {"proposer": branching(lambda parts: KnownAnswers(parts, script), 3), "tree": 7}
    rule = Speculation(4, mixed_percent=100)
    with rig(depth=2, rows=3, speculation=rule, blocks=60, max_prefill_tokens=12, **how, **exact(model)) as engine:
        found = answers(engine, requests)
        assert engine.counters["spec_num_accepted_tokens"] > engine.counters["spec_num_drafts"] / 2
    told = difference(found, expected)
    assert (told.flips, told.bits) == (0, 0), told


@pytest.mark.parametrize("model", ["mistral", *(long(model) for model in [*MODELS][1:])])
def test_a_narrower_window_gives_other_answers(model: str) -> None:
    requests = questions(1, count=2)
    expected = plainly(rig, requests, **exact(model))
    narrow = exact(model) | {"shape": MODELS[model] | {"sliding_window": 4}}
    assert difference(plainly(rig, requests, **narrow), expected).bits > 0
