"""Sessions: one short story for every promise, the fuzzer, and schedulers that break one and are found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from runtime.schedule.config import SchedulerConfig
from runtime.schedule.plan import Continue, Extend, Notice, Refused
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.resources import Resources
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import SequenceState, Session
from runtime.schedule.sessions import Sessions
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.session_fuzz import SessionHang, WrongSession, check_seed, make_story, tell

SEEDS = 1200
LONG_SEEDS = 40_000


def test_random_stories() -> None:
    counted: Counter[str] = Counter()
    for seed in range(SEEDS):
        told = check_seed(seed, check=seed % 4 == 0)
        counted.update(told.counted)
    assert min(counted.values()) > 50, "all of it happens"


@pytest.mark.long
def test_many_random_stories() -> None:
    for seed in range(SEEDS, SEEDS + LONG_SEEDS):
        check_seed(seed, check=False)


def test_two_ranks_that_hear_the_same_decide_the_same() -> None:
    for seed in range(40):
        first, second = (tell(make_story(seed), check=False) for _ in range(2))
        assert (first.digest, first.steps) == (second.digest, second.steps)
    assert len({tell(make_story(seed), check=False).digest for seed in range(40)}) == 40


# ---- mutants ----


class ParksTooEarly(Sessions):
    """Does not wait until the last step with a row of it has landed."""

    def over(self, sequence: SequenceState, session: Session, reason: FinishReason) -> None:
        sequence.last_step = -1
        super().over(sequence, session, reason)


class TakesAnyEpoch(Sessions):
    def _refusal(self, event, sequence):  # type: ignore[no-untyped-def]
        if sequence is not None and sequence.session is not None and isinstance(event, Continue | Extend):
            sequence.session.epoch, kept = event.epoch, sequence.session.epoch
            try:
                return super()._refusal(event, sequence)
            finally:
                sequence.session.epoch = kept
        return super()._refusal(event, sequence)


class ForgetsTheNewestToken(Sessions):
    """Computes what was said, but not the token before it, whose KV was never written."""

    def _extend(self, sequence: SequenceState, session: Session, event: Extend) -> None:
        super()._extend(sequence, session, event)
        sequence.prefilled += bool(sequence.slot)


class RevivesWhoRuns(Sessions):
    """Says that a running row goes on, although a stop id may be in flight."""

    def _continue(self, sequence: SequenceState, session: Session, tokens: int) -> None:
        super()._continue(sequence, session, tokens)
        for update in list(self._resources._slot_updates.values()):
            self._resources._slot_updates[update.slot] = type(update)(update.slot, update.max_length, True)


class NeverRevives(Resources):
    def update_slot(self, sequence: SequenceState, *, revive: bool) -> None:
        super().update_slot(sequence, revive=False)


def with_sessions(kind: type[Sessions]) -> Callable[[SchedulerConfig], Scheduler]:
    def build(config: SchedulerConfig) -> Scheduler:
        scheduler = Scheduler(config)
        scheduler.sessions = kind(scheduler.resources)
        return scheduler

    return build


def check_all(build: Callable[[SchedulerConfig], Scheduler]) -> None:
    for seed in range(SEEDS):
        check_seed(seed, build, check=False)


@pytest.mark.parametrize(
    ("build", "errors"),
    [
        (with_sessions(ParksTooEarly), (AssertionError,)),
        (with_sessions(TakesAnyEpoch), (WrongSession,)),
        (with_sessions(ForgetsTheNewestToken), (WrongSession,)),
        (with_sessions(RevivesWhoRuns), (AssertionError,)),
        (lambda config: Scheduler(config, resources=NeverRevives), (SessionHang, RuntimeError)),
    ],
    ids=["parks too early", "any epoch", "newest token", "revives who runs", "never revives"],
)
def test_mutants_are_found_out(
    build: Callable[[SchedulerConfig], Scheduler], errors: tuple[type[Exception], ...]
) -> None:
    with pytest.raises(errors):
        check_all(build)


# ---- stories ----


def scheduler(**limits: object) -> Scheduler:
    return Scheduler(config_with(**{"max_sessions": 4, **limits}))  # type: ignore[arg-type]


def said(of: Scheduler) -> list[Notice]:
    return list(of.take_notices()[0])


def test_nothing_is_continued_that_is_not_there() -> None:
    engine = scheduler()
    engine.submit(Continue(7, 1, 1))
    (notice,) = said(engine)
    assert notice == Refused(7, "Continue", "there is no such session: it has ended, or never was")
    assert engine.counters.session_refusals == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_sessions": 5}, "max_sessions is 5, but 8 slots for 4 rows leave room for 0 to 4"),
        ({"session_policy": "hope"}, "session_policy is 'hope', but must be one of evict, close, refuse"),
    ],
)
def test_a_config_that_cannot_be(limits: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler(**limits)


def test_there_are_no_more_sessions_than_there_may_be() -> None:
    engine = scheduler(max_sessions=1)
    request = Request(0, (1, 2), SamplingParams(max_tokens=4))
    assert not engine.resources.arrive(request, 1)
    (refused,) = engine.resources.arrive(Request(1, (1, 2), SamplingParams(max_tokens=4)), 1)
    assert (refused.reason, refused.detail) == (
        FinishReason.REJECTED,
        "there are 1 sessions, max_sessions is 1: close one",
    )
    assert not engine.resources.arrive(Request(2, (1, 2), SamplingParams(max_tokens=4))), "requests are not sessions"


def test_with_the_policy_refuse_what_is_promised_fits() -> None:
    """16 blocks of 4 hold two sessions of 8 blocks, whatever they do."""
    engine = scheduler(blocks=16, session_policy="refuse")
    for number in range(2):
        assert not engine.resources.arrive(Request(number, (1, 2), SamplingParams(max_tokens=31)), 1)
    (refused,) = engine.resources.arrive(Request(2, (1, 2), SamplingParams(max_tokens=1)), 1)
    assert "1 blocks, and 16 of 16 are promised to other sessions" in refused.detail
