"""Prefixes of a model with recurrent state: where state is kept, who goes on from there, and what is lost with what.

The fake device compares each slot's state with the tokens before it, so that every ``finish`` here checks that too.
"""

from __future__ import annotations

from typing import Unpack

import pytest

from runtime.schedule import reservation
from runtime.schedule.config import SnapshotPolicy
from runtime.schedule.plan import StepPlan
from runtime.schedule.request import FinishReason
from runtime.schedule.slots import AccountingError
from runtime.schedule.snapshots import SnapshotPool
from runtime.schedule.states import State
from tests.runtime.schedule.configs import Limits
from tests.runtime.schedule.driver import Driver, prompt_of
from tests.runtime.schedule.test_sharing import chunks_of, computed

DEPTHS = (0, 2, 4)


def hybrid(count: int = 4, interval: int = 0, worth: int = 1, **more: Unpack[Limits]) -> Driver:
    policy = SnapshotPolicy(count, interval, worth)
    limits: Limits = {"block_size": 4, "depth": 2, "max_model_len": 128, "snapshots": policy, **more}
    return Driver(**limits)


def counted(engine: Driver) -> tuple[int, int, int]:
    """Snapshots saved, restored and evicted."""
    counters = engine.scheduler.counters
    return counters.snapshot_saves, counters.snapshot_restores, counters.snapshot_evictions


def ends(engine: Driver, request_id: int) -> list[int]:
    return [chunk.start + len(chunk.token_ids) for _, chunk in chunks_of(engine, request_id)]


def plans(engine: Driver) -> list[StepPlan]:
    return [plan for plan in engine.plans if plan is not None]


# ---- where chunks end ----


def test_a_chunk_ends_at_the_last_full_block() -> None:
    engine = hybrid()
    engine.admit(0, 14)
    first, second = engine.real_turns(2)
    assert ends(engine, 0) == [12, 14]
    assert first.saved == ((first.slots[0], 1),)
    assert second.saved == first.restored == ()
    engine.finish()


def test_a_prompt_that_fills_its_blocks_is_kept_before_and_at_its_end() -> None:
    """Equal prompts compute their last token, so they go on from the block before; longer ones need not."""
    engine = hybrid()
    engine.admit(0, 12)
    engine.finish()
    engine.admit(1, prompt_of(12))
    engine.admit(2, (*prompt_of(12), 1, 2))
    engine.finish()
    assert ends(engine, 0) == [8, 12]
    assert [chunk.start for _, chunk in chunks_of(engine, 1)] == [8]
    assert [chunk.start for _, chunk in chunks_of(engine, 2)] == [12]


def test_a_chunk_ends_at_every_interval() -> None:
    engine = hybrid(interval=2)
    engine.admit(0, 31)
    engine.finish()
    assert ends(engine, 0) == [8, 16, 24, 28, 31]
    assert counted(engine) == (4, 0, 0)


def test_a_snapshot_lies_so_many_tokens_behind_the_one_before() -> None:
    engine = hybrid(interval=2, worth=10)
    engine.admit(0, 31)
    engine.admit(1, 10)
    engine.finish()
    assert ends(engine, 0) == [16, 28, 31]
    assert ends(engine, 1) == [10], "not worth a step"


def test_without_snapshots_chunks_end_nowhere_else() -> None:
    for engine in (Driver(block_size=4, depth=2), hybrid(interval=1, prefix_caching=False)):
        engine.admit(0, 31)
        engine.finish()
        assert ends(engine, 0) == [31]
        assert counted(engine) == (0, 0, 0)


@pytest.mark.parametrize("scored", [True, False])
def test_scored_prompts_are_computed_whole(scored: bool) -> None:
    engine = hybrid()
    engine.admit(0, 14, prompt_logprobs=0 if scored else None)
    engine.finish()
    assert ends(engine, 0) == ([14] if scored else [12, 14])


# ---- hits ----


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("tokens", [1, 3, 5, 64])
def test_equal_prompts_go_on_from_the_last_full_block(depth: int, tokens: int) -> None:
    engine = hybrid(depth=depth, max_prefill_tokens=tokens)
    engine.admit(0, 18, max_tokens=9)
    engine.finish()
    for request_id in (1, 2):
        engine.admit(request_id, prompt_of(18), max_tokens=9)
        engine.finish()
    assert computed(engine) == 18 + 2 + 2
    assert engine.scheduler.counters.prefix_hit_tokens == 32
    assert counted(engine) == (1, 2, 0)


def test_a_prefix_without_state_is_a_miss_and_leaves_its_state_where_it_ends() -> None:
    """What two prompts have in common, the third one goes on from."""
    engine = hybrid()
    stem = prompt_of(13)
    for request_id in range(4):
        engine.admit(request_id, (*stem, *prompt_of(9, request_id + 1)), max_tokens=2)
        engine.finish()
    assert ends(engine, 1) == [12, 20, 22]
    assert [chunk.start for _, chunk in chunks_of(engine, 1)] == [0, 12, 20]
    assert [chunk.start for _, chunk in chunks_of(engine, 2)] == [12, 20]
    counters = engine.scheduler.counters
    assert counters.snapshot_missed_tokens == 12
    assert counters.prefix_hit_tokens == 24
    assert computed(engine) == 22 + 22 + 10 + 10


def test_prompts_that_arrive_together_wait_for_the_state_behind_what_they_share() -> None:
    """64 prompts of 2,048 tokens, of which 1,900 are common: two of them compute that, one to find where it ends."""
    engine = hybrid(
        64, rows=64, slots=128, blocks=4096, block_size=64, max_model_len=4096, max_prefill_tokens=8192, worth=256
    )
    stem = prompt_of(1900)
    for request_id in range(64):
        own = tuple(range(1000 * request_id, 1000 * request_id + 148))
        engine.admit(request_id, (*stem, *own), max_tokens=2)
    engine.turns_until(State.DRAINING, 63)
    assert computed(engine) == 2 * 2048 + 62 * (2048 - 29 * 64)
    assert engine.scheduler.counters.snapshot_restores == 62


def test_equal_prompts_that_arrive_together_compute_it_once() -> None:
    engine = hybrid()
    for request_id in range(4):
        engine.admit(request_id, prompt_of(30), max_tokens=3)
    engine.finish()
    assert computed(engine) == 30 + 3 * 2


def test_a_prompt_follows_a_longer_one_from_snapshot_to_snapshot() -> None:
    engine = hybrid(8, interval=2, max_prefill_tokens=4)
    engine.admit(0, prompt_of(40), max_tokens=2)
    engine.admit(1, (*prompt_of(33), 5), max_tokens=2)
    engine.finish()
    assert next(chunk.start for _, chunk in chunks_of(engine, 1)) == 32


def test_short_prompts_do_not_wait_for_a_snapshot_that_nobody_leaves() -> None:
    engine = hybrid(worth=64)
    for request_id in range(2):
        engine.admit(request_id, prompt_of(9), max_tokens=3)
    assert len(engine.real_turns(1)[0].chunks) == 2
    engine.finish()


def test_what_was_evicted_goes_on_from_its_snapshot() -> None:
    engine = hybrid(rows=1, slots=3)
    engine.admit(0, 21, max_tokens=6)
    engine.turns(4)
    engine.pause(0)
    engine.turns(4)
    reservation.evict(engine.scheduler.ledger, engine.sequence(0))
    engine.resume(0)
    engine.finish()
    assert counted(engine)[1] == 1
    assert chunks_of(engine, 0)[2][1].start == 20


# ---- what is lost with what ----


def test_the_least_recently_used_snapshot_goes_first() -> None:
    engine = hybrid(2)

    def ask(request_id: int, stem: int) -> int:
        """Tokens that were computed for a prompt of ``stem``."""
        before = computed(engine)
        engine.admit(request_id, (*prompt_of(9, stem), 1), max_tokens=2)
        engine.finish()
        return computed(engine) - before

    assert [ask(0, 0), ask(1, 1), ask(2, 0)] == [10, 10, 2]
    assert ask(3, 2) == 10, "in place of that of 1, since 0 was used later"
    assert counted(engine)[2] == 1
    assert [ask(4, 0), ask(5, 1)] == [2, 10]
    assert engine.scheduler.counters.snapshot_missed_tokens == 8


def test_a_block_that_is_needed_takes_its_snapshot_with_it() -> None:
    engine = hybrid(4, blocks=8, rows=1, slots=2)
    engine.admit(0, 13, max_tokens=2)
    engine.finish()
    engine.admit(1, 27, max_tokens=4)
    engine.finish()
    engine.admit(2, prompt_of(13), max_tokens=2)
    engine.finish()
    assert next(chunk.start for _, chunk in chunks_of(engine, 2)) == 0
    assert counted(engine)[1:] == (0, 0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_snapshot_of_a_cancelled_prompt_is_a_good_one(depth: int) -> None:
    """Its step runs all the same, in front of whoever goes on from there."""
    engine = hybrid(depth=depth)
    engine.admit(0, 18)
    engine.turn()
    engine.cancel(0)
    engine.admit(1, prompt_of(18))
    engine.finish()
    assert [chunk.start for _, chunk in chunks_of(engine, 1)] == [16]


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_breaks_takes_its_snapshots_along(depth: int) -> None:
    """The one that goes on from a state with NaN in it is computed again, and nobody else finds that."""
    engine = hybrid(depth=depth)
    engine.device.poisons[0] = 5
    for request_id in range(3):
        engine.admit(request_id, prompt_of(18), max_tokens=6)
        engine.turn()
    engine.finish()
    assert engine.reason(0) is FinishReason.ERROR
    assert all(engine.reason(request_id) is FinishReason.LENGTH for request_id in (1, 2))


def test_a_snapshot_comes_from_the_steps_of_its_block() -> None:
    """Who leaves one where there was KV alone has his own block found from then on, and it breaks with him."""
    engine = hybrid(depth=0)
    stem = prompt_of(8)
    engine.admit(0, (*stem, 1, 1, 1, 1, 1, 1), max_tokens=1)
    engine.finish()
    engine.device.poisons[1] = 2
    engine.admit(1, (*stem, 2, 2, 2), max_tokens=3)
    engine.finish()
    assert engine.reason(1) is FinishReason.ERROR
    pool = engine.scheduler.pool
    assert len(pool.lookup((*stem, 9), 2)) == 1, "the block before is the first one's, and whole"
    engine.admit(2, (*stem, 3, 3, 3), max_tokens=3)
    engine.finish()
    assert engine.reason(2) is FinishReason.LENGTH


# ---- the pool ----


def test_the_pool_accounts_for_every_row() -> None:
    pool = SnapshotPool(2)
    first, second = pool.take(), pool.take()
    assert (first, second, pool.take()) == (1, 2, 0)
    with pytest.raises(AccountingError, match="neither kept nor given back"):
        pool.check([], [])
    pool.keep(first, 7)
    pool.give_back(second)
    pool.check([], [7])
    with pytest.raises(AccountingError, match="which cannot be found"):
        pool.check([], [])
    assert pool.pin(7) == first
    with pytest.raises(AccountingError, match="pinned 1 times, read by 0"):
        pool.check([], [7])
    pool.drop(7)
    assert pool.find(7) == 0
    pool.check([first], [])
    assert [pool.take(), pool.take()] == [second, 0], "it is still to be read"
    pool.give_back(second)
    pool.unpin(first)
    pool.check([], [])
    assert {pool.take(), pool.take()} == {first, second}
    assert pool.evictions == 0


@pytest.mark.parametrize("numbers", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_a_policy_of_impossible_numbers_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="numbers of snapshots, blocks and tokens"):
        SnapshotPolicy(*numbers)


def test_the_digest_holds_the_policy() -> None:
    digests = {hybrid(count, interval).scheduler.digest.value for count in (1, 2) for interval in (0, 1)}
    assert len(digests) == 4
