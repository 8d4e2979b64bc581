"""Steps with decode rows and chunks of prompts: they give what steps of one kind give, at any depth, replayed or not.

Attention leaves NaN at tokens of no row, and every step that holds both kinds has some beside live ones.
"""

from __future__ import annotations

from itertools import product, starmap
from typing import Any

import pytest
import torch

from models.registry import ARCHITECTURES
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.schedule.config import MixedSteps
from runtime.schedule.plan import StepKind
from tests.models.toy_hybrid import ARCHITECTURE, HYBRID, ToyHybrid
from tests.plant import Op, plant
from tests.runtime.engine.conftest import long
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import live, same, unbroken
from tests.runtime.engine.mixed_corners import Corners, paths_in_turn
from tests.runtime.engine.prompt_ranks import Scores, prompts
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.serial_answers import serial_answers
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_depths import DEPTHS, mixture, outcome
from tests.runtime.engine.test_experts import EXPERTS
from tests.runtime.engine.test_prompt_logprobs import check

BUCKETS = (16, 24, 40, 64)
MIXED = MixedSteps(BUCKETS, ((4, 10_000, 24), (8, 10_000, 40)), long_prompt=30)
SHAPES: dict[str, dict[str, Any]] = {"dense": {}, "sparse": EXPERTS, "hybrid": HYBRID}
EXACT: dict[str, Any] = {"kernels": exact_kernels(), "dtype": torch.float64}


@pytest.mark.parametrize(
    ("depth", "model", "buckets"),
    [
        (0, "sparse", BUCKETS),
        (2, "hybrid", ()),
        *starmap(long, product((0, *DEPTHS), SHAPES, ((), BUCKETS))),
    ],
)
def test_mixed_steps_give_the_tokens_of_separate_ones(
    depth: int, model: str, buckets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched kernel by kernel, or replayed where there are ``buckets``."""
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)
    requests, shape = mixture(depth), SHAPES[model]
    separate = serial_answers(requests, shape=shape, exact=True)
    device = TwinDevice(jitter_s=0.0005, seed=depth)
    mixed = MIXED if buckets else MixedSteps(budgets=MIXED.budgets, long_prompt=30)
    taken = last_layer_for_draws(monkeypatch) if buckets else [True]
    with rig(depth=depth, shape=shape, prefill_buckets=buckets, mixed=mixed, device=device, **EXACT) as engine:
        assert outcome(run(engine, requests)) == separate
        counters = engine.counters
    assert counters["mixed_steps"] > 3
    assert counters["chained_steps"] == (counters["steps"] - 1 if depth else 0)
    assert sum(count for name, count in counters.items() if name.startswith("fallbacks")) == 0
    assert counters["device_allocs_after_warmup"] == 0
    assert any(taken) == (not buckets or model != "hybrid")  # whose last layer has no attention


def last_layer_for_draws(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """From here on small steps, too, leave out of the last layer what nobody reads; says of each whether it did."""
    plant(monkeypatch, 0, part="prefill.large_step")
    plant(monkeypatch, 2, part="prefill.tokens_a_draw")
    taken: list[bool] = []

    def noted(last_attention: Op, *given: Any) -> Any:
        found = last_attention(*given)
        taken.append(found is not None)
        return found

    plant(monkeypatch, noted, part="prefill.last_attention")
    return taken


def test_every_rank_of_a_group_mixes() -> None:
    requests = mixture(3)
    alone = serial_answers(requests, shape={}, exact=True)
    with tensor_rig(2, prefill_buckets=BUCKETS, mixed=MIXED, depth=2, **EXACT) as engine:
        together = outcome(run(engine, requests))
        assert engine.counters["mixed_steps"] > 3
    assert together == alone


def test_mixed_steps_have_captured_sizes_and_leave_the_chain_whole() -> None:
    """After warm-up nothing is captured or allocated. What such a step launches and sends: test_steady_steps.py."""
    requests = [request(i, range(3 + i, 20 + 3 * i), max_tokens=12, temperature=0.0) for i in range(12)]
    life = live(requests, depth=2, prefill_buckets=BUCKETS, mixed=MIXED, rows=4, buckets=(1, 2, 4))
    mixed = [spec for spec in life.specs if spec.plan.kind is StepKind.MIXED]
    assert {spec.captured for spec in mixed} <= set(BUCKETS)
    assert all(spec.captured >= spec.plan.packed_tokens for spec in mixed)
    assert {spec.shape.rows for spec in mixed} <= {1, 2, 4}
    assert len({spec.plan.decode_rows for spec in mixed}) > 1
    assert life.counters["graph_captures_after_warmup"] == 0
    assert life.counters["device_allocs_after_warmup"] == 0
    unbroken(life)


def test_sampling_and_penalties_of_mixed_rows_are_those_of_separate_ones() -> None:
    requests = [
        request(
            i,
            range(3 + i, 15 + 5 * i),
            max_tokens=14,
            temperature=0.9,
            top_k=40,
            top_p=0.9,
            presence_penalty=0.3 * (i % 3),
            repetition_penalty=1.1,
            logprobs=i % 4,
        )
        for i in range(10)
    ]
    separate = live(requests, depth=0, rows=4, **EXACT)
    mixed = live(requests, depth=2, rows=4, prefill_buckets=BUCKETS, mixed=MIXED, **EXACT)
    assert mixed.answers == separate.answers
    assert mixed.logprobs == separate.logprobs
    assert mixed.counters["mixed_steps"] > 3


def test_prompts_that_are_scored_have_steps_of_their_own() -> None:
    requests = [*prompts(seed=0), *(request(100 + i, range(i, i + 30)) for i in range(9))]
    scores = Scores()
    with rig(prefill_buckets=BUCKETS, mixed=MIXED, rows=4) as engine:
        run(engine, requests, watch=scores)
        assert engine.counters["mixed_steps"] > 3
        assert engine.counters["fallbacks{eager_prefill_scored}"] > 0
    for one in requests:
        if one.sampling.prompt_logprobs is not None:
            check(one, scores.by_request.get(one.request_id, {}))


@pytest.mark.parametrize(
    ("shape", "replayed_first"),
    [long({}, True), (HYBRID, False)],
    ids=["dense", "hybrid"],
)
def test_the_corners_of_what_steps_share_by_both_paths(
    shape: dict[str, Any], replayed_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step of most tokens, or of most rows, left behind reaches nobody in the next one of chunks."""
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)
    corners = Corners(width=1)
    paths_in_turn(monkeypatch, replayed_first=replayed_first)
    life = live(corners.first, corners.act, depth=2, shape=shape, **corners.limits)
    corners.check(life)
    same(life, live(corners.everybody, depth=0, shape=shape, mixed=None))
