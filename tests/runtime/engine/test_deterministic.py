"""The deterministic mode on the CPU twin: a request's tokens and log-probabilities are its own, in every bit.

Against the plainest engine, which runs one request after the other. A mutant shows that the comparison can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from models.ops.select import select_kernels
from parallel.layers.weight import Weight
from runtime.config import ConfigError, EngineConfig
from runtime.execute.proposer import Proposed
from runtime.execute.slot_state import SlotColumns
from runtime.model_checks import missing_invariance, missing_operations, require_invariance
from runtime.schedule.request import Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.tree import branching
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_nemotron import NEMOTRON
from tests.models.toy_hybrid import ARCHITECTURE
from tests.plant import Op, invariant_kernels, kernels_with, reference_kernels
from tests.runtime.engine import rig as over
from tests.runtime.engine.conftest import long
from tests.runtime.engine.prompt_ranks import Scores, prompts
from tests.runtime.engine.replay_proposer import script_of
from tests.runtime.engine.rig import rig, run
from tests.runtime.engine.same_bits import CONDITIONS, PLAIN, answers, difference, plainly, questions
from tests.runtime.engine.settings import HYBRIDS
from tests.runtime.engine.tensor_ranks import MetCollectives, tensor_rig
from tests.runtime.engine.test_experts import EXPERTS
from tests.runtime.engine.test_mixed import last_layer_for_draws
from tests.runtime.engine.test_trees import KnownAnswers

HYBRID = "Mamba-2, sigmoid routers"  # and experts in a block of their own, behind which no layer leaves anything out
SHAPES: dict[str, dict[str, Any]] = {"dense": {}, "sparse": EXPERTS, HYBRID: HYBRIDS["nemotron-h"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "conditions"),
    [
        ("sparse", (CONDITIONS[0], CONDITIONS[2], CONDITIONS[4])),
        (HYBRID, CONDITIONS[3:4]),
        *(long(shape, CONDITIONS) for shape in SHAPES),
    ],
)
def test_nothing_that_others_do_changes_a_bit(
    shape: str, conditions: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch sizes, depths, chunks, mixed steps, prefix hits, evictions, and what the last layer leaves out."""
    model: dict[str, Any] = {"shape": SHAPES[shape], "kernels": invariant_kernels()}
    requests = questions(1)
    expected = plainly(rig, requests, **model)
    taken = last_layer_for_draws(monkeypatch)
    for number, (name, limits, counter) in enumerate(conditions):
        buckets = (16, 32, 48, 64) if number % 2 and limits.get("max_prefill_tokens", 64) == 64 else ()
        with rig(**(limits | model), prefill_buckets=buckets) as engine:
            found = answers(engine, requests)
            assert engine.counters[counter] > 0, f"{name}: nothing was tried"
        told = difference(found, expected)
        assert (told.flips, told.bits) == (0, 0), f"{name}: {told}"
        assert told.compared > 80
    assert any(taken) == (shape != HYBRID)


@pytest.mark.parametrize(
    "shape", [{}, long(FAMILIES["qwen3.5"]), long(NEMOTRON)], ids=["attention", "gated delta nets", "Mamba-2"]
)
def test_trees_of_guesses_change_no_bit(shape: dict[str, object]) -> None:
    """A node's keys, and its state, are those of the path down to it; also beside chunks, where there is no state."""
    model: dict[str, Any] = {"shape": shape, "kernels": invariant_kernels()}
    requests = questions(1, count=3, longest=20)
    expected = plainly(rig, requests, **model)
    script = script_of(requests, expected.tokens)
    how: dict[str, Any] = {"proposer": branching(lambda parts: KnownAnswers(parts, script), 3), "tree": 7}
    rule = Speculation(4, mixed_percent=0 if shape else 100)
    with rig(depth=2, rows=3, speculation=rule, blocks=60, max_prefill_tokens=12, **how, **model) as engine:
        found = answers(engine, requests)
        assert engine.counters["mixed_steps"] > engine.counters.get("speculation_off{mixed}", 0) or shape
        assert engine.counters["spec_num_accepted_tokens"] > engine.counters["spec_num_drafts"] / 2
    told = difference(found, expected)
    assert (told.flips, told.bits) == (0, 0), told
    assert told.compared > 25


class ChainOfKnownAnswers(KnownAnswers):
    """What seems likeliest at each place: right in half of them."""

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return Proposed(self.candidates(rows_B, columns, count, 1).ids_BQC[:, :, 0])


def chains_change_no_bit(over: Callable[..., Any], requests: Sequence[Request], width: int, **limits: Any) -> None:
    """Of ``width`` tokens, which stand alone and beside chunks of prompts, on engines that ``over(**limits)`` makes."""
    expected = plainly(over, requests, **limits)
    proposer = partial(ChainOfKnownAnswers, script=script_of(requests, expected.tokens))
    limits = {"depth": 2, "rows": 3, "blocks": 80, "max_prefill_tokens": 8 + 2 * width} | limits
    with over(proposer=proposer, speculation=Speculation(width, mixed_percent=100), **limits) as engine:
        found = answers(engine, requests)
        counters = engine.counters
    assert counters["spec_num_accepted_tokens"] > counters["spec_num_drafts"] / 2
    assert counters["mixed_steps"] > 0 == counters.get("speculation_off{mixed}", 0)
    told = difference(found, expected)
    assert (told.flips, told.bits) == (0, 0), told
    assert told.compared > 25


CHAINS: dict[str, dict[str, object]] = {"attention": {}, "gated delta nets": FAMILIES["qwen3.5"], "Mamba-2": NEMOTRON}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "width"),
    [("attention", 16), ("Mamba-2", 4), long("gated delta nets", 4), *(long(name, 16) for name in [*CHAINS][1:])],
)
def test_chains_of_guesses_change_no_bit(shape: str, width: int) -> None:
    requests = questions(1, count=3, longest=20)
    chains_change_no_bit(rig, requests, width, shape=CHAINS[shape], kernels=invariant_kernels())


def test_two_ranks_against_themselves() -> None:
    requests = questions(2, 3, longest=20)
    model: dict[str, Any] = {"kernels": invariant_kernels()}
    with tensor_rig(2, depth=0, rows=1, mixed=None, prefix_caching=False, **model) as engine:
        expected = answers(engine, requests)
    several: tuple[dict[str, Any], ...] = ({"depth": 4, "rows": 5, "max_prefill_tokens": 16},)
    for limits in several:
        with tensor_rig(2, **limits, **model) as engine:
            found = answers(engine, requests)
        assert difference(found, expected).bits == 0
        assert found.tokens == expected.tokens


def test_scores_of_prompts_too() -> None:
    """However a prompt is cut, and whatever it shares a step with."""
    found = []
    for limits in (PLAIN, {"depth": 2, "max_prefill_tokens": 24}, {"depth": 0, "max_prefill_tokens": 7, "mixed": None}):
        scores = Scores()
        with rig(kernels=invariant_kernels(), **limits) as engine:
            run(engine, prompts(), watch=scores)
        found.append(scores.by_request)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 4  # of six, one asks for nothing and one has a single token


def splits_by_rows(linear: Op, x_TN: Tensor, weight: Weight) -> Any:
    """The mutant: for few rows a sum over K in two halves, as the fastest kernels of a GPU have it."""
    if x_TN.shape[0] > 1:
        return linear(x_TN, weight)
    first, second = weight.data.tensor_split(2, 1)
    half = first.shape[1]
    return F.linear(x_TN[:, :half], first, weight.bias) + F.linear(x_TN[:, half:], second)


def test_a_split_that_depends_on_the_rows_is_caught() -> None:
    requests = questions(1, 4)
    kernels = kernels_with(invariant_kernels(), linear=splits_by_rows)
    expected = plainly(rig, requests, kernels=kernels)
    with rig(depth=2, kernels=kernels) as engine:
        found = answers(engine, requests)
    assert difference(found, expected).bits > 10


# -- who may take part -------------------------------------------------------------------------------------------------


def test_what_is_not_batch_invariant_is_named() -> None:
    assert missing_operations(invariant_kernels()) == []
    assert missing_operations(reference_kernels(), sparse=False, recurrent=False) == [
        "rms_norm",
        "silu_mul",
        "linear",
        "rope_and_cache",
        "decode_attention",
        "prefill_attention",
        "relu2",
        "vocab_rows",
    ]
    with rig(kernels=invariant_kernels()) as engine:
        model = engine.executor._model
        assert missing_invariance(model) == []
        require_invariance(model)
        model.collectives = MetCollectives.__new__(MetCollectives)
        with pytest.raises(ConfigError, match="sums between ranks by MetCollectives"):
            require_invariance(model)
    with (
        rig() as engine,
        pytest.raises(ConfigError, match=r"linear of the reference kernels.*leave out --deterministic"),
    ):
        require_invariance(engine.executor._model)


def test_a_layer_that_does_not_declare_it_is_named(every_model: str) -> None:
    with rig(kernels=invariant_kernels()) as engine:
        named = missing_invariance(engine.executor._model)
    toy = over.TINY["architectures"] == [ARCHITECTURE]
    assert named == (["layers of RunningSum"] if toy else []), every_model


def test_options_that_do_not_go_together_are_refused() -> None:
    assert EngineConfig(model="m", device="cpu", deterministic=True).deterministic
    with pytest.raises(ConfigError, match="--data-parallel-size or --deterministic"):
        EngineConfig(model="m", device="cpu", deterministic=True, data_parallel=2)
    with pytest.raises(ConfigError, match="--prefill-attention or --deterministic"):
        EngineConfig(model="m", device="cpu", deterministic=True, prefill_attention="flashinfer")
    plain, mode = (EngineConfig(model="m", device="cpu", deterministic=on) for on in (False, True))
    assert "deterministic=True" in mode.describe()
    assert "deterministic=False" in plain.describe()


def test_the_mode_selects_its_kernels() -> None:
    import torch

    assert select_kernels("cpu", torch.float32, 64, deterministic=True).name == "deterministic reference"
