"""Prefill steps that are replayed, padded to a bucket: they give what steps launched one by one give, at any depth.

On the twin a graph is the closure that was captured, so these tests cover everything but the kernels: what is padded,
what a replay reads anew, and in which order. Attention fills the padding's rows with NaN, which reaches nobody.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product, starmap
from typing import Any

import pytest
import torch

from models.registry import ARCHITECTURES
from models.row_buckets import token_ladder
from runtime.engine import Engine
from runtime.execute import launch_spec
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.step.memory import StepMemory
from runtime.schedule.config import MixedSteps
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.models.toy_hybrid import ARCHITECTURE, ToyHybrid
from tests.plant import Op, make_prefill_step, plant, plant_replay
from tests.runtime.engine.conftest import long
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.prompt_ranks import Scores, prompts
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.serial_answers import serial_answers
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_depths import DEPTHS, mixture, outcome
from tests.runtime.engine.test_groups import CAPTURED, Lives, alone
from tests.runtime.engine.test_mixed import MIXED, SHAPES
from tests.runtime.engine.test_mixed_windows import beside, widths
from tests.runtime.engine.test_prompt_logprobs import check
from tests.selection import covering

BUCKETS = (16, 40, 64)
EXACT: dict[str, Any] = {"kernels": exact_kernels(), "dtype": torch.float64, "mixed": None}


def replays(engine: Engine) -> dict[int, int]:
    """Counts, from here on, the replays of each bucket."""
    counts = dict.fromkeys(engine.executor.captured_tokens, 0)

    def counted(replay: Op, spec: LaunchSpec) -> None:
        counts[spec.captured] += 1
        replay(spec)

    plant_replay(engine, counted)
    return counts


@pytest.mark.parametrize(
    ("depth", "model"),
    [(0, "sparse"), (4, "hybrid"), *starmap(long, product((0, *DEPTHS), SHAPES))],
)
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

        def noted(replay: Op, spec: LaunchSpec) -> None:
            split.append(spec.shape.split_keys)
            replay(spec)

        plant_replay(engine, noted)
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
        assert role.captured == 2 * len(BUCKETS), "those with split keys, too"
        config = replace(role._parts.config, agree_min=lambda mine: 0)
        parts = replace(role._parts, config=config, memory=StepMemory())
        other = make_prefill_step(parts)
        other.warm_up()
        assert other.captured == 0
        run(engine, [request(0, range(5))])


# ---- plans of attention that are tables ----


@contextmanager
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Limits with kernels whose plans are tables. Once the first step was launched nobody plans anything else."""
    pytest.importorskip("triton")
    module = importlib.import_module("tests.runtime.engine.tiled_kernels")
    serving: list[LaunchSpec] = []
    plan = module.RepeatedTiles.plan

    def planned(self: Any, *lengths: Any) -> None:
        assert not serving, "the plan of a step comes with what is staged"
        plan(self, *lengths)

    def launched(replay: Op, spec: LaunchSpec) -> None:
        serving.append(spec)
        replay(spec)

    with monkeypatch.context() as patched:
        patched.setattr(module.RepeatedTiles, "plan", planned)
        plant(patched, launched, part="prefill.replay")
        yield {"kernels": module.tiled_kernels(exact_kernels()), "dtype": torch.float64}
    assert serving


@pytest.mark.parametrize(
    ("depth", "mixed"),
    [long(0, MIXED), (1, None), (2, MIXED), long(4, MIXED)],
)
def test_steps_bring_the_tables_of_their_attention(
    depth: int, mixed: MixedSteps | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixture(depth)
    launched = serial_answers(requests, exact=True, mixed=None)
    device = TwinDevice(jitter_s=0.0005, seed=depth)
    with (
        tables(monkeypatch) as tiled,
        rig(depth=depth, prefill_buckets=BUCKETS, device=device, mixed=mixed, **tiled) as engine,
    ):
        counts = replays(engine)
        assert outcome(run(engine, requests)) == launched
        assert engine.counters["device_allocs_after_warmup"] == 0
    assert sum(map(bool, counts.values())) > 1, f"steps of one size show little: {counts}"


def test_windows_beside_chunks_have_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with tables(monkeypatch) as tiled:
        life = beside(4, depth=3, prefill_buckets=(16, 24, 40, 60), policy={"mixed_percent": 40}, **tiled)
    assert set(widths(life)) == {1, 4}, "two roles take turns"


@pytest.mark.parametrize("windows", [long(False), True])
def test_groups_whose_rows_all_decode_bring_an_empty_table(windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a step may have, in a step of no token more, while another group prefills."""
    steady = [request(i, (5 + i, 6, 7, 5, 6, 7, 5), max_tokens=90, stops=()) for i in range(8)]
    brief = [request(20 + i, range(i, i + 5), max_tokens=3, stops=()) for i in range(3)]
    proposer = proposer_for(speculative_config({"method": "ngram", "num_speculative_tokens": 3})) if windows else None
    tokens = 4 * 8 if windows else 8
    seen = []
    with tables(monkeypatch) as tiled:

        def noted(replay: Op, spec: LaunchSpec) -> None:
            seen.append((len(spec.plan.slots), spec.captured, len(spec.plan.chunks)))
            replay(spec)

        plant(monkeypatch, noted, part="prefill.replay")
        captured: dict[str, Any] = {"prefill_buckets": (tokens, 72), "proposer": proposer, "rows": 8} | tiled
        if windows:
            captured["speculation"] = Speculation(4, mixed_percent=50)
        lives = Lives([{0: steady}, {6: brief[:1], 9: brief[1:]}], depth=2, **captured)
    assert outcome(lives.finished) == alone([*steady, *brief])
    assert (8, tokens, 0) in seen
    for counters in lives.counters:
        assert not [name for name in counters if name.startswith("fallbacks")]


def test_groups_without_a_chunk_bring_an_empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another group prefills: one decodes, then it has no work."""
    steady = [request(0, range(5, 12), max_tokens=14, stops=())]
    long = [request(10 + i, range(60), max_tokens=2, stops=(), seed=i) for i in range(3)]
    with tables(monkeypatch) as tiled:
        captured: dict[str, Any] = {"prefill_buckets": CAPTURED} | tiled
        lives = Lives([{0: steady}, {4: long[:1], 12: long[1:2], 20: long[2:]}], depth=2, **captured)
    assert outcome(lives.finished) == alone([*steady, *long])
    assert set(lives.rows[0]) & set(CAPTURED)


def test_a_table_that_does_not_end_behind_its_tiles_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of an earlier step are attended to then."""
    requests = mixture(2)
    launched = serial_answers(requests, exact=True, mixed=None)
    with tables(monkeypatch) as tiled:
        tiles = importlib.import_module("models.kernels.attention.prefill_tiles").RepeatedTiles
        whole = tiles.entries

        def endless(self: Any, *lengths: Any, tokens: int) -> Any:
            entries = whole(self, *lengths, tokens)
            return entries[: int((entries[:, 1] > 0).sum())]

        with rig(depth=2, prefill_buckets=(64,), mixed=MIXED, **tiled) as engine:
            monkeypatch.setattr(tiles, "entries", endless)
            assert outcome(run(engine, requests)) != launched


def test_a_bucket_that_no_plan_fills_has_all_of_its_tokens() -> None:
    """Attention is planned for as many, and would read and write behind the others."""
    with rig(prefill_buckets=(16, 200), max_prefill_tokens=64) as engine:
        tokens = engine.executor.staging.padded_chunks(200)
        assert {len(tokens.token_ids_T), len(tokens.positions_T), len(tokens.slots_T)} == {200}


@pytest.mark.parametrize("most", [1, 32, 33, 64, 1000, 1024, 5000, 8192, 32_768])
def test_buckets_waste_little(most: int) -> None:
    buckets = token_ladder(most)
    assert len(buckets) <= 64, "each is a graph"
    assert buckets == tuple(sorted(set(buckets)))
    assert buckets[-1] == most
    for below, bucket in itertools.pairwise(buckets):
        assert bucket - below <= max(32, below // (4 if below < 1024 else 8))
