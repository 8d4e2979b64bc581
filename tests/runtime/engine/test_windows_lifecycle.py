"""What can happen to a request whose rows gain several tokens a step, one event a test, each of them counted.

The events are those of test_lifecycle.py. Answers, ends and log-probabilities are those of one token a step (lives.py),
and after every life all blocks, slots and epochs are back. Steps alternate between widths, or have one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.plan import StepKind
from runtime.schedule.request import Request
from runtime.schedule.states import State
from tests.runtime.engine.lives import Life, people, prompt
from tests.runtime.engine.rig import request
from tests.runtime.engine.test_lifecycle import CANCELLED, LENGTH, STOP, ending, state_of
from tests.runtime.engine.test_windows import windows
from tests.selection import covering

WIDTHS = [(2,), (8,), (8, 1, 3)]
EVENTS = ("pause", "pause all", "give way", "cancel", "cancel paused", "cancel last", "defer")
ONCE = (
    "finish together",
    "cancel prefill",
    "cancel first",
    "pause first",
    "block boundary",
    "buckets",
    "chunks",
    "prefix",
)
DEPTHS = (1, 4, 2, 0, 3)
GRID = covering([*product(EVENTS, WIDTHS)], (0, 1, 2, 3, 4), at_once=1)


def everywhere(event: str) -> pytest.MarkDecorator:
    """The event meets each width, and they share out the depths; each of them at every depth is long."""
    cases = [(*case.values, case.marks) for case in GRID]
    of_it = [pytest.param(widths, depth, marks=marks) for (name, widths), depth, marks in cases if name == event]
    return pytest.mark.parametrize(("widths", "depth"), of_it, ids=str)


def somewhere(event: str) -> pytest.MarkDecorator:
    """The event meets one width at one depth, others than its neighbours do; each width at every depth is long."""
    turn = ONCE.index(event)
    chosen = WIDTHS[turn % len(WIDTHS)], DEPTHS[turn % len(DEPTHS)]
    cases = [pytest.param(*at, marks=() if at == chosen else pytest.mark.long) for at in product(WIDTHS, DEPTHS)]
    return pytest.mark.parametrize(("widths", "depth"), cases, ids=str)


def talkers(count: int, widths: tuple[int, ...]) -> list[Request]:
    """Requests that are not over before turn 11, however much their windows gain."""
    return people(count, max_tokens=30 + 8 * max(widths))


def several_at_once(life: Life, request_id: int) -> bool:
    return max(life.rounds[request_id]) > 1


# ---- how requests end ----


@somewhere("finish together")
def test_all_rows_finish_in_one_step(widths: tuple[int, ...], depth: int) -> None:
    """In the middle of a window. Their successors are prefilled while the ghosts of the first are in flight."""
    first = ending(6, people(12, max_tokens=60))[:4]
    second = [replace(one, request_id=one.request_id + 50) for one in first]
    life = windows([*first, *second], widths, depth=depth, rows=4, right=10)
    assert [(len(tokens), reason) for tokens, reason in life.answers.values()] == [(7, STOP)] * 8
    for batch in (first, second):
        ends = {tuple(gained.get(one.request_id) == 7 for one in batch) for gained in life.gained}
        assert ends == {(False,) * 4, (True,) * 4}, "no turn in which some have ended, and others not"
    assert life.counters["ghost_rows"] == 2 * 4 * depth


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


@somewhere("pause first")
def test_a_request_is_paused_before_its_first_token(widths: tuple[int, ...], depth: int) -> None:
    requests = [talkers(1, widths)[0], request(1, prompt(60, 1), max_tokens=8, logprobs=2, stops=())]
    waits = depth % 2 == 0

    def act(engine: Engine, turn: int) -> None:
        if turn == (0 if waits else 2):
            engine.pause(1)
        if turn == 3 and not waits:
            assert state_of(engine, 1) is State.PREFILL, "a prompt is finished all the same"
        if turn == 14:
            assert state_of(engine, 1) is State.PAUSED
            engine.resume(1)

    life = windows(requests, widths, depth=depth, act=act, max_prefill_tokens=16)
    assert max(gained.get(1, 0) for gained in life.gained[:14]) == (0 if waits else 1)
    assert (life.counters["pauses"], life.counters["resumes"]) == (1, 1)


# ---- cancel ----


def cancelled(
    requests: list[Request], widths: tuple[int, ...], depth: int, *, turn: int, state: State, **limits: Any
) -> tuple[Life, int]:
    """A life in which request 0 is cancelled before ``turn``, in ``state``, and how many ghosts that left. The others
    must not notice; they are not over before all ghosts have landed, for a window that ends leaves some, too."""
    ghosts: list[int] = []

    def act(engine: Engine, now: int) -> None:
        if now == turn:
            assert state_of(engine, 0) is state
            engine.cancel(0)
        if now == turn + max(depth, 1):
            ghosts.append(int(engine.counters["ghost_rows"]))
            assert len(engine.scheduler.resources.sequences) == len(requests) - 1

    life = windows(requests, widths, depth=depth, act=act, but={0}, **limits)
    assert life.answers[0][1] is CANCELLED
    return life, ghosts[0]


@somewhere("cancel prefill")
def test_cancel_during_prefill(widths: tuple[int, ...], depth: int) -> None:
    requests = [request(0, prompt(110), max_tokens=8, prompt_logprobs=1), *talkers(4, widths)[1:]]
    life, ghosts = cancelled(requests, widths, depth, turn=8, state=State.PREFILL, max_prefill_tokens=8)
    assert life.answers[0][0] == ()
    assert ghosts == depth, "chunks in flight"
    assert len(life.scores.by_request[0]) == 8 * (8 - depth), "what had landed is kept"


@somewhere("cancel first")
def test_cancel_between_prefill_and_the_first_token(widths: tuple[int, ...], depth: int) -> None:
    """No window was planned yet. The serial engine has its first token by then."""
    life, ghosts = cancelled(talkers(4, widths), widths, depth, turn=1, state=State.DECODE)
    assert len(life.answers[0][0]) == (0 if depth else 1)
    assert ghosts == (1 if depth else 0), "the prefill's row"
    assert 0 not in life.rounds


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


# ---- blocks and buckets ----


@somewhere("block boundary")
def test_every_row_crosses_a_block_boundary_at_once(widths: tuple[int, ...], depth: int) -> None:
    requests = people(8, length=12, max_tokens=100)
    life = windows(requests, widths, depth=depth, right=10, block_size=4, max_prefill_tokens=96)
    together = [plan for plan in life.real_plans if len({slot for slot, _, _ in plan.block_writes}) == 8]
    assert len([plan for plan in together if plan.kind is StepKind.DECODE]) >= 3
    assert life.counters["stalls"] == 0


@somewhere("buckets")
def test_buckets_change_up_and_down(widths: tuple[int, ...], depth: int) -> None:
    """Each arrives two turns after the one before it, and ends before that one does. All graphs were there before."""
    ends = [max(widths) * (20 - 2 * i) for i in range(8)]
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=ends[i])) for i, r in enumerate(people(8))]
    room: dict[str, Any] = {"max_model_len": 256}
    life = windows(
        requests[:1],
        widths,
        depth=depth,
        right=10,
        every=requests,
        later={2 * i: [one] for i, one in enumerate(requests) if i},
        buckets=(1, 2, 4, 8),
        variants=(SamplingVariant(random=True, logprobs=True, top_logprobs=5),),
        serial=room,
        **room,
    )
    buckets = [spec.bucket for spec in life.specs if spec.plan.kind is StepKind.DECODE]
    changes = [bucket for i, bucket in enumerate(buckets) if i == 0 or buckets[i - 1] != bucket]
    assert changes == [1, 2, 4, 8, 4, 2, 1]
    assert life.counters["graph_captures_after_warmup"] == 0


# ---- prompts ----


@somewhere("chunks")
def test_chunked_prefill_between_windows(widths: tuple[int, ...], depth: int) -> None:
    talking, long = talkers(3, widths), request(9, prompt(100, 9), max_tokens=6, logprobs=1, stops=())
    burst = (1, 3)[depth % 2]
    room: dict[str, Any] = {"max_prefill_tokens": 12, "prefill_burst": burst}
    life = windows(talking, widths, depth=depth, every=[*talking, long], later={5: [long]}, **room)
    kinds = "".join("pd"[plan.kind] for plan in life.real_plans)
    assert "p" * burst + "d" + "p" * burst in kinds
    assert "p" * (burst + 1) not in kinds.lstrip("p")
    assert life.counters["prefill_steps"] >= 3 + 9
    assert all(several_at_once(life, i) for i in range(3))


@somewhere("prefix")
def test_prefix_hits(widths: tuple[int, ...], depth: int) -> None:
    """Found while their owner gains tokens by windows, and after it has ended."""
    stem, most = prompt(40, 5), max(widths)
    requests = [request(i, stem + prompt(3 + i, i), max_tokens=12 + 2 * most, logprobs=2, stops=()) for i in range(4)]
    keepalive = request(9, prompt(6, 9), max_tokens=24 * most, stops=())

    def act(engine: Engine, turn: int) -> None:
        if turn in (2, 18):
            assert state_of(engine, 0) is (State.DECODE if turn == 2 else State.ENDED)

    room: dict[str, Any] = {"max_model_len": 256}
    life = windows(
        [requests[0], keepalive],
        widths,
        depth=depth,
        act=act,
        right=10,
        every=[*requests, keepalive],
        later={2: requests[1:3], 18: requests[3:]},
        serial={"prefix_caching": False, **room},
        **room,
    )
    assert life.counters["prefix_hit_tokens"] == 3 * 40
