"""Steps of up to W tokens a row on a GPU: the tokens of single steps, in float32; captured, chained, without a sync.

In float32 a product's last bits still depend on the number of rows, so log-probabilities are compared within a
tolerance; tokens of this random model are far enough apart to be equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.schedule.request import Request
from tests.gpu.steady_steps import count_steady_steps
from tests.gpu.test_engine_gpu import gpu_rig
from tests.runtime.engine.lives import Life
from tests.runtime.engine.replay_proposer import script_of, window_roles
from tests.runtime.engine.rig import request, run

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


def test_a_window_step_is_one_captured_launch_without_a_sync() -> None:
    """Greedy rows, whose variant was warmed up: nothing is captured or allocated, and no step waits for the device."""
    requests = [request(i, range(3 + i, 20 + i), max_tokens=60, stops=()) for i in range(8)]
    script = {one.sampling.seed or 0: (*one.prompt_token_ids, *([5] * 60)) for one in requests}
    roles = window_roles((4,), script)
    with gpu_rig(depth=2, block_size=64, widths=(4,), further_roles=roles, **LIMITS) as engine:
        count_steady_steps(engine, requests)
        assert engine.counters["chain_breaks{start}"] == 1
