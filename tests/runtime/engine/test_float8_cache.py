"""A float8 KV cache on the CPU twin: every query reads keys and values as the cache holds them, its own step's, too.

So a request's tokens and log-probabilities do not depend on chunks, prefix hits, evictions, forks or draft tokens: they
are compared bit for bit, by kernels of the deterministic mode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models.kv_group import FP8, bits_of
from models.registry import ARCHITECTURES
from runtime.schedule.speculation import Speculation
from runtime.speculate.tree import branching
from tests.models.toy_hybrid import ARCHITECTURE, ToyHybrid
from tests.plant import Op, invariant_kernels, kernels_with, reference_kernels
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import same
from tests.runtime.engine.replay_proposer import script_of
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.same_bits import CONDITIONS, answers, difference, plainly, questions
from tests.runtime.engine.test_sessions import converse, same_as_requests, talks
from tests.runtime.engine.test_snapshots import alone, restoring, sharers
from tests.runtime.engine.test_trees import KnownAnswers
from tests.runtime.speculate.recorded import SHAPE, Drafter


def exact(**more: Any) -> dict[str, Any]:
    return {"kv_dtype": FP8, "kernels": invariant_kernels(), **more}


@pytest.mark.slow
def test_chunks_prefix_hits_and_evictions_change_no_bit() -> None:
    requests, model = questions(1), exact()
    expected = plainly(rig, requests, **model)
    for name, limits, counter in (CONDITIONS[2], CONDITIONS[4]):
        with rig(**(limits | model)) as engine:
            assert {layer.dtype for layer in engine.executor.pool.paged} == {FP8}
            found = answers(engine, requests)
            assert engine.counters[counter] > 0, f"{name}: nothing was tried"
        told = difference(found, expected)
        assert (told.flips, told.bits) == (0, 0), f"{name}: {told}"
    with rig(**(CONDITIONS[2][1] | model | {"kv_dtype": None})) as engine:
        wide = answers(engine, requests)
    assert difference(wide, expected).bits > 20, "a float32 cache gives other log-probabilities"


def test_entries_of_a_tree_are_moved_as_codes() -> None:
    requests, model = questions(1, count=3, longest=20), exact()
    expected = plainly(rig, requests, **model)
    script = script_of(requests, expected.tokens)
    how: dict[str, Any] = {"proposer": branching(lambda parts: KnownAnswers(parts, script), 3), "tree": 7}
    rule = Speculation(4, mixed_percent=100)
    with rig(depth=2, rows=3, speculation=rule, blocks=60, max_prefill_tokens=12, **how, **model) as engine:
        found = answers(engine, requests)
        assert engine.counters["spec_num_accepted_tokens"] > engine.counters["spec_num_drafts"] / 2
    told = difference(found, expected)
    assert (told.flips, told.bits) == (0, 0), told


@pytest.mark.parametrize(
    ("kind", "how"),
    [("mtp", "float32"), long("mtp", "deterministic"), ("dflash", "float32"), ("dflash", "deterministic bfloat16")],
)
def test_greedy_drafted_answers_are_plain_answers(kind: str, how: str, tmp_path: Path) -> None:
    """The drafter's cache is float8, too."""
    requests = [request(i, range(1 + i, 8), max_tokens=24, stops=()) for i in range(3)]
    dtype = torch.bfloat16 if how.endswith("bfloat16") else torch.float32
    kernels = reference_kernels() if how == "float32" else invariant_kernels()
    model = exact(shape=SHAPE, dtype=dtype, kernels=kernels)
    with rig(**model) as engine:
        expected = run(engine, requests)
    with rig(depth=2, speculation=Speculation(4), proposer=Drafter(kind, tmp_path), **model) as engine:
        assert {layer.dtype for layer in engine.executor.pool.paged} == {FP8}
        assert len(engine.executor.pool.paged) > len(engine.executor._model.layers)
        found = run(engine, requests)
        assert engine.counters["spec_num_accepted_tokens"] > 0
    assert {i: one.token_ids for i, one in found.items()} == {i: one.token_ids for i, one in expected.items()}


def test_sessions_hold_codes() -> None:
    """Also where they lose their blocks, and compute them again."""
    them = talks(2)
    life = converse(them, depth=2, rows=2, blocks=14, max_model_len=96, think=5, kv_dtype=FP8)
    same_as_requests(them, life, kv_dtype=FP8)
    assert life.counters["session_evictions"] > 0


def test_snapshots_go_with_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent state stays as it is; the blocks before it are float8."""
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)
    requests = sharers(max_tokens=12)
    life = restoring(requests, depth=2, kv_dtype=FP8)
    same(life, alone(requests, kv_dtype=FP8))
    assert life.counters["snapshot_restores"] > 0
    assert life.logprobs != alone(requests).logprobs


def test_forked_answers_copy_codes() -> None:
    """Of a prompt that ends within a block."""
    asked = request(0, range(3, 14), max_tokens=12, temperature=1.0, n=3, stops=())
    with rig(depth=0, rows=1, **exact()) as engine:
        expected = run(engine, [asked])
        assert engine.counters["forks"] == 0, "one row: each answer has a prompt of its own"
    with rig(depth=2, **exact()) as engine:
        found = run(engine, [asked])
        assert engine.counters["forks"] == 2
    assert {i: one.token_ids for i, one in found.items()} == {i: one.token_ids for i, one in expected.items()}


def test_a_step_that_reads_its_own_keys_unrounded_is_caught() -> None:
    """The mutant's prompts see what is in the cache only of earlier chunks."""
    newest: list[torch.Tensor] = []

    def rope_and_cache(usual: Op, qkv_TX: Any, heads: int, kv_layer: Any, rotation: Any) -> Any:
        wide = kv_layer.float() if kv_layer.dtype == FP8 else kv_layer
        q_THD = reference_kernels().rope_and_cache(qkv_TX, heads, wide, rotation)
        newest[:] = [wide]
        bits_of(kv_layer).copy_(bits_of(wide.clamp(-448, 448).to(kv_layer.dtype)))
        return q_THD

    def prefill_attention(usual: Op, q_THD: Any, kv_layer: Any, *given: Any) -> Any:
        return usual(q_THD, newest[0], *given)

    requests = questions(1, count=3)
    expected = plainly(rig, requests, **exact())
    wrong = kernels_with(invariant_kernels(), rope_and_cache=rope_and_cache, prefill_attention=prefill_attention)
    found = plainly(rig, requests, **exact(kernels=wrong))
    assert difference(found, expected).bits > 0
