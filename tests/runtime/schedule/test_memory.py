"""What happens when blocks run out, and what requests share: stalls, evictions, pauses, prefix hits."""

from __future__ import annotations

from typing import Unpack

import pytest

from runtime.schedule import reservation
from runtime.schedule.plan import StepPlan
from runtime.schedule.request import FinishReason
from runtime.schedule.states import State
from tests.runtime.schedule.configs import Limits
from tests.runtime.schedule.driver import Driver, ending_by_stop, prompt_of


def tight(**more: Unpack[Limits]) -> Driver:
    limits: Limits = {"block_size": 2, "prefix_caching": False, **more}
    return Driver(**limits)


def seated_at(engine: Driver, request_id: int) -> list[StepPlan]:
    """The steps in which the request was given a slot."""
    return [
        plan
        for plan in engine.plans
        if plan is not None and any(write.request_id == request_id for write in plan.slot_writes)
    ]


# ---- stall and evict ----


def test_a_row_without_a_block_stalls_until_somebody_who_is_draining_gives_one() -> None:
    engine = tight(blocks=8, depth=2)
    engine.admit(0, prompt=2, max_tokens=3)
    engine.admit(1, prompt=2, max_tokens=12)
    engine.admit(2, prompt=2, max_tokens=4)
    engine.turns_until(State.STALLED, 1)
    held = list(engine.sequence(1).blocks)
    assert engine.scheduler.counters.evictions == 0, "the others' last tokens are planned: it is worth waiting"
    engine.turns_until(State.DECODE, 1)
    assert engine.sequence(1).blocks[: len(held)] == held
    engine.finish()
    assert engine.scheduler.counters.evictions == 0


def test_the_last_in_line_is_evicted_and_recomputed() -> None:
    engine = tight(blocks=12, depth=2)
    engine.admit(0, prompt=4, max_tokens=16)
    engine.admit(1, prompt=4, max_tokens=16)
    engine.turns_until(State.EVICTING, 1)
    assert engine.state(0) is State.STALLED, "it waits for the fence in front of the blocks it was given"
    engine.finish()
    first, second = seated_at(engine, 1)
    (again,) = (write for write in second.slot_writes if write.request_id == 1)
    generated = len(again.token_ids) - again.prompt_length
    assert generated > 0
    assert tuple(again.token_ids[again.prompt_length :]) == engine.alone(1)[:generated]
    (before,) = (write for write in first.slot_writes if write.request_id == 1)
    kept = ("prompt_length", "min_length", "max_length", "stop_token_ids", "sampling")
    assert [getattr(again, name) for name in kept] == [getattr(before, name) for name in kept], "limits are absolute"
    assert second.step > first.step
    assert engine.scheduler.counters.evictions == 1


def test_an_evicted_request_keeps_the_tokens_that_were_in_flight() -> None:
    engine = tight(blocks=12, depth=2)
    engine.admit(0, prompt=4, max_tokens=16)
    engine.admit(1, prompt=4, max_tokens=16)
    engine.turns_until(State.EVICTING, 1)
    sequence = engine.sequence(1)
    coming = sequence.planned_tokens
    assert sequence.landed_tokens < coming
    engine.turns_until(State.WAITING, 1)
    assert sequence.landed_tokens == coming, "nothing that was computed is computed again"
    engine.finish()


def test_priority_decides_who_is_evicted() -> None:
    engine = tight(blocks=12, depth=2)
    engine.admit(0, prompt=4, max_tokens=16, priority=1)
    engine.admit(1, prompt=4, max_tokens=16, priority=0)
    engine.finish()
    assert (len(seated_at(engine, 0)), len(seated_at(engine, 1))) == (2, 1)


def test_a_victim_behind_its_fence_is_not_evicted_again() -> None:
    """Its blocks count as soon free, so one eviction is enough however long the fence takes (no livelock)."""
    engine = tight(blocks=15, depth=4)
    for request_id in range(3):
        engine.admit(request_id, prompt=2, max_tokens=12)
    engine.turns_until(State.EVICTING, 2)
    evictions = engine.scheduler.counters.evictions
    engine.turns_until(State.WAITING, 2)
    assert engine.scheduler.counters.evictions == evictions
    engine.finish()


def test_admission_waits_while_the_context_is_full_and_says_so() -> None:
    engine = tight(blocks=8, depth=2, slots=4)
    engine.admit(0, prompt=8, max_tokens=6)
    engine.turns(2)
    engine.admit(1, prompt=8, max_tokens=6)
    engine.turns(2)
    assert engine.state(1) is State.WAITING
    engine.finish()
    counters = engine.scheduler.counters
    assert counters.chain_breaks == {"start": 1, "context_full": 1}
    assert counters.evictions == 0, "nobody who runs gives way to somebody who waits"


def test_nobody_is_admitted_while_a_row_is_stalled() -> None:
    """Blocks that come back belong to those who run; else a stream of short prompts could starve them."""
    engine = tight(blocks=12, depth=2)
    engine.admit(0, prompt=4, max_tokens=16)
    engine.admit(1, prompt=4, max_tokens=16)
    engine.turns_until(State.STALLED, 0)
    engine.admit(2, prompt=2, max_tokens=1, priority=-1)
    engine.turns_until(State.DECODE, 0)
    assert engine.state(2) is State.WAITING, "first in line, and one block would do"
    assert engine.scheduler.pool.free_count > 2
    engine.finish()


def test_stalls_of_everybody_are_counted_as_the_reason_of_the_break() -> None:
    engine = tight(blocks=12, depth=2)
    engine.admit(0, prompt=4, max_tokens=16)
    engine.admit(1, prompt=4, max_tokens=16)
    engine.finish()
    assert engine.scheduler.counters.chain_breaks.keys() <= {"start", "no_blocks", "context_full"}
    assert engine.scheduler.counters.chain_breaks["no_blocks"] == 1


@pytest.mark.parametrize("state", [State.STALLED, State.EVICTING])
def test_cancel_of_a_request_that_lost_its_blocks_or_waits_for_some(state: State) -> None:
    engine = tight(blocks=12, depth=2)
    engine.admit(0, prompt=4, max_tokens=16)
    engine.admit(1, prompt=4, max_tokens=16)
    who = 0 if state is State.STALLED else 1
    engine.turns_until(state, who)
    engine.cancel(who)
    engine.finish()
    assert engine.reason(who) is FinishReason.CANCELLED
    assert engine.reason(1 - who) is FinishReason.LENGTH


def test_cancel_after_an_eviction_keeps_what_was_generated() -> None:
    engine = tight(blocks=12, depth=2)
    engine.admit(0, prompt=4, max_tokens=16)
    engine.admit(1, prompt=4, max_tokens=16)
    engine.turns_until(State.EVICTING, 1)
    engine.turns_until(State.WAITING, 1)
    engine.cancel(1)
    engine.finish()
    assert len(engine.finished[1].token_ids) > 0


# ---- pause and resume ----


def test_a_paused_request_keeps_its_place_and_goes_on() -> None:
    engine = Driver()
    engine.admit(0, max_tokens=12)
    engine.admit(1, max_tokens=12)
    engine.turns(4)
    engine.pause(0)
    engine.pause(0)
    engine.turns(4)
    held = (engine.sequence(0).slot, list(engine.sequence(0).blocks))
    assert engine.sequence(0).planned_tokens == engine.sequence(0).landed_tokens
    engine.resume(0)
    engine.resume(0)
    engine.turn()
    assert engine.state(0) is State.DECODE
    assert (engine.sequence(0).slot, engine.sequence(0).blocks[: len(held[1])]) == held
    engine.finish()
    assert engine.scheduler.counters.chain_breaks == {"start": 1}


def test_pausing_everybody_breaks_the_chain_by_name() -> None:
    engine = Driver(depth=2)
    engine.admit(0, max_tokens=12)
    engine.turns(4)
    engine.pause(0)
    engine.turns(4)
    engine.resume(0)
    engine.finish()
    assert engine.scheduler.counters.chain_breaks == {"start": 1, "paused": 1}


def test_pause_of_a_request_that_waits() -> None:
    engine = Driver(rows=1)
    for request_id in range(3):
        engine.admit(request_id)
    engine.pause(1)
    engine.turns_until(State.ENDED, 2)
    assert engine.state(1) is State.PAUSED
    engine.resume(1)
    engine.finish()
    assert engine.reason(1) is FinishReason.LENGTH


def test_a_pause_in_the_middle_of_a_prompt_waits_for_its_end() -> None:
    engine = Driver(max_prefill_tokens=4)
    engine.admit(0, prompt=10, max_tokens=8)
    engine.turn()
    engine.pause(0)
    assert engine.state(0) is State.PREFILL
    engine.turns_until(State.PAUSED, 0)
    engine.turns(3)
    assert len(engine.sequence(0).generated) == 1
    engine.resume(0)
    engine.finish()


def test_a_request_that_pauses_at_its_prompt_s_end_has_been_a_row_of_that_step() -> None:
    """Its place is free for the next step, not for this one."""
    engine = Driver(rows=1, slots=4, max_prefill_tokens=4, depth=1)
    engine.admit(0, prompt=6, max_tokens=3)
    engine.admit(1, prompt=2, max_tokens=3)
    engine.turn()
    engine.pause(0)
    plan = engine.turn()
    assert plan is not None
    assert [chunk.last for chunk in plan.chunks] == [True]
    assert engine.state(0) is State.PAUSED
    engine.turns_until(State.ENDED, 1)
    engine.resume(0)
    engine.finish()


def test_a_paused_request_gives_its_blocks_to_one_that_waits() -> None:
    engine = tight(blocks=8, depth=2)
    engine.admit(0, prompt=8, max_tokens=6)
    engine.turns(4)
    engine.pause(0)
    engine.admit(1, prompt=8, max_tokens=6)
    engine.turns_until(State.ENDED, 1)
    assert engine.state(0) is State.PAUSED
    assert engine.sequence(0).blocks == []
    engine.resume(0)
    engine.finish()
    assert engine.scheduler.counters.evictions == 1


@pytest.mark.parametrize("turns", [1, 4], ids=["in its prompt", "while decoding"])
def test_a_pause_frees_the_way_for_one_that_was_refused_before(turns: int) -> None:
    """The refusal is remembered until a block comes back; a pause is news too, and nobody else would bring any."""
    engine = tight(blocks=8, depth=2, max_prefill_tokens=3)
    engine.admit(0, prompt=8, max_tokens=6)
    engine.admit(1, prompt=8, max_tokens=6)
    engine.turns(turns)
    assert engine.state(1) is State.WAITING
    engine.pause(0)
    engine.turns_until(State.ENDED, 1)
    engine.resume(0)
    engine.finish()


def test_one_paused_request_gives_way_where_one_is_enough() -> None:
    """Blocks behind the first one's fence count as soon free: the second is left alone."""
    engine = tight(blocks=11, depth=3)
    for request_id in range(2):
        engine.admit(request_id, prompt=4, max_tokens=10)
    engine.turns(3)
    engine.pause(0)
    engine.pause(1)
    engine.admit(2, prompt=6, max_tokens=4)
    engine.turns_until(State.ENDED, 2)
    assert engine.scheduler.counters.evictions == 1
    assert engine.sequence(0).blocks != []
    for request_id in range(2):
        engine.resume(request_id)
    engine.finish()


def test_cancel_while_paused() -> None:
    engine = Driver()
    engine.admit(0, max_tokens=12)
    engine.turns(4)
    engine.pause(0)
    engine.cancel(0)
    engine.finish()
    assert engine.reason(0) is FinishReason.CANCELLED


def test_a_block_planned_for_a_victim_is_not_written_over_the_next_tenant_of_its_slot() -> None:
    """Request 1 gets a block, and gives it up to request 0 in the same step, which stays void. Then 0 stops, 1 returns
    to the slot it had, and no cell of its block table may be written twice (the fake device checks every plan).
    """
    engine = Driver(blocks=4, block_size=4, depth=1, prefix_caching=False)
    engine.admit(1, prompt=4, max_tokens=12, priority=1)
    engine.turns(3)
    prompt, stop = ending_by_stop(0, length=2, after=3)
    engine.admit(0, prompt, max_tokens=12, stop=stop)
    engine.finish()
    before, after = (plan.slot_writes[0].slot for plan in seated_at(engine, 1))
    assert before == after


# ---- prefix hits ----


def test_a_published_prefix_is_shared_and_not_computed_again() -> None:
    engine = Driver(block_size=4)
    stem = prompt_of(12)
    engine.admit(0, (*stem, 1), max_tokens=4)
    engine.finish()
    engine.admit(1, (*stem, 2), max_tokens=4)
    engine.finish()
    plan = seated_at(engine, 1)[0]
    assert plan.slot_writes[0].length == 12
    assert (plan.chunks[0].start, *plan.chunks[0].token_ids) == (12, 2)
    assert engine.scheduler.counters.prefix_hit_tokens == 12


def test_the_last_prompt_token_is_always_computed() -> None:
    """It gives the first new token: a prompt that is cached whole still runs its last block."""
    engine = Driver(block_size=4)
    engine.admit(0, prompt_of(12), max_tokens=4)
    engine.finish()
    engine.admit(1, prompt_of(12), max_tokens=4)
    engine.finish()
    plan = seated_at(engine, 1)[0]
    assert (plan.slot_writes[0].length, plan.chunks[0].start, len(plan.chunks[0].token_ids)) == (8, 8, 4)


def test_a_prompt_in_chunks_is_published_as_it_is_planned() -> None:
    engine = Driver(block_size=4, max_prefill_tokens=8, depth=1)
    engine.admit(0, prompt_of(29), max_tokens=8)
    engine.turns(3)
    assert engine.sequence(0).published_blocks == 6, "of step 2, too, which has not landed"
    engine.finish()


def test_generated_tokens_that_are_computed_again_are_published_as_they_are_planned() -> None:
    """They are known by then, as a prompt is: nobody waits for the step that writes them to land."""
    engine = Driver(blocks=14, block_size=2, max_prefill_tokens=4, depth=2)
    engine.admit(0, prompt=4, max_tokens=22)
    engine.admit(1, prompt=4, max_tokens=20)
    engine.turns_until(State.EVICTING, 1)
    engine.turns_until(State.WAITING, 1)
    known = engine.sequence(1).landed_tokens
    assert known >= 12
    engine.turns_until(State.PREFILL, 1)
    sequence = engine.sequence(1)
    first = seated_at(engine, 1)[1].slot_writes[0].length
    assert first < 4, "others have its blocks: what it generated is computed again"
    for chunk in (1, 2):
        planned = first + 4 * chunk
        assert (sequence.prefilled, sequence.published_blocks) == (planned, planned // 2), "of steps in flight, too"
        engine.turn()
    engine.finish()


def test_a_block_whose_last_token_was_just_sampled_is_not_published() -> None:
    """The newest token's KV is written by the step that reads it, not by the one that made it."""
    engine = Driver(block_size=4, depth=0)
    engine.admit(0, prompt_of(11), max_tokens=8)
    engine.turn()
    assert (engine.sequence(0).landed_tokens, engine.sequence(0).published_blocks) == (12, 2)
    engine.turn()
    assert (engine.sequence(0).landed_tokens, engine.sequence(0).published_blocks) == (13, 3)
    engine.finish()


def test_generated_tokens_are_found_again_too() -> None:
    """The next turn of a conversation: its prompt is the first one's prompt and answer."""
    engine = Driver(block_size=4)
    engine.admit(0, prompt_of(6), max_tokens=8)
    engine.finish()
    answer = engine.finished[0].token_ids
    engine.admit(1, (*prompt_of(6), *answer, 5, 6), max_tokens=4)
    engine.finish()
    assert seated_at(engine, 1)[0].slot_writes[0].length == 12, "14 tokens, the last one's KV was never written"


@pytest.mark.parametrize("ends", ["by length", "by cancel", "by eviction"])
def test_what_is_full_at_the_end_is_found_although_its_turn_to_be_published_had_not_come(ends: str) -> None:
    """Rows publish blocks of generated tokens up to half a block late, each by its slot."""
    engine = Driver(block_size=16, depth=1, blocks=16)
    engine.admit(0, prompt_of(3, 3), max_tokens=40)
    engine.admit(1, prompt_of(10), max_tokens=9 if ends == "by length" else 40)
    sequence = engine.sequence(1)
    while sequence.landed_tokens < 18:
        engine.turn()
    assert reservation.early(engine.scheduler.ledger, sequence) == 2
    assert sequence.published_blocks == 0, "due with the 19th token"
    if ends == "by cancel":
        engine.cancel(1)
    elif ends == "by eviction":
        reservation.evict(engine.scheduler.ledger, sequence)
    else:
        engine.turns_until(State.ENDED, 1)
    known = (*prompt_of(10), *engine.alone(1))
    assert len(engine.scheduler.pool.lookup(known[:17], 1)) == 1
    engine.finish()


def test_an_evicted_request_finds_its_own_blocks() -> None:
    engine = Driver(blocks=13, block_size=2, depth=2)
    engine.admit(0, prompt=4, max_tokens=16)
    engine.admit(1, prompt=4, max_tokens=16)
    engine.turns_until(State.EVICTING, 1)
    engine.turns_until(State.WAITING, 1)
    engine.cancel(0)
    engine.finish()
    assert seated_at(engine, 1)[1].slot_writes[0].length >= 4


def test_switched_off_nothing_is_shared() -> None:
    engine = Driver(prefix_caching=False)
    for request_id in range(2):
        engine.admit(request_id, prompt_of(12))
        engine.finish()
    assert engine.scheduler.counters.prefix_hit_tokens == 0


# ---- what nobody may find: blocks under logits that broke ----


def lost(lose: str, *, breaks: bool) -> Driver:
    """Request 1 loses its blocks, evicted or cancelled, while a step is in flight in which its logits may break."""

    def begin() -> Driver:
        engine = Driver(blocks=12, block_size=2, depth=2)
        engine.admit(0, prompt=4, max_tokens=16)
        engine.admit(1, prompt=6, max_tokens=12)
        return engine

    rehearsal = begin()
    rehearsal.turns_until(State.EVICTING, 1)
    turns, landed = len(rehearsal.plans), rehearsal.sequence(1).landed_tokens
    engine = begin()
    engine.device.breaks_at = {1: landed} if breaks else {}
    engine.turns(turns - 1)
    assert engine.sequence(1).published_blocks >= 3, "its prompt can be found"
    if lose == "evicted":
        engine.turn()
        assert engine.state(1) is State.EVICTING
    else:
        engine.cancel(1)
    engine.turns(3)
    return engine


@pytest.mark.parametrize("lose", ["evicted", "cancelled"])
def test_blocks_of_a_request_that_breaks_after_it_has_lost_them_are_not_found(lose: str) -> None:
    engine = lost(lose, breaks=True)
    assert engine.reason(1) is (FinishReason.ERROR if lose == "evicted" else FinishReason.CANCELLED)
    prompt = prompt_of(6, 1)
    assert engine.scheduler.pool.lookup(prompt, 3) == []
    engine.admit(2, prompt=prompt, max_tokens=4)
    engine.finish()
    assert engine.scheduler.counters.prefix_hit_tokens == 0


@pytest.mark.parametrize("lose", ["evicted", "cancelled"])
def test_blocks_of_a_request_that_does_not_break_are_found_after_it_has_lost_them(lose: str) -> None:
    engine = lost(lose, breaks=False)
    assert len(engine.scheduler.pool.lookup(prompt_of(6, 1), 3)) == 3
    engine.finish()
