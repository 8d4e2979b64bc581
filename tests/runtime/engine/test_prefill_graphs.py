"""Prefill steps that are replayed, padded to a bucket: they give what steps launched one by one give, at any depth.

On the twin a graph is the closure that was captured, so these tests cover everything but the kernels: what is padded,
what a replay reads anew, and in which order. Attention fills the padding's rows with NaN, which reaches nobody.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.registry import ARCHITECTURES
from runtime.engine import Engine
from runtime.execute import launch_spec
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.step.prefill_graphs import Lengths, PrefillGraphs, prefill_buckets
from runtime.schedule.config import MixedSteps
from tests.models.toy_hybrid import ARCHITECTURE, ToyHybrid
from tests.runtime.engine.exact_kernels import ExactKernels
from tests.runtime.engine.prompt_ranks import Scores, prompts
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.serial_answers import serial_answers
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_depths import DEPTHS, mixture, outcome
from tests.runtime.engine.test_mixed import MIXED, SHAPES
from tests.runtime.engine.test_prompt_logprobs import check
from tests.selection import covering

BUCKETS = (16, 40, 64)
EXACT: dict[str, Any] = {"kernels": ExactKernels(), "dtype": torch.float64, "mixed": None}


def replays(engine: Engine) -> dict[int, int]:
    """Counts, from here on, the replays of each bucket."""
    counts = dict.fromkeys(engine.executor.prefill.graphs._graphs, 0)
    launch = engine.executor.prefill.graphs.launch

    def counted(spec: LaunchSpec, lengths: Lengths) -> None:
        counts[spec.padded_tokens] += 1
        launch(spec, lengths)

    engine.executor.prefill.graphs.launch = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize(("depth", "model"), covering((0, *DEPTHS), [*SHAPES], at_once=1))
def test_replayed_steps_give_the_tokens_of_launched_ones(
    depth: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)
    requests, shape = mixture(depth), SHAPES[model]
    launched = serial_answers(requests, shape=shape, exact=True, mixed=None)
    device = TwinDevice(jitter_s=0.0005, seed=depth)
    with rig(depth=depth, shape=shape, prefill_buckets=BUCKETS, device=device, **EXACT) as engine:
        counts = replays(engine)
        assert outcome(run(engine, requests)) == launched
        assert engine.counters["chained_steps"] == (engine.counters["steps"] - 1 if depth else 0)
        assert sum(counts.values()) == engine.counters["prefill_steps"]
    assert sum(map(bool, counts.values())) > 1, f"steps of one size show little: {counts}"


@pytest.mark.parametrize(("model", "mixed"), covering([*SHAPES], [None, MIXED], at_once=1))
def test_steps_with_split_keys_give_the_same_tokens(
    model: str, mixed: MixedSteps | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)
    requests, shape = mixture(2), SHAPES[model]
    launched = serial_answers(requests, shape=shape, exact=True, mixed=None)
    monkeypatch.setattr(launch_spec, "LONG_PREFIX", 4)
    with rig(depth=2, shape=shape, prefill_buckets=BUCKETS, **{**EXACT, "mixed": mixed}) as engine:
        split: list[bool] = []
        launch = engine.executor.prefill.graphs.launch

        def noted(spec: LaunchSpec, lengths: Lengths) -> None:
            split.append(spec.split_keys)
            launch(spec, lengths)

        engine.executor.prefill.graphs.launch = noted  # type: ignore[method-assign]
        assert outcome(run(engine, requests)) == launched
    assert sum(split) > 3
    assert not all(split)


def test_steps_beyond_the_last_bucket_are_launched() -> None:
    requests = mixture(1)
    launched = serial_answers(requests, exact=True, mixed=None)
    with rig(prefill_buckets=BUCKETS[:2], **EXACT) as engine:
        counts = replays(engine)
        assert outcome(run(engine, requests)) == launched
        steps, eager = engine.counters["prefill_steps"], engine.counters["fallbacks{eager_prefill_beyond_buckets}"]
    assert 0 < sum(counts.values()) < steps
    assert sum(counts.values()) + eager == steps


def test_steps_that_score_prompts_are_launched() -> None:
    """They need every token's last layer; others between them are replayed."""
    requests = [*prompts(seed=0), *(request(100 + i, range(i, i + 30)) for i in range(9))]
    with rig(prefill_buckets=BUCKETS, rows=4, mixed=None) as engine:
        counts, scores = replays(engine), Scores()
        run(engine, requests, watch=scores)
        assert 0 < sum(counts.values()) < engine.counters["prefill_steps"]
        eager = engine.counters["prefill_steps"] - sum(counts.values())
        assert engine.counters["fallbacks{eager_prefill_scored}"] == eager
        assert [name for name in engine.counters if name.startswith("fallbacks")] == ["fallbacks{eager_prefill_scored}"]
    for one in requests:
        if one.sampling.prompt_logprobs is not None:
            check(one, scores.by_request.get(one.request_id, {}))  # of a single token there is nothing to say


def test_every_rank_of_a_group_replays() -> None:
    ranks = 2
    requests = mixture(3)
    with rig(depth=0, **EXACT) as engine:
        alone = outcome(run(engine, requests))
    prepared: list[dict[int, int]] = []
    with tensor_rig(
        ranks, prefill_buckets=BUCKETS, prepare=lambda e: prepared.append(replays(e)), depth=2, **EXACT
    ) as engine:
        together = outcome(run(engine, requests))
    assert together == alone
    assert len(prepared) == ranks
    assert prepared[0] == prepared[1]
    assert any(prepared[0].values())


def test_without_attention_for_it_on_every_rank_nothing_is_captured() -> None:
    """``agree_min`` says what the least able rank can do."""
    with rig(prefill_buckets=BUCKETS) as engine:
        role = engine.executor.prefill
        assert role.graphs.captured == 2 * len(BUCKETS), "those with split keys, too"
        parts = replace(role._parts, config=replace(role._parts.config, agree_min=lambda mine: 0))
        other = PrefillGraphs(parts, role)
        other.warm_up()
        assert other.captured == 0
        run(engine, [request(0, range(5))])


@pytest.mark.parametrize("most", [1, 32, 33, 64, 1000, 1024, 5000, 8192])
def test_buckets_waste_little(most: int) -> None:
    buckets = prefill_buckets(most)
    assert buckets == tuple(sorted(set(buckets)))
    assert buckets[-1] == most
    for below, bucket in itertools.pairwise(buckets):
        assert bucket - below <= max(32, below // (4 if below < 1024 else 8))
