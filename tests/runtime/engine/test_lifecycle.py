"""What can happen to a request, one event a test: every depth gives what the serial engine gives, and counts it.

Answers and log-probabilities are compared bit for bit (lives.py says why that is possible), and after every life all
blocks, slots and epochs are back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest

from runtime.engine import Engine
from runtime.schedule.plan import StepKind, StepPlan
from runtime.schedule.planner import Planned, Planner
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.states import State
from tests.models.tiny_delta import FAMILIES
from tests.runtime.engine.conftest import HYBRIDS, long, over_model, over_models
from tests.runtime.engine.lives import Life, live, oracle, people, prompt, same, unbroken
from tests.runtime.engine.random_lives import random_life
from tests.runtime.engine.rig import request
from tests.selection import covering

pytestmark = pytest.mark.usefixtures("every_model")
STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED


DEPTHS = (1, 2, 4)


@pytest.fixture
def every_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return over_model(request.param, monkeypatch)


@pytest.fixture
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every event happens at each depth and over each kind of model; each of both together is long."""
    turned = turn(metafunc)
    if says(metafunc, "every_model"):
        return
    if says(metafunc, "depth"):
        kept = of_each_recurrence(turned)
        models = ["attention", "hybrid", *(name if name in kept else long(name) for name in HYBRIDS)]
        metafunc.parametrize("every_model", models, indirect=True)
    elif "depth" in metafunc.fixturenames:
        cases = covering(("attention", "hybrid"), DEPTHS, at_once=1, turned=turned)
        cases += [long("attention", 3), long("hybrid", 3), *over_families(metafunc, (*DEPTHS, 3))]
        metafunc.parametrize(("every_model", "depth"), cases, indirect=True)
    else:
        assert metafunc.function.__name__ == "test_random_lives"
        further = [long(model, seed) for model in ("attention", "hybrid", *HYBRIDS) for seed in range(10, 60)]
        metafunc.parametrize(("every_model", "seed"), over_models(range(10)) + further, indirect=["every_model"])


def over_families(metafunc: pytest.Metafunc, depths: tuple[int, ...]) -> list[Any]:
    """One hybrid family of each recurrence, at one of ``depths``, both in turn; the rest is long."""
    turned = turn(metafunc)
    kept = of_each_recurrence(turned)
    found = []
    for number, name in enumerate(HYBRIDS):
        its = depths[(turned + number) % len(depths)]
        found += [(name, depth) if depth == its and name in kept else long(name, depth) for depth in depths]
    return found


def of_each_recurrence(turned: int) -> list[str]:
    """A family with gated delta nets, in turn, and the one with Mamba-2."""
    return [[*FAMILIES][turned // 7 % len(FAMILIES)], "nemotron-h"]


def says(metafunc: pytest.Metafunc, name: str) -> bool:
    """It says itself which."""
    return any(name in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))


def turn(metafunc: pytest.Metafunc) -> int:
    """Other events meet other depths."""
    return crc32(metafunc.function.__name__.encode())


def ending(at: int, requests: list[Request]) -> list[Request]:
    """Those of ``requests`` whose token ``at`` (from 0) comes for the first time, which makes it their stop id."""
    alone = oracle(requests)
    found = []
    for one in requests:
        tokens = alone.finished[one.request_id].token_ids
        if tokens[at] not in tokens[:at]:
            found.append(replace(one, stop_token_ids=(tokens[at],)))
    return found


def state_of(engine: Engine, request_id: int) -> State:
    sequence = engine.scheduler.resources.sequences.get(request_id)
    return State.ENDED if sequence is None else sequence.state


# ---- how requests end ----


def test_finish_by_length(depth: int) -> None:
    """The host knows when it comes: nothing is launched that is not wanted."""
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=1 + 3 * i)) for i, r in enumerate(people(6))]
    life = live(requests, depth=depth)
    same(life, oracle(requests))
    assert [life.answers[i][1] for i in range(6)] == [LENGTH] * 6
    assert [len(life.answers[i][0]) for i in range(6)] == [1, 4, 7, 10, 13, 16]
    assert (life.counters["ghost_rows"], life.counters["wasted_tokens"]) == (0, 0)
    unbroken(life)


def test_finish_by_the_context(depth: int) -> None:
    requests = people(3, length=20, max_tokens=100)
    life = live(requests, depth=depth, max_model_len=32)
    same(life, oracle(requests, max_model_len=32))
    assert [(len(tokens), reason) for tokens, reason in life.answers.values()] == [(12, LENGTH)] * 3
    assert life.counters["ghost_rows"] == 0


@pytest.mark.parametrize("at", [0, 1, 5])
def test_finish_by_eos(depth: int, at: int) -> None:
    """Nobody knows when it comes: each end leaves as many ghosts as there are steps in flight, and they do nothing."""
    requests = ending(at, people(6))
    assert len(requests) >= 5
    bystander = request(99, prompt(9), temperature=1.0, max_tokens=30, stops=())
    # Without the cache: else some prompts wait a step for what they have in common, and prefills have no ghosts.
    life = live([*requests, bystander], depth=depth, max_prefill_tokens=200, prefix_caching=False)
    same(life, oracle([*requests, bystander]))
    for one in requests:
        assert (len(life.answers[one.request_id][0]), life.answers[one.request_id][1]) == (at + 1, STOP)
    assert life.counters["ghost_rows"] == depth * len(requests)
    assert life.counters["wasted_tokens"] == 0, "a ghost row is masked on the device"
    unbroken(life)


def test_finish_by_a_stop_id_that_does_not_count_yet(depth: int) -> None:
    requests = [replace(r, sampling=replace(r.sampling, min_tokens=9)) for r in ending(4, people(6))]
    life = live(requests, depth=depth)
    same(life, oracle(requests))
    for one in requests:
        tokens, _ = life.answers[one.request_id]
        assert len(tokens) >= 9
        assert one.stop_token_ids[0] not in tokens[:8]


def test_several_rows_finish_in_one_step(depth: int) -> None:
    ends, others = ending(6, people(8, max_tokens=20))[:4], people(8, max_tokens=20)[4:]
    requests = [*ends, *(replace(r, request_id=r.request_id + 50) for r in others)]
    life = live(requests, depth=depth)
    same(life, oracle(requests))
    assert [life.answers[r.request_id][1] for r in ends] == [STOP] * 4
    assert life.counters["ghost_rows"] == 4 * depth
    unbroken(life)


def test_all_rows_finish_in_one_step(depth: int) -> None:
    """Their successors are prefilled while the ghosts of the first are in flight."""
    first = ending(6, people(12, max_tokens=20))[:4]
    second = [replace(r, request_id=r.request_id + 50) for r in first]
    life = live([*first, *second], depth=depth, rows=4)
    same(life, oracle([*first, *second]))
    assert [reason for _, reason in life.answers.values()] == [STOP] * 8
    assert life.counters["ghost_rows"] == 2 * 4 * depth
    unbroken(life)


# ---- how requests come in ----


def test_admission_while_steps_are_in_flight(depth: int) -> None:
    requests = people(6)
    later = {3: requests[2:3], 4: requests[3:5], 11: requests[5:]}
    life = live(requests[:2], depth=depth, later=later)
    same(life, oracle(requests))
    assert life.counters["prefill_steps"] + life.counters["mixed_steps"] == 4
    unbroken(life)


def test_admission_is_deferred_while_the_context_is_full(depth: int) -> None:
    """The third needs blocks that only the end of another gives back; nobody loses blocks for its sake."""
    lengths = (8, 20, 16)
    requests = [request(i, prompt(33, i), max_tokens=lengths[i], logprobs=1, stops=()) for i in range(3)]
    life = live(requests, depth=depth, blocks=13, max_model_len=64)
    same(life, oracle(requests))
    turns = len(life.gained)
    began = next(turn for turn in range(turns) if 2 in life.gained[turn])
    assert life.gained[began - 1][0] == 8, "it began when the first had ended"
    assert life.counters["evictions"] == 0
    unbroken(life)


def test_the_chain_breaks_where_the_context_leaves_nothing_to_run(depth: int) -> None:
    """One request fills the pool: when its last token is planned, the next must wait until that one has landed."""
    requests = [request(i, prompt(60, i), max_tokens=10, logprobs=1, stops=()) for i in range(2)]
    life = live(requests, depth=depth, blocks=10, max_model_len=70)
    same(life, oracle(requests))
    assert life.counters["chain_breaks{context_full}"] == 1
    assert life.counters["chained_steps"] == life.counters["steps"] - 2
    assert [plan is None for plan in life.plans[10 : 10 + depth]] == [True] * depth


def test_admission_waits_for_a_row(depth: int) -> None:
    requests = people(7, max_tokens=9)
    life = live(requests, depth=depth, rows=2)
    same(life, oracle(requests))
    assert max(len(plan.slots) for plan in life.real_plans) == 2
    unbroken(life)


# ---- pause, resume, evict ----


def test_a_paused_request_stands_still_while_the_others_go_on(depth: int) -> None:
    requests = people(3, max_tokens=40)

    def act(engine: Engine, turn: int) -> None:
        if turn == 6:
            engine.pause(1)
            engine.pause(1)
        if turn == 25:
            engine.resume(1)
            engine.resume(1)

    life = live(requests, act, depth=depth)
    same(life, oracle(requests))
    still = {life.gained[turn][1] for turn in range(6 + depth, 25 + depth)}
    assert len(still) == 1, "what was in flight has landed, and nothing more"
    assert life.gained[24 + depth][0] - life.gained[6 + depth][0] == 18
    assert life.counters["evictions"] == 0
    unbroken(life)


def test_nothing_runs_while_everybody_is_paused(depth: int) -> None:
    requests = people(2)

    def act(engine: Engine, turn: int) -> None:
        for request_id in (0, 1):
            if turn == 5:
                engine.pause(request_id)
            if turn == 20:
                engine.resume(request_id)

    life = live(requests, act, depth=depth)
    same(life, oracle(requests))
    assert life.counters["chain_breaks{paused}"] == 1
    assert [plan is None for plan in life.plans[5:20]] == [True] * 15


@pytest.mark.parametrize("when", ["waiting", "prefill"])
def test_a_request_is_paused_before_its_first_token(depth: int, when: str) -> None:
    first, second = people(1)[0], request(1, prompt(60, 1), max_tokens=8, logprobs=2, stops=())

    def act(engine: Engine, turn: int) -> None:
        if turn == (0 if when == "waiting" else 2):
            engine.pause(1)
        if turn == 3 and when == "prefill":
            assert state_of(engine, 1) is State.PREFILL, "a prompt is finished all the same"
        if turn == 14:
            assert state_of(engine, 1) is State.PAUSED
            engine.resume(1)

    life = live([first, second], act, depth=depth, max_prefill_tokens=16)
    same(life, oracle([first, second]))
    assert max(gained.get(1, 0) for gained in life.gained[:14]) == (0 if when == "waiting" else 1)


def test_a_paused_request_gives_way_and_is_recomputed(depth: int) -> None:
    """Paused and holding what somebody else needs: its blocks go, its tokens stay."""
    requests = [request(i, prompt(30, i), max_tokens=20, temperature=1.0, logprobs=1, stops=()) for i in range(3)]

    def act(engine: Engine, turn: int) -> None:
        if turn == 8:
            engine.pause(0)
        if turn == 18:
            assert state_of(engine, 0) is State.PAUSED
            assert engine.scheduler.resources.sequences[0].slot == 0
        if turn == 20:
            engine.resume(0)

    life = live(requests[:2], act, depth=depth, blocks=15, max_model_len=64, later={10: requests[2:]})
    same(life, oracle(requests))
    assert life.counters["evictions"] == 1


def test_eviction_under_pressure(depth: int) -> None:
    """Everybody outgrows the pool: the last in line give way, wait, and go on where they were."""
    requests = people(6, length=20, max_tokens=40)
    life = live(requests, depth=depth, blocks=20)
    same(life, oracle(requests))
    assert life.counters["evictions"] > 0


# ---- cancel ----


def cancelled(
    requests: list[Request], depth: int, turn: int, state: State, reason: FinishReason = CANCELLED, **limits: Any
) -> Life:
    """A life in which request 0 is cancelled before ``turn``, in ``state``, twice; the others must not notice."""

    def act(engine: Engine, now: int) -> None:
        if now == turn:
            assert state_of(engine, 0) is state
            engine.cancel(0, reason)
            engine.cancel(0)
            engine.cancel(4711)

    life = live(requests, act, depth=depth, **limits)
    same(life, oracle(requests), but=[0])
    assert life.answers[0][1] is reason
    return life


def test_cancel_before_prefill(depth: int) -> None:
    requests = people(3, max_tokens=9)
    waiting = [replace(requests[0], priority=1), *requests[1:]]
    life = cancelled(waiting, depth, turn=2, state=State.WAITING, rows=2)
    assert life.answers[0][0] == ()
    assert life.counters["ghost_rows"] == 0
    unbroken(life)


def test_cancel_in_the_turn_of_its_arrival(depth: int) -> None:
    requests = people(3)

    def act(engine: Engine, turn: int) -> None:
        if turn == 0:
            engine.cancel(0)

    life = live(requests, act, depth=depth)
    same(life, oracle(requests), but=[0])
    assert life.answers[0] == ((), CANCELLED)


def test_cancel_during_prefill(depth: int) -> None:
    requests = [request(0, prompt(110), max_tokens=8, prompt_logprobs=1), *people(4)[1:]]
    life = cancelled(requests, depth, turn=8, state=State.PREFILL, max_prefill_tokens=8, mixed=None)
    assert life.answers[0][0] == ()
    assert life.counters["ghost_rows"] == depth, "chunks in flight"
    assert len(life.scores.by_request[0]) == 8 * (8 - depth), "what had landed is kept"
    unbroken(life)


def test_cancel_between_prefill_and_the_first_token(depth: int) -> None:
    requests = people(4)
    life = cancelled(requests, depth, turn=1, state=State.DECODE)
    assert life.answers[0][0] == ()
    assert life.counters["ghost_rows"] == 1, "the prefill's row; no decode step was planned yet"
    unbroken(life)


@pytest.mark.parametrize("reason", [CANCELLED, STOP])
def test_cancel_while_decoding(depth: int, reason: FinishReason) -> None:
    """Somebody asked, or the host found a stop string."""
    requests = people(4)
    life = cancelled(requests, depth, turn=8, state=State.DECODE, reason=reason)
    assert len(life.answers[0][0]) == 8 - depth
    assert life.counters["ghost_rows"] == depth
    assert life.counters["wasted_tokens"] == depth, "the device could not know"
    unbroken(life)


@pytest.mark.parametrize(("depth", "turn"), [(1, 10), (2, 10), (2, 11), (4, 10), (4, 11), (4, 13)])
def test_cancel_while_its_last_tokens_are_in_flight(depth: int, turn: int) -> None:
    """Of ten tokens, the last is planned in turn 9; from turn 10 on the request is no row of anything."""
    requests = [*people(1, max_tokens=10), *people(4, max_tokens=20)[1:]]
    life = cancelled(requests, depth, turn, State.DECODE if turn == 10 else State.DRAINING)
    assert len(life.answers[0][0]) == turn - depth
    assert life.counters["ghost_rows"] == 10 - (turn - depth)


def test_cancel_while_paused_or_evicted(depth: int) -> None:
    requests = [request(i, prompt(30, i), max_tokens=20, temperature=1.0, logprobs=1, stops=()) for i in range(3)]
    for evicted in (False, True):

        def act(engine: Engine, turn: int, evicted: bool = evicted) -> None:
            if turn == 8:
                engine.pause(0)
            if turn == 18:
                assert (engine.scheduler.resources.sequences[0].slot == 0) is evicted
                engine.cancel(0)

        later = {10: requests[2:]} if evicted else {}
        life = live(requests[:2], act, depth=depth, blocks=15, max_model_len=64, later=later)
        same(life, oracle(requests if evicted else requests[:2]), but=[0])
        assert (len(life.answers[0][0]), life.answers[0][1]) == (8, CANCELLED)


# ---- blocks and buckets ----


def test_every_row_crosses_a_block_boundary_at_once(depth: int) -> None:
    requests = people(8, length=12, max_tokens=30)
    life = live(requests, depth=depth, block_size=4, max_prefill_tokens=96)
    same(life, oracle(requests))
    together = [plan for plan in life.real_plans if len({slot for slot, _, _ in plan.block_writes}) == 8]
    assert len([plan for plan in together if plan.kind is StepKind.DECODE]) >= 6
    assert life.counters["stalls"] == 0
    unbroken(life)


def test_buckets_change_up_and_down(depth: int) -> None:
    """With each arrival and each end another graph runs; all were captured before the first request."""
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=30 - 3 * i)) for i, r in enumerate(people(8))]
    later = {2 * i: [one] for i, one in enumerate(requests) if i}
    life = live(requests[:1], depth=depth, buckets=(1, 2, 4, 8), later=later)
    same(life, oracle(requests))
    buckets = [spec.bucket for spec in life.specs if spec.plan.kind is StepKind.DECODE]
    changes = [bucket for i, bucket in enumerate(buckets) if i == 0 or buckets[i - 1] != bucket]
    assert changes == [1, 2, 4, 8, 4, 2, 1]
    unbroken(life)


# ---- prompts ----


@pytest.mark.parametrize("burst", [1, 3])
def test_chunked_prefill_between_decode_steps(depth: int, burst: int) -> None:
    talking, long = people(3, max_tokens=30), request(9, prompt(100, 9), max_tokens=6, logprobs=1, stops=())
    life = live(talking, depth=depth, max_prefill_tokens=40, prefill_burst=burst, mixed=None, later={5: [long]})
    small = live(talking, depth=depth, max_prefill_tokens=12, prefill_burst=burst, mixed=None, later={5: [long]})
    same(life, oracle([*talking, long]))
    same(small, oracle([*talking, long]))
    kinds = "".join("pd"[plan.kind] for plan in small.real_plans)
    assert "p" * burst + "d" + "p" * burst in kinds
    assert "p" * (burst + 1) not in kinds.lstrip("p")
    assert small.counters["prefill_steps"] > life.counters["prefill_steps"]
    unbroken(small)


def test_prefix_hits(depth: int, every_model: str) -> None:
    """Found while their owner decodes, and after it has ended; none where state of slots would be missing."""
    stem = prompt(40, 5)
    requests = [request(i, stem + prompt(3 + i, i), max_tokens=12, logprobs=2, stops=()) for i in range(4)]
    later = {5: requests[1:3], 40: requests[3:]}
    keepalive = request(9, prompt(6, 9), max_tokens=60, stops=())
    life = live([requests[0], keepalive], depth=depth, later=later)
    same(life, oracle([*requests, keepalive], prefix_caching=False))
    assert life.counters["prefix_hit_tokens"] == (3 * 40 if every_model == "attention" else 0)
    unbroken(life)


# ---- everything at once ----


def drawn_life(seed: int, depth: int) -> Life:
    drawn = random_life(seed)
    life = live(drawn.first, drawn.act, depth=depth, later=drawn.later, **drawn.limits)
    same(life, oracle(drawn.requests), but=[i for i in drawn.cut if life.answers[i][1] is CANCELLED])
    return life


def test_a_plan_is_launched_as_it_was_digested(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner folds what it decides and returns it. From there to the device it is one value, never another."""
    made: list[StepPlan | None] = []
    plan = Planner.plan

    def kept(planner: Planner) -> Planned | None:
        planned = plan(planner)
        made.append(None if planned is None else planned[0])
        return planned

    monkeypatch.setattr(Planner, "plan", kept)
    drawn = random_life(4)
    life = live(drawn.first, drawn.act, depth=depth, later=drawn.later, **drawn.limits)
    assert {type(plan) for plan in made} == {StepPlan, type(None)}
    digested = {id(one) for one in made}  # of other groups, too, where there are some
    assert all(id(told) in digested for told in life.plans)
    # A group without a plan launches one without rows.
    assert all(id(spec.plan) in digested or not spec.plan.slots for spec in life.specs)


def test_random_lives(seed: int) -> None:
    """At depth 0, too: its plans are others where rows, blocks and tokens a step are few."""
    drawn_life(seed, (1, 2, 4, 3, 0)[seed % 5])
