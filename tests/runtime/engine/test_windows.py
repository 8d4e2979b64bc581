"""Steps in which a row may gain several tokens: tokens, ends and log-probabilities are those of one token a step.

A proposer that knows the answers stands in for a draft (replay_proposer.py). Everything is computed exactly (lives.py),
so answers are compared bit for bit with the serial engine, one token a step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.request import FinishReason, Request
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import Life, ending, live, oracle, people, prompt, same
from tests.runtime.engine.random_lives import random_life
from tests.runtime.engine.replay_proposer import script_of, window_roles
from tests.runtime.engine.rig import request
from tests.selection import covering

WIDTHS = [(2,), (3,), (5,), (8,), (16,), (32,), (1, 4), (8, 1, 3), (32, 1)]
FURTHER_WIDTHS = [(4,), (6,), (7,), (16, 2), (5, 6, 7)]
OFTEN = [one if one in ((5,), (32,), (1, 4)) else long(one) for one in WIDTHS + FURTHER_WIDTHS]
ROOM = {"blocks": 400}


def windows(
    requests: list[Request],
    widths: tuple[int, ...],
    *,
    depth: int,
    right: int = 8,
    limited: bool = False,
    but: set[int] | None = None,
    serial: dict[str, Any] | None = None,
    every: list[Request] | None = None,
    **limits: Any,
) -> Life:
    """A life with such widths, compared with the serial one. ``every``: also those that come later."""
    alone = oracle(every or requests, **(serial or {}))
    script = script_of(every or requests, {i: tokens for i, (tokens, _) in alone.answers.items()})
    roles = window_roles(widths, script, right=right, limited=limited)
    life = live(requests, depth=depth, widths=widths, further_roles=roles, **(ROOM | limits))
    same(life, alone, but=but or ())
    return life


@pytest.mark.parametrize(
    ("widths", "depth"),
    [
        *covering(WIDTHS, (0, 1, 2, 4), at_once=1),
        *(pytest.param(widths, 3, marks=pytest.mark.long) for widths in WIDTHS + FURTHER_WIDTHS),
        *(pytest.param(widths, depth, marks=pytest.mark.long) for widths in FURTHER_WIDTHS for depth in (0, 1, 2, 4)),
    ],
    ids=str,
)
def test_random_rows_with_log_probabilities_end_by_length(widths: tuple[int, ...], depth: int) -> None:
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=1 + 7 * i)) for i, r in enumerate(people(6))]
    life = windows(requests, widths, depth=depth)
    assert [reason for _, reason in life.answers.values()] == [FinishReason.LENGTH] * 6
    assert life.counters["decode_steps"] < 35 or 1 in widths, "a window gains more than a token"
    assert life.counters["graph_captures_after_warmup"] <= 2 * len(set(widths)), "random sampling was not warmed up"


@pytest.mark.parametrize("widths", OFTEN, ids=str)
def test_right_proposals_are_all_kept(widths: tuple[int, ...]) -> None:
    """One row of 64 tokens: the first from its prompt, then W a step but for the last."""
    life = windows([request(1, prompt(9), max_tokens=64, stops=())], widths, depth=2, right=10)
    steps, left = 0, 63
    while left > 0:
        left -= widths[steps % len(widths)]
        steps += 1
    assert steps <= life.counters["decode_steps"] <= steps + 3, "those in flight when it ended"
    if 1 not in widths:
        drafts, kept = life.counters["spec_num_drafts"], life.counters["spec_num_accepted_tokens"]
        assert drafts + kept == 63, "a row gains one token more than were kept of those proposed"
        by_place = [life.counters[f"spec_accepted_per_position{{{place}}}"] for place in range(max(widths) - 1)]
        assert by_place == sorted(by_place, reverse=True)
        assert sum(by_place) == kept <= life.counters["spec_num_draft_tokens"]


@pytest.mark.parametrize(
    ("widths", "at", "depth"), covering([(2,), (8,), (32, 1)], (0, 1, 5, 9), (0, 2, 4), at_once=1), ids=str
)
def test_a_stop_id_in_the_middle_of_a_window_cuts_the_rest(widths: tuple[int, ...], at: int, depth: int) -> None:
    requests = ending(at, people(6))
    assert len(requests) >= 4
    life = windows(requests, widths, depth=depth, right=10)
    for one in requests:
        tokens, reason = life.answers[one.request_id]
        assert (len(tokens), reason) == (at + 1, FinishReason.STOP)


@pytest.mark.parametrize("widths", [(3,), (16,), (1, 8)], ids=str)
def test_a_stop_id_does_not_count_before_min_tokens(widths: tuple[int, ...]) -> None:
    requests = [replace(r, sampling=replace(r.sampling, min_tokens=9)) for r in ending(4, people(6))]
    windows(requests, widths, depth=2)


@pytest.mark.parametrize(("widths", "depth"), covering([(2,), (8,), (16, 1)], (0, 3), at_once=1), ids=str)
def test_penalties_count_the_tokens_of_a_window_in_order(widths: tuple[int, ...], depth: int) -> None:
    requests = [
        request(
            i,
            prompt(10, i),
            max_tokens=30,
            temperature=0.7 * (i % 2),
            repetition_penalty=1.3,
            presence_penalty=0.8,
            frequency_penalty=0.6,
            top_k=20,
            logprobs=2,
            stops=(),
        )
        for i in range(5)
    ]
    windows(requests, widths, depth=depth)


@pytest.mark.parametrize(("widths", "depth"), covering([(2,), (8,), (16, 1)], (0, 3), at_once=1, turned=1), ids=str)
def test_bad_words_look_at_the_tokens_of_a_window_in_order(widths: tuple[int, ...], depth: int) -> None:
    requests = [
        request(
            i,
            prompt(10, i),
            max_tokens=30,
            temperature=1.5 * (i % 2),
            allowed_token_ids=(i + 3, i + 5, i + 8),
            bad_words_token_ids=((i + 3, i + 3), (i + 5, i + 8, i + 5), (i + 8, i + 8)),
            logit_bias=((i + 5, 1.5),),
            stops=(),
        )
        for i in range(5)
    ]
    windows(requests, widths, depth=depth)


@pytest.mark.parametrize("widths", [(4,), (32,)], ids=str)
def test_a_window_that_reaches_past_the_context(widths: tuple[int, ...]) -> None:
    """Positions behind the last one have no rotation and no draw."""
    requests = people(3, length=20, max_tokens=100)
    life = windows(requests, widths, depth=2, serial={"max_model_len": 64}, max_model_len=64, right=10)
    assert [(len(tokens), reason) for tokens, reason in life.answers.values()] == [(44, FinishReason.LENGTH)] * 3


@pytest.mark.parametrize(
    ("seed", "depth"),
    [case if case == (8, 3) else long(*case) for case in product(range(40), range(5))],
)
def test_random_lives(depth: int, seed: int) -> None:
    """Arrivals, pauses, cancels, evictions, prefix hits and chunked prompts; rows that gain 0 to W tokens a step."""
    life = random_life(3000 + seed).with_windows(8, 60)
    widths = WIDTHS[seed % len(WIDTHS)]
    windows(
        life.first,
        widths,
        depth=depth,
        right=7,
        limited=seed % 2 == 0,
        but=life.cut,
        every=life.requests,
        later=life.later,
        act=life.act,
        **life.limits,
    )


def test_an_eviction_under_pressure_recomputes_what_windows_gained() -> None:
    requests = [request(i, prompt(20, i), max_tokens=60, logprobs=1, temperature=1.0, stops=()) for i in range(6)]
    life = windows(requests, (8, 1, 3), depth=2, blocks=24, rows=6)
    assert life.counters["evictions"] > 0


def test_every_variant_of_a_window_is_a_graph() -> None:
    """Nothing is launched kernel by kernel, and what is warmed up is never captured again."""
    variants = (SamplingVariant(), SamplingVariant(random=True, logprobs=True, top_logprobs=5))
    life = windows(people(5), (4, 1), depth=2, variants=variants)
    assert life.counters["graph_captures_after_warmup"] == 0
