"""Sessions: one short story for every promise, the fuzzer, and schedulers that break one and are found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from runtime.schedule import admission
from runtime.schedule.config import MixedSteps, SchedulerConfig
from runtime.schedule.plan import Continue, Extend, Notice, Refused
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import SequenceState, Session
from runtime.schedule.sessions import Sessions
from runtime.schedule.speculation import Speculation
from runtime.schedule.states import State
from tests.runtime.schedule import fake_device
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.driver import Driver, ending_by_stop
from tests.runtime.schedule.session_fuzz import SessionHang, WrongSession, check_seed, make_story, tell

SEEDS = 300  # the rarest mutant below shows in one of nine


@pytest.mark.slow
def test_random_stories() -> None:
    counted: Counter[str] = Counter()
    for seed in range(SEEDS):
        told = check_seed(seed, check=seed % 4 == 0)
        counted.update(told.counted)
    assert min(counted.values()) > 25, "all of it happens"


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
        for update in list(self._ledger.slot_updates.values()):
            self._ledger.slot_updates[update.slot] = type(update)(update.slot, update.max_length, True)


class NeverRevives(Scheduler):
    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.ledger.update_slot = partial(never_revives, self.ledger.update_slot)  # type: ignore[method-assign]


def never_revives(usual: Callable[..., None], sequence: SequenceState, *, revive: bool) -> None:
    usual(sequence, revive=False)


def with_sessions(kind: type[Sessions]) -> Callable[[SchedulerConfig], Scheduler]:
    def build(config: SchedulerConfig) -> Scheduler:
        scheduler = Scheduler(config)
        scheduler.sessions = kind(scheduler.ledger)
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
        (NeverRevives, (SessionHang, RuntimeError)),
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
    assert not admission.arrive(engine.ledger, request, 1)
    (refused,) = admission.arrive(engine.ledger, Request(1, (1, 2), SamplingParams(max_tokens=4)), 1)
    assert (refused.reason, refused.detail) == (
        FinishReason.REJECTED,
        "there are 1 sessions, max_sessions is 1: close one",
    )
    assert not admission.arrive(engine.ledger, Request(2, (1, 2), SamplingParams(max_tokens=4))), (
        "requests are not sessions"
    )


def test_with_the_policy_refuse_what_is_promised_fits() -> None:
    """16 blocks of 4 hold two sessions of 8 blocks, whatever they do."""
    engine = scheduler(blocks=16, session_policy="refuse")
    for number in range(2):
        assert not admission.arrive(engine.ledger, Request(number, (1, 2), SamplingParams(max_tokens=31)), 1)
    (refused,) = admission.arrive(engine.ledger, Request(2, (1, 2), SamplingParams(max_tokens=1)), 1)
    assert "1 blocks, and 16 of 16 are promised to other sessions" in refused.detail


@pytest.mark.parametrize("told", [State.DECODE, State.STALLED], ids=lambda state: str(state.value))
def test_what_a_stop_id_overtook_does_not_meet_the_next_turn(told: State) -> None:
    """Somebody continues a session early. No plan is made that could carry its new end: it has no block to go on with,
    and its last row in flight draws a stop id. Then it is extended, and its slot is written whole."""
    prompt, stop = ending_by_stop(1, 3, after=6)
    engine = Driver(
        rows=2,
        slots=6,
        blocks=11,
        block_size=2,
        depth=2,
        max_sessions=2,
        mixed=MixedSteps(),
        prefix_caching=False,
    )
    engine.admit(2, 8, max_tokens=6)
    engine.admit(1, prompt, max_tokens=20, stop=stop, quantum=10)
    engine.turns({State.DECODE: 6, State.STALLED: 7}[told])
    assert engine.state(1) is told
    engine.submit(Continue(1, 1, 2))
    engine.turns_until(State.PARKED, 1)
    assert engine.scheduler.ledger.slot_updates, "its new end still waits for a plan"
    engine.submit(Extend(1, 1, (3, 4), 5, 5))
    engine.turns_until(State.DECODE, 1)
    (plan,) = [plan for plan in engine.plans if plan is not None and plan.chunks][-1:]
    assert [write.slot for write in plan.slot_writes] == [engine.sequence(1).slot]
    assert not plan.slot_updates


def test_windows_behind_the_end_of_a_quantum_are_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that may end a quantum has others in flight behind it, which gain nothing: neither the counters nor the
    policy, which would turn speculation off for it, take them for guesses that were wrong."""
    monkeypatch.setattr(fake_device, "accepted", lambda request_id, tokens, width, *, barren: width)
    policy, found = Speculation(4, None, ((1, 1300),)), []
    for quantum in (0, 4):
        engine = Driver(rows=2, slots=6, blocks=60, depth=2, widths=(4,), max_sessions=4, speculation=policy)
        engine.admit(1, 3, max_tokens=40, quantum=quantum)
        while engine.state(1) not in (State.PARKED, State.ENDED):
            engine.turn()
            if engine.state(1) is State.PARKED and engine.sequence(1).landed_tokens < 43:
                engine.submit(Continue(1, 1, 4))
        counters, kept = engine.scheduler.counters, engine.scheduler.planner.speculation
        assert kept is not None
        found.append((counters.spec_num_drafts, counters.spec_num_accepted_tokens, dict(kept.off)))
    assert found == [(10, 29, {})] * 2


def test_with_the_policy_refuse_what_is_promised_is_admitted() -> None:
    """Nothing is spared for others to grow where nobody runs: two sessions of 5 of 10 blocks, one of them parked."""
    engine = Driver(rows=2, slots=6, blocks=10, block_size=4, depth=1, max_sessions=4, session_policy="refuse")
    for session in (1, 2):
        engine.admit(session, 18, max_tokens=2, quantum=1)
        engine.turns_until(State.PARKED, session)
    assert engine.scheduler.pool.free_count == 0
    assert engine.scheduler.counters.evictions == 0


def test_tokens_that_a_session_is_told_are_looked_up_too() -> None:
    """Somebody else has computed them: hits never exceed queries."""
    engine = Driver(rows=2, slots=6, blocks=60, block_size=4, max_model_len=128, depth=1, max_sessions=4)
    engine.admit(1, 5, max_tokens=1, quantum=1)
    engine.turns_until(State.PARKED, 1)
    talk, document = tuple(engine.sequence(1).tokens), tuple((7 * i + 3) % 29 for i in range(64))
    engine.admit(9, (*talk, *document), max_tokens=1)
    engine.turns_until(State.ENDED, 9)
    counters = engine.scheduler.counters
    queries, hits = counters.prefix_query_tokens, counters.prefix_hit_tokens
    engine.submit(Extend(1, 1, document, 1, 1))
    engine.turn()
    engine.turns_until(State.PARKED, 1)
    assert counters.prefix_query_tokens - queries == 65, "what it is told, and its newest token"
    assert 65 > counters.prefix_hit_tokens - hits >= 60
