"""Steps with decode rows and prompt chunks: who is in them, with how many tokens, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from runtime.schedule import reservation
from runtime.schedule.config import MixedSteps, SchedulerConfig
from runtime.schedule.plan import Admit, StepKind, StepPlan
from runtime.schedule.request import Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.states import State
from tests.runtime.schedule.configs import Limits, config_with
from tests.runtime.schedule.driver import Driver, ending_by_stop, prompt_of

SIXTEEN = MixedSteps(buckets=(4, 8, 16, 32), budgets=((16, 1 << 20, 16),))  # tokens of any mixed step
WIDE_OPEN: Limits = {
    "rows": 16,
    "slots": 32,
    "blocks": 1000,
    "block_size": 4,
    "max_model_len": 1000,
    "max_prefill_tokens": 32,
    "prefix_caching": False,
}


def mixing(mixed: MixedSteps = SIXTEEN, **limits: Any) -> Driver:
    return Driver(**cast(Limits, {**WIDE_OPEN, "mixed": mixed, **limits}))


def kinds(plans: Sequence[StepPlan | None]) -> str:
    return "".join("-" if plan is None else plan.kind.name[0] for plan in plans)


def score(engine: Driver, request_id: int, prompt: int, *, max_tokens: int = 4) -> None:
    request = Request(
        request_id, prompt_of(prompt, request_id), SamplingParams(max_tokens=max_tokens, prompt_logprobs=1)
    )
    engine._requests[request_id] = request
    assert engine.scheduler.submit(Admit(request)) == ()


def steps_until(engine: Driver, request_id: int, state: State = State.DECODE) -> int:
    before = len(engine.plans)
    engine.turns_until(state, request_id)
    return len(engine.plans) - before


# ---- the kinds of steps ----


def test_prompts_alone_are_prefilled_and_rows_alone_decode() -> None:
    engine = mixing()
    engine.admit(0, prompt=50, max_tokens=5)
    plans = engine.turns(8)
    assert kinds(plans) == "PPDDDD--"
    assert [plan.prefill_tokens for plan in plans[:2] if plan is not None] == [32, 18]


def test_prompts_join_the_rows_that_decode() -> None:
    engine = mixing()
    engine.admit(0, prompt=3, max_tokens=20)
    engine.turns(2)
    engine.admit(1, prompt=40, max_tokens=9)
    plans = engine.real_turns(4)
    assert kinds(plans) == "MMMD"
    assert [plan.prefill_tokens for plan in plans] == [15, 15, 10, 0], "16 tokens, the row's included, and what is left"
    assert [plan.decode_rows for plan in plans] == [1, 1, 1, 2]
    first = plans[0]
    assert first.slots == (engine.sequence(0).slot, engine.sequence(1).slot)
    assert (first.chunks[0].slot, first.chunks[0].start, first.chunks[0].last) == (engine.sequence(1).slot, 0, False)
    assert plans[2].chunks[0].last
    engine.finish()
    counters = engine.scheduler.counters
    assert (counters.mixed_steps, counters.mixed_prompt_tokens, counters.mixed_padded_tokens) == (3, 40, 16 - 11)
    assert (counters.prefill_steps, counters.chain_breaks) == (1, {"start": 1})


def test_a_row_that_decodes_is_in_every_step() -> None:
    engine = mixing(depth=2)
    engine.admit(0, prompt=3, max_tokens=40)
    engine.turns(2)
    for request_id in range(1, 9):
        engine.admit(request_id, prompt=30, max_tokens=3)
    engine.finish()
    steps = engine.steps_of(0)
    assert steps == list(range(steps[0], steps[0] + 40))


def test_a_decode_step_behind_a_mixed_one_has_the_rows_of_the_one_before_it() -> None:
    """Staging tells by identity that nothing changed: a prompt that goes on is no reason to send the rows again."""
    engine = mixing()
    engine.admit(0, prompt=3, max_tokens=40)
    engine.admit(1, prompt=3, max_tokens=40)
    _, decode = engine.real_turns(2)
    engine.admit(2, prompt=20, max_tokens=4)
    (mixed,) = engine.real_turns(1)
    engine.cancel(2)
    (again,) = engine.real_turns(1)
    assert kinds([decode, mixed, again]) == "DMD"
    assert again.slots is decode.slots
    assert again.epochs is decode.epochs
    engine.admit(3, prompt=3, max_tokens=4)
    last_chunk, longer = engine.real_turns(2)
    assert last_chunk.slots[:2] == decode.slots
    assert longer.slots == last_chunk.slots, "its last chunk made a row of it"
    assert longer.slots is not decode.slots


def test_the_successor_of_a_row_that_drains_is_prefilled_in_the_same_step() -> None:
    engine = mixing(rows=1, slots=2)
    engine.admit(0, prompt=3, max_tokens=3)
    engine.admit(1, prompt=3, max_tokens=3)
    assert kinds(engine.turns(8)) == "PDDPDD--"
    engine = mixing(rows=2, slots=4)
    for request_id in range(4):
        engine.admit(request_id, prompt=3, max_tokens=3 + request_id % 2)
    plans = engine.turns(5)
    assert kinds(plans) == "PDDMM"
    engine.finish()
    assert engine.scheduler.counters.chain_breaks == {"start": 1}


def test_more_rows_than_the_configuration_has_are_never_in_a_step() -> None:
    """The driver checks it at every turn."""
    engine = mixing(rows=3, slots=3, depth=4)
    for request_id in range(12):
        engine.admit(request_id, prompt=5 + request_id, max_tokens=4)
    engine.finish()
    assert engine.scheduler.counters.mixed_steps >= 3


# ---- how many tokens ----


def test_the_budget_is_looked_up_by_rows_and_by_the_most_kv_they_can_have() -> None:
    table = ((1, 20, 16), (1, 1 << 20, 8), (8, 1 << 20, 4))
    engine = mixing(MixedSteps((4, 8, 16, 32), table))
    engine.admit(0, prompt=17, max_tokens=30)
    engine.turns(2)
    engine.admit(1, prompt=200, max_tokens=1)
    plans = engine.real_turns(3)
    assert engine.sequence(0).planned_tokens == 17 + 5
    assert [plan.prefill_tokens for plan in plans] == [15, 15, 7], "19, 20, 21 tokens when the step was planned"
    engine.admit(2, prompt=2, max_tokens=30)
    engine.turn()
    (plan,) = engine.real_turns(1)
    assert (plan.decode_rows, plan.prefill_tokens) == (2, 2)


def test_prompts_advance_however_small_the_budget_is() -> None:
    engine = mixing(MixedSteps((4, 8, 32), ((16, 1 << 20, 0),)))
    for request_id in range(4):
        engine.admit(request_id, prompt=2, max_tokens=60)
    engine.turns(2)
    engine.admit(9, prompt=20, max_tokens=2)
    assert [plan.prefill_tokens for plan in engine.real_turns(3)] == [4, 4, 4], "up to the bucket above four rows"


def test_few_tokens_wait_in_small_steps_and_many_in_large_ones() -> None:
    engine = mixing(replace(SIXTEEN, budgets=((16, 1 << 20, 32),), calm=((16, 3),), drain_steps=4))
    engine.admit(0, prompt=2, max_tokens=60)
    engine.turns(2)
    engine.admit(1, prompt=12, max_tokens=2)
    assert [plan.prefill_tokens for plan in engine.real_turns(4)] == [3, 3, 3, 3], "4 tokens with the row"
    for request_id in range(2, 6):
        engine.admit(request_id, prompt=20, max_tokens=2)
    tokens = [plan.prefill_tokens for plan in engine.real_turns(8)]
    assert tokens == [30, 14, 14, 7, 6, 3, 3, 3], "a fourth of what waits, up to a bucket"


def test_few_tokens_wait_for_a_step_whose_number_the_stride_divides() -> None:
    """As those of all groups that pad their steps alike do; many are computed in every step."""
    engine = mixing(replace(SIXTEEN, stride=3))
    engine.admit(0, prompt=3, max_tokens=60)
    engine.turns(2)
    for request_id, few in ((1, 15), (2, 1), (3, 7)):
        engine.admit(request_id, prompt=few, max_tokens=2)
        plans = engine.real_turns(5)
        assert [plan.step % 3 for plan in plans if plan.chunks] == [0], "one step is enough for all of it"
        assert all(plan.decode_rows for plan in plans)
    engine.admit(4, prompt=47, max_tokens=2)
    chunks = [(plan.step % 3, plan.prefill_tokens) for plan in engine.real_turns(8) if plan.chunks]
    assert [tokens for _, tokens in chunks] == [15, 15, 15, 2]
    assert {at for at, _ in chunks[:3]} == {0, 1, 2}, "every step, but for the rest"
    assert chunks[-1][0] == 0


def test_prompts_that_nobody_decodes_beside_wait_for_no_step() -> None:
    engine = mixing(replace(SIXTEEN, stride=3))
    for request_id in range(3):
        engine.admit(request_id, prompt=9, max_tokens=1)
        assert kinds(engine.turns(1)) == "P", "in whatever step they come"


def test_scored_prompts_wait_for_the_same_steps() -> None:
    engine = mixing(replace(SIXTEEN, stride=2))
    engine.admit(0, prompt=3, max_tokens=60)
    engine.turns(2)
    for request_id in (1, 2, 3):
        score(engine, request_id, 9)
        engine.admit(request_id + 10, prompt=5, max_tokens=2)
        plans = engine.real_turns(5)
        assert [plan.step % 2 for plan in plans if plan.chunks] == [0, 0]
        assert {plan.kind for plan in plans if plan.chunks} == {StepKind.PREFILL, StepKind.MIXED}
    for request_id in (4, 5, 6):
        score(engine, request_id, 9, max_tokens=1)
        assert sorted(kinds(engine.real_turns(2))) == ["D", "P"], "of no other kind: in each step that may have chunks"


@pytest.mark.parametrize("scored_keep_coming", [True, False])
def test_prompts_of_either_kind_that_keep_coming_do_not_hold_the_other_up(scored_keep_coming: bool) -> None:
    """Three tokens come for every second step, which alone may have chunks. The other prompt takes two of those."""
    engine = mixing(replace(SIXTEEN, calm=((16, 2),), stride=2))
    engine.admit(0, prompt=3, max_tokens=90)
    engine.turns(2)

    def come(request_id: int, tokens: int, *, scored: bool) -> None:
        if scored:
            score(engine, request_id, tokens, max_tokens=1)
        else:
            engine.admit(request_id, prompt=tokens, max_tokens=1)

    for request_id in range(1, 12):
        come(request_id, 3, scored=scored_keep_coming)
        if request_id == 4:
            come(20, 10, scored=not scored_keep_coming)
        engine.turns(2)
    assert engine.state(20) is State.ENDED


def test_who_has_no_row_to_come_does_not_count_as_waiting() -> None:
    engine = mixing(replace(SIXTEEN, calm=((16, 1),), drain_steps=4), rows=2, slots=4)
    engine.admit(0, prompt=2, max_tokens=60)
    engine.turns(2)
    for request_id in range(1, 9):
        engine.admit(request_id, prompt=8, max_tokens=60)
    assert [plan.prefill_tokens for plan in engine.real_turns(3)] == [3, 3, 2]


def test_a_chunk_behind_a_long_prefix_is_smaller_and_fills_a_bucket_all_the_same() -> None:
    mixed = MixedSteps((8, 16, 24, 32), ((16, 1 << 20, 32),), costly_prefix=40)
    engine = mixing(mixed, max_prefill_tokens=200)
    engine.admit(0, prompt=2, max_tokens=80)
    engine.turns(2)
    engine.admit(1, prompt=300, max_tokens=2)
    plans = engine.real_turns(8)
    assert [(plan.chunks[0].start, 1 + plan.prefill_tokens) for plan in plans][:5] == [
        (0, 32),
        (31, 24),  # 31 tokens at 1 + 31 / 40 each buy 17, and the row's one
        (54, 16),
        (69, 16),
        (84, 16),
    ]
    assert plans[-1].prefill_tokens == 7


def test_chunks_behind_a_long_prefix_fill_waves_of_attention() -> None:
    mixed = MixedSteps(tuple(range(8, 129, 8)), ((16, 1 << 20, 56),), costly_prefix=120, tile=8, wave=4)
    engine = mixing(mixed, max_prefill_tokens=200)
    engine.admit(0, prompt=2, max_tokens=80)
    engine.turns(2)
    engine.admit(1, prompt=300, max_tokens=2)
    plans = [plan for plan in engine.real_turns(12) if plan.chunks]
    chunks = [(plan.chunks[0].start, plan.prefill_tokens) for plan in plans]
    assert chunks[:5] == [
        (0, 55),
        (55, 39),  # less than 60 tokens are no long prefix
        (94, 31),  # they buy 31, which is nearly a wave; a token less than that, for the bucket's sake
        (125, 31),
        (156, 23),  # less than three quarters of a wave
    ]


def test_a_wide_step_has_w_tokens_a_row_and_one_a_chunk() -> None:
    engine = mixing(widths=(4,), depth=3, rows=4)
    engine.admit(0, prompt=3, max_tokens=30)
    engine.turns(2)
    engine.admit(1, prompt=20, max_tokens=6)
    plans = engine.real_turns(2)
    assert [(plan.width, plan.prefill_tokens) for plan in plans] == [(4, 12), (4, 8)]
    joined = engine.sequence(1)
    assert (joined.planned_tokens, joined.uncertain_tokens, joined.landed_tokens) == (21, 0, 20)
    (plan,) = engine.real_turns(1)
    assert plan.kind is StepKind.DECODE
    assert (joined.planned_tokens, joined.uncertain_tokens) == (25, 3)
    engine.finish()


# ---- groups ----


def test_whoever_prefills_alone_keeps_to_what_rows_of_another_group_may_wait() -> None:
    """Forty rows decode in one group, behind steps of 512 tokens at most; then the other one gets long prompts."""
    mixed = MixedSteps((16, 64, 256, 512, 1024, 2048), ((64, 1 << 12, 512), (64, 1 << 20, 256)), stride=2)
    groups = [mixing(mixed, rows=64, slots=128, block_size=64, max_prefill_tokens=2048, depth=1) for _ in range(2)]

    def longest() -> int:
        """What a turn's step is padded to."""
        plans = [group.turn() for group in groups]
        room = min(group.scheduler.room_for_rows for group in groups)
        for group in groups:
            group.scheduler.agreed_room(room)
        return max(plan.packed_tokens if plan is not None and plan.chunks else 0 for plan in plans)

    for request_id in range(40):
        groups[0].admit(request_id, prompt=30, max_tokens=60)
    assert longest() == 40 * 30, "nobody decodes"
    for request_id in range(100, 104):
        groups[1].admit(request_id, prompt=900, max_tokens=8)
    lengths = [longest() for _ in range(20)]
    assert max(lengths) == 512
    assert lengths[:4] == [512] * 4
    assert groups[0].scheduler.digest.value != groups[1].scheduler.digest.value
    for _ in range(80):
        longest()
    groups[1].admit(200, prompt=900, max_tokens=2)
    assert longest() == 900, "no row decodes in either"
    for group in groups:
        group.finish()


# ---- fairness ----


def test_a_short_prompt_gets_its_first_token_in_one_step_behind_any_number_of_long_ones() -> None:
    """It needs no more than half a step, and that half goes to the shortest."""
    for longs in (1, 3, 9):
        engine = mixing(replace(SIXTEEN, long_prompt=100))
        engine.admit(0, prompt=2, max_tokens=200)
        engine.turns(2)
        for request_id in range(1, 1 + longs):
            engine.admit(request_id, prompt=400, max_tokens=2)
        engine.turns(5)
        engine.admit(99, prompt=7, max_tokens=3)
        assert steps_until(engine, 99) == 1


def test_a_longer_one_gets_half_of_every_step() -> None:
    engine = mixing(replace(SIXTEEN, long_prompt=100))
    engine.admit(0, prompt=2, max_tokens=200)
    engine.turns(2)
    for request_id in range(1, 5):
        engine.admit(request_id, prompt=400, max_tokens=2)
    engine.turns(5)
    engine.admit(99, prompt=70, max_tokens=3)
    assert steps_until(engine, 99) == 70 / 7


def test_a_long_prompt_gets_half_of_every_step_whatever_comes_after_it() -> None:
    engine = mixing(replace(SIXTEEN, long_prompt=100), depth=1)
    engine.admit(0, prompt=2, max_tokens=400)
    engine.turns(2)
    engine.admit(1, prompt=240, max_tokens=2)
    took, following = 0, 2
    while engine.state(1) is not State.DECODE:
        for _ in range(2):  # more than the other half has room for
            engine.admit(following, prompt=6, max_tokens=1)
            following += 1
        engine.turn()
        took += 1
    assert took <= -(-240 // 7), "at least 7 tokens in each: 16, but for a bucket that the rows leave no more of"
    assert following - 2 - engine.scheduler.waiting > took / 2, "the short ones went on meanwhile"
    engine.scheduler.ledger.check()


def test_a_long_prompt_behind_another_waits_without_a_slot_and_shorter_ones_pass_it() -> None:
    engine = mixing(replace(SIXTEEN, long_prompt=20))
    engine.admit(0, prompt=2, max_tokens=200)
    engine.turns(2)
    for request_id in (1, 2, 3):
        engine.admit(request_id, prompt=100, max_tokens=1)
    engine.turn()
    assert [engine.state(request_id) for request_id in (1, 2, 3)] == [State.PREFILL, State.WAITING, State.WAITING]
    engine.admit(4, prompt=5, max_tokens=1)
    engine.turn()
    assert engine.state(4) is State.DECODE
    engine.finish()
    firsts = [engine.steps_of(request_id)[0] for request_id in (1, 2, 3)]
    assert firsts == sorted(firsts)
    assert engine.steps_of(4)[0] < firsts[0]


def test_nobody_passes_a_long_prompt_whose_turn_it_is() -> None:
    """Its blocks are not free yet: the next in line would take them again and again."""
    engine = mixing(replace(SIXTEEN, long_prompt=20), blocks=40, depth=0)
    engine.admit(0, prompt=2, max_tokens=100)
    engine.admit(1, prompt=60, max_tokens=20)
    engine.turns(4)
    assert engine.state(1) is State.DECODE
    engine.admit(2, prompt=92, max_tokens=2)
    engine.admit(3, prompt=3, max_tokens=2)
    engine.turns(3)
    assert (engine.state(2), engine.state(3)) == (State.WAITING, State.WAITING)
    engine.turns_until(State.ENDED, 1)
    engine.turn()
    assert engine.state(2) is State.PREFILL
    engine.finish()


def test_priority_comes_first_in_mixed_steps_too() -> None:
    engine = mixing(rows=2, slots=4)
    engine.admit(0, prompt=2, max_tokens=100)
    engine.turns(2)
    for request_id, priority in ((1, 1), (2, 0), (3, 2), (4, 0)):
        engine.admit(request_id, prompt=10, max_tokens=2, priority=priority)
    engine.finish()
    order = sorted((1, 2, 3, 4), key=lambda request_id: engine.steps_of(request_id)[0])
    assert order == [2, 4, 1, 3]


# ---- scored prompts ----


def test_scored_prompts_have_steps_of_their_own_and_rows_wait_for_one_at_most() -> None:
    engine = mixing()
    engine.admit(0, prompt=2, max_tokens=60)
    engine.turns(2)
    score(engine, 1, prompt=40)
    engine.admit(2, prompt=20, max_tokens=2)
    plans = engine.real_turns(8)
    assert kinds(plans) == "PMPMPDDD"
    assert [plan.prefill_tokens for plan in plans[:5]] == [15, 15, 15, 5, 10]
    assert [plan.scored_tokens > 0 for plan in plans] == [True, False, True, False, True, False, False, False]
    engine.finish()


@pytest.mark.parametrize("scored_first", [True, False])
def test_a_prompt_does_not_wait_for_all_of_the_other_kind_before_it(scored_first: bool) -> None:
    """Many that come at once, each a little shorter than what a step takes: one of them is always due."""
    engine = mixing()
    engine.admit(0, prompt=2, max_tokens=200)
    engine.turns(2)
    for request_id in range(1, 13):
        if scored_first:
            score(engine, request_id, prompt=14)
        else:
            engine.admit(request_id, prompt=14, max_tokens=1)
    if scored_first:
        engine.admit(20, prompt=8, max_tokens=1)
    else:
        score(engine, 20, prompt=8, max_tokens=1)
    assert steps_until(engine, 20, State.ENDED) <= 5
    assert engine.state(12) is State.WAITING
    engine.finish()


def test_scored_prompts_are_prefilled_with_the_others_where_nobody_decodes() -> None:
    engine = mixing()
    score(engine, 0, prompt=10)
    engine.admit(1, prompt=10, max_tokens=2)
    (plan,) = engine.real_turns(1)
    assert (plan.kind, len(plan.chunks)) == (StepKind.PREFILL, 2)


def test_what_was_scored_before_an_eviction_rides_with_the_rows_when_it_is_computed_again() -> None:
    engine = mixing(depth=0)
    engine.admit(0, prompt=2, max_tokens=60)
    score(engine, 1, prompt=20, max_tokens=20)
    engine.turns_until(State.DECODE, 1)
    engine.turn()
    reservation.evict(engine.scheduler.ledger, engine.sequence(1))
    plans = engine.real_turns(2)
    assert kinds(plans) == "MM"
    assert all(plan.scored_tokens == 0 for plan in plans)
    engine.finish()


def test_neither_scored_prompts_nor_others_take_the_room_of_those_before_them() -> None:
    """Blocks for one of them only: the first in line gets them, whichever kind it is."""
    for scored_first in (True, False):
        engine = mixing(blocks=40, depth=0)
        engine.admit(0, prompt=2, max_tokens=100)
        engine.admit(1, prompt=60, max_tokens=12)
        engine.turns_until(State.DECODE, 1)
        for request_id in (2, 3, 4):
            if (request_id % 2 == 0) is scored_first:
                score(engine, request_id, prompt=66)
            else:
                engine.admit(request_id, prompt=66)
        engine.finish()
        firsts = [engine.steps_of(request_id)[0] for request_id in (2, 3, 4)]
        assert firsts == sorted(firsts)


# ---- lives of requests ----


@pytest.mark.parametrize("depth", range(5))
def test_cancel_pause_and_eviction_of_a_prompt_in_mixed_steps(depth: int) -> None:
    engine = mixing(depth=depth)
    engine.admit(0, prompt=2, max_tokens=60)
    engine.turns(2)
    for request_id in (1, 2, 3):
        engine.admit(request_id, prompt=30, max_tokens=5)
    engine.turns(2)
    engine.cancel(1)
    engine.pause(2)
    engine.turns_until(State.PAUSED, 2)
    engine.turns_until(State.PREFILL, 3)
    reservation.evict(engine.scheduler.ledger, engine.sequence(3))
    engine.turns(2)
    engine.resume(2)
    engine.finish()
    assert engine.scheduler.counters.evictions == 1


@pytest.mark.parametrize("depth", range(5))
def test_stops_and_broken_logits_in_mixed_steps(depth: int) -> None:
    """A prompt whose first token is its last, one whose logits break with the last chunk, and rows that stop early."""
    engine = mixing(depth=depth, prefix_caching=True)
    engine.device.breaks_at = {3: 30}
    engine.admit(0, prompt=2, max_tokens=60)
    engine.turns(2)
    prompt, stop = ending_by_stop(1, length=20, after=1)
    engine.admit(1, prompt, stop=stop, max_tokens=9)
    engine.admit(3, prompt=30, max_tokens=9)
    prompt, stop = ending_by_stop(4, length=20, after=3)
    engine.admit(4, prompt, stop=stop, max_tokens=9)
    engine.finish()
    assert [engine.reason(request_id).label for request_id in (0, 1, 3, 4)] == ["length", "stop", "error", "stop"]


def test_blocks_written_in_a_mixed_step_are_found_in_the_next() -> None:
    """A prompt that begins alike gets no tokens of the step that writes them, though its bucket has room."""
    engine = mixing(prefix_caching=True, depth=2)
    engine.admit(0, prompt=2, max_tokens=60)
    engine.turns(2)
    for request_id in (1, 2):
        engine.admit(request_id, prompt_of(24, 5), max_tokens=2)
    first, second, third = engine.real_turns(3)
    sizes = [[(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] for plan in (first, second, third)]
    assert sizes == [[(0, 15)], [(15, 9)], [(20, 4)]]
    engine.finish()
    assert engine.scheduler.counters.prefix_hit_tokens == 20, "at least the last token is computed"


@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize("widths", [(1,), (3,), (1, 4)], ids=str)
def test_a_busy_batch_gets_the_tokens_that_its_requests_get_alone(widths: tuple[int, ...], depth: int) -> None:
    engine = mixing(
        replace(SIXTEEN, buckets=(8, 16, 32, 80), calm=((16, 4),)), widths=widths, depth=depth, block_size=2
    )
    for request_id in range(12):
        engine.admit(request_id, prompt=3 + 5 * (request_id % 5), max_tokens=3 + request_id)
        engine.turn()
    engine.finish()
    assert engine.scheduler.counters.mixed_steps >= 6


# ---- agreement ----


def test_ranks_with_other_numbers_disagree_before_the_first_step() -> None:
    def digest(config: SchedulerConfig) -> int:
        return Scheduler(config).digest.value

    tables = [
        None,
        MixedSteps(),
        MixedSteps(buckets=(8, 64)),
        MixedSteps(budgets=((8, 64, 32),)),
        MixedSteps(budgets=((8, 64, 33),)),
        MixedSteps(calm=((8, 64),)),
        MixedSteps(drain_steps=5),
        MixedSteps(long_prompt=5),
        MixedSteps(costly_prefix=5),
        MixedSteps(tile=64, wave=132),
        MixedSteps(tile=64, wave=264),
        MixedSteps(tile=128, wave=132),
        MixedSteps(stride=2),
    ]
    digests = [digest(config_with(mixed=mixed)) for mixed in tables]
    assert len(set(digests)) == len(tables)
    assert digest(config_with(mixed=MixedSteps((8, 64)))) == digests[2]


def test_the_largest_bucket_holds_all_rows_and_a_prompts_token() -> None:
    for rows, widths in ((8, (1,)), (4, (1, 2))):
        with pytest.raises(ValueError, match=f"8 tokens: {rows} decode rows of width {max(widths)} leave no room"):
            config_with(rows=rows, widths=widths, mixed=MixedSteps((4, 8)))
    assert config_with(rows=7, mixed=MixedSteps((4, 8))).mixed is not None
