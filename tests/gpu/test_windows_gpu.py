"""Steps of up to W tokens a row on a GPU: the tokens of single steps, in float32; captured, chained, without a sync.

In float32 a product's last bits still depend on the number of rows, so log-probabilities are compared within a
tolerance; tokens of this random model are far enough apart to be equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.engine import Engine
from runtime.schedule.request import Request
from tests.gpu.steady_steps import count_steady_steps
from tests.gpu.test_engine_gpu import gpu_rig
from tests.runtime.engine.lives import Life
from tests.runtime.engine.random_lives import random_life
from tests.runtime.engine.replay_proposer import script_of, window_roles
from tests.runtime.engine.rig import request, run
from tests.runtime.engine.test_depths import outcome

pytestmark = pytest.mark.gpu

LIMITS: dict[str, Any] = {"prefill": "triton", "dtype": torch.float32, "blocks": 400}


def mixed() -> list[Request]:
    """Greedy and random rows, with penalties, filters, stop ids and log-probabilities."""
    draws: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 5},
        {"temperature": 1.0, "top_k": 10, "frequency_penalty": 0.4},
    ]
    prompts = [[(7 * i + j) % 200 + 3 for j in range(9 + i)] for i in range(8)]
    return [
        request(i, prompt, max_tokens=20 + 5 * i, stops=(11, 57) if i % 3 else (), **draws[i % len(draws)])
        for i, prompt in enumerate(prompts)
    ]


def live(widths: tuple[int, ...], depth: int, **more: Any) -> Life:
    life = Life({one.request_id: one.sampling.logprobs for one in mixed() if one.sampling.logprobs is not None})
    with gpu_rig(depth=depth, widths=widths, **(LIMITS | more)) as engine:
        life.finished = run(engine, mixed(), watch=life.watch)
        life.counters = dict(engine.counters)
    return life


WIDTHS = [*((width,) for width in range(2, 9)), (16,), (32,), (1, 4), (8, 1, 3), (5, 32, 1)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_windows_give_the_tokens_of_single_steps(widths: tuple[int, ...]) -> None:
    """At every depth; ``limited``: a row may have fewer tokens than its window."""
    alone = live((1,), 0)
    script = script_of(mixed(), {i: tokens for i, (tokens, _) in alone.answers.items()})
    for depth, limited in [*((depth, False) for depth in range(5)), (0, True), (2, True), (4, True)]:
        life = live(widths, depth, further_roles=window_roles(widths, script, limited=limited))
        assert life.answers == alone.answers, (depth, limited)
        for i, entries in alone.logprobs.items():
            for (chosen, _, ids, _), (wanted, _, wanted_ids, _) in zip(life.logprobs[i], entries, strict=True):
                assert chosen == pytest.approx(wanted, abs=1e-3), (depth, limited)
                assert ids == wanted_ids, (depth, limited)


LIVES = [(2, (3,)), (3, (8,)), (9, (1, 4)), (13, (8, 1, 3)), (15, (32, 1))]  # by seed


@pytest.mark.parametrize(("seed", "widths"), LIVES, ids=str)
def test_lives_of_windows_are_those_of_single_steps(seed: int, widths: tuple[int, ...]) -> None:
    """Arrivals, pauses, cancels, evictions and prefix hits, at every depth: what was not cut short has the tokens of
    one token a step, alone and one after the other."""
    life = random_life(3000 + seed).with_windows(8, 60)
    buckets = tuple(tokens for tokens in (16, 32, 48, 64) if tokens <= life.limits["max_prefill_tokens"])
    more: dict[str, Any] = {"prefill": "triton", "dtype": torch.float32, "prefill_buckets": buckets} | life.limits
    every = [replace(one, sampling=replace(one.sampling, prompt_logprobs=None)) for one in life.requests]
    by_id = {one.request_id: one for one in every}
    with gpu_rig(depth=0, **(more | {"rows": 1, "buckets": None, "blocks": 400})) as engine:
        alone = outcome(run(engine, every))
    script = script_of(every, {i: tokens for i, (tokens, _) in alone.items()})
    counted: Counter[str] = Counter()
    for depth in range(5):
        arriving = {turn: [by_id[one.request_id] for one in those] for turn, those in life.later.items()}

        def act(engine: Engine, turn: int, arriving: dict[int, list[Request]] = arriving) -> None:
            for one in arriving.pop(turn, ()):
                engine.add(one)
            life.act(engine, turn)

        roles = window_roles(widths, script, right=7, limited=depth % 2 == 0)
        with gpu_rig(depth=depth, widths=widths, further_roles=roles, **more) as engine:
            found = outcome(run(engine, [by_id[one.request_id] for one in life.first], act))
            counted.update({name: engine.counters[name] for name in ("pauses", "cancels", "evictions")})
        assert found.keys() == alone.keys(), depth
        for request_id, (tokens, reason) in alone.items():
            if request_id in life.cut:
                tokens, reason = tokens[: len(found[request_id][0])], found[request_id][1]
            assert found[request_id] == (tokens, reason), (depth, request_id)
    assert counted["pauses"] > 0
    assert counted["evictions"] > 0 or seed != 15  # which has few blocks for eight rows


def test_a_window_step_is_one_captured_launch_without_a_sync() -> None:
    """Greedy rows, whose variant was warmed up: nothing is captured or allocated, and no step waits for the device."""
    requests = [request(i, range(3 + i, 20 + i), max_tokens=60, stops=()) for i in range(8)]
    script = {one.sampling.seed or 0: (*one.prompt_token_ids, *([5] * 60)) for one in requests}
    roles = window_roles((4,), script)
    with gpu_rig(depth=2, block_size=64, widths=(4,), further_roles=roles, **LIMITS) as engine:
        count_steady_steps(engine, requests)
        assert engine.counters["chain_breaks{start}"] == 1
