"""Random traces against depth 0, width 1 and every request alone; and proof that the fuzzer bites."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from runtime.schedule import admission, prefill, prefix, reservation
from runtime.schedule.chain import Flight
from runtime.schedule.config import MixedSteps
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import Fork, StepKind, StepOutput, StepPlan, StepResult
from runtime.schedule.plan_draft import PlanDraft
from runtime.schedule.planner import Planned, Planner
from runtime.schedule.prefill import Prefill
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import SequenceState
from runtime.schedule.shares import remaining
from runtime.schedule.slots import AccountingError
from runtime.schedule.snapshots import SnapshotPool
from runtime.schedule.states import State, Trigger
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.fuzz import (
    WIDTHS,
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
from tests.runtime.schedule.mutants import Mutant, plant
from tests.selection import covering

SEEDS = 120  # seeds of rare mutants are named below; make test-all PART=fuzz has 50,000


@pytest.mark.slow
def test_traces_equal_the_serial_engine() -> None:
    steps, failure = check_range(0, SEEDS)
    assert not failure, failure
    assert steps >= 100 * SEEDS


def test_the_first_in_line_keeps_half_of_a_step_that_is_cut_to_a_lower_bucket() -> None:
    check_seed(275791)  # found by `make test-all PART=fuzz`


def test_a_seed_replays_exactly() -> None:
    first, second = run(make_trace(12)), run(make_trace(12))
    assert first == second


@pytest.mark.parametrize(("widths", "depth"), covering(sorted(set(WIDTHS)), range(5), at_once=1), ids=str)
def test_tokens_are_the_same_whatever_the_widths(widths: tuple[int, ...], depth: int) -> None:
    """Every pattern of widths and every depth, steps without a token included, against depth 0 and against width 1."""
    most = max(widths)
    for seed in range(10):
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

    def waves(usual: Mutant, shares: dict[SequenceState, int], *how: Any) -> Any:
        cut = usual(shares, *how)
        seen["waves"] += cut != shares
        return cut

    def fell_short(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> None:
        seen["fell short"] += 1
        usual(ledger, sequence)

    def found_later(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> None:
        before = sequence.prefilled
        usual(ledger, sequence)
        seen["found later"] += sequence.prefilled > before

    def forks(usual: Mutant, ledger: Ledger, prompt: SequenceState, answer: SequenceState, chunk: int) -> Fork:
        fork: Fork = usual(ledger, prompt, answer, chunk)
        seen["copied" if fork.copied is not None else "nothing to copy"] += 1
        return fork

    def left_out(usual: Mutant, ledger: Ledger, prompt: SequenceState) -> None:
        seen["left out", prompt.state] += len(ledger.joining(prompt))
        usual(ledger, prompt)

    def reserves(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> Any:
        seen["early"] += sequence.planned_tokens == sequence.wake_at < reservation.wake_at_latest(ledger, sequence)
        return usual(ledger, sequence)

    plant(monkeypatch, prefill, "whole_waves", waves)
    plant(monkeypatch, Ledger, "fall_short", fell_short)
    plant(monkeypatch, prefix, "look_again", found_later)
    plant(monkeypatch, admission, "fork", forks)
    plant(monkeypatch, Ledger, "leave_out", left_out)
    plant(monkeypatch, reservation, "reserve", reserves)

    class Counting(Scheduler):
        def plan(self) -> StepPlan | None:
            plan, rule = super().plan(), self.config.speculation
            strides = self.config.mixed is not None and self.config.mixed.stride > 1
            seen["later chunks"] += strides and bool(
                plan and plan.slots and not plan.chunks and self.planner.prefill.prefilling
            )
            if plan is not None and rule is not None and plan.kind is StepKind.MIXED:
                seen["narrower with chunks"] += 1 < plan.width < rule.width
            return plan

        def land(self, step: int, result: StepResult | None) -> StepOutput:
            names = (*NAMES, *OF_SNAPSHOTS, "distrusted")
            seen.update(name for name in names if getattr(self.counters, name) > 0)
            seen["fenced blocks"] += self.pool.soon_free > 0
            seen[f"depth {self.config.limits.depth}"] = seen[self.config.widths] = 1
            return super().land(step, result)

    for seed in range(350):
        run(make_trace(seed), Counting)
    for name in (*NAMES, "fenced blocks"):
        assert seen[name] > 50, (name, seen)
    assert {f"depth {d}" for d in range(5)} | set(WIDTHS) <= set(seen)
    for name in OF_SNAPSHOTS:
        assert seen[name] > 20, (name, seen)
    assert seen["fell short"] > 5
    assert seen["distrusted"] > 5
    assert seen["found later"] > 2
    assert seen["early"] > 2
    assert seen["waves"] > 2
    assert seen["later chunks"] > 50
    assert seen["narrower with chunks"] > 10
    assert min(seen["copied"], seen["nothing to copy"], seen["left out", State.DECODE]) > 50
    assert min(seen["left out", State.ENDED], seen["left out", State.EVICTING]) > 0


# ---- the fuzzer bites: mutants, each caught for what it does ----

MUTANTS: list[Any] = []
RARE = (252, 156, 127, 93, 76, 61, 47)  # seeds that show those mutants which few seeds do


def mutant_of(
    owner: type | ModuleType, name: str, caught_by: type[Exception], **also: Mutant
) -> Callable[[Mutant], Mutant]:
    """The function below replaces this one, and is caught so. ``also``: other functions of the owner, replaced, too."""

    def note(mutant: Mutant) -> Mutant:
        MUTANTS.append(pytest.param(owner, {name: mutant, **also}, caught_by, id=mutant.__name__))
        return mutant

    return note


@mutant_of(Ledger, "release", WrongTokens)
def no_fence(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> None:
    """Slot and blocks return to the pools at once, whatever is in flight."""
    ledger.pool.give_back(sequence.blocks)
    ledger.slots.give_back(sequence.slot)
    sequence.blocks = []


@mutant_of(reservation, "evict", WrongTokens)
def no_fence_for_victims(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> None:
    """The same for evicted requests only."""
    sequence.last_step = -1
    usual(ledger, sequence)


@mutant_of(Scheduler, "_is_ghost", WrongTokens, _drop_ghosts=lambda *_: [])
def no_ghost_check(usual: Mutant, scheduler: Scheduler, slot: int, epoch: int) -> bool:
    """Results are believed whatever became of the row's request."""
    return False


@mutant_of(Planner, "_ready_rows", WrongTokens)
def frees_on_planned_counts(usual: Mutant, planner: Planner) -> Any:
    """A request whose last token is planned gives its slot and blocks back before that token has landed."""
    ready = usual(planner)
    for sequence in planner.ledger.sequences.values():
        if sequence.slot and sequence.blocks and sequence.planned_tokens >= sequence.max_length:
            planner.ledger.pool.give_back(sequence.blocks)
            sequence.blocks = []
    return ready


@mutant_of(prefix, "planned", WrongTokens)
def publishes_the_unplanned(usual: Mutant, ledger: Ledger, plan: StepPlan, rows: Sequence[SequenceState]) -> None:
    """All of a prompt's blocks are findable as soon as its first chunk is planned."""
    for sequence in rows[len(rows) - len(plan.chunks) :]:
        ledger.publish(sequence, sequence.prefill_target)
    usual(ledger, plan, rows)


@mutant_of(Prefill, "_cut_chunk", WrongTokens)
def found_a_step_too_early(usual: Mutant, prompts: Prefill, sequence: SequenceState, *given: Any) -> Any:
    """Other rows of a step find the blocks that are written in this very step."""
    tokens = usual(prompts, sequence, *given)
    prompts.ledger.publish(sequence, sequence.prefilled)
    return tokens


@mutant_of(prefix, "_compute_again", WrongTokens)
def forgets_without_requeue(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> None:
    """The blocks of a request that broke are not found any more, and requests that share them continue."""


@mutant_of(prefix, "share", WrongTokens)
def trusts_what_it_borrows(usual: Mutant, ledger: Ledger, sequence: SequenceState, found: list[int]) -> None:
    """A block that another request writes is believed to be whole before a token was sampled over it."""
    ledger.pool.trust(found)
    usual(ledger, sequence, found)


@mutant_of(prefix, "look_again", WrongTokens)
def borrows_in_secret(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> None:
    """A prompt shares blocks that it found on its way, and the device does not learn of it."""
    before = dict(ledger.block_writes)
    usual(ledger, sequence)
    ledger.block_writes = before


@mutant_of(reservation, "set_wake", WrongTokens)
def reserves_one_step(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> None:
    """Blocks for one step only, where D + 1 steps may be in flight."""
    usual(ledger, sequence)
    sequence.wake_at += ledger.limits.tokens_ahead


@mutant_of(Planner, "_ready_rows", WrongTokens)
def reserves_for_this_width(usual: Mutant, planner: Planner) -> Any:
    """Blocks for the width of the step being planned, where the steps after it may be wider."""
    planner.ledger.limits = replace(planner.limits, width=planner._width())
    return usual(planner)


@mutant_of(Planner, "_wake", Hang)
def counts_steps_by_one_width(usual: Mutant, planner: Planner, sequence: SequenceState) -> None:
    """Steps in flight are computed from tokens in flight, as if all of them were as wide as the narrowest."""
    in_flight = (sequence.planned_tokens - sequence.landed_tokens) // min(planner.config.widths)
    before, sequence.uncertain_tokens = sequence.uncertain_tokens, 0
    planned, sequence.planned_tokens = sequence.planned_tokens, sequence.landed_tokens + in_flight
    usual(planner, sequence)
    sequence.uncertain_tokens, sequence.planned_tokens = before, planned


@mutant_of(Ledger, "fall_short", Hang)
def never_falls_short(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> None:
    """A step that gives a live row no token changes nothing for a row that drains."""


@mutant_of(Scheduler, "_gained_nothing", AccountingError)
def believes_in_every_step(usual: Mutant, scheduler: Scheduler, sequence: SequenceState, width: int) -> None:
    """A row that got no token still counts on it."""


@mutant_of(Ledger, "release", AccountingError)
def leaks_a_block(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> None:
    """Each end forgets one block."""
    sequence.blocks.pop()
    usual(ledger, sequence)


@mutant_of(Ledger, "move", AccountingError)
def keeps_its_slot(usual: Mutant, ledger: Ledger, sequence: SequenceState, trigger: Trigger) -> None:
    """A slot is given back while its request still counts as its holder."""
    usual(ledger, sequence, trigger)
    if trigger is Trigger.ALL_PLANNED:
        ledger.slots.give_back(sequence.slot)


@mutant_of(Ledger, "release", StillFound)
def trusts_broken_blocks(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> None:
    """A request that has lost its blocks already does not report that they are broken."""
    usual(ledger, sequence)
    sequence.given_up = []


@mutant_of(reservation, "reserve", Hang)
def none_gives_way(usual: Mutant, ledger: Ledger, sequence: SequenceState) -> Any:
    """Out of blocks, rows wait for each other for ever."""
    short = reservation.blocks_to_hold(ledger, sequence) - len(sequence.blocks) - ledger.pool.free_count
    return short <= 0 and usual(ledger, sequence)


# ---- of resets of the prefix cache ----


@mutant_of(prefix, "reset", StillFound)
def resets_nothing(usual: Mutant, ledger: Ledger) -> None:
    """What was published before a reset is found after it."""
    for sequence in ledger.sequences.values():
        sequence.private = bool(sequence.blocks)


@mutant_of(prefix, "reset", StillFound)
def publishes_the_old(usual: Mutant, ledger: Ledger) -> None:
    """Live requests publish after a reset what they computed before it."""
    usual(ledger)
    for sequence in ledger.sequences.values():
        sequence.private = False


@mutant_of(prefix, "planned", StillFound)
def answers_publish_the_old(usual: Mutant, ledger: Ledger, plan: StepPlan, rows: Sequence[SequenceState]) -> None:
    """The same, of answers that join a prompt which was begun before it."""
    usual(ledger, plan, rows)
    for answer in rows[len(rows) - len(plan.forks) :]:
        answer.private = False
        answer.published_blocks, answer.prefix_id = 0, 0


# ---- of forks ----


@mutant_of(admission, "fork", WrongTokens)
def shares_the_last_block(
    usual: Mutant, ledger: Ledger, prompt: SequenceState, answer: SequenceState, chunk: int
) -> Fork:
    """An answer shares the block that its prompt ends in, where it will write."""
    fork: Fork = usual(ledger, prompt, answer, chunk)
    if fork.copied is not None:
        shared, own = fork.copied
        answer.blocks[answer.blocks.index(own)] = shared
        ledger.pool.share([shared])
        ledger.pool.give_back([own])
        ledger.write_blocks(answer, 0)
    return replace(fork, copied=None)


@mutant_of(admission, "fork", WrongTokens)
def copies_nothing(usual: Mutant, *given: Any) -> Fork:
    """An answer gets an empty block for the one that its prompt ends in."""
    fork: Fork = usual(*given)
    return replace(fork, copied=None)


@mutant_of(Prefill, "row_free", TooManyRows)
def forks_into_thin_air(usual: Mutant, prompts: Prefill) -> bool:
    """A step has all answers, whether there are rows for them or not."""
    return True


@mutant_of(Ledger, "leave_out", Hang)
def forgets_who_waits(usual: Mutant, ledger: Ledger, prompt: SequenceState) -> None:
    """Answers for which there was no room wait for a prompt that is long over."""


@mutant_of(admission, "fork", WrongTokens)
def trusts_its_prompt(usual: Mutant, ledger: Ledger, prompt: SequenceState, answer: SequenceState, chunk: int) -> Any:
    """An answer believes the blocks of its prompt to be sound before a token was sampled over them."""
    fork = usual(ledger, prompt, answer, chunk)
    answer.borrowed = False
    return fork


@mutant_of(admission, "fork", WrongTokens)
def fences_no_fork(usual: Mutant, ledger: Ledger, prompt: SequenceState, answer: SequenceState, chunk: int) -> Any:
    """What a fork was given is free again before its step has landed."""
    fork = usual(ledger, prompt, answer, chunk)
    answer.last_step = -1
    return fork


# ---- of snapshots of recurrent state ----


@mutant_of(PlanDraft, "finish", WrongTokens)
def restores_nothing(usual: Mutant, draft: PlanDraft, *parts: Any, **more: Any) -> Any:
    """A prompt continues a prefix whose state its slot does not have."""
    draft.restored.clear()
    return usual(draft, *parts, **more)


@mutant_of(PlanDraft, "finish", WrongTokens)
def saves_a_step_late(usual: Mutant, draft: PlanDraft, *parts: Any, **more: Any) -> StepPlan:
    """State is kept after the step that follows the one that came to the end of the block."""
    plan: StepPlan = usual(draft, *parts, **more)
    slots = [chunk.slot for chunk in plan.chunks]
    due = tuple(pair for pair in vars(draft).get("late", ()) if pair[0] in slots)
    vars(draft)["late"] = plan.saved
    return plan._replace(saved=due)


def keeps_what_is_planned(usual: Mutant, ledger: Ledger, plan: StepPlan, rows: Sequence[SequenceState]) -> None:
    usual(ledger, plan, rows)
    for chunk, sequence in zip(plan.chunks, rows[plan.decode_rows :], strict=False):
        sequence.prefilled = max(sequence.prefilled, chunk.start + len(chunk.token_ids))


@mutant_of(prefix, "save", WrongTokens, planned=keeps_what_is_planned)
def saves_wherever_it_ends(usual: Mutant, ledger: Ledger, sequence: SequenceState, end: int) -> int:
    """The state of any chunk is believed to be that of the last block before its end."""
    if ledger.snapshots is None or sequence.scoring or end < ledger.limits.block_size:
        return 0
    row = ledger.snapshots.take()
    if row:
        ledger.saving[sequence.request.request_id] = row
        sequence.prefilled -= end % ledger.limits.block_size  # as ``publish`` is to see it
    return row


@mutant_of(SnapshotPool, "drop", WrongTokens)
def outlives_its_block(usual: Mutant, snapshots: SnapshotPool, block: int) -> None:
    """A snapshot stays with a block that holds other tokens by now."""


@mutant_of(prefix, "save", AccountingError)
def leaks_a_snapshot(usual: Mutant, ledger: Ledger, sequence: SequenceState, end: int) -> Any:
    """A row that was taken is neither kept nor given back."""
    row = usual(ledger, sequence, end)
    ledger.saving.pop(sequence.request.request_id, None)
    return row


# ---- of mixed steps ----


@mutant_of(Planner, "_together", BrokenRule)
def waits_for_prompts(usual: Mutant, planner: Planner, mixed: MixedSteps) -> Planned | None:
    """Chunks in separate steps, as if there were no mixed ones."""
    return planner._in_turns()


@mutant_of(Prefill, "cut_shares", BrokenRule)
def scores_with_rows(usual: Mutant, prompts: Prefill, tokens: int, *, scored: bool | None, row_tokens: int = 0) -> Any:
    """Prompts whose tokens are scored are in steps with rows like all others."""
    return ([], []) if scored else usual(prompts, tokens, scored=None, row_tokens=row_tokens)


@mutant_of(Prefill, "cut_shares", BrokenRule)
def spends_one_more(usual: Mutant, prompts: Prefill, tokens: int, *, scored: bool | None, row_tokens: int = 0) -> Any:
    """One token of prompts more than the budget has."""
    return usual(prompts, tokens + bool(row_tokens), scored=scored, row_tokens=row_tokens)


@mutant_of(Prefill, "cut_shares", BrokenRule)
def leaves_one_out(usual: Mutant, prompts: Prefill, tokens: int, *, scored: bool | None, row_tokens: int = 0) -> Any:
    """One token of the bucket is padding, though more of a prompt waits."""
    return usual(prompts, max(1, tokens - bool(row_tokens)), scored=scored, row_tokens=row_tokens)


@mutant_of(Prefill, "_cut_chunk", BrokenRule)
def forgets_the_first(usual: Mutant, prompts: Prefill, sequence: SequenceState, *given: Any) -> Any:
    """The shortest first, and no other."""
    shorter = [s for s in prompts.prefilling.values() if remaining(s) < remaining(sequence)]
    return 0 if shorter and prompts.ledger.config.mixed is not None else usual(prompts, sequence, *given)


@mutant_of(Scheduler, "_apply", AccountingError)
def counts_chunks_as_wide(
    usual: Mutant, scheduler: Scheduler, flight: Flight, plan: StepPlan, result: StepResult
) -> Any:
    """A prompt's last chunk is counted as a decode row, which appends up to W tokens."""
    output = usual(scheduler, flight, plan, result)
    for sequence, chunk in zip(flight.rows[plan.decode_rows :], plan.chunks, strict=True):
        if chunk.last and plan.kind is StepKind.MIXED:
            sequence.planned_tokens -= plan.width - 1
    return output


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "mutants", "caught_by"), MUTANTS)
def test_a_broken_scheduler_is_caught_for_what_it_breaks(
    owner: type | ModuleType,
    mutants: dict[str, Mutant],
    caught_by: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where wrong tokens are expected the accounting is not even looked at: the answer itself must tell. (That the same
    traces pass without a mutation is the test above.)
    """
    for name, mutant in mutants.items():
        plant(monkeypatch, owner, name, mutant)
    verdicts: Counter[str] = Counter()
    for seed in (*RARE, *range(400)):
        try:
            check_seed(seed, check=caught_by in (AccountingError, BrokenRule))
        except caught_by:
            return
        except Exception as error:  # it may break in other ways first
            verdicts[type(error).__name__] += 1
    pytest.fail(f"400 seeds of {sorted(mutants)} gave no {caught_by.__name__}: {dict(verdicts)}")


def test_plans_do_not_depend_on_the_process() -> None:
    """Law 1: no hash seed, address or order of a set enters a plan."""
    program = "from tests.runtime.schedule.fuzz import *; print([run(make_trace(seed)).digest for seed in range(20)])"
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
