"""The block pool: taking, sharing, publishing, fences; and any mixture of these against a model made of plain sets."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.schedule.blocks import ROOT, BlockPool
from runtime.schedule.slots import AccountingError

A, B, C = (1, 2), (3, 4), (5, 6)


def published_pair() -> tuple[BlockPool, list[int]]:
    """A pool of four, two of its blocks owned, published with contents A, then B."""
    pool = BlockPool(4, 2)
    blocks = pool.take(2)
    pool.publish(blocks[1], pool.publish(blocks[0], ROOT, A), B)
    return pool, blocks


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(4, 2)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.free_count == 0


def test_a_fenced_block_is_soon_free_then_free() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.take(2)
    pool.retire_after(7, blocks)
    assert (pool.free_count, pool.soon_free) == (2, 2)
    pool.landed(6)
    assert (pool.free_count, pool.soon_free) == (2, 2)
    pool.landed(7)
    assert (pool.free_count, pool.soon_free) == (4, 0)
    pool.check([])


def test_what_is_shared_is_free_only_when_the_last_one_lets_go() -> None:
    pool, blocks = published_pair()
    found = pool.lookup((*A, *B, 9), most=2)
    assert found == blocks
    pool.share(found)
    pool.retire_after(1, blocks)
    assert pool.soon_free == 0, "the other still reads them"
    pool.give_back(found)
    assert pool.soon_free == 2
    pool.landed(1)
    assert pool.free_count == 4


def test_a_fenced_block_can_be_shared_before_it_is_free() -> None:
    pool, blocks = published_pair()
    pool.retire_after(1, blocks)
    pool.share(pool.lookup((*A, *B), most=2))
    assert pool.soon_free == 0
    pool.landed(1)
    assert pool.refs[1:3] == [1, 1]
    pool.check(blocks)


def test_cached_blocks_count_as_free_and_come_back_by_their_contents() -> None:
    pool, blocks = published_pair()
    pool.give_back(blocks)
    assert pool.free_count == 4
    assert pool.idle_among(blocks) == 2
    assert pool.lookup((*A, *B), most=2) == blocks
    pool.share(blocks)
    assert pool.free_count == 2
    pool.check(blocks)


def test_a_reset_forgets_everything_and_frees_what_nothing_refers_to() -> None:
    pool, blocks = published_pair()
    (third,) = pool.take(1)
    pool.publish(third, pool.prefix_id(blocks[1]), C)
    pool.give_back([third])
    assert pool.forget_all() == 3
    assert pool.lookup((*A, *B, *C, 9), most=3) == []
    pool.check(blocks)
    assert pool.free_count == 2
    (third,) = pool.take(1)
    assert pool.publish(third, ROOT, A) not in (ROOT, pool.prefix_id(blocks[0]))
    assert pool.lookup((*A, *B), most=2) == [third]
    pool.give_back([*blocks, third])
    pool.check([])


def test_a_lookup_stops_at_the_first_difference_and_at_its_limit() -> None:
    pool, blocks = published_pair()
    assert pool.lookup((*A, *C), most=2) == blocks[:1]
    assert pool.lookup((*B, *A), most=2) == []
    assert pool.lookup((*A, *B), most=1) == blocks[:1]
    assert pool.lookup((*A, 3), most=2) == blocks[:1], "half a block is no block"


def test_equal_contents_after_different_beginnings_are_different() -> None:
    pool = BlockPool(4, 2)
    first, second, third, fourth = pool.take(4)
    pool.publish(second, pool.publish(first, ROOT, A), C)
    pool.publish(fourth, pool.publish(third, ROOT, B), C)
    assert pool.lookup((*A, *C), most=2) == [first, second]
    assert pool.lookup((*B, *C), most=2) == [third, fourth]


def test_of_two_blocks_with_equal_contents_the_first_stays_the_one_to_find() -> None:
    pool = BlockPool(4, 2)
    first, twin, tail = pool.take(3)
    after = pool.publish(first, ROOT, A)
    assert pool.publish(twin, ROOT, A) == after
    pool.publish(tail, after, B)
    assert pool.lookup((*A, *B), most=2) == [first, tail]
    pool.give_back([twin])
    assert pool.free_count - pool.idle_among([first, tail]) == 2, "the twin is free, not cached"


def test_fresh_blocks_are_used_before_cached_ones_and_then_the_oldest_is_forgotten() -> None:
    pool, blocks = published_pair()
    pool.give_back(blocks)
    pool.take(2)
    assert pool.lookup((*A, *B), most=2) == blocks
    pool.take(1)
    assert pool.lookup((*A, *B), most=2) == blocks[:1], "the tail of a prefix goes first"
    pool.take(1)
    assert pool.lookup((*A, *B), most=2) == []


def test_a_forgotten_beginning_never_leads_to_another_ones_tail() -> None:
    """A block that is published again after it was forgotten begins a new prefix, with an id nobody had."""
    pool, (head, tail) = published_pair()
    pool.give_back([head])  # its tail is still owned
    taken = pool.take(3)
    assert head in taken
    pool.publish(head, ROOT, A)
    assert pool.lookup((*A, *B), most=2) == [head]
    pool.check([*taken, tail])


def test_references_that_do_not_add_up_are_an_error_that_names_the_block() -> None:
    pool = BlockPool(4, 2)
    taken = pool.take(2)
    with pytest.raises(AccountingError, match=r"\(block, owners \+ fences, references\) differ: \[\(2, 0, 1\)\]"):
        pool.check(taken[:1])


class PoolMachine(RuleBasedStateMachine):
    """Owners come, share, publish, leave at once or behind a fence; steps land. The model is what each owner holds.

    Contents are drawn from few, so that prefixes collide often. ``promised`` holds what every published block must
    contain for as long as it can be found.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[tuple[list[int], list[tuple[int, ...]], int]] = []  # blocks, contents published, prefix id
        self.fenced: list[tuple[int, list[int]]] = []
        self.step = 0
        self.promised: dict[int, tuple[tuple[int, ...], ...]] = {}

    @initialize(count=st.integers(1, 12))
    def build(self, count: int) -> None:
        self.pool = BlockPool(count, 2)

    @rule(prompt=st.lists(st.sampled_from([A, B]), max_size=4), more=st.integers(0, 3))
    def arrive(self, prompt: list[tuple[int, ...]], more: int) -> None:
        tokens = tuple(token for block in prompt for token in block)
        hits = self.pool.lookup(tokens, len(prompt))
        for length, block in enumerate(hits, 1):
            assert self.promised[block] == tuple(prompt[:length]), "found under contents it does not have"
        if more > self.pool.free_count - self.pool.idle_among(hits):
            return
        prefix = self.pool.share(hits)
        fresh = self.pool.take(more)
        assert not set(fresh) & self.referred(), "handed out while somebody may touch it"
        for block in fresh:
            self.promised.pop(block, None)
        if hits or fresh:
            self.owners.append((hits + fresh, prompt[: len(hits)], prefix))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), contents=st.sampled_from([A, B]))
    def publish(self, data: st.DataObject, contents: tuple[int, ...]) -> None:
        which = data.draw(st.integers(0, len(self.owners) - 1))
        blocks, known, prefix = self.owners[which]
        if len(known) == len(blocks):
            return
        block = blocks[len(known)]
        prefix = self.pool.publish(block, prefix, contents)
        known = [*known, contents]
        if self.pool._key[block] is not None:
            self.promised[block] = tuple(known)
        self.owners[which] = (blocks, known, prefix)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), ahead=st.integers(0, 3))
    def leave(self, data: st.DataObject, ahead: int) -> None:
        blocks, _, _ = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        if ahead:
            self.pool.retire_after(self.step + ahead, blocks)
            self.fenced.append((self.step + ahead, blocks))
        else:
            self.pool.give_back(blocks)

    @rule()
    def land(self) -> None:
        self.step += 1
        drops = self.pool.drops
        self.pool.landed(self.step)
        assert self.pool.drops - drops == sum(len(blocks) for step, blocks in self.fenced if step == self.step)
        self.fenced = [(step, blocks) for step, blocks in self.fenced if step > self.step]

    def referred(self) -> set[int]:
        return {b for blocks, _, _ in self.owners for b in blocks} | {b for _, blocks in self.fenced for b in blocks}

    @invariant()
    def references_are_owners_plus_fences(self) -> None:
        if not hasattr(self, "pool"):
            return
        owned = [block for blocks, _, _ in self.owners for block in blocks]
        self.pool.check(owned)
        expected = Counter(owned) + Counter(block for _, blocks in self.fenced for block in blocks)
        assert {block: refs for block, refs in enumerate(self.pool.refs) if refs} == expected
        assert self.pool.free_count == self.pool.count - len(expected)
        assert self.pool.soon_free == len(self.referred() - set(owned))


TestPool = pytest.mark.slow(PoolMachine.TestCase)
TestPool.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_prefix_id_is_never_used_twice() -> None:
    pool = BlockPool(2, 2)
    ids: list[int] = []
    for _ in range(5):
        (block,) = pool.take(1)
        ids.append(pool.publish(block, ROOT, (len(ids), 0)))
        pool.give_back([block])
    assert all(earlier < later for earlier, later in pairwise(ids))
