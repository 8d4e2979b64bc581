"""The verbs, one story each: how requests begin, run and end, and what that does to the chain."""

from __future__ import annotations

import pytest

from runtime.schedule.plan import Admit, StepKind
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.states import State
from tests.runtime.schedule.configs import ROOMY
from tests.runtime.schedule.driver import Driver, ending_by_stop, prompt_of

UNBROKEN = {"start": 1}


# ---- ends ----


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_end_by_length_is_foreseen_so_nothing_runs_as_a_ghost(depth: int) -> None:
    engine = Driver(depth=depth)
    engine.admit(0, max_tokens=5)
    engine.finish()
    counters = engine.scheduler.counters
    assert engine.reason(0) is FinishReason.LENGTH
    assert len(engine.finished[0].token_ids) == 5
    assert (counters.prefill_steps, counters.decode_steps, counters.ghost_rows) == (1, 4, 0)
    assert counters.chain_breaks == UNBROKEN


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_stop_id_is_a_surprise_and_leaves_one_ghost_row_a_step_in_flight(depth: int) -> None:
    engine = Driver(depth=depth)
    prompt, stop = ending_by_stop(0, length=5, after=3)
    engine.admit(0, prompt, max_tokens=20, stop=stop)
    engine.finish()
    counters = engine.scheduler.counters
    assert engine.reason(0) is FinishReason.STOP
    assert engine.finished[0].token_ids[-1] == stop
    assert counters.ghost_rows == depth
    assert counters.wasted_tokens == 0  # the device masked them
    assert counters.decode_steps == 2 + depth


def test_the_first_token_may_be_the_last() -> None:
    engine = Driver()
    prompt, stop = ending_by_stop(1, length=4, after=1)
    engine.admit(0, max_tokens=1)
    engine.admit(1, prompt, max_tokens=9, stop=stop)
    engine.finish()
    assert (engine.reason(0), engine.reason(1)) == (FinishReason.LENGTH, FinishReason.STOP)
    assert len(engine.finished[0].token_ids) == len(engine.finished[1].token_ids) == 1


def test_the_context_ends_a_request_by_length() -> None:
    engine = Driver(max_model_len=8)
    engine.admit(0, prompt=6, max_tokens=50)
    engine.finish()
    assert engine.reason(0) is FinishReason.LENGTH
    assert len(engine.finished[0].token_ids) == 2


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_all_rows_end_at_once_and_their_successors_keep_the_chain(depth: int) -> None:
    """Twice as many slots as rows: the queue is seated while the last tokens of those before are in flight."""
    engine = Driver(rows=4, slots=8, depth=depth)
    for request_id in range(12):
        engine.admit(request_id, max_tokens=5)
    engine.finish()
    counters = engine.scheduler.counters
    assert [engine.reason(r) for r in range(12)] == [FinishReason.LENGTH] * 12
    last_steps = [engine.steps_of(r)[-1] for r in range(12)]
    assert last_steps == sorted(last_steps)
    assert len(set(last_steps)) == 3, "four at a time"
    assert counters.chain_breaks == UNBROKEN
    assert counters.void_steps == depth, "only while the very last tokens land"
    assert counters.ghost_rows == 0


def test_without_spare_slots_the_same_queue_breaks_the_chain() -> None:
    """The opposite of the test before: successors wait for the slots, with the reason counted."""
    engine = Driver(rows=4, slots=4)
    for request_id in range(12):
        engine.admit(request_id, max_tokens=5)
    engine.finish()
    assert engine.scheduler.counters.chain_breaks == {"start": 1, "context_full": 2}


def test_all_rows_stop_at_once_and_the_chain_goes_on_over_their_ghosts() -> None:
    engine = Driver(depth=2)
    for request_id in range(4):
        prompt, stop = ending_by_stop(request_id, length=5, after=3)
        engine.admit(request_id, prompt, max_tokens=20, stop=stop)
    for request_id in range(4, 8):
        engine.admit(request_id, max_tokens=5)
    engine.finish()
    counters = engine.scheduler.counters
    assert [engine.reason(r) for r in range(4)] == [FinishReason.STOP] * 4
    assert counters.ghost_rows == 4 * 2
    assert counters.chain_breaks == UNBROKEN


def test_depth_zero_is_the_serial_engine() -> None:
    engine = Driver(depth=0)
    for request_id in range(6):
        engine.admit(request_id, max_tokens=4)
    engine.finish()
    counters = engine.scheduler.counters
    assert counters.chained_steps == 0
    assert counters.chain_breaks == {"serial": counters.prefill_steps + counters.decode_steps}


@pytest.mark.parametrize("width", [2, 3, 4])
def test_rows_of_several_tokens(width: int) -> None:
    """Accepted counts vary from row to row; ends, tokens and reservations are those of one token at a time."""
    engine = Driver(widths=(width,), block_size=2)
    for request_id in range(4):
        prompt, stop = ending_by_stop(request_id, length=5, after=6)
        engine.admit(request_id, prompt, max_tokens=(6, 7, 20, 20)[request_id], stop=stop)
    engine.finish()
    assert [len(engine.finished[r].token_ids) for r in range(4)] == [6, 6, 6, 6]
    assert engine.scheduler.counters.chain_breaks == UNBROKEN
    assert max(count for output in engine.outputs for count in output.counts) == width


# ---- the steady state ----


def test_a_steady_decode_step_repeats_the_very_same_rows_and_writes_nothing() -> None:
    engine = Driver(block_size=16)
    engine.admit(0, max_tokens=12)
    engine.admit(1, max_tokens=12)
    _prefill, first, second, third = engine.real_turns(4)
    assert first.slots is second.slots is third.slots
    assert first.epochs is third.epochs
    assert (second.slot_writes, second.block_writes, second.chunks) == ((), (), ())


def test_a_block_boundary_of_every_row_at_once_does_not_stop_the_chain() -> None:
    engine = Driver(block_size=4)
    for request_id in range(4):
        engine.admit(request_id, prompt=4, max_tokens=20)
    engine.finish()
    counters = engine.scheduler.counters
    assert (counters.stalls, counters.chain_breaks) == (0, UNBROKEN)


@pytest.mark.parametrize(("depth", "width"), [(0, 1), (2, 1), (4, 1), (3, 2), (2, 4)])
def test_blocks_are_reserved_for_every_step_in_flight(depth: int, width: int) -> None:
    """Law 4: a request gets blocks for landed + (D + 1) * W tokens; the driver checks at every step that they do."""
    engine = Driver(depth=depth, widths=(width,), block_size=2)
    engine.admit(0, prompt=5, max_tokens=40)
    engine.turn()
    assert len(engine.sequence(0).blocks) == -(-(5 + (depth + 1) * width) // 2)
    engine.finish()


def test_the_two_counts_meet_when_everything_has_landed() -> None:
    engine = Driver(depth=2)
    engine.admit(0, prompt=5, max_tokens=20)
    engine.turns(3)
    assert (engine.sequence(0).planned_tokens, engine.sequence(0).landed_tokens) == (5 + 3, 5 + 1)
    engine.pause(0)
    engine.turns(2)
    assert engine.sequence(0).planned_tokens == engine.sequence(0).landed_tokens == 5 + 3


# ---- arrivals ----


def test_an_admission_does_not_wait_for_what_is_in_flight() -> None:
    engine = Driver(depth=4)
    engine.admit(0, max_tokens=20)
    engine.turns(4)
    engine.admit(1, max_tokens=5)
    (plan,) = engine.real_turns(1)
    assert plan.kind is StepKind.PREFILL
    assert [output.step for output in engine.outputs] == [0], "the prefill was in flight with steps 1, 2 and 3"
    (following,) = engine.real_turns(1)
    assert len(following.slots) == 2
    engine.finish()
    assert engine.scheduler.counters.chain_breaks == UNBROKEN


def test_a_second_burst_of_work_starts_a_second_chain() -> None:
    engine = Driver()
    engine.admit(0)
    engine.finish()
    engine.turns(3)
    engine.admit(1)
    engine.finish()
    assert engine.scheduler.counters.chain_breaks == {"start": 2}


def test_priority_first_then_first_come_first_served() -> None:
    engine = Driver(rows=1, slots=2)
    for request_id, priority in ((0, 1), (1, 1), (2, 0), (3, 2), (4, 0)):
        engine.admit(request_id, priority=priority)
    engine.finish()
    assert sorted(engine.finished, key=lambda r: engine.steps_of(r)[0]) == [2, 4, 0, 1, 3]


def test_nobody_overtakes_a_head_that_does_not_fit() -> None:
    engine = Driver(blocks=8, block_size=4, prefix_caching=False)
    engine.admit(0, prompt=8, max_tokens=10)
    engine.turns(2)
    engine.admit(1, prompt=24, max_tokens=4)
    engine.admit(2, prompt=1, max_tokens=1)
    engine.turns(3)
    assert (engine.state(1), engine.state(2)) == (State.WAITING, State.WAITING)
    engine.finish()
    assert engine.steps_of(0)[-1] < engine.steps_of(1)[0] <= engine.steps_of(2)[0]


# ---- refusals ----


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        (0, 4, "at least one prompt token"),
        (3, 0, "max_tokens >= 1"),
        (64, 4, "prompt has 64 tokens, max_model_len is 64"),
        (30, 20, "30 prompt \\+ 20 new tokens need 13 blocks of 4, the pool has 12"),
    ],
)
def test_what_can_never_run_is_refused_at_once_with_both_numbers(prompt: int, max_tokens: int, says: str) -> None:
    scheduler = Scheduler(Driver(blocks=12).config)
    request = Request(0, prompt_of(prompt), SamplingParams(max_tokens=max_tokens))
    (refused,) = scheduler.submit(Admit(request))
    assert refused.reason is FinishReason.REJECTED
    assert refused.token_ids == ()
    with pytest.raises(ValueError, match=says):
        raise ValueError(refused.detail)
    assert scheduler.unfinished == 0


def test_the_waiting_queue_is_bounded() -> None:
    engine = Driver(rows=1, slots=1, max_waiting=2)
    engine.admit(0)
    engine.turn()
    for request_id in (1, 2, 3):
        engine.admit(request_id)
    assert engine.finished[3].detail == "2 requests are waiting, max_waiting is 2"
    engine.finish()
    assert [engine.reason(r) for r in (0, 1, 2)] == [FinishReason.LENGTH] * 3


def test_exactly_the_whole_pool_is_enough() -> None:
    engine = Driver(blocks=12)
    engine.admit(0, prompt=30, max_tokens=19)  # 30 + 19 - 1 KV entries: the last token needs none
    engine.finish()
    assert engine.reason(0) is FinishReason.LENGTH


# ---- chunked prefill ----


def test_a_long_prompt_is_cut_to_the_budget_and_only_its_last_chunk_gives_a_token() -> None:
    engine = Driver(max_prefill_tokens=8)
    engine.admit(0, prompt=20, max_tokens=3)
    engine.finish()
    chunks = [p.chunks[0] for p in engine.plans if p is not None and p.kind is StepKind.PREFILL]
    assert [(c.start, len(c.token_ids), c.last) for c in chunks] == [(0, 8, False), (8, 8, False), (16, 4, True)]
    assert engine.steps_of(0)[0] == 2


def test_the_budget_of_a_step_is_shared_in_order() -> None:
    engine = Driver(max_prefill_tokens=10)
    for request_id in range(3):
        engine.admit(request_id, prompt=6)
    first, second = engine.real_turns(2)
    assert [(c.start, len(c.token_ids), c.last) for c in first.chunks] == [(0, 6, True), (0, 4, False)]
    assert [(c.start, len(c.token_ids), c.last) for c in second.chunks] == [(4, 2, True), (0, 6, True)]
    engine.finish()


def test_prefill_and_decode_take_turns() -> None:
    engine = Driver(max_prefill_tokens=4, prefill_burst=2)
    engine.admit(0, prompt=2, max_tokens=20)
    engine.turns(3)
    engine.admit(1, prompt=20, max_tokens=2)
    kinds = "".join("-" if plan is None else plan.kind.name[0] for plan in engine.turns(8))
    assert kinds == "PPDPPDPD"
    engine.finish()


def test_a_decode_turn_with_no_row_left_goes_to_the_prefill() -> None:
    """The row drains on what would have been its turn; the step is not left void."""
    engine = Driver(max_prefill_tokens=4, prefill_burst=1)
    engine.admit(0, prompt=2, max_tokens=3)
    engine.turns(2)
    engine.admit(1, prompt=20, max_tokens=2)
    kinds = "".join("-" if plan is None else plan.kind.name[0] for plan in engine.turns(7))
    assert kinds == "PDPPPPD"
    engine.finish()


# ---- cancel ----


def test_cancel_while_waiting() -> None:
    engine = Driver(rows=1)
    engine.admit(0)
    engine.admit(1)
    engine.turn()
    engine.cancel(1)
    assert engine.finished[1].token_ids == ()
    engine.finish()
    assert engine.steps_of(1) == []


def test_cancel_in_the_middle_of_a_prompt() -> None:
    engine = Driver(max_prefill_tokens=4)
    engine.admit(0, prompt=20)
    engine.turns(2)
    engine.cancel(0)
    engine.admit(1)
    engine.finish()
    assert engine.reason(0) is FinishReason.CANCELLED
    assert engine.scheduler.counters.ghost_rows == 2


def test_cancel_between_the_prompt_and_its_first_token() -> None:
    engine = Driver(depth=2)
    engine.admit(0)
    engine.turn()
    engine.cancel(0)
    engine.finish()
    assert engine.finished[0].token_ids == ()
    assert engine.scheduler.counters.wasted_tokens == 1


def test_cancel_while_steps_are_in_flight_drops_their_tokens() -> None:
    engine = Driver(depth=2)
    engine.admit(0, max_tokens=20)
    engine.admit(1, max_tokens=20)
    engine.turns(6)
    landed = engine.sequence(0).generated
    engine.cancel(0)
    assert engine.finished[0].token_ids == landed
    assert len(landed) == 4
    engine.finish()
    counters = engine.scheduler.counters
    assert (counters.ghost_rows, counters.wasted_tokens) == (2, 2)
    assert counters.chain_breaks == UNBROKEN


def test_cancel_after_the_last_token_was_planned() -> None:
    engine = Driver(depth=2)
    engine.admit(0, max_tokens=3)
    engine.turns_until(State.DRAINING, 0)
    engine.cancel(0)
    engine.finish()
    assert engine.reason(0) is FinishReason.CANCELLED


@pytest.mark.parametrize("request_id", [0, 99])
def test_cancelling_twice_or_the_unknown_changes_nothing(request_id: int) -> None:
    engine = Driver()
    engine.admit(0)
    engine.turns(2)
    engine.cancel(0)
    engine.cancel(request_id)
    engine.finish()
    engine.cancel(request_id)
    assert list(engine.finished) == [0]


def test_a_stop_string_is_a_cancel_that_reads_stop() -> None:
    engine = Driver()
    engine.admit(0, max_tokens=20)
    engine.turns(6)
    engine.cancel(0, FinishReason.STOP)
    engine.finish()
    assert engine.reason(0) is FinishReason.STOP


def test_an_id_may_return_after_it_ended_but_not_before() -> None:
    scheduler = Scheduler(ROOMY)
    request = Request(5, prompt_of(3), SamplingParams(max_tokens=4))
    assert scheduler.submit(Admit(request)) == ()
    (refused,) = scheduler.submit(Admit(request))
    assert refused.detail == "request id 5 is in use"
