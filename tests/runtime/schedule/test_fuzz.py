"""Random traces against depth 0, width 1 and every request alone; and proof that the fuzzer bites."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.schedule import planner
from runtime.schedule.chain import Flight
from runtime.schedule.config import MixedSteps, SchedulerConfig
from runtime.schedule.plan import Chunk, Fork, StepKind, StepOutput, StepPlan, StepResult
from runtime.schedule.planner import Cut, Planned, Planner
from runtime.schedule.resources import Resources
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import SequenceState
from runtime.schedule.shares import remaining, whole_waves
from runtime.schedule.slots import AccountingError
from runtime.schedule.snapshots import SnapshotPool
from runtime.schedule.states import State, Trigger
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.fuzz import (
    WIDTHS,
    Build,
    Hang,
    StillFound,
    TooManyRows,
    WrongTokens,
    check_range,
    check_seed,
    check_trace,
    make_trace,
    run,
)
from tests.runtime.schedule.mixed_rules import BrokenRule
from tests.selection import covering

SEEDS = 400  # of a part. The rarest mutant below shows in one seed of a hundred; make test-all PART=fuzz has a million
PARTS = [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 80))]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_traces_equal_the_serial_engine(part: int) -> None:
    steps, failure = check_range(part * SEEDS, SEEDS)
    assert not failure, failure
    assert steps >= 100 * SEEDS


def test_a_seed_replays_exactly() -> None:
    first, second = run(make_trace(12)), run(make_trace(12))
    assert first == second


@pytest.mark.parametrize(("widths", "depth"), covering(sorted(set(WIDTHS)), range(5), at_once=1), ids=str)
def test_tokens_are_the_same_whatever_the_widths(widths: tuple[int, ...], depth: int) -> None:
    """Every pattern of widths and every depth, steps without a token included, against depth 0 and against width 1."""
    most = max(widths)
    for seed in range(40):
        trace = make_trace(seed)
        blocks = trace.config.blocks + most // trace.config.limits.block_size
        mixed = trace.config.mixed
        if mixed is not None and mixed.buckets:  # wide rows need room in them
            mixed = replace(mixed, buckets=(*mixed.buckets, mixed.buckets[-1] + most * trace.config.limits.rows))
        config = replace(trace.config, speculation=None)
        config = config_with(config, widths=widths, depth=depth, blocks=blocks, mixed=mixed, tree=0)
        check_trace(replace(trace, config=config, barren=seed % 2 == 0))


NAMES = (
    "ghost_rows",
    "evictions",
    "stalls",
    "prefix_hit_tokens",
    "prefix_waits",
    "fenced_blocks",
    "chained_steps",
    "deferred_admissions",
    "cancels",
    "pauses",
    "resumes",
    "mixed_steps",
    "mixed_padded_tokens",
    "forks",
    "forked_tokens",
)
OF_SNAPSHOTS = ("snapshot_saves", "snapshot_restores", "snapshot_evictions", "snapshot_missed_tokens")


@pytest.mark.slow
def test_every_part_of_the_space_is_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traces do reach evictions, stalls, ghosts, prefix hits, fences, rows that fall short, forks of every kind and
    prompts that leave before theirs, chunks cut to waves or left to a later step, every depth, every pattern of widths.
    """
    seen: Counter[object] = Counter()

    def waves(shares: dict[SequenceState, int], *how: Any) -> dict[SequenceState, int]:
        cut = whole_waves(shares, *how)
        seen["waves"] += cut != shares
        return cut

    monkeypatch.setattr(planner, "whole_waves", waves)

    class CountingResources(Resources):
        def fall_short(self, sequence: SequenceState) -> None:
            seen["fell short"] += 1
            super().fall_short(sequence)

        def look_again(self, sequence: SequenceState) -> None:
            before = sequence.prefilled
            super().look_again(sequence)
            seen["found later"] += sequence.prefilled > before

        def fork(self, prompt: SequenceState, answer: SequenceState, chunk: int) -> Fork:
            fork = super().fork(prompt, answer, chunk)
            seen["copied" if fork.copied is not None else "nothing to copy"] += 1
            return fork

        def leave_out(self, prompt: SequenceState) -> None:
            seen["left out", prompt.state] += len(self.joining(prompt))
            super().leave_out(prompt)

        def reserve(self, sequence: SequenceState) -> bool:
            seen["early"] += sequence.planned_tokens == sequence.wake_at < self._wake_at_latest(sequence)
            return super().reserve(sequence)

    class Counting(Scheduler):
        def plan(self) -> StepPlan | None:
            plan, rule = super().plan(), self.config.speculation
            strides = self.config.mixed is not None and self.config.mixed.stride > 1
            seen["later chunks"] += strides and bool(
                plan and plan.slots and not plan.chunks and self.planner._prefilling
            )
            if plan is not None and rule is not None and plan.kind is StepKind.MIXED:
                seen["narrower beside chunks"] += 1 < plan.width < rule.width
            return plan

        def land(self, step: int, result: StepResult | None) -> StepOutput:
            names = (*NAMES, *OF_SNAPSHOTS, "distrusted")
            seen.update(name for name in names if getattr(self.counters, name) > 0)
            seen[f"depth {self.config.limits.depth}"] = seen[self.config.widths] = 1
            return super().land(step, result)

    for seed in range(700):
        run(make_trace(seed), partial(Counting, resources=CountingResources))
    for name in NAMES:
        assert seen[name] > 100, (name, seen)
    assert {f"depth {d}" for d in range(5)} | set(WIDTHS) <= set(seen)
    for name in OF_SNAPSHOTS:
        assert seen[name] > 40, (name, seen)
    assert seen["fell short"] > 10
    assert seen["distrusted"] > 10
    assert seen["found later"] > 5
    assert seen["early"] > 5
    assert seen["waves"] > 5
    assert seen["later chunks"] > 100
    assert seen["narrower beside chunks"] > 20
    assert min(seen["copied"], seen["nothing to copy"], seen["left out", State.DECODE]) > 100
    assert min(seen["left out", State.ENDED], seen["left out", State.EVICTING]) > 0


# ---- the fuzzer bites: mutants, each caught for what it does ----


class NoFence(Resources):
    """Slot and blocks return to the pools at once, whatever is in flight."""

    def _release(self, sequence: SequenceState) -> None:
        self.pool.give_back(sequence.blocks)
        self.slots.give_back(sequence.slot)
        sequence.blocks = []


class NoFenceForVictims(Resources):
    """The same for evicted requests only."""

    def evict(self, sequence: SequenceState) -> None:
        sequence.last_step = -1
        super().evict(sequence)


class NoGhostCheck(Scheduler):
    """Results are believed whatever became of the row's request."""

    def _is_ghost(self, slot: int, epoch: int) -> bool:
        return False

    def _drop_ghosts(self, rows: list[SequenceState | None], plan: StepPlan, result: StepResult) -> list[int]:
        return []


class FreesOnPlannedCounts(Planner):
    """A request whose last token is planned gives its slot and blocks back before that token has landed."""

    def _ready_rows(self) -> bool:
        ready = super()._ready_rows()
        for sequence in self.resources.sequences.values():
            if sequence.slot and sequence.blocks and sequence.planned_tokens >= sequence.max_length:
                self.resources.pool.give_back(sequence.blocks)
                sequence.blocks = []
        return ready


class PublishesTheUnplanned(Resources):
    """All of a prompt's blocks are findable as soon as its first chunk is planned."""

    def planned(self, plan: StepPlan, rows: Sequence[SequenceState]) -> None:
        for sequence in rows[len(rows) - len(plan.chunks) :]:
            self.publish(sequence, sequence.prefill_target)
        super().planned(plan, rows)


class FoundAStepTooEarly(Planner):
    """Other rows of a step find the blocks that are written in this very step."""

    def _cut_chunk(self, sequence: SequenceState, budget: int, rows: list[SequenceState], chunks: list[Chunk]) -> int:
        tokens = super()._cut_chunk(sequence, budget, rows, chunks)
        self.resources.publish(sequence, sequence.prefilled)
        return tokens


class ForgetsWithoutRequeue(Resources):
    """Nobody finds the blocks of a request that broke any more; those who share them go on."""

    def _compute_again(self, sequence: SequenceState) -> None:
        pass


class TrustsWhatItBorrows(Resources):
    """A block that somebody writes is believed to be whole before a token was drawn over it."""

    def _share(self, sequence: SequenceState, found: list[int]) -> None:
        self.pool.trust(found)
        super()._share(sequence, found)


class BorrowsInSecret(Resources):
    """A prompt takes blocks that it found on its way, and the device is not told."""

    def look_again(self, sequence: SequenceState) -> None:
        before = dict(self._block_writes)
        super().look_again(sequence)
        self._block_writes = before


class ReservesOneStep(Resources):
    """Blocks for one step only, where D + 1 steps may be in flight."""

    def set_wake(self, sequence: SequenceState) -> None:
        super().set_wake(sequence)
        sequence.wake_at += self.limits.tokens_ahead


class ReservesForThisWidth(Planner):
    """Blocks for the width of the step being planned, where the steps behind it may be wider."""

    def _ready_rows(self) -> bool:
        self.resources.limits = replace(self.limits, width=self._width())
        return super()._ready_rows()


class CountsStepsByOneWidth(Planner):
    """Steps in flight are told from tokens in flight, as if all of them were as wide as the narrowest."""

    def _wake(self, sequence: SequenceState) -> None:
        in_flight = (sequence.planned_tokens - sequence.landed_tokens) // min(self.config.widths)
        before, sequence.uncertain_tokens = sequence.uncertain_tokens, 0
        planned, sequence.planned_tokens = sequence.planned_tokens, sequence.landed_tokens + in_flight
        super()._wake(sequence)
        sequence.uncertain_tokens, sequence.planned_tokens = before, planned


class NeverFallsShort(Resources):
    """A step that gives a live row no token changes nothing for a row that drains."""

    def fall_short(self, sequence: SequenceState) -> None:
        pass


class BelievesInEveryStep(Scheduler):
    """A row that got no token still counts on it."""

    def _gained_nothing(self, sequence: SequenceState, width: int) -> None:
        pass


class LeaksABlock(Resources):
    """Each end forgets one block."""

    def _release(self, sequence: SequenceState) -> None:
        sequence.blocks.pop()
        super()._release(sequence)


class KeepsItsSlot(Resources):
    """A slot is given back while its request still counts as its holder."""

    def move(self, sequence: SequenceState, trigger: Trigger) -> None:
        super().move(sequence, trigger)
        if trigger is Trigger.ALL_PLANNED:
            self.slots.give_back(sequence.slot)


class TrustsBrokenBlocks(Resources):
    """What is found out about the blocks of a request that has lost them already is not heard."""

    def _release(self, sequence: SequenceState) -> None:
        super()._release(sequence)
        sequence.given_up = []


class NobodyGivesWay(Resources):
    """Out of blocks, rows wait for each other for ever."""

    def reserve(self, sequence: SequenceState) -> bool:
        short = self.blocks_for(self.reservation(sequence)) - len(sequence.blocks) - self.pool.free_count
        return short <= 0 and super().reserve(sequence)


# ---- of resets of the prefix cache ----


class ResetsNothing(Resources):
    """What was published before a reset is found after it."""

    def reset_prefixes(self) -> None:
        for sequence in self.sequences.values():
            sequence.private = bool(sequence.blocks)


class PublishesTheOld(Resources):
    """Live requests publish behind a reset what they computed before it."""

    def reset_prefixes(self) -> None:
        super().reset_prefixes()
        for sequence in self.sequences.values():
            sequence.private = False


class AnswersPublishTheOld(Resources):
    """The same, of answers that join a prompt which was begun before it."""

    def planned(self, plan: StepPlan, rows: Sequence[SequenceState]) -> None:
        super().planned(plan, rows)
        for answer in rows[len(rows) - len(plan.forks) :]:
            answer.private = False
            answer.published_blocks, answer.prefix_id = 0, 0


# ---- of forks ----


class SharesTheLastBlock(Resources):
    """An answer shares the block that its prompt ends in, where it will write."""

    def fork(self, prompt: SequenceState, answer: SequenceState, chunk: int) -> Fork:
        fork = super().fork(prompt, answer, chunk)
        if fork.copied is not None:
            shared, own = fork.copied
            answer.blocks[answer.blocks.index(own)] = shared
            self.pool.share([shared])
            self.pool.give_back([own])
            self._write_blocks(answer, 0)
        return replace(fork, copied=None)


class CopiesNothing(Resources):
    """An answer gets a block of its own for the one that its prompt ends in, with nothing in it."""

    def fork(self, prompt: SequenceState, answer: SequenceState, chunk: int) -> Fork:
        return replace(super().fork(prompt, answer, chunk), copied=None)


class ForksIntoThinAir(Planner):
    """A step takes all answers along, whether there are rows for them or not."""

    @property
    def _row_free(self) -> bool:
        return True


class ForgetsWhoWaits(Resources):
    """Answers for which there was no room wait for a prompt that is long over."""

    def leave_out(self, prompt: SequenceState) -> None:
        pass


class TrustsItsPrompt(Resources):
    """An answer takes the blocks of its prompt for sound before a token was drawn over them."""

    def fork(self, prompt: SequenceState, answer: SequenceState, chunk: int) -> Fork:
        fork = super().fork(prompt, answer, chunk)
        answer.borrowed = False
        return fork


class FencesNoFork(Resources):
    """What a fork was given is free again before its step has landed."""

    def fork(self, prompt: SequenceState, answer: SequenceState, chunk: int) -> Fork:
        fork = super().fork(prompt, answer, chunk)
        answer.last_step = -1
        return fork


# ---- of snapshots of recurrent state ----


class RestoresNothing(Planner):
    """A prompt goes on behind a prefix whose state its slot does not have."""

    def _step_plan(self, *parts: Any, **more: Any) -> StepPlan:
        self._restored.clear()
        return super()._step_plan(*parts, **more)


class SavesAStepLate(Planner):
    """State is kept behind the step after the one that came to the end of the block."""

    late: tuple[tuple[int, int], ...] = ()

    def _step_plan(self, *parts: Any, **more: Any) -> StepPlan:
        plan = super()._step_plan(*parts, **more)
        slots = [chunk.slot for chunk in plan.chunks]
        due = tuple(pair for pair in self.late if pair[0] in slots)
        self.late = plan.saved
        return plan._replace(saved=due)


class SavesWhereverItEnds(Resources):
    """The state of any chunk is taken for that of the last block before its end."""

    def _choose(self, sequence: SequenceState, end: int) -> bool:
        return not sequence.scoring and end >= self.limits.block_size

    def save(self, sequence: SequenceState, end: int) -> int:
        if self.snapshots is None or not self._choose(sequence, end):
            return 0
        row = self.snapshots.take()
        if row:
            self._saving[sequence.request.request_id] = row
            sequence.prefilled -= end % self.limits.block_size  # as ``publish`` is to see it
        return row

    def planned(self, plan: StepPlan, rows: Sequence[SequenceState]) -> None:
        super().planned(plan, rows)
        for chunk, sequence in zip(plan.chunks, rows[plan.decode_rows :], strict=False):
            sequence.prefilled = max(sequence.prefilled, chunk.start + len(chunk.token_ids))


class _NeverDropped(SnapshotPool):
    def drop(self, block: int) -> None:
        pass


class OutlivesItsBlock(Resources):
    """A snapshot stays with a block that holds other tokens by now."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        if self.snapshots is not None:
            self.pool._snapshots = self.snapshots = _NeverDropped(self.snapshots.count)


class LeaksASnapshot(Resources):
    """Nobody hears of a row that was taken."""

    def save(self, sequence: SequenceState, end: int) -> int:
        row = super().save(sequence, end)
        self._saving.pop(sequence.request.request_id, None)
        return row


# ---- of mixed steps ----


class WaitsForPrompts(Planner):
    """Chunks in steps of their own, as if there were no mixed ones."""

    def _together(self, mixed: MixedSteps) -> Planned | None:
        return self._in_turns()


class ScoresBesideRows(Planner):
    """Prompts whose tokens are scored ride with the rows like all others."""

    def _cut_shares(self, tokens: int, *, scored: bool | None, beside: int = 0) -> Cut:
        return ([], []) if scored else super()._cut_shares(tokens, scored=None, beside=beside)


class SpendsOneMore(Planner):
    """One token of prompts more than the budget has."""

    def _cut_shares(self, tokens: int, *, scored: bool | None, beside: int = 0) -> Cut:
        return super()._cut_shares(tokens + bool(beside), scored=scored, beside=beside)


class LeavesOneOut(Planner):
    """One token of the bucket is padding, though more of a prompt waits."""

    def _cut_shares(self, tokens: int, *, scored: bool | None, beside: int = 0) -> Cut:
        return super()._cut_shares(max(1, tokens - bool(beside)), scored=scored, beside=beside)


class CountsChunksAsWide(Scheduler):
    """A prompt's last chunk is taken for a decode row, which gains up to W tokens."""

    def _apply(self, flight: Flight, plan: StepPlan, result: StepResult) -> StepOutput:
        output = super()._apply(flight, plan, result)
        for sequence, chunk in zip(flight.rows[plan.decode_rows :], plan.chunks, strict=True):
            if chunk.last and plan.kind is StepKind.MIXED:
                sequence.planned_tokens -= plan.width - 1
        return output


class ForgetsTheFirst(Planner):
    """The shortest first, and nobody else."""

    def _cut_chunk(self, sequence: SequenceState, budget: int, rows: list[SequenceState], chunks: list[Chunk]) -> int:
        shorter = [s for s in self._prefilling.values() if remaining(s) < remaining(sequence)]
        if shorter and self.config.mixed is not None:
            return 0
        return super()._cut_chunk(sequence, budget, rows, chunks)


def mutated(part: type[Scheduler] | type[Planner] | type[Resources]) -> Build:
    """A scheduler with this in place of the part that it breaks."""
    if issubclass(part, Resources):
        return partial(Scheduler, resources=part)
    if issubclass(part, Planner):
        return partial(Scheduler, planner=part)
    return part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "caught_by"),
    [
        (NoFence, WrongTokens),
        (NoFenceForVictims, WrongTokens),
        (NoGhostCheck, WrongTokens),
        (FreesOnPlannedCounts, WrongTokens),
        (PublishesTheUnplanned, WrongTokens),
        (FoundAStepTooEarly, WrongTokens),
        (ForgetsWithoutRequeue, WrongTokens),
        (TrustsWhatItBorrows, WrongTokens),
        (BorrowsInSecret, WrongTokens),
        (ReservesOneStep, WrongTokens),
        (ReservesForThisWidth, WrongTokens),
        (CountsStepsByOneWidth, Hang),
        (NeverFallsShort, Hang),
        (BelievesInEveryStep, AccountingError),
        (LeaksABlock, AccountingError),
        (KeepsItsSlot, AccountingError),
        (TrustsBrokenBlocks, StillFound),
        (NobodyGivesWay, Hang),
        (ResetsNothing, StillFound),
        (PublishesTheOld, StillFound),
        (AnswersPublishTheOld, StillFound),
        (SharesTheLastBlock, WrongTokens),
        (CopiesNothing, WrongTokens),
        (ForksIntoThinAir, TooManyRows),
        (ForgetsWhoWaits, Hang),
        (TrustsItsPrompt, WrongTokens),
        (FencesNoFork, WrongTokens),
        (RestoresNothing, WrongTokens),
        (SavesAStepLate, WrongTokens),
        (SavesWhereverItEnds, WrongTokens),
        (OutlivesItsBlock, WrongTokens),
        (LeaksASnapshot, AccountingError),
        (WaitsForPrompts, BrokenRule),
        (ScoresBesideRows, BrokenRule),
        (SpendsOneMore, BrokenRule),
        (LeavesOneOut, BrokenRule),
        (ForgetsTheFirst, BrokenRule),
        (CountsChunksAsWide, AccountingError),
    ],
    ids=lambda member: member.__name__,
)
def test_a_broken_scheduler_is_caught_for_what_it_breaks(
    mutant: type[Scheduler] | type[Planner] | type[Resources], caught_by: type[Exception]
) -> None:
    """Where wrong tokens are expected the accounting is not even looked at: the answer itself must tell. (That the same
    traces pass without a mutation is the test above.)
    """
    verdicts: Counter[str] = Counter()
    for seed in range(400):
        try:
            check_seed(seed, mutated(mutant), check=caught_by in (AccountingError, BrokenRule))
        except caught_by:
            return
        except Exception as error:  # it may break in other ways first
            verdicts[type(error).__name__] += 1
    pytest.fail(f"400 seeds of {mutant.__name__} gave no {caught_by.__name__}: {dict(verdicts)}")


def test_plans_do_not_depend_on_the_process() -> None:
    """Law 1: no hash seed, address or order of a set enters a plan."""
    program = "from tests.runtime.schedule.fuzz import *; print([run(make_trace(seed)).digest for seed in range(60)])"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
