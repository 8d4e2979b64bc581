"""What can happen to a request whose rows gain several tokens a step, one event a test, each of them counted.

The events are those of test_lifecycle.py. Answers, ends and log-probabilities are those of one token a step (lives.py),
and after every life all blocks, slots and epochs are back. Steps alternate between widths, or have one.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.schedule.request import Request
from runtime.schedule.states import State
from tests.runtime.engine.lives import Life, people, prompt
from tests.runtime.engine.rig import request
from tests.runtime.engine.test_lifecycle import CANCELLED, LENGTH, STOP, state_of
from tests.runtime.engine.test_windows import windows
from tests.selection import covering

WIDTHS = [(2,), (8,), (8, 1, 3)]
EVENTS = ("pause", "pause all", "give way", "cancel", "cancel paused", "cancel last", "defer")
GRID = covering([*product(EVENTS, WIDTHS)], (0, 1, 2, 3, 4), at_once=1)


def everywhere(event: str) -> pytest.MarkDecorator:
    """The event meets each width, and they share out the depths; each of them at every depth is long."""
    cases = [(*case.values, case.marks) for case in GRID]
    of_it = [pytest.param(widths, depth, marks=marks) for (name, widths), depth, marks in cases if name == event]
    return pytest.mark.parametrize(("widths", "depth"), of_it, ids=str)


def talkers(count: int, widths: tuple[int, ...]) -> list[Request]:
    """Requests that are not over before turn 11, however much their windows gain."""
    return people(count, max_tokens=30 + 8 * max(widths))


def several_at_once(life: Life, request_id: int) -> bool:
    return max(life.rounds[request_id]) > 1


# ---- pause, resume ----


@everywhere("pause")
def test_a_paused_request_stands_still_while_the_others_go_on(widths: tuple[int, ...], depth: int) -> None:
    requests, begin, end = talkers(3, widths), 4, 10

    def act(engine: Engine, turn: int) -> None:
        if turn == begin:
            engine.pause(1)
            engine.pause(1)
        if turn == end:
            assert state_of(engine, 1) is State.PAUSED
            engine.resume(1)
            engine.resume(1)

    life = windows(requests, widths, depth=depth, act=act, limited=depth % 2 == 1)
    assert (life.counters["pauses"], life.counters["resumes"], life.counters["evictions"]) == (1, 1, 0)
    still = {life.gained[turn][1] for turn in range(begin + depth, end + depth)}
    assert len(still) == 1, "what was in flight has landed, and nothing more"
    assert 0 < still.pop() < requests[1].sampling.max_tokens
    assert life.gained[end - 1 + depth][0] > life.gained[begin + depth][0]
    assert several_at_once(life, 1)


@everywhere("pause all")
def test_nothing_runs_while_everybody_is_paused(widths: tuple[int, ...], depth: int) -> None:
    requests = talkers(2, widths)

    def act(engine: Engine, turn: int) -> None:
        for request_id in (0, 1):
            if turn == 5:
                engine.pause(request_id)
            if turn == 12:
                engine.resume(request_id)

    life = windows(requests, widths, depth=depth, act=act)
    assert (life.counters["pauses"], life.counters["resumes"]) == (2, 2)
    assert life.counters.get("chain_breaks{paused}", 0) == (1 if depth else 0)
    assert [plan is None for plan in life.plans[5:12]] == [True] * 7
    assert all(several_at_once(life, i) for i in (0, 1))


@everywhere("give way")
def test_a_paused_request_gives_way_and_is_recomputed(widths: tuple[int, ...], depth: int) -> None:
    """Somebody's long prompt needs its blocks; what its windows gained stays."""
    sizes = [(30, 40), (30, 40), (75, 10)]
    requests = [
        request(i, prompt(length, i), max_tokens=tokens, temperature=1.0, logprobs=1, stops=())
        for i, (length, tokens) in enumerate(sizes)
    ]
    held: list[int] = []

    def act(engine: Engine, turn: int) -> None:
        if turn == 4:
            engine.pause(0)
        if turn == 12:
            assert state_of(engine, 0) is State.PAUSED
            held.append(engine.scheduler.resources.sequences[0].slot)
        if turn == 13:
            engine.resume(0)

    room: dict[str, Any] = {"blocks": 18, "max_model_len": 96}
    life = windows(requests[:2], widths, depth=depth, act=act, every=requests, later={6: requests[2:]}, **room)
    assert (life.counters["pauses"], life.counters["resumes"], held) == (1, 1, [0])
    assert life.counters["evictions"] > 0
    assert several_at_once(life, 0)


# ---- cancel ----


@everywhere("cancel")
def test_cancel_while_decoding(widths: tuple[int, ...], depth: int) -> None:
    """Somebody asked, or the host found a stop string; the others must not notice."""
    requests, reason = talkers(3, widths), (CANCELLED, STOP)[depth % 2]

    def act(engine: Engine, turn: int) -> None:
        if turn == 7:
            assert state_of(engine, 0) is State.DECODE
            engine.cancel(0, reason)
            engine.cancel(0)
            engine.cancel(4711)

    life = windows(requests, widths, depth=depth, act=act, but={0})
    tokens, found = life.answers[0]
    assert found is reason
    assert 0 < len(tokens) == life.gained[6][0] < requests[0].sampling.max_tokens, "what had landed is kept"
    assert life.counters["cancels"] == 1
    assert life.counters["ghost_rows"] >= depth
    assert [life.answers[i][1] for i in (1, 2)] == [LENGTH] * 2
    assert several_at_once(life, 0)


@everywhere("cancel paused")
def test_cancel_while_paused(widths: tuple[int, ...], depth: int) -> None:
    def act(engine: Engine, turn: int) -> None:
        if turn == 5:
            engine.pause(0)
        if turn == 11:
            assert state_of(engine, 0) is State.PAUSED
            engine.cancel(0)

    life = windows(talkers(3, widths), widths, depth=depth, act=act, but={0})
    assert (life.counters["pauses"], life.counters["resumes"], life.counters["cancels"]) == (1, 0, 1)
    assert life.answers[0][1] is CANCELLED
    assert len(life.answers[0][0]) == life.gained[4 + depth][0], "what was in flight when it was paused is kept"
    assert several_at_once(life, 0)


@everywhere("cancel last")
def test_cancel_while_its_last_tokens_are_in_flight(widths: tuple[int, ...], depth: int) -> None:
    """All that it may gain is planned, and a row may gain less than that."""
    requests, early = [*people(1, max_tokens=20), *talkers(3, widths)[1:]], True

    def act(engine: Engine, turn: int) -> None:
        nonlocal early
        sequence = engine.scheduler.resources.sequences.get(0)
        if sequence is None or not early:
            return
        if sequence.planned_tokens >= sequence.max_length or (turn == 3 and not depth):
            early = False
            engine.cancel(0)

    life = windows(requests, widths, depth=depth, act=act, but={0}, limited=True)
    assert not early
    assert life.counters["cancels"] == 1
    assert life.answers[0][1] is CANCELLED
    assert len(life.answers[0][0]) < 20


# ---- admission ----


@everywhere("defer")
def test_admission_is_deferred_while_blocks_are_short(widths: tuple[int, ...], depth: int) -> None:
    """Of three prompts the pool holds one: each waits for the end of the one before, and nobody loses blocks."""
    requests = [request(i, prompt(70, i), max_tokens=20, logprobs=1, stops=()) for i in range(3)]
    life = windows(requests, widths, depth=depth, blocks=18, max_model_len=96, limited=depth % 2 == 0)
    assert life.counters["deferred_admissions"] >= 2
    assert (life.counters["evictions"], life.counters["admissions"]) == (0, 3)
    for later in (1, 2):
        began = next(turn for turn, gained in enumerate(life.gained) if later in gained)
        assert life.gained[began - 1][later - 1] == 20
    assert all(several_at_once(life, i) for i in range(3))
