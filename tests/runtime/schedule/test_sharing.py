"""What prompts share that run at once: found as soon as it is planned, waited for, and not believed when it breaks."""

from __future__ import annotations

from typing import Unpack
from unittest.mock import patch

import pytest

from runtime.schedule import prefix, reservation
from runtime.schedule.config import MixedSteps, SnapshotPolicy
from runtime.schedule.plan import Chunk, ResetPrefixCache
from runtime.schedule.prefill import MOST_TOLD_BLOCKS
from runtime.schedule.request import FinishReason
from runtime.schedule.sharing import MOST_WAITS
from runtime.schedule.slots import AccountingError
from runtime.schedule.states import State
from tests.runtime.schedule.configs import Limits
from tests.runtime.schedule.driver import Driver, prompt_of


def sharing(**more: Unpack[Limits]) -> Driver:
    limits: Limits = {"block_size": 4, "depth": 2, **more}
    return Driver(**limits)


def chunks_of(engine: Driver, request_id: int) -> list[tuple[int, Chunk]]:
    """Its chunks with their steps, by the slot it was first given."""
    found: list[tuple[int, Chunk]] = []
    slots: dict[int, int] = {}
    for plan in engine.plans:
        if plan is not None:
            slots |= {write.slot: write.request_id for write in plan.slot_writes}
            found += [(plan.step, chunk) for chunk in plan.chunks if slots[chunk.slot] == request_id]
    return found


def computed(engine: Driver) -> int:
    return sum(plan.prefill_tokens for plan in engine.plans if plan is not None)


# ---- found early, waited for ----


@pytest.mark.parametrize("mixed", [MixedSteps(), None], ids=["mixed", "in turns"])
def test_a_prompt_that_did_not_fit_is_looked_at_again_when_its_blocks_are_found(mixed: MixedSteps | None) -> None:
    """Both come in the same turn. Beside the first there is no room for the whole of the second, but behind the step
    that computes the first there is for what they have not in common; and for whoever is behind it in line."""
    engine = sharing(blocks=60, max_model_len=400, max_prefill_tokens=512, depth=1, mixed=mixed)
    document = tuple((7 * i * i + 3 * i) % 29 for i in range(160))
    engine.admit(1, document, max_tokens=60)
    engine.admit(2, (*document, 1, 2, 3), max_tokens=5)
    engine.admit(3, 3, max_tokens=2)
    engine.turns(2)
    assert [engine.state(request_id) for request_id in (2, 3)] == [State.DECODE] * 2
    assert engine.sequence(1).landed_tokens < 163, "the first has long to go"
    engine.finish()
    assert computed(engine) == 160 + 3 + 3


def test_a_long_prompt_that_does_not_fit_is_not_looked_up_for_each_block_that_comes_back() -> None:
    """Rows end in front of it, a few blocks each; it is admitted as soon as it fits all the same."""
    (looked_up, ended), (always, at_once) = (_turns_until_it_fits(every_time) for every_time in (False, True))
    assert ended == at_once > 8, "it waited for several"
    assert 3 * looked_up < always


def _turns_until_it_fits(every_time: bool) -> tuple[int, int]:
    """How often a prompt of 1,690 tokens is looked up until then, and how many have ended."""
    engine = sharing(rows=48, slots=96, blocks=640, max_model_len=2600, max_prefill_tokens=999, mixed=MixedSteps())
    document = tuple((7 * i * i + 3 * i) % 29 for i in range(300))
    engine.admit(0, document, max_tokens=300)
    engine.turns(4)
    for request_id in range(1, 41):
        engine.admit(request_id, 40, max_tokens=4 + request_id)
    engine.turns(4)
    engine.admit(99, (*document[:290], *prompt_of(1400, 99)), max_tokens=9)
    ended, look_ups = len(engine.finished), 0
    scheduler = engine.scheduler
    with patch.object(scheduler.ledger.sharing, "hits", wraps=scheduler.ledger.sharing.hits) as hits:
        while engine.state(99) is State.WAITING:
            if every_time:
                scheduler.planner.prefill._fits_from = (-1, -1, 0)
            engine.turn()
        look_ups, ended = hits.call_count, len(engine.finished) - ended
    engine.finish()
    return look_ups, ended


def test_seating_many_who_share_a_long_beginning_is_spread_over_steps() -> None:
    """Each has hardly a token to compute, and the device is to be told of hundreds of blocks."""
    engine = Driver(
        rows=64, slots=128, blocks=2000, block_size=4, max_model_len=1300, max_prefill_tokens=512, mixed=MixedSteps()
    )
    document = tuple((7 * i * i + 3 * i) % 29 for i in range(1200))
    engine.admit(0, document, max_tokens=40)
    engine.turns(4)
    for request_id in range(1, 41):
        engine.admit(request_id, (*document, request_id % 29), max_tokens=2)
    plans = engine.real_turns(4)
    blocks = -(-1300 // 4)
    assert max(len(plan.block_writes) for plan in plans) <= MOST_TOLD_BLOCKS + blocks
    assert [len(plan.chunks) for plan in plans] == [-(-MOST_TOLD_BLOCKS // 301)] * 2 + [12, 0]
    engine.finish()


def test_prompts_that_arrive_together_compute_their_common_beginning_once() -> None:
    """64 prompts of 2,048 tokens, of which 1,900 are common: 29 blocks of 64 are computed by the first alone."""
    engine = Driver(
        rows=64, slots=128, blocks=4096, block_size=64, max_model_len=4096, max_prefill_tokens=8192, depth=2
    )
    stem = prompt_of(1900)
    for request_id in range(64):
        own = tuple(range(1000 * request_id, 1000 * request_id + 148))
        engine.admit(request_id, (*stem, *own), max_tokens=2)
    engine.turns_until(State.DRAINING, 63)
    assert computed(engine) == 2048 + 63 * (2048 - 29 * 64) <= 14_300
    counters = engine.scheduler.counters
    assert counters.prefill_tokens == computed(engine)
    assert counters.prefix_hit_tokens == 63 * 29 * 64
    assert counters.prefix_query_tokens == 64 * 2048
    assert counters.prefix_waits == 63, "for one step: the first prompt takes no more"
    assert not any(plan is None for plan in engine.plans[:3]), "and no step is void for it"


def test_a_block_is_found_from_the_step_after_the_one_that_writes_it() -> None:
    engine = sharing()
    engine.admit(0, prompt_of(13), max_tokens=8)
    engine.turn()
    engine.admit(1, prompt_of(13), max_tokens=4)
    (plan,) = engine.real_turns(1)
    assert plan.slot_writes[0].length == 12, "step 0 is in flight"
    engine.finish()


def test_what_a_prompt_does_not_find_in_its_own_step_it_waits_for() -> None:
    engine = sharing()
    for request_id in range(3):
        engine.admit(request_id, (*prompt_of(12), request_id), max_tokens=4)
    engine.turns(2)
    assert [(step, chunk.start) for step, chunk in chunks_of(engine, 0)] == [(0, 0)]
    assert [(step, chunk.start) for step, chunk in chunks_of(engine, 1)] == [(1, 12)]
    assert [(step, chunk.start) for step, chunk in chunks_of(engine, 2)] == [(1, 12)]
    engine.finish()


def test_a_prompt_follows_a_longer_one_chunk_by_chunk() -> None:
    """It takes blocks for its own while the other writes them, and computes what is its own in the end."""
    engine = sharing(max_prefill_tokens=6)
    engine.admit(0, prompt_of(30), max_tokens=4)
    engine.admit(1, (*prompt_of(26), 1), max_tokens=4)
    engine.turns_until(State.DECODE, 1)
    assert [chunk.start for _, chunk in chunks_of(engine, 0)] == [0, 6, 12, 18, 24]
    assert [chunk.start for _, chunk in chunks_of(engine, 1)] == [24]
    assert engine.sequence(1).blocks[:6] == engine.sequence(0).blocks[:6]
    engine.finish()


def test_a_prompt_does_not_wait_for_a_block_that_it_must_compute_a_token_of() -> None:
    """Its last token gives its first new one, so its last block is its own."""
    engine = sharing()
    engine.admit(0, prompt_of(8), max_tokens=4)
    engine.admit(1, prompt_of(4), max_tokens=4)
    (plan,) = engine.real_turns(1)
    assert [(chunk.slot, chunk.start, chunk.last) for chunk in plan.chunks] == [(1, 0, True), (2, 0, True)]
    engine.finish()


def test_a_block_with_generated_tokens_is_found_when_it_has_landed() -> None:
    engine = sharing(depth=3)
    engine.admit(0, prompt_of(7), max_tokens=12)
    engine.turns(5)
    answer = engine.alone(0)
    landed = engine.sequence(0).landed_tokens
    assert engine.sequence(0).planned_tokens > landed
    assert engine.sequence(0).published_blocks == (landed - 1) // 4
    engine.admit(1, (*prompt_of(7), *answer, 1), max_tokens=4)
    engine.turn()
    assert engine.sequence(1).prefilled <= landed - 1 or engine.state(1) is State.DECODE
    (_, chunk), *_ = chunks_of(engine, 1)
    assert chunk.start == (landed - 1) // 4 * 4
    engine.finish()


def test_a_writer_that_leaves_is_not_waited_for() -> None:
    engine = sharing(max_prefill_tokens=6)
    engine.admit(0, prompt_of(30), max_tokens=4)
    engine.admit(1, (*prompt_of(26), 1), max_tokens=4)
    engine.turns(2)
    assert [chunk.start for _, chunk in chunks_of(engine, 1)] == []
    engine.cancel(0)
    (plan,) = engine.real_turns(1)
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(12, 6)], "what it wrote is there"
    engine.finish()


def until_an_eviction(blocks: int, depth: int, chunk: int) -> tuple[Driver, State, int]:
    """What request 1, the sharer, was doing before the turn that evicted somebody, or in which request 0, the writer,
    ended, and how many blocks it had taken. Six rows that grow come before both in line, and the writer last.
    """
    engine = sharing(rows=8, slots=16, blocks=blocks, depth=depth, max_prefill_tokens=chunk, mixed=MixedSteps())
    for request_id in range(10, 16):
        engine.admit(request_id, prompt_of(2, request_id), max_tokens=26, priority=-1)
    engine.turns_until(State.DECODE, 15)
    engine.admit(0, prompt_of(30), max_tokens=6, priority=2)
    engine.turns_until(State.PREFILL, 0)
    engine.admit(1, (*prompt_of(26), 1), max_tokens=6, priority=1)
    doing, taken = engine.state(1), 0
    while not engine.scheduler.counters.evictions and engine.state(0) is not State.ENDED:
        doing = engine.state(1)
        taken = 0 if doing is State.ENDED else engine.sequence(1).published_blocks
        engine.turn()
    return engine, doing, taken


@pytest.mark.parametrize(("depth", "chunk"), [(0, 2), (1, 3), (2, 2), (4, 3)])
def test_a_writer_that_is_evicted_is_not_waited_for_and_takes_nothing_along(depth: int, chunk: int) -> None:
    """Whatever the sharer is doing then. It has a chunk in the same plan, behind all that was written; the writer finds
    what the sharer keeps, or computes it again."""
    met: set[tuple[State, bool]] = set()
    for blocks in range(24, 46):
        engine, doing, taken = until_an_eviction(blocks, depth, chunk)
        writer = engine.scheduler.ledger.sequences.get(0)
        if writer is not None and writer.seated_before and writer.state in (State.EVICTING, State.WAITING):
            wrote = sum(len(cut.token_ids) for _, cut in chunks_of(engine, 0))
            met.add((doing, taken > 0))
            begun = [(step, cut.start) for step, cut in chunks_of(engine, 1)]
            if doing is State.PREFILL and len(begun) < 2:
                assert begun == [(engine.scheduler.step - 1, min(wrote, 26) // 4 * 4)]
        engine.finish()  # right tokens, and every block and slot is back
        assert engine.reason(0) is engine.reason(1) is FinishReason.LENGTH
        assert engine.scheduler.counters.distrusted == 0
        assert not engine.scheduler.ledger.sharing._begun, "nobody waits for a block that nobody writes"
    assert met >= {(State.PREFILL, True), (State.DECODE, True)}, met


def test_a_writer_that_gets_no_chunk_is_waited_for_no_longer_than_so_many_steps() -> None:
    engine = sharing(max_prefill_tokens=6)
    engine.admit(0, prompt_of(30), max_tokens=4)
    engine.admit(1, (*prompt_of(26), 1), max_tokens=4)
    engine.turn()
    planner, writer = engine.scheduler.planner, engine.sequence(0)
    held_back = planner.prefill.prefilling.pop(0)
    assert held_back is writer
    assert engine.turns(MOST_WAITS) == [None] * MOST_WAITS
    (plan,) = engine.real_turns(1)
    assert [chunk.start for chunk in plan.chunks] == [4], "the block that the writer has begun"
    planner.prefill.prefilling[0] = writer
    engine.finish()


@pytest.mark.parametrize("alike", [False, True])
def test_nobody_waits_for_a_writer_of_worse_priority(alike: bool) -> None:
    """A prompt of better priority takes every step's tokens, half of them for the last one, which comes to need what
    the one of worse priority has begun."""
    engine = sharing(blocks=400, max_model_len=600, max_prefill_tokens=16, mixed=MixedSteps())
    low = prompt_of(100, 1)
    engine.admit(1, low, max_tokens=2, priority=5)
    engine.turns(3)
    engine.admit(2, prompt_of(500, 2), max_tokens=2)
    engine.turns(2)
    engine.admit(3, (*low[:80],) if alike else prompt_of(80, 3), max_tokens=2)
    before = len(engine.plans)
    engine.turns_until(State.DECODE, 3)
    assert len(engine.plans) - before <= 80 // 8, "half of each step"
    engine.finish()


def test_two_writers_of_the_same_beginning_do_not_wait_for_each_other() -> None:
    """Scored prompts are computed whole, so they neither find nor wait; whoever comes behind them does both."""
    engine = sharing()
    engine.admit(0, prompt_of(12), max_tokens=2)
    engine.cancel(0)
    for request_id in range(1, 4):
        engine.admit(request_id, (*prompt_of(12), request_id), max_tokens=4)
    engine.finish()
    assert computed(engine) == 13 + 1 + 1


def test_what_takes_the_place_of_a_block_that_is_begun_waits_for_its_fence() -> None:
    """A prompt that has written a part of a block finds the whole one: its own is free when that part has landed."""
    engine = sharing(max_prefill_tokens=6, depth=2)
    engine.admit(0, prompt_of(14), max_tokens=4)
    engine.turn()
    writer = engine.sequence(0)
    begun = writer.blocks[1]
    twin = engine.scheduler.pool.take(1)  # somebody else has computed the same meanwhile
    engine.scheduler.pool.publish(twin[0], writer.prefix_id, prompt_of(14)[4:8])
    engine.device.cells[twin[0]] = list(prompt_of(14)[4:8])
    prefix.look_again(engine.scheduler.ledger, writer)
    assert (writer.blocks[1], writer.prefilled) == (twin[0], 8)
    assert begun not in engine.scheduler.pool._free
    engine.scheduler.pool.give_back(twin)
    engine.turns(3)
    assert begun in engine.scheduler.pool._free or engine.scheduler.pool.refs[begun] == 1, "its step has landed"
    engine.finish()


def test_a_prompt_that_ends_before_its_first_chunk_leaves_nothing_behind() -> None:
    """It has a slot and blocks, but no plan has named it: its slot's next tenant is the only one to be written."""
    engine = sharing()
    engine.admit(0, prompt_of(30), max_tokens=4)
    engine.admit(1, prompt_of(26), max_tokens=4)
    engine.turn()
    slot = engine.sequence(1).slot
    assert slot
    assert chunks_of(engine, 1) == []
    engine.cancel(1)
    engine.admit(2, prompt_of(3, 5), max_tokens=4)
    engine.turns_until(State.DECODE, 2)
    writes = [write for plan in engine.plans if plan is not None for write in plan.slot_writes if write.slot == slot]
    assert [write.request_id for write in writes] == [2]
    engine.finish()


def test_switched_off_nobody_waits() -> None:
    engine = sharing(prefix_caching=False)
    for request_id in range(2):
        engine.admit(request_id, prompt_of(12), max_tokens=4)
    (plan,) = engine.real_turns(1)
    assert len(plan.chunks) == 2
    engine.finish()
    assert engine.scheduler.counters.prefix_waits == engine.scheduler.counters.prefix_query_tokens == 0


# ---- blocks that break ----


def broken_writer(**more: Unpack[Limits]) -> Driver:
    """Request 0 leaves NaN in the first block; request 1 shares it a step later, and no token has told of it yet."""
    engine = sharing(**more)
    engine.device.poisons = {0: 2}
    engine.admit(0, prompt_of(12), max_tokens=4)
    engine.admit(1, (*prompt_of(8), 1, 2), max_tokens=6)
    return engine


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_whoever_shares_blocks_of_one_that_breaks_is_computed_again(depth: int) -> None:
    engine = broken_writer(depth=depth)
    engine.turns(2)
    assert [chunk.start for _, chunk in chunks_of(engine, 1)] == [8]
    engine.turns_until(State.ENDED, 0)
    assert engine.reason(0) is FinishReason.ERROR
    assert engine.state(1) is State.EVICTING
    assert engine.scheduler.pool.lookup(prompt_of(12), 3) == []
    engine.finish()
    assert (engine.reason(1), engine.finished[1].token_ids) == (FinishReason.LENGTH, engine.alone(1))
    assert engine.scheduler.counters.distrusted == 1
    assert engine.scheduler.counters.evictions == 0, "which are for want of memory"


def test_whoever_breaks_first_over_borrowed_blocks_is_computed_again() -> None:
    """Its writer was cancelled in the middle of its prompt, and never told of an error."""
    engine = sharing(max_prefill_tokens=8)
    engine.device.poisons = {0: 2}
    engine.admit(0, prompt_of(40), max_tokens=4)
    engine.turn()
    engine.cancel(0)
    engine.admit(1, (*prompt_of(6), 1), max_tokens=6)
    engine.finish()
    assert [chunk.start for _, chunk in chunks_of(engine, 1)] == [4, 0]
    assert engine.scheduler.counters.distrusted == 1
    assert engine.finished[1].token_ids == engine.alone(1)


def test_a_request_that_broke_by_itself_does_so_again_and_ends() -> None:
    """Whose fault it was is not known: it borrowed a block, so it gets a second chance, without any."""
    engine = sharing()
    engine.device.breaks_at = {1: 13}
    engine.admit(0, prompt_of(12), max_tokens=4)
    engine.admit(1, (*prompt_of(12), 1), max_tokens=6)
    engine.finish()
    assert engine.reason(0) is FinishReason.LENGTH
    assert engine.reason(1) is FinishReason.ERROR
    assert engine.scheduler.counters.distrusted == 1
    assert [chunk.start for _, chunk in chunks_of(engine, 1)] == [12, 0]


def test_blocks_over_which_a_token_was_drawn_are_trusted() -> None:
    """Whoever breaks over those broke by itself: it ends, and nobody else is disturbed."""
    engine = sharing()
    engine.device.breaks_at = {1: 16}
    engine.admit(0, prompt_of(12), max_tokens=16)
    engine.turns(4)
    assert engine.sequence(0).trusted
    engine.admit(1, (*prompt_of(12), 1), max_tokens=6)
    engine.finish()
    assert engine.reason(1) is FinishReason.ERROR
    assert engine.scheduler.counters.distrusted == 0


@pytest.mark.parametrize("state", [State.DECODE, State.DRAINING, State.PAUSED, State.PREFILL])
def test_a_sharer_is_computed_again_whatever_it_is_doing(state: State) -> None:
    engine = broken_writer(depth=4, max_prefill_tokens=12 if state is not State.PREFILL else 9)
    engine.cancel(1)
    engine.admit(2, (*prompt_of(8), *prompt_of(30, 3)), max_tokens=1 if state is State.DRAINING else 9)
    if state is State.PREFILL:
        engine.turns(4)
    elif state is State.PAUSED:
        engine.turns(2)
        engine.pause(2)
        engine.turns_until(State.PAUSED, 2)
    else:
        engine.turns_until(state, 2)
    if engine.state(0) is not State.ENDED:
        assert engine.state(2) is state
    engine.turns_until(State.ENDED, 0)
    if engine.state(2) is State.PAUSED:
        engine.resume(2)
    engine.turns(12)
    if engine.state(2) is State.PAUSED:
        engine.resume(2)
    engine.finish()
    assert engine.finished[2].token_ids == engine.alone(2)
    assert engine.scheduler.counters.distrusted == 1


# ---- a reset of the prefix cache ----


@pytest.mark.parametrize("snapshots", [None, SnapshotPolicy(4, worth=1)], ids=["attention", "recurrent state"])
@pytest.mark.parametrize("depth", [0, 2])
def test_requests_behind_a_reset_hit_nothing_older(depth: int, snapshots: SnapshotPolicy | None) -> None:
    """Not of one that has ended, nor of one that runs, is half computed, or waits for such a one."""
    engine = sharing(depth=depth, max_prefill_tokens=12, snapshots=snapshots, blocks=200, max_model_len=64)
    prompt = prompt_of(32)
    engine.admit(1, prompt, max_tokens=2)
    engine.finish()
    engine.admit(2, prompt, max_tokens=20)
    engine.turns(3)
    engine.admit(3, (*prompt_of(30, 3), 1, 2), max_tokens=4)  # its first chunk is planned, the rest is not
    engine.turns(1)
    hits, done = engine.scheduler.counters.prefix_hit_tokens, computed(engine)
    assert hits >= 28
    engine.submit(ResetPrefixCache())
    engine.admit(4, prompt, max_tokens=2)
    engine.admit(5, (*prompt_of(30, 3), 1, 2), max_tokens=2)
    engine.turns(12)
    assert engine.scheduler.counters.prefix_hit_tokens == hits
    assert computed(engine) == done + 20 + 2 * 32
    engine.admit(6, prompt, max_tokens=2)
    engine.finish()
    assert engine.scheduler.counters.prefix_hit_tokens >= hits + 28, "what came behind the reset is found"


def test_a_request_that_is_evicted_behind_a_reset_shares_again() -> None:
    engine = sharing(blocks=60, max_model_len=64)
    engine.admit(1, 12, max_tokens=30)
    engine.turns(4)
    engine.submit(ResetPrefixCache())
    reservation.evict(engine.scheduler.ledger, engine.sequence(1))
    engine.turns_until(State.DECODE, 1)
    engine.admit(2, prompt_of(12, 1), max_tokens=2)
    engine.finish()
    assert engine.scheduler.counters.prefix_hit_tokens == 8


# ---- cache_salt ----


@pytest.mark.parametrize("snapshots", [None, SnapshotPolicy(16, worth=1)], ids=["attention", "recurrent state"])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_prefix_is_found_by_requests_with_the_same_salt_alone(depth: int, snapshots: SnapshotPolicy | None) -> None:
    """Neither of one that has ended, nor of one that comes at the same time, nor after an eviction."""
    engine = sharing(depth=depth, max_prefill_tokens=64, snapshots=snapshots, blocks=200, max_model_len=64)
    prompt = prompt_of(32)
    for request_id, salt in ((1, "alice"), (2, "bob"), (3, "")):
        engine.admit(request_id, prompt, max_tokens=8, salt=salt)
    engine.turns(8)
    assert engine.scheduler.counters.prefix_waits == 0, "none waits for another one's blocks"
    reservation.evict(engine.scheduler.ledger, engine.sequence(2))
    engine.finish()
    done = engine.scheduler.counters.prefix_hit_tokens
    for request_id, salt, hits in ((4, "carol", 0), (5, "alice", 28), (6, "bob", 28), (7, "", 28), (8, "carol", 28)):
        engine.admit(request_id, prompt, max_tokens=2, salt=salt)
        engine.finish()
        assert engine.scheduler.counters.prefix_hit_tokens - done == hits, salt
        done += hits


def test_a_salt_is_a_decision_that_ranks_compare() -> None:
    """With another one on one rank, the same plans would come of it for a while."""
    values = set()
    for salt in ("", "a", "b"):
        engine = sharing()
        engine.admit(1, 8, salt=salt)
        values.add(engine.scheduler.digest.value)
    assert len(values) == 3


def test_mutant_a_scheduler_without_salts_is_found() -> None:
    """Two that come at the same time share, and accounting says so."""
    engine = sharing(blocks=60, max_model_len=64)
    with patch("runtime.schedule.sequence.root_of", lambda salt: 0):
        engine.admit(1, prompt_of(32), max_tokens=20, salt="a")
        engine.turns(4)
        engine.sequence(1).root = -5  # what accounting would know
        engine.admit(2, prompt_of(32), max_tokens=20, salt="b")
        with pytest.raises(AccountingError, match="another cache_salt"):
            engine.turns(4)
