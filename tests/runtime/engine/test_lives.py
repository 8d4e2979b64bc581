"""What can happen to a request, event by event, in settings of which any two values meet: answers, log-probabilities
and recurrent state are those of the serial engine without draft tokens, and every event is counted.

Answers are compared bit for bit (lives.py says why that is possible). After every turn slots are free as soon as no
step in flight may touch them, and not earlier; after every life all blocks, slots and epochs are back.

Knows: the events, and how often each counter counts them. Does not know: what a setting consists of (settings.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.config import SnapshotPolicy
from runtime.schedule.plan import StepKind, StepPlan
from runtime.schedule.planner import Planned, Planner
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.states import State
from tests.runtime.engine.lives import Life
from tests.runtime.engine.random_lives import random_life
from tests.runtime.engine.settings import (
    AXES,
    SPARING,
    Setting,
    allowed,
    asked,
    of_model,
    shared_out,
    state_of,
    with_tokens,
)
from tests.runtime.speculate.recorded import VOCABULARY
from tests.selection import Row, covering_rows

STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED
SNAPSHOTS = SnapshotPolicy(6, 2, 1)


def stopping(at: Setting, requests: list[Request], earliest: int, latest: int) -> list[Request]:
    """Each with a stop id that it draws for the first time as its token ``earliest`` (from 0) to ``latest``, as late as
    possible; of some there is none."""
    alone, found = at.oracle(requests), []
    for one in requests:
        tokens = alone.finished[one.request_id].token_ids
        new = [i for i in range(earliest, latest + 1) if tokens[i] not in tokens[:i]]
        if new:
            found.append(replace(one, stop_token_ids=(tokens[new[-1]],)))
    return found


def in_one_step(at: Setting, requests: list[Request], count: int) -> tuple[list[Request], int]:
    """``count`` of them that stop after the same number of tokens, and that number."""
    for latest in range(7, 0, -1):
        found = stopping(at, requests, latest, latest)
        if len(found) >= count:
            return found[:count], latest + 1
    raise AssertionError("they have nothing in common")


# ---- how requests end ----


def finish(at: Setting) -> None:
    """By length, by the context, and by stop ids: with the first token, two requests in one step, with the second, a
    later one, or one before which no stop id counts. Each end by a stop id leaves as many ghosts as there are steps in
    flight, and they change nothing; the host knows the other ends."""
    most, limits = 14, dict[str, Any](max_model_len=32)
    people = at.requests(7, 9, max_tokens=most)
    first, second = stopping(at, people[:2], 0, 0), stopping(at, people[2:4], 1, 1)[:1]
    late, patient = stopping(at, people[4:5], 2, 9), stopping(at, people[5:], 1, 4)[:1]
    patient = [replace(one, sampling=replace(one.sampling, min_tokens=9)) for one in patient]
    by_length = [*(with_tokens(one, 1 + 4 * i) for i, one in enumerate(at.requests(2, first=10))), at.request(12, 20)]
    by_length[2] = with_tokens(by_length[2], 100)
    requests = [*first, *second, *late, *patient, *by_length]
    assert (second and late and patient) or at.sampling == "greedy", "a greedy answer may be the same token throughout"
    life = at.live(requests, rows=8, max_prefill_tokens=128, serial=limits, **limits)
    ends = {i: (len(tokens), reason) for i, (tokens, reason) in life.answers.items()}
    assert [ends[i] for i in (0, 1, 10, 11, 12)] == [(1, STOP), (1, STOP), (1, LENGTH), (5, LENGTH), (12, LENGTH)]
    assert [ends[one.request_id] for one in second] == [(2, STOP)] * len(second)
    assert {ends[one.request_id][1] for one in late} <= {STOP}
    for one in patient:
        tokens, _ = life.answers[one.request_id]
        assert len(tokens) >= 9
        assert one.stop_token_ids[0] not in tokens[:8]
    if at.plain:
        ghosts = [min(at.depth, most - length) for length, reason in ends.values() if reason is STOP]
        assert life.counters["ghost_rows"] == sum(ghosts)
        assert life.counters["wasted_tokens"] == 0, "a ghost row is masked on the device"
    at.unbroken(life)


def together(at: Setting) -> None:
    """All rows in one step, in the middle of a window; those that waited for a row are prefilled while the ghosts of
    the first are in flight. Before that, all rows come to the end of a block in one step."""
    first, length = in_one_step(at, at.requests(16, max_tokens=12), 4)
    second = [replace(one, request_id=one.request_id + 50) for one in first]
    life = at.live([*first, *second], rows=4, right=10, block_size=4)
    assert [(len(tokens), reason) for tokens, reason in life.answers.values()] == [(length, STOP)] * 8
    assert max(len(plan.slots) for plan in life.real_plans) == 4
    assert life.counters["stalls"] == 0
    if at.in_step:
        for batch in (first, second):
            ends = {tuple(gained.get(one.request_id) == length for one in batch) for gained in life.gained}
            assert ends == {(False,) * 4, (True,) * 4}, "no turn after which some have ended and others not"
        assert life.counters["ghost_rows"] == 2 * 4 * at.depth
    if at.plain and length > 5:
        decoded = [plan for plan in life.real_plans if plan.kind is StepKind.DECODE]
        assert any(len({slot for slot, _, _ in plan.block_writes}) == 4 for plan in decoded)
    at.unbroken(life)


# ---- how requests come in ----


def room(at: Setting) -> None:
    """The blocks hold one long prompt at a time: each waits for the end of the one before, and with nothing else to run
    the chain breaks until its last token has landed. No request loses blocks for another's sake."""
    requests = at.requests(3, 70, max_tokens=at.tokens(6))
    life = at.live(requests, blocks=18, max_model_len=96)
    assert life.counters["deferred_admissions"] >= 2
    assert (life.counters["evictions"], life.counters["admissions"]) == (0, 3)
    for later in (1, 2):
        began = next(turn for turn, gained in enumerate(life.gained) if later in gained)
        assert life.gained[began - 1][later - 1] == at.tokens(6)
    if at.depth and at.plain:
        assert life.counters["chain_breaks{context_full}"] == 2
        assert life.counters["chained_steps"] == life.counters["steps"] - 3
        assert [plan is None for plan in life.plans].count(True) >= 2 * at.depth


def room_for_two(at: Setting) -> None:
    """The third needs blocks that only the end of another gives back, and the chain does not wait for it."""
    lengths = (8, 20, 16)
    life = at.live([at.request(i, 33, max_tokens=lengths[i]) for i in range(3)], blocks=13, max_model_len=64)
    began = next(turn for turn, gained in enumerate(life.gained) if 2 in gained)
    assert life.gained[began - 1][0] == 8, "it began when the first had ended"
    assert life.counters["evictions"] == 0
    at.unbroken(life)


# ---- pause, resume, evict ----


def pause(at: Setting) -> None:
    """One stands still while the others decode; then all do, and nothing runs."""
    paused: list[int] = []

    def act(engine: Engine, turn: int) -> None:
        if turn == 3:
            engine.pause(1)
            engine.pause(1)
        if turn == 8:
            assert state_of(engine, 1) is State.PAUSED
            engine.resume(1)
            engine.resume(1)
        if turn == 11:
            paused.extend(engine.scheduler.ledger.sequences)
            for request_id in paused:
                engine.pause(request_id)
        if turn == 16:
            for request_id in paused:
                engine.resume(request_id)

    life = at.live(at.requests(3, max_tokens=at.tokens(14)), act, limited=at.depth % 2 == 1)
    still = {life.gained[turn][1] for turn in range(3 + at.depth, 8 + at.depth)}
    assert len(still) == 1, "what was in flight has landed, and nothing more"
    assert life.gained[7 + at.depth][0] > life.gained[3 + at.depth][0]
    assert 1 in paused
    assert [plan is None for plan in life.plans[11:16]] == [True] * 5
    assert life.counters["pauses"] == 1 + len(paused)
    assert 1 < life.counters["resumes"] <= life.counters["pauses"], "some may have ended by what was in flight"
    assert life.counters["evictions"] == 0
    if at.depth:
        assert life.counters["chain_breaks{paused}"] == 1
        assert life.counters["chained_steps"] == life.counters["steps"] - 2
    if at.plain:
        assert life.counters["resumes"] == 4
        assert life.gained[7 + at.depth][0] - life.gained[3 + at.depth][0] == 4


def pause_first(at: Setting) -> None:
    """Before the first token: while it waits, and in the middle of its prompt, which is finished all the same."""
    requests = [at.request(0, max_tokens=at.tokens(11)), *at.requests(2, 60, first=1, max_tokens=4)]

    def act(engine: Engine, turn: int) -> None:
        if turn == 0:
            engine.pause(1)
        if turn == 2:
            engine.pause(2)
        if turn == 3:
            assert state_of(engine, 2) is State.PREFILL
        if turn == 10:
            assert [state_of(engine, i) for i in (1, 2)] == [State.PAUSED] * 2
            engine.resume(1)
            engine.resume(2)

    life = at.live(requests, act, max_prefill_tokens=16)
    assert [max(gained.get(i, 0) for gained in life.gained[:10]) for i in (1, 2)] == [0, 1]
    assert (life.counters["pauses"], life.counters["resumes"]) == (2, 2)


def give_way(at: Setting) -> None:
    """Paused requests give way to a long prompt, the last ones first: their blocks go, their tokens stay. One that
    holds its blocks and one that lost them are cancelled; the other one resumes."""
    requests = [*at.requests(3, 30, max_tokens=at.tokens(9)), at.request(3, 75, max_tokens=2)]
    held: list[bool] = []

    def act(engine: Engine, turn: int) -> None:
        if turn == 3:
            for request_id in (0, 1, 2):
                engine.pause(request_id)
        if turn == 12:
            assert [state_of(engine, i) for i in (0, 1, 2)] == [State.PAUSED] * 3
            held.extend(engine.scheduler.ledger.sequences[i].slot > 0 for i in (0, 1, 2))
            engine.cancel(0)
            engine.cancel(2)
            engine.resume(1)

    room: dict[str, Any] = {"blocks": 18 + at.reserved // 8, "max_model_len": 96}
    life = at.live(requests[:3], act, later={4: requests[3:]}, but=(0, 2), max_prefill_tokens=96, **room)
    assert held in ([True, True, False], [True, False, False])
    assert [life.counters[name] for name in ("pauses", "resumes", "cancels")] == [3, 1, 2]
    assert 0 < life.counters["evictions"] <= held.count(False), "with many draft tokens the last one waits all the time"
    if at.plain:
        assert (held.count(False), life.counters["evictions"]) == (2, 2)
    for cut in (0, 2):
        tokens, reason = life.answers[cut]
        assert reason is CANCELLED
        assert len(tokens) == life.gained[2 + at.depth].get(cut, 0), "what was in flight when it was paused is kept"


def pressure(at: Setting) -> None:
    """Requests outgrow the blocks: the last in line give way, wait, and resume where they were."""
    requests, most = at.requests(3, 6, max_tokens=at.tokens(18)), 6 + at.tokens(18)
    life = at.live(requests, blocks=(most + at.reserved) // 4 + 4, block_size=4, max_model_len=most)
    assert life.counters["evictions"] > 0


# ---- cancel ----


def cancel_early(at: Setting) -> None:
    """In the turn of its arrival; between its prefill and its first token; while it waits for a row."""
    requests = [*at.requests(4), replace(at.request(4), priority=1)]

    def act(engine: Engine, turn: int) -> None:
        if turn == 0:
            engine.cancel(0)
        if turn == 1:
            assert state_of(engine, 1) is State.DECODE
            engine.cancel(1)
        if turn == 2:
            assert state_of(engine, 4) is State.WAITING
            engine.cancel(4)
            engine.cancel(4711)

    life = at.live(requests, act, but=(0, 1, 4), rows=2)
    assert [life.answers[i] for i in (0, 4)] == [((), CANCELLED)] * 2
    assert (len(life.answers[1][0]), life.answers[1][1]) == (0 if at.depth else 1, CANCELLED)
    assert life.counters["cancels"] == 3
    assert 1 not in life.rounds
    if at.plain:
        assert life.counters["ghost_rows"] == (1 if at.depth else 0), "the prefill's row: no other step was planned"
    at.unbroken(life)


def cancel_prefill(at: Setting) -> None:
    scored = at.request(0, 110, max_tokens=8, prompt_logprobs=1)
    ghosts: list[int] = []

    def act(engine: Engine, turn: int) -> None:
        if turn == 8:
            assert state_of(engine, 0) is State.PREFILL
            engine.cancel(0)
            engine.cancel(0)
        if turn == 8 + max(at.depth, 1):
            ghosts.append(int(engine.counters["ghost_rows"]))

    life = at.live([scored, *at.requests(3, first=1)], act, but=[0], max_prefill_tokens=8)
    assert life.answers[0] == ((), CANCELLED)
    assert 0 < len(life.scores.by_request[0]) < 109, "what had landed is kept"
    if at.in_turns:
        assert ghosts == [at.depth], "chunks in flight"
        assert len(life.scores.by_request[0]) == 8 * (8 - at.depth)
    at.unbroken(life)


def cancel_decode(at: Setting) -> None:
    """A caller left, in a turn in which others pause, resume and arrive; or the host found a stop string."""

    def act(engine: Engine, turn: int) -> None:
        if turn == 3:
            engine.pause(3)
        if turn == 6:
            engine.pause(2)
            engine.resume(3)
        if turn == 9:
            engine.resume(2)
        if turn in (6, 7):
            cut = turn - 6
            assert state_of(engine, cut) is State.DECODE
            engine.cancel(cut, (CANCELLED, STOP)[cut])
            engine.cancel(cut)

    requests, late = at.requests(4, max_tokens=at.tokens(11)), at.request(4, max_tokens=5)
    life = at.live(requests, act, later={6: [late]}, but=(0, 1))
    assert [life.answers[i][1] for i in range(5)] == [CANCELLED, STOP, LENGTH, LENGTH, LENGTH]
    for cut in (0, 1):
        assert 0 < len(life.answers[cut][0]) == life.gained[5 + cut][cut] < at.tokens(11), "what had landed is kept"
    assert [life.counters[name] for name in ("cancels", "pauses", "resumes")] == [2, 2, 2]
    assert life.counters["ghost_rows"] >= 2 * at.depth
    if at.plain:
        assert len(life.answers[0][0]) == 6 - at.depth
        assert life.counters["ghost_rows"] == 2 * at.depth
        assert life.counters["wasted_tokens"] == 2 * at.depth, "the device could not know"
    at.unbroken(life)


def cancel_last(at: Setting) -> None:
    """When all that they may gain is planned: at once, a turn later, and as late as possible. Only then is a request
    a row of nothing any more."""
    due: dict[int, int] = {0: 0, 1: 1, 2: at.depth - 1} if at.depth else {}
    due = {request_id: wait for request_id, wait in due.items() if 0 <= wait < at.depth}
    seen: dict[int, int] = {}

    def act(engine: Engine, turn: int) -> None:
        for request_id, wait in due.items():
            sequence = engine.scheduler.ledger.sequences.get(request_id)
            if sequence is not None and sequence.planned_tokens >= sequence.max_length:
                since = seen.setdefault(request_id, turn)
                if turn - since == wait:
                    assert state_of(engine, request_id) is (State.DRAINING if wait and at.plain else sequence.state)
                    engine.cancel(request_id)
        if turn == 3 and not at.depth:
            engine.cancel(0)

    requests = [*at.requests(3, max_tokens=10), *at.requests(1, first=3, max_tokens=at.tokens(14))]
    cut = [*due] if at.depth else [0]
    life = at.live(requests, act, but=cut, limited=True)
    assert 0 < life.counters["cancels"] <= len(cut), "what was in flight may have been the end"
    assert seen.keys() == due.keys()
    if at.plain:
        assert life.counters["cancels"] == len(cut)
        assert all(life.answers[i][1] is CANCELLED for i in cut)
        assert [len(life.answers[i][0]) for i in due] == [10 + wait - at.depth for wait in due.values()]
        assert life.counters["ghost_rows"] == sum(at.depth - wait for wait in due.values())


# ---- graphs and prompts ----


def buckets(at: Setting) -> None:
    """With each arrival and each end another graph runs, while steps of the one before are in flight; all were captured
    before the first request."""
    requests = [with_tokens(one, at.tokens(22 - 4 * i)) for i, one in enumerate(at.requests(4))]
    life = at.live(
        requests[:1],
        right=10,
        later={2 * i: [one] for i, one in enumerate(requests) if i},
        buckets=(1, 2, 4),
        variants=(SamplingVariant.covering(one.sampling for one in requests),),
    )
    found = [spec.shape.rows for spec in life.specs if spec.plan.kind is StepKind.DECODE]
    changes = [bucket for i, bucket in enumerate(found) if i == 0 or found[i - 1] != bucket]
    assert changes == [1, 2, 4, 2, 1] if at.in_step else {*changes} == {1, 2, 4}
    assert life.counters["prefill_steps"] + life.counters["mixed_steps"] == 4
    if at.groups == "alone":
        assert life.counters["graph_captures_after_warmup"] == 0
    at.unbroken(life)


def chunks(at: Setting) -> None:
    """A long prompt, between steps of others or in the same ones."""
    talking, long = at.requests(3, max_tokens=at.tokens(16)), at.request(9, 96, max_tokens=4)
    burst = (1, 3)[at.depth % 2]
    life = at.live(talking, later={4: [long]}, max_prefill_tokens=12, prefill_burst=burst)
    assert life.counters["prefill_steps"] + life.counters["mixed_steps"] >= 3 + 8
    if at.in_turns:
        kinds = "".join("pd"[plan.kind] for plan in life.real_plans)
        assert "p" * burst + "d" + "p" * burst in kinds
        assert "p" * (burst + 1) not in kinds.lstrip("p")
    else:
        assert life.counters["mixed_steps"] >= 7
    at.unbroken(life)


def prefix(at: Setting) -> None:
    """Found while its owner decodes, and after it has ended. A hybrid model finds its snapshots."""
    stem = at.prompt(40, 5)
    requests = [at.request(i, (*stem, *at.prompt(3 + i, i)), max_tokens=at.tokens(9)) for i in range(4)]
    keepalive = at.request(9, 6, max_tokens=at.tokens(22))
    waves = [requests[1:3], requests[3:]]

    def act(engine: Engine, turn: int) -> None:
        owner = engine.scheduler.ledger.sequences.get(0)
        if (owner is not None and owner.landed_tokens > 43 and len(waves) == 2) or (owner is None and len(waves) == 1):
            for one in waves.pop(0):
                engine.add(one)

    life = at.live(
        [requests[0], keepalive],
        act,
        added=requests[1:],
        right=10,
        serial={"prefix_caching": False},
        snapshots=SNAPSHOTS if at.hybrid else None,
    )
    assert not waves
    assert life.counters["prefix_hit_tokens"] == 3 * 40
    assert bool(life.counters["snapshot_restores"]) is at.hybrid
    at.unbroken(life)


# ---- everything at once ----


SEEDS = (16, 27)  # lives that have everything


def random(at: Setting) -> None:
    """Whatever happens in a drawn life, in as few blocks as serve a request."""
    life = drawn_life(at, SEEDS[at.depth % 2])
    found = [life.counters[name] > 0 for name in ("pauses", "evictions", "cancels")]
    assert all(found) or (any(found[1:]) and not at.plain), "where answers are over sooner, something may come too late"
    assert any(entry[2] for entries in life.logprobs.values() for entry in entries), "likely tokens"
    assert any(score[2] for scores in life.scores.by_request.values() for score in scores.values()), "scored prompts"


def drawn_life(at: Setting, seed: int) -> Life:
    drawn = random_life(seed).over(VOCABULARY)
    if not at.plain:  # answers are over sooner
        drawn = drawn.with_windows(2, 0)
    least = (132 + at.reserved) // drawn.limits["block_size"] + 1
    cut = drawn.cut
    return at.live(drawn.first, drawn.act, later=drawn.later, but=cut, **(drawn.limits | {"blocks": least}))


EVENTS: dict[str, Callable[[Setting], None]] = {
    event.__name__.replace("_", " "): event
    for event in (
        *(finish, together, room, room_for_two, pause, pause_first, give_way, pressure, cancel_early),
        *(cancel_prefill, cancel_decode, cancel_last, buckets, chunks, prefix, random),
    )
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")


def lived(row: Row, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        of_model(row["model"], patch)
        setting = Setting(**{name: row[name] for name in AXES}, folder=folder)
        EVENTS[row["event"]](setting)


def named(rows: list[Row]) -> list[Any]:
    return [pytest.param(row, id="-".join(map(str, row.values()))) for row in rows]


ROWS = covering_rows({"event": tuple(EVENTS), **AXES}, shared_out, asked=asked, sparing=SPARING)


@pytest.mark.parametrize("row", named(ROWS))
def test_every_life_is_that_of_the_serial_engine(row: Row, folder: Path) -> None:
    """Each event meets every value of each axis, or one that is like it; the values of any two axes meet, of three and
    more that are alike one."""
    lived(row, folder)


@pytest.mark.long
@pytest.mark.parametrize("event", EVENTS)
def test_any_two_values_meet_in_each_event(event: str, folder: Path) -> None:
    for row in covering_rows(AXES, lambda row: allowed({"event": event, **row}), sparing=SPARING):
        lived({"event": event, **row}, folder)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_random_lives(seed: int, folder: Path) -> None:
    rows = covering_rows(AXES, lambda row: allowed({"event": "random", **row}))
    row = rows[seed % len(rows)]
    with pytest.MonkeyPatch.context() as patch:
        of_model(row["model"], patch)
        drawn_life(Setting(**row, folder=folder), seed)


@pytest.mark.parametrize(("drafts", "groups"), [("none", "two groups"), ("ngram", "alone")])
def test_a_plan_is_launched_as_it_was_digested(
    drafts: str, groups: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner folds what it decides and returns it. From there to the device it is one value, never another."""
    made: list[StepPlan | None] = []
    plan = Planner.plan

    def kept(planner: Planner) -> Planned | None:
        planned = plan(planner)
        made.append(None if planned is None else planned[0])
        return planned

    monkeypatch.setattr(Planner, "plan", kept)
    of_model("experts", monkeypatch)
    life = drawn_life(Setting(drafts, "experts", 2, "mixed", "random", groups, "fp8", "fp8", folder), SEEDS[0])
    assert {type(plan) for plan in made} == {StepPlan, type(None)}
    digested = {id(one) for one in made}  # of both groups
    assert all(id(one) in digested for one in life.plans)
    # A group without a plan launches one without rows.
    assert all(id(spec.plan) in digested or not spec.plan.slots for spec in life.specs)
