"""A ledger alone: no planner, no results. What requests get, give up, wait for, and how it is accounted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from runtime.schedule import admission, reservation
from runtime.schedule.chain import Flight
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import StepKind, StepPlan
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.sequence import SequenceState
from runtime.schedule.slots import AccountingError
from runtime.schedule.states import State, Trigger
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.driver import Driver, prompt_of

SMALL = config_with(blocks=8, block_size=2, depth=1)


def arrive(ledger: Ledger, request_id: int, prompt: int = 4, max_tokens: int = 8) -> SequenceState:
    request = Request(request_id, prompt_of(prompt, request_id), SamplingParams(max_tokens=max_tokens))
    assert admission.arrive(ledger, request) == ()
    return ledger.sequences[request_id]


def seat(ledger: Ledger, request_id: int, blocks: int = 3) -> SequenceState:
    """A request that arrived, got a slot, and whose prompt is planned: a row of the next decode step."""
    sequence = arrive(ledger, request_id)
    ledger.queue.pop(sequence)
    admission.admit(ledger, sequence, [], blocks)
    ledger.move(sequence, Trigger.PROMPT_PLANNED)
    return sequence


def launch(ledger: Ledger, *rows: SequenceState, width: int = 1) -> int:
    """A decode step of these rows, as far as the ledger sees it."""
    step = ledger.chain.step
    plan = StepPlan(step, StepKind.DECODE, tuple(s.slot for s in rows), tuple(s.epoch for s in rows), width)
    for sequence in rows:
        sequence.last_step = step
        sequence.planned_tokens += width
        sequence.uncertain_tokens += width - 1
    ledger.chain.launch(Flight(step, plan, rows, ledger.slots.version))
    return step


def land(ledger: Ledger, step: int) -> None:
    """Each row gets one token."""
    flight = ledger.chain.land(step)
    assert flight.plan is not None
    for sequence in flight.rows:
        sequence.tokens.append(7)
        sequence.planned_tokens += 1 - flight.plan.width
        sequence.uncertain_tokens -= flight.plan.width - 1
    ledger.landed(step)


def test_a_request_arrives_is_seated_and_ends() -> None:
    ledger = Ledger(SMALL)
    sequence = arrive(ledger, 0)
    assert ledger.queue.head() is sequence
    assert list(ledger.by_state[State.WAITING]) == [0]
    ledger.queue.pop(sequence)
    admission.admit(ledger, sequence, [], 3)
    assert (sequence.state, sequence.slot, len(sequence.blocks), ledger.pool.free_count) == (State.PREFILL, 1, 3, 5)
    assert list(ledger.block_writes.values()) == [(1, i, block) for i, block in enumerate(sequence.blocks)]
    ledger.check()
    ended = ledger.end(sequence, FinishReason.CANCELLED)
    assert (ended.request_id, ended.reason) == (0, FinishReason.CANCELLED)
    assert (ledger.sequences, ledger.pool.free_count, ledger.slots.free_count) == ({}, 8, 8)
    ledger.check()


def test_what_ends_with_steps_in_flight_returns_when_the_last_of_them_has_landed() -> None:
    ledger = Ledger(SMALL)
    sequence = seat(ledger, 0)
    step = launch(ledger, sequence)
    ledger.end(sequence, FinishReason.CANCELLED)
    assert (ledger.pool.free_count, ledger.pool.soon_free, ledger.slots.fenced_count) == (5, 3, 1)
    ledger.check()
    ledger.chain.land(step)
    ledger.landed(step)
    assert (ledger.pool.free_count, ledger.slots.free_count) == (8, 8)
    assert ledger.pool.soon_free == 0


def test_an_evicted_request_queues_again_when_its_last_step_has_landed() -> None:
    ledger = Ledger(SMALL)
    sequence = seat(ledger, 0)
    step = launch(ledger, sequence)
    reservation.evict(ledger, sequence)
    assert (sequence.state, ledger.queue.head()) == (State.EVICTING, None)
    land(ledger, step)
    assert (sequence.state, sequence.slot, ledger.queue.head()) == (State.WAITING, 0, sequence)
    assert sequence.landed_tokens == 5, "the token in flight is kept"
    ledger.check()


def test_with_nothing_in_flight_an_evicted_request_queues_again_at_once() -> None:
    ledger = Ledger(SMALL)
    sequence = seat(ledger, 0)
    reservation.evict(ledger, sequence)
    assert sequence.state is State.WAITING
    assert ledger.pool.free_count == 8
    ledger.check()


@pytest.mark.parametrize("widths", [(1,), (2,), (1, 8), (32, 1)], ids=str)
@pytest.mark.parametrize("depth", [0, 2, 4])
def test_a_reservation_covers_every_step_in_flight_at_the_largest_width(widths: tuple[int, ...], depth: int) -> None:
    ledger = Ledger(config_with(widths=widths, depth=depth, max_model_len=400, blocks=400))
    most, ahead = max(widths), (depth + 1) * max(widths)
    assert reservation.kv_to_hold(ledger, arrive(ledger, 0, 5, 300)) == 5 + ahead
    near = arrive(ledger, 1, 5, 3)
    assert reservation.kv_to_hold(ledger, near) == min(5 + ahead, 5 + 3 - 2 + most), "its last row starts at position 6"


def test_nobody_can_ever_write_beyond_the_block_table() -> None:
    """The executor sizes a row of it for max_model_len + W entries."""
    for width in (1, 2, 8, 32):
        for max_model_len in range(2, 40):
            config = config_with(widths=(width, 1), depth=4, max_model_len=max_model_len, blocks=400, block_size=3)
            ledger = Ledger(config)
            longest = arrive(ledger, 0, max_model_len - 1, 100)
            assert reservation.blocks_to_hold(ledger, longest) <= -(-(max_model_len + width) // 3)


def test_a_row_that_needs_blocks_takes_them_from_the_last_in_line() -> None:
    ledger = Ledger(SMALL)
    first, last = seat(ledger, 0, 2), seat(ledger, 1, 6)
    assert reservation.reserve(ledger, first), "landed 4 + 2 steps"
    assert (last.state, len(first.blocks)) == (State.WAITING, 3)
    *_, newest = ledger.block_writes.values()
    assert newest == (first.slot, 2, first.blocks[2])
    assert all(slot != last.slot for slot, _ in ledger.block_writes)
    ledger.check()


def test_a_row_waits_for_blocks_that_are_soon_free() -> None:
    ledger = Ledger(SMALL)
    first, ended, other = seat(ledger, 0, 2), seat(ledger, 1, 3), seat(ledger, 2, 3)
    step = launch(ledger, first, ended, other)
    ledger.end(ended, FinishReason.CANCELLED)
    assert not reservation.reserve(ledger, first)
    assert (other.state, ledger.counters.evictions) == (State.DECODE, 0)
    ledger.chain.land(step)
    ledger.landed(step)
    assert reservation.reserve(ledger, first)


def test_room_changes_when_blocks_come_back_or_somebody_pauses_and_not_otherwise() -> None:
    ledger = Ledger(SMALL)
    first, second = seat(ledger, 0), seat(ledger, 1)
    version = admission.room_version(ledger)
    arrive(ledger, 2)
    launch(ledger, first, second)
    reservation.reserve(ledger, first)
    assert admission.room_version(ledger) == version
    ledger.pause(first)
    assert admission.room_version(ledger) != version
    version = admission.room_version(ledger)
    ledger.pause(first)
    ledger.resume(first)
    assert admission.room_version(ledger) == version
    ledger.end(second, FinishReason.CANCELLED)
    assert admission.room_version(ledger) == version, "fenced"
    ledger.chain.land(0)
    ledger.landed(0)
    assert admission.room_version(ledger) != version


def test_the_decode_version_tells_when_rows_changed() -> None:
    ledger = Ledger(SMALL)
    before = ledger.decode_version
    sequence = arrive(ledger, 0)
    ledger.queue.pop(sequence)
    admission.admit(ledger, sequence, [], 3)
    assert ledger.decode_version == before
    ledger.move(sequence, Trigger.PROMPT_PLANNED)
    assert ledger.decode_version != before
    before = ledger.decode_version
    ledger.pause(sequence)
    assert ledger.decode_version != before
    before = ledger.decode_version
    ledger.resume(sequence)
    assert (ledger.decode_version, sequence.state) == (before, State.STALLED)


@pytest.mark.parametrize("paused", [False, True])
def test_a_draining_request_that_falls_short_waits_to_be_a_row_again(paused: bool) -> None:
    ledger = Ledger(SMALL)
    sequence = seat(ledger, 0)
    ledger.move(sequence, Trigger.ALL_PLANNED)
    if paused:
        ledger.pause(sequence)
    assert sequence.state is State.DRAINING
    ledger.fall_short(sequence)
    assert sequence.state is (State.PAUSED if paused else State.STALLED)


def test_blocks_are_published_as_they_are_written_and_found_by_the_next() -> None:
    ledger = Ledger(SMALL)
    sequence = seat(ledger, 0)
    ledger.publish(sequence, 3)
    assert ledger.pool.lookup(prompt_of(4), 2) == sequence.blocks[:1]
    ledger.publish(sequence, 4)
    assert ledger.pool.lookup(prompt_of(4), 2) == sequence.blocks[:2]
    later = arrive(ledger, 1)
    ledger.queue.pop(later)
    admission.admit(ledger, later, sequence.blocks[:2], 1)
    assert (later.prefilled, later.published_blocks, ledger.counters.prefix_hit_tokens) == (4, 2, 4)
    ledger.check()


@pytest.mark.parametrize(("planned", "uncertain"), [(1, 0), (0, 1), (-1, -1)])
def test_tokens_that_no_step_in_flight_accounts_for_are_an_error(planned: int, uncertain: int) -> None:
    ledger = Ledger(SMALL)
    sequence = seat(ledger, 0)
    launch(ledger, sequence, width=4)
    ledger.check()
    sequence.planned_tokens += planned
    sequence.uncertain_tokens += uncertain
    with pytest.raises(AccountingError, match=r"request 0: .* counted by steps in flight"):
        ledger.check()


def test_rows_of_one_length_do_not_all_need_their_blocks_in_one_step() -> None:
    """256 rows that were prefilled together, in blocks of 64: each gets its next one in time, but not all at once."""
    engine = Driver(rows=256, slots=512, blocks=1500, block_size=64, max_model_len=256, max_prefill_tokens=8192)
    for request_id in range(256):
        engine.admit(request_id, prompt_of(20, request_id), max_tokens=200)
    grown = [len(plan.block_writes) for plan in engine.real_turns(120)[1:]]
    assert sum(grown) >= 256
    assert max(grown) <= 96, "of 30 places nine are given theirs together"
    sequences, published = engine.scheduler.ledger.sequences, []
    for _ in range(60):
        engine.turn()
        published.append(sum(sequence.published_blocks for sequence in sequences.values()))
    assert published[-1] >= published[0] + 200
    assert max(after - before for before, after in pairwise(published)) <= 9
    engine.finish()


@pytest.mark.parametrize(
    ("rows", "most"), [(8, 1 / 20), (32, 1 / 20), pytest.param(128, 1 / 10, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("width", [1, 4])
def test_few_steps_give_blocks_to_rows_of_all_lengths(rows: int, most: float, width: int) -> None:
    """One row or another needs a block in every step; those that need one soon get it with whoever needs it now."""
    engine = Driver(
        rows=rows,
        slots=2 * rows,
        blocks=14 * rows,
        block_size=64,
        max_model_len=800,
        max_prefill_tokens=1 << 16,
        widths=(width,),
    )
    for request_id in range(rows):
        engine.admit(request_id, prompt_of(20 + 37 * request_id % 64, request_id), max_tokens=700)
    engine.real_turns(20)
    plans = engine.real_turns(400 // width)
    assert all(len(plan.slots) == rows for plan in plans)
    assert sum(len(plan.block_writes) for plan in plans) >= rows
    changed = sum(bool(plan.block_writes) for plan in plans)
    assert changed <= width * most * len(plans), f"{changed} of {len(plans)} steps"
    held = [
        len(sequence.blocks) - -(-sequence.planned_tokens // 64)
        for sequence in engine.scheduler.ledger.sequences.values()
    ]
    assert max(held) <= 2


def test_nobody_gets_a_block_ahead_while_few_are_free() -> None:
    ledger = Ledger(config_with(blocks=8, block_size=16, depth=1))
    rows = [seat(ledger, request_id, blocks=1) for request_id in range(3)]
    for sequence in rows:
        sequence.max_length = 60
        reservation.set_wake(ledger, sequence)
        sequence.planned_tokens = sequence.wake_at - 8
    held = ledger.pool.take(1)
    reservation.reserve_ahead(ledger, rows)
    assert [len(sequence.blocks) for sequence in rows] == [2, 1, 1], "one free block for each row is kept"
    ledger.pool.give_back(held)
    reservation.reserve_ahead(ledger, rows)
    assert [len(sequence.blocks) for sequence in rows] == [2, 2, 1]
    ledger.pool.give_back([])
    rows[2].max_length = rows[2].wake_at
    reservation.reserve_ahead(ledger, rows[2:])
    assert len(rows[2].blocks) == 1, "its last token needs no other"


def test_a_row_that_is_early_goes_on_with_what_it_has() -> None:
    """No block is free for it: nobody is evicted for its sake before it really needs one."""
    ledger = Ledger(config_with(blocks=6, block_size=16, depth=1))
    rows = [seat(ledger, request_id, blocks=1) for request_id in range(3)]
    held = ledger.pool.take(3)
    last = rows[-1]
    last.max_length = 60
    assert reservation.early(ledger, last) == 3
    reservation.set_wake(ledger, last)
    latest = 16 + 2 - 1
    assert last.wake_at == latest - 3
    last.planned_tokens = last.wake_at
    assert reservation.reserve(ledger, last)
    assert (len(last.blocks), last.wake_at, ledger.counters.evictions) == (1, latest, 0)
    ledger.pool.give_back(held)
    last.tokens.extend([7] * (latest - 1 - last.landed_tokens))
    last.planned_tokens = latest
    assert reservation.reserve(ledger, last)
    assert (len(last.blocks), last.wake_at) == (2, latest + 16 - 3)
