"""20,000 random traces against the depth-0 engine and against every request alone; and proof that the fuzzer bites."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from runtime.schedule.chain import Trigger
from runtime.schedule.plan import Chunk, StepOutput, StepPlan, StepResult
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import SequenceState
from runtime.schedule.slots import AccountingError
from tests.runtime.schedule.fuzz import Hang, StillFound, WrongTokens, check_range, check_seed, make_trace, run

SEEDS = 20_000
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_traces_equal_the_serial_engine(part: int) -> None:
    size = SEEDS // PARTS
    steps, failure = check_range(part * size, size)
    assert not failure, failure
    assert steps >= 60 * size


def test_a_seed_replays_exactly() -> None:
    first, second = run(make_trace(12)), run(make_trace(12))
    assert first == second


def test_every_part_of_the_space_is_visited() -> None:
    """The traces do reach evictions, stalls, ghosts, prefix hits, fences and every depth and width."""
    seen: dict[str, int] = {}

    class Counting(Scheduler):
        def land(self, step: int, result: StepResult | None) -> StepOutput:
            for name in ("ghost_rows", "evictions", "stalls", "prefix_hit_tokens", "fenced_blocks", "chained_steps"):
                seen[name] = seen.get(name, 0) + int(getattr(self.counters, name) > 0)
            seen[f"depth {self.config.depth}"] = seen[f"width {self.config.width}"] = 1
            return super().land(step, result)

    for seed in range(300):
        run(make_trace(seed), Counting)
    for name in ("ghost_rows", "evictions", "stalls", "prefix_hit_tokens", "fenced_blocks", "chained_steps"):
        assert seen[name] > 100, (name, seen)
    assert {f"depth {d}" for d in range(5)} | {f"width {w}" for w in range(1, 5)} <= set(seen)


# ---- the fuzzer bites: mutants, each caught for what it does ----


class NoFence(Scheduler):
    """Slot and blocks return to the pools at once, whatever is in flight."""

    def _release(self, sequence: SequenceState) -> None:
        self.pool.give_back(sequence.blocks)
        self.slots.give_back(sequence.slot)
        sequence.blocks = []


class NoFenceForVictims(Scheduler):
    """The same for evicted requests only."""

    def _evict(self, sequence: SequenceState) -> None:
        sequence.last_step = -1
        super()._evict(sequence)


class NoGhostCheck(Scheduler):
    """Results are believed whatever became of the row's request."""

    def _is_ghost(self, slot: int, epoch: int) -> bool:
        return False


class FreesOnPlannedCounts(Scheduler):
    """A request whose last token is planned gives its slot and blocks back before that token has landed."""

    def _plan_decode(self) -> StepPlan | None:
        plan = super()._plan_decode()
        for sequence in self._sequences.values():
            if sequence.slot and sequence.blocks and sequence.planned_tokens >= sequence.max_length:
                self.pool.give_back(sequence.blocks)
                sequence.blocks = []
        return plan


class SettlesUnlanded(Scheduler):
    """A prompt's blocks are findable as soon as its first chunk has landed."""

    def _settle_blocks(self, sequence: SequenceState, chunk: Chunk | None) -> None:
        super()._settle_blocks(sequence, None)


class ReservesOneStep(Scheduler):
    """Blocks for one step only, where D + 1 steps may be in flight."""

    def _set_wake(self, sequence: SequenceState) -> None:
        super()._set_wake(sequence)
        sequence.wake_at += (self.config.depth + 1) * self.config.width


class LeaksABlock(Scheduler):
    """Each end forgets one block."""

    def _release(self, sequence: SequenceState) -> None:
        sequence.blocks.pop()
        super()._release(sequence)


class KeepsItsSlot(Scheduler):
    """A slot is given back while its request still counts as its holder."""

    def _move(self, sequence: SequenceState, trigger: Trigger) -> None:
        super()._move(sequence, trigger)
        if trigger is Trigger.ALL_PLANNED:
            self.slots.give_back(sequence.slot)


class TrustsBrokenBlocks(Scheduler):
    """What is found out about the blocks of a request that has lost them already is not heard."""

    def _release(self, sequence: SequenceState) -> None:
        super()._release(sequence)
        sequence.given_up = []


class NobodyGivesWay(Scheduler):
    """Out of blocks, rows wait for each other for ever."""

    def _reserve(self, sequence: SequenceState) -> bool:
        config = self.config
        most = min(sequence.landed_tokens + (config.depth + 1) * config.width, self._most_kv(sequence))
        short = self._blocks_for(most) - len(sequence.blocks) - self.pool.free_count
        return short <= 0 and super()._reserve(sequence)


@pytest.mark.parametrize(
    ("mutant", "caught_by"),
    [
        (NoFence, WrongTokens),
        (NoFenceForVictims, WrongTokens),
        (NoGhostCheck, WrongTokens),
        (FreesOnPlannedCounts, WrongTokens),
        (SettlesUnlanded, WrongTokens),
        (ReservesOneStep, WrongTokens),
        (LeaksABlock, AccountingError),
        (KeepsItsSlot, AccountingError),
        (TrustsBrokenBlocks, StillFound),
        (NobodyGivesWay, Hang),
    ],
    ids=lambda member: member.__name__,
)
def test_a_broken_scheduler_is_caught_for_what_it_breaks(mutant: type[Scheduler], caught_by: type[Exception]) -> None:
    """Where wrong tokens are expected the books are not even looked at: the answer itself must tell. (That the same
    traces pass without a mutation is the test above.)
    """
    verdicts: Counter[str] = Counter()
    for seed in range(400):
        try:
            check_seed(seed, mutant, check=caught_by is AccountingError)
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
