"""Groups with a sliding window: which pages a request holds, what a prefix hit needs, and mutants that are found out.

The fake device compares what each row's window holds with its last tokens, and spoils pages that are free, so that
every ``finish`` here checks that too. fuzz.py tells random traces about such models (one seed in four).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any, Unpack

import pytest

from runtime.schedule import prefix, windows
from runtime.schedule.config import SchedulerConfig, StepLimits
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import Admit, Branch, Continue, ResetPrefixCache, StepPlan, StepResult
from runtime.schedule.request import Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import SequenceState
from runtime.schedule.slots import AccountingError
from runtime.schedule.states import State
from runtime.schedule.window_pool import WindowPages, WindowPool
from tests.runtime.schedule.configs import ROOMY, Limits, config_with
from tests.runtime.schedule.driver import Driver, prompt_of
from tests.runtime.schedule.fuzz import Trace, WrongTokens, check_trace, make_trace, with_windows
from tests.runtime.schedule.mutants import Mutant, plant
from tests.runtime.schedule.test_sharing import chunks_of

DEPTHS = (0, 2, 4)
SMALL = ((6, 40),)  # a window of 6 tokens, and blocks


def windowed(window: int = 6, pages: int = 40, **more: Unpack[Limits]) -> Driver:
    limits: Limits = {"block_size": 4, "depth": 2, "max_model_len": 128, "windows": ((window, pages),)}
    limits.update(more)
    return Driver(**limits)


def pages_of(engine: Driver, request_id: int) -> WindowPages:
    (pages,) = engine.sequence(request_id).windows
    return pages


def computed(engine: Driver, request_id: int) -> int:
    """Tokens of its prompt."""
    return sum(len(chunk.token_ids) for _, chunk in chunks_of(engine, request_id))


def window_pool(engine: Driver) -> WindowPool:
    (pool,) = engine.scheduler.ledger.windows
    return pool


# ---- what a request holds ----


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("window", [1, 3, 4, 6, 9])
def test_a_decode_row_holds_its_window_and_what_is_reserved(window: int, depth: int) -> None:
    engine = windowed(window, depth=depth)
    engine.admit(0, 30, max_tokens=60)
    most = 0
    while engine.scheduler.unfinished:
        engine.turn()
        if engine.state(0) is State.DECODE and not engine.sequence(0).chunks:
            pages, landed = pages_of(engine, 0), engine.sequence(0).landed_tokens
            most = max(most, len(pages.blocks))
            assert pages.first * 4 <= max(0, landed - window), "its newest token sees so far back"
            assert pages.end == len(engine.sequence(0).blocks), "written as far as the pages of all tokens"
    size = -(-(window - 1 + engine.config.limits.tokens_ahead + 2) // 4) + 1
    assert most <= size == window_pool(engine).quota
    engine.finish()


def test_rejected_draft_tokens_hold_their_pages() -> None:
    """A rejected tree never moves the frontier: pages go by landed tokens, which rounds of 0 to 8 tokens prove."""
    for depth in DEPTHS:
        engine = windowed(3, 40, depth=depth, widths=(8,), tree=11, max_model_len=96)
        engine.device.barren = True
        for request_id in range(3):
            engine.admit(request_id, 20 + request_id, max_tokens=50)
        engine.finish()


def test_chunks_in_flight_hold_their_pages_and_later_ones_wait() -> None:
    engine = windowed(6, pages=8, max_prefill_tokens=64, depth=2)
    engine.admit(0, 60, max_tokens=2)
    engine.finish()
    starts = [(chunk.start, len(chunk.token_ids)) for _, chunk in chunks_of(engine, 0)]
    assert starts[0] == (0, 32), "eight pages of four tokens"
    assert len(starts) > 2, "what follows comes as the window moves on"
    assert sum(length for _, length in starts) == 60
    assert None in engine.plans, "while chunks are in flight no page is free"


def test_the_window_of_a_long_prompt_is_not_taken_from_decode_rows() -> None:
    engine = windowed(6, pages=16, max_prefill_tokens=64, depth=2)
    engine.admit(0, 8, max_tokens=40)
    engine.turns_until(State.DECODE, 0)
    engine.admit(1, 64, max_tokens=2)
    while engine.scheduler.unfinished:
        engine.turn()
        assert engine.state(0) in (State.DECODE, State.DRAINING, State.ENDED), "it never stalls"
    assert engine.scheduler.counters.evictions == engine.scheduler.counters.stalls == 0
    engine.finish()


def test_a_request_waits_until_its_window_can_be_promised() -> None:
    engine = windowed(6, pages=8)  # two windows of four blocks
    for request_id in range(3):
        engine.admit(request_id, 20, max_tokens=20)
    engine.turns(10)
    assert [engine.state(request_id) for request_id in range(3)] == [State.DECODE, State.DECODE, State.WAITING]
    assert engine.scheduler.counters.deferred_admissions
    engine.finish()


def test_short_requests_are_promised_what_they_can_use() -> None:
    engine = windowed(40, pages=13, rows=4)
    for request_id in range(4):
        engine.admit(request_id, 5, max_tokens=4)
    engine.turns(4)
    assert [engine.state(request_id) for request_id in range(4)] == [State.DECODE] * 4
    engine.finish()


def test_a_group_that_cannot_hold_one_window_is_refused() -> None:
    config_with(ROOMY, windows=((6, 4),))
    with pytest.raises(ValueError, match=r"window 6 has 3 blocks.*may hold 4 blocks"):
        config_with(ROOMY, windows=((6, 3),))


# ---- prefix hits ----


def test_a_hit_needs_the_pages_of_its_last_window_only() -> None:
    engine = windowed(6)
    prompt = prompt_of(30)
    engine.admit(0, prompt, max_tokens=2)
    engine.finish()
    engine.admit(1, (*prompt, 5), max_tokens=2)
    engine.turn()
    assert computed(engine, 1) == 3, "seven pages of four tokens are shared"
    assert pages_of(engine, 1).first == 5, "of a window two: tokens 23 to 27 precede the first one computed"
    engine.finish()


def test_the_longest_hit_that_every_group_grants() -> None:
    """Two windows: where one has lost a page, the hit ends before it, and is as long as the other grants there."""
    engine = Driver(block_size=4, max_model_len=128, windows=((6, 40), (14, 40)))
    prompt = prompt_of(41)
    engine.admit(0, prompt, max_tokens=2)
    engine.finish()
    short, long = engine.scheduler.ledger.windows
    found = engine.scheduler.pool.lookup(prompt, 10)
    ids = [engine.scheduler.pool.prefix_id(block) for block in found]
    assert len(ids) == 10

    def lose(pool: WindowPool, page: int) -> None:
        block = pool.find(ids[page])
        assert block is not None
        pool.forget([block])
        pool._free.append(block)
        del pool._cached[block]

    lose(short, 9)  # hits end at page 9 at most, and need pages 5 to 8 of the long window
    lose(long, 6)  # so at 6
    lose(short, 4)  # which needs pages 4 and 5 of the short one: so at 4
    engine.admit(1, prompt, max_tokens=2)
    engine.turn()
    assert [chunk.start for _, chunk in chunks_of(engine, 1)] == [16]
    engine.finish()
    assert None not in (short.find(ids[4]), short.find(ids[8]), long.find(ids[6])), "what it computed can be found"


def test_one_block_short_is_no_hit() -> None:
    engine = windowed(5)  # four keys before the query: one page
    assert window_pool(engine).tail == 1
    for window, tail in ((1, 0), (2, 1), (4, 1), (5, 1), (6, 2), (9, 2), (10, 3)):
        assert windowed(window).scheduler.ledger.windows[0].tail == tail


def test_a_page_larger_than_the_window_is_still_found() -> None:
    """The frontier must not free the last page of a prompt where pages are longer than windows."""
    engine = windowed(2, block_size=16, max_model_len=128)
    prompt = prompt_of(40)
    engine.admit(0, prompt, max_tokens=20)
    engine.finish()
    engine.admit(1, prompt, max_tokens=2)
    engine.turn()
    assert computed(engine, 1) == 8
    engine.finish()


@pytest.mark.parametrize("depth", DEPTHS)
def test_pages_are_found_from_the_step_after_the_one_that_writes_them(depth: int) -> None:
    engine = windowed(6, depth=depth, max_prefill_tokens=64)
    prompt = prompt_of(24)
    engine.admit(0, prompt, max_tokens=3)
    engine.admit(1, prompt, max_tokens=3)
    engine.finish()
    (first, _), (second, _) = chunks_of(engine, 0)[0], chunks_of(engine, 1)[0]
    assert second == first + 1
    assert computed(engine, 1) == 4


def test_a_long_prompt_does_not_evict_where_conversations_continue() -> None:
    """Pages that a window has passed are reused first: the pages at the ends of others stay to be hit."""
    engine = windowed(6, pages=16, max_prefill_tokens=16, depth=0)
    turns = [prompt_of(20, request_id) for request_id in range(2)]
    for request_id, prompt in enumerate(turns):
        engine.admit(request_id, prompt, max_tokens=2)
    engine.finish()
    engine.admit(2, 100, max_tokens=2)  # 25 pages through a pool of 16
    engine.finish()
    for request_id, prompt in enumerate(turns, 3):
        engine.admit(request_id, (*prompt, 1, 2, 3), max_tokens=2)
        engine.turns(1)
        assert computed(engine, request_id) == 3, "two tokens of the answer and one page were left out"
    engine.finish()


def test_pages_where_a_hit_ended_once_are_kept_like_ends() -> None:
    """A prefix that several prompts share ends in the middle of each: its last window is needed by the next one."""
    engine = windowed(6, pages=16, max_prefill_tokens=16, depth=0)
    shared = prompt_of(16)
    for request_id in range(2):
        engine.admit(request_id, (*shared, *prompt_of(12, 5 + request_id)), max_tokens=2)
        engine.finish()
    assert computed(engine, 1) == 12
    engine.admit(2, 100, max_tokens=2)
    engine.finish()
    engine.admit(3, (*shared, *prompt_of(12, 9)), max_tokens=2)
    engine.turn()
    assert [chunk.start for _, chunk in chunks_of(engine, 3)] == [16]
    engine.finish()


def test_scored_prompts_and_resets_work_with_windows() -> None:
    engine = windowed(6)
    prompt = prompt_of(22)
    engine.admit(0, prompt, max_tokens=9, prompt_logprobs=0)
    engine.turns(3)
    engine.submit(ResetPrefixCache())
    engine.finish()
    engine.admit(1, prompt, max_tokens=2)
    engine.turn()
    assert computed(engine, 1) == 22
    engine.finish()


# ---- forks, eviction, sessions ----


@pytest.mark.parametrize("length", [15, 16, 17])
def test_answers_share_the_window_of_their_prompt_and_copy_its_last_page(length: int) -> None:
    engine = windowed(6, rows=4)
    engine.admit(0, length, max_tokens=12, n=3)
    engine.turns_until(State.DECODE, 0)
    forks = [fork for plan in engine.plans if plan is not None for fork in plan.forks]
    assert [len(fork.in_windows) for fork in forks] == [int(length % 4 > 0)] * 2
    shared = set(pages_of(engine, 0).blocks) & set(pages_of(engine, 1).blocks)
    assert len(shared) == length // 4 - (length - 6) // 4
    engine.finish()


def test_an_evicted_request_gives_back_its_window_and_finds_it_again() -> None:
    engine = Driver(block_size=4, rows=2, blocks=14, max_model_len=64, windows=SMALL, depth=2)
    engine.admit(0, 12, max_tokens=30)
    engine.admit(1, 12, max_tokens=30)
    engine.finish()
    assert engine.scheduler.counters.evictions


def test_a_parked_session_keeps_its_window_and_a_branch_copies_it() -> None:
    engine = windowed(6, max_sessions=3, slots=8, rows=2)
    engine.admit(0, 10, max_tokens=30, quantum=5)
    engine.turns_until(State.PARKED, 0)
    held = list(pages_of(engine, 0).blocks)
    engine.submit(Branch(1, 0))
    engine.turn()
    copies = [copy for plan in engine.plans if plan is not None for copy in plan.copies]
    assert len(copies) == 1
    (pair,) = copies[0].in_windows
    assert pair[0] in held
    assert pair[1] in pages_of(engine, 1).blocks
    engine.submit(Continue(0, 1, 30))
    engine.turns_until(State.PARKED, 0)
    assert engine.sequence(0).landed_tokens == 40


# ---- bytes ----


def held_bytes(config: SchedulerConfig, prompts: Iterable[int], new: int, layers: tuple[int, int]) -> tuple[int, int]:
    """(Held, needed) once all decode, in tokens times layers; ``layers``: that see all tokens, and a window. Steps give
    what a list gives: no cells are kept."""
    scheduler, (window, _) = Scheduler(config), config.windows[0]
    lengths = list(prompts)
    for request_id, length in enumerate(lengths):
        scheduler.submit(Admit(Request(request_id, prompt_of(length, request_id), SamplingParams(max_tokens=10_000))))
    in_flight: list[StepPlan | None] = []
    done = 0
    while done < new:
        in_flight.append(scheduler.plan())
        if len(in_flight) > config.limits.depth:
            plan = in_flight.pop(0)
            step = scheduler.step - 1 - config.limits.depth
            if plan is None:
                scheduler.land(step, None)
                continue
            counts = [int(plan.draws(row)) for row in range(len(plan.slots))]
            scheduler.land(step, StepResult(step, [3] * len(counts), counts, [0] * len(counts)))
            done += plan.decode_rows == len(lengths)
    scheduler.check()
    size, sequences = config.limits.block_size, scheduler.ledger.sequences.values()
    held = sum(len(s.blocks) * layers[0] + len(s.windows[0].blocks) * layers[1] for s in sequences) * size
    tokens = [sequence.landed_tokens for sequence in sequences]
    return held, sum(length * layers[0] + min(window, length) * layers[1] for length in tokens)


GEMMA, GPT_OSS = ((1024, (10, 52)), (128, (12, 12)))


@pytest.mark.slow
@pytest.mark.parametrize(("window", "layers"), [GEMMA, GPT_OSS], ids=["gemma-3-27b", "gpt-oss-20b"])
@pytest.mark.parametrize("lengths", [(131_072,), (1_900,) * 256], ids=["128k", "256 of 2000"])
def test_what_rows_hold_is_at_most_a_tenth_more_than_they_need(
    lengths: tuple[int, ...], window: int, layers: tuple[int, int]
) -> None:
    limits = StepLimits(len(lengths), 2 * len(lengths), 16, 140_000, depth=2)
    config = SchedulerConfig(limits, blocks=300_000 // 8, prefix_caching=False, windows=((window, 20_000),))
    held, needed = held_bytes(config, lengths, 100, layers)
    assert needed <= held <= 1.1 * needed


# ---- mutants ----


MUTANTS: list[Any] = []
TWICE = tuple(Admit(Request(number, prompt_of(16), SamplingParams(max_tokens=3))) for number in range(2))
ALIKE = Trace(config_with(ROOMY, windows=SMALL), {0: TWICE})  # the second prompt comes in the step of the first


def with_a_window(seed: int) -> Trace:
    trace = make_trace(seed)
    return replace(trace, config=with_windows(trace.config, seed))


def mutant_of(owner: type | ModuleType, name: str, *caught_by: type[Exception]) -> Callable[[Mutant], Mutant]:
    def note(mutant: Mutant) -> Mutant:
        MUTANTS.append(pytest.param(owner, name, mutant, caught_by, id=mutant.__name__))
        return mutant

    return note


@mutant_of(WindowPool, "first_page", WrongTokens)
def frees_a_page_early(usual: Mutant, pool: WindowPool, position: int) -> Any:
    return usual(pool, position) + (position >= pool.window)


@mutant_of(WindowPool, "granted", WrongTokens)
def hits_one_block_short(usual: Mutant, pool: WindowPool, ids: list[int], *, trusted: bool = False) -> Any:
    pool.tail -= 1
    granted = usual(pool, ids, trusted=trusted)
    pool.tail += 1
    return granted


@mutant_of(windows, "cut", WrongTokens)
def publishes_before_it_writes(usual: Mutant, ledger: Ledger, sequence: SequenceState, start: int, end: int) -> None:
    usual(ledger, sequence, start, end)
    ledger.publish(sequence, end)


@mutant_of(windows, "_oldest_query", WrongTokens)
def frees_by_planned_tokens(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> Any:
    oldest = usual(ledger, sequence)
    return oldest if sequence.chunks or sequence.prefilling else max(oldest, sequence.planned_tokens - 1)


@mutant_of(windows, "promise", KeyError, AccountingError)
def promises_too_little(usual: Mutant, ledger: Ledger, pool: WindowPool, sequence: SequenceState) -> Any:
    return min(1, usual(ledger, pool, sequence))


@mutant_of(windows, "copy", WrongTokens)
def copies_nothing(usual: Mutant, *given: Any) -> Any:
    return tuple((own, own) for _, own in usual(*given))


@mutant_of(prefix, "share", WrongTokens)
def hits_without_pages(usual: Mutant, ledger: Ledger, sequence: SequenceState, found: list[int]) -> None:
    """A hit takes the pages of all tokens, and of windows fresh ones."""
    usual(ledger, sequence, found)
    for pool, pages in zip(ledger.windows, sequence.windows, strict=True):
        old, pages.blocks = pages.blocks, pool.take(len(pages.blocks))
        pool.give_back(old)


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "mutant", "caught_by"), MUTANTS)
def test_a_broken_window_is_caught(
    owner: type | ModuleType,
    name: str,
    mutant: Mutant,
    caught_by: tuple[type[Exception], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, owner, name, mutant)
    verdicts: Counter[str] = Counter()
    for trace in (ALIKE, *(with_a_window(seed) for seed in range(1200))):
        try:
            check_trace(trace, check=AccountingError in caught_by)
        except caught_by:
            return
        except Exception as error:  # it may break in other ways first
            verdicts[type(error).__name__] += 1
    pytest.fail(f"1200 seeds gave no {caught_by}: {dict(verdicts)}")


@pytest.mark.slow
def test_windows_are_visited_by_every_kind_of_trace() -> None:
    seen: Counter[str] = Counter()

    class Counting(Scheduler):
        def plan(self) -> StepPlan | None:
            plan = super().plan()
            for pool in self.ledger.windows:
                seen["room is short"] += pool.room < pool.quota
                seen["fenced"] += pool._waiting > 0
            for sequence in self.ledger.sequences.values():
                seen["moved on"] += any(pages.first for pages in sequence.windows)
            return plan

    for seed in range(80):
        check_trace(with_a_window(seed), Counting, check=False)
    assert min(seen.values()) > 40, seen
    assert len(seen) == 3
