"""Several answers to one prompt: one row computes it, and its last step gives each of them a first token."""

from __future__ import annotations

from typing import Unpack

import pytest

from runtime.schedule.config import MixedSteps
from runtime.schedule.plan import Fork, StepPlan
from runtime.schedule.request import FinishReason
from runtime.schedule.states import State
from tests.runtime.schedule.configs import Limits
from tests.runtime.schedule.driver import Driver, prompt_of


def forking(**more: Unpack[Limits]) -> Driver:
    limits: Limits = {"block_size": 4, "depth": 2, "rows": 8, "slots": 16, **more}
    return Driver(**limits)


def fork_of(engine: Driver) -> StepPlan:
    """The one plan that forks."""
    (plan,) = (plan for plan in engine.plans if plan is not None and plan.forks)
    return plan


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_an_answer_that_breaks_late_leaves_the_others_alone(prefix_caching: bool) -> None:
    """They share the blocks of their prompt, over which tokens of all have landed: what broke is not in these."""
    engine = forking(prefix_caching=prefix_caching, blocks=60)
    engine.device.breaks_at = {1: 40}
    engine.admit(0, 10, max_tokens=50, n=3)
    engine.finish()
    counters = engine.scheduler.counters
    assert [engine.reason(i) for i in range(3)] == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert (counters.distrusted, counters.admissions, counters.prefill_tokens) == (0, 3, 10)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_one_step_gives_every_answer_its_first_token(prefix_caching: bool) -> None:
    engine = forking(prefix_caching=prefix_caching)
    engine.admit(0, 10, n=4)
    (first, second) = engine.real_turns(2)
    prompt, answers = engine.sequence(0), [engine.sequence(i) for i in (1, 2, 3)]
    assert first.slots == (prompt.slot, *(answer.slot for answer in answers))
    assert (first.decode_rows, first.prefill_tokens) == (0, 10)
    assert [first.draws(row) for row in range(4)] == [True] * 4
    copied = [(prompt.blocks[2], answer.blocks[2]) for answer in answers]
    assert first.forks == tuple(Fork(a.slot, 0, pair) for a, pair in zip(answers, copied, strict=True))
    assert all(answer.blocks[:2] == prompt.blocks[:2] for answer in answers), "full blocks are shared"
    assert len({sequence.blocks[2] for sequence in (prompt, *answers)}) == 4, "the one that all write into is not"
    assert second.decode_rows == 4
    engine.finish()
    assert [len(engine.steps_of(i)) for i in range(4)] == [4] * 4
    counters = engine.scheduler.counters
    assert (counters.prefill_tokens, counters.forks, counters.forked_tokens) == (10, 3, 30)
    assert (counters.admissions, counters.chain_breaks) == (4, {"start": 1})


def test_eight_answers_to_1024_tokens() -> None:
    engine = forking(blocks=200, block_size=16, max_model_len=1100, max_prefill_tokens=300)
    engine.admit(0, 1024, n=8)
    engine.finish()
    assert engine.scheduler.counters.prefill_tokens == 1024
    assert engine.scheduler.counters.prefix_waits == 0
    plan = fork_of(engine)
    assert plan.step == 3
    assert [fork.copied for fork in plan.forks] == [None] * 7, "1,024 tokens are full blocks, which are shared"


def test_decode_rows_go_on_beside_a_fork() -> None:
    engine = forking(mixed=MixedSteps())
    engine.admit(0, 3, max_tokens=9)
    engine.turns(2)
    engine.admit(1, 6, n=3)
    (plan,) = engine.real_turns(1)
    assert (plan.decode_rows, len(plan.chunks), [fork.chunk for fork in plan.forks]) == (1, 1, [0, 0])
    engine.admit(10, 5, n=2)
    engine.admit(20, 7, n=2)
    (plan,) = engine.real_turns(1)
    assert (plan.decode_rows, [fork.chunk for fork in plan.forks]) == (4, [0, 1])
    engine.finish()


def test_rows_are_kept_for_answers_while_their_prompt_is_computed() -> None:
    engine = forking(max_prefill_tokens=6, rows=4, slots=8)
    engine.admit(0, 12, n=4)
    engine.admit(4, 3)
    engine.turn()
    assert [engine.state(i) for i in range(5)] == [State.PREFILL, *[State.JOINING] * 3, State.WAITING]
    assert engine.scheduler.waiting == 4
    engine.turn()
    assert [engine.state(i) for i in range(5)] == [*[State.DECODE] * 4, State.WAITING]
    engine.finish()


def test_shorter_prompts_pass_the_answers_to_a_long_one() -> None:
    engine = forking(mixed=MixedSteps(long_prompt=10), max_prefill_tokens=6, rows=3, slots=6)
    engine.admit(0, 30, n=3)
    engine.admit(3, 3, max_tokens=12)
    engine.turn()
    assert engine.state(3) in (State.PREFILL, State.DECODE)
    engine.finish()
    assert engine.scheduler.counters.forks == 1, "the other one comes later"


def test_as_many_fork_as_there_are_rows_and_the_others_come_one_by_one() -> None:
    """Each of these computes the last block of the prompt anew, or all of it where no prefixes are kept."""
    for prefix_caching, again in ((True, 2), (False, 10)):
        engine = forking(rows=3, slots=6, prefix_caching=prefix_caching)
        engine.admit(9, 5, max_tokens=9)
        engine.turns(2)
        engine.admit(0, 10, n=3, max_tokens=20)
        engine.turn()
        assert [engine.state(i) for i in range(3)] == [State.DECODE, State.DECODE, State.WAITING]
        engine.finish()
        counters = engine.scheduler.counters
        assert (counters.forks, counters.prefill_tokens) == (1, 5 + 10 + again)


def test_as_many_fork_as_there_are_blocks_for() -> None:
    engine = forking(blocks=6)
    engine.admit(0, 13, n=4, max_tokens=8)
    engine.turn()
    states = [engine.state(i) for i in range(4)]
    assert states.count(State.DECODE) == 1 + engine.scheduler.counters.forks
    assert 0 < engine.scheduler.counters.forks < 3
    assert set(states) == {State.DECODE, State.WAITING}
    engine.finish()


def test_more_answers_than_rows() -> None:
    engine = forking(rows=2, slots=4)
    engine.admit(0, 10, n=9, max_tokens=3)
    engine.finish()
    assert engine.scheduler.counters.forks >= 4, "two at a time"


def test_an_answer_is_cancelled_while_it_waits() -> None:
    engine = forking(max_prefill_tokens=6)
    engine.admit(0, 10, n=3)
    engine.turn()
    engine.cancel(1)
    engine.turn()
    assert [fork.slot for fork in fork_of(engine).forks] == [engine.sequence(2).slot]
    engine.finish()
    assert engine.finished[1].token_ids == ()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_another_answer_computes_the_prompt_when_the_first_is_cancelled(prefix_caching: bool) -> None:
    engine = forking(max_prefill_tokens=6, prefix_caching=prefix_caching)
    engine.admit(0, 20, n=3)
    engine.turns(2)
    engine.cancel(0)
    assert [engine.state(i) for i in (1, 2)] == [State.WAITING] * 2
    engine.turn()
    assert [engine.state(i) for i in (1, 2)] == [State.PREFILL, State.JOINING]
    engine.finish()
    counters = engine.scheduler.counters
    assert counters.forks == 1
    assert counters.prefill_tokens == (12 + 8 if prefix_caching else 12 + 20), "what was written is found"


def test_the_prompts_own_answer_is_cancelled_in_the_step_of_the_fork() -> None:
    """Its slot and blocks wait behind the fence of that step, which copies one of them."""
    engine = forking()
    engine.admit(0, 10, n=3, max_tokens=9)
    engine.turn()
    blocks = list(engine.sequence(0).blocks)
    engine.cancel(0)
    assert all(engine.scheduler.pool.refs[block] for block in blocks)
    engine.finish()
    assert engine.scheduler.counters.ghost_rows == 1


def test_a_paused_answer_stays_behind() -> None:
    engine = forking(max_prefill_tokens=6)
    engine.admit(0, 10, n=3)
    engine.turn()
    engine.pause(1)
    assert engine.state(1) is State.PAUSED
    engine.turns(3)
    engine.resume(1)
    engine.finish()
    assert engine.scheduler.counters.forks == 1


def test_the_answer_that_computes_the_prompt_may_be_paused_meanwhile() -> None:
    engine = forking(max_prefill_tokens=6)
    engine.admit(0, 10, n=3)
    engine.turn()
    engine.pause(0)
    engine.turn()
    assert [engine.state(i) for i in range(3)] == [State.PAUSED, State.DECODE, State.DECODE]
    assert len(fork_of(engine).slots) == 3
    engine.resume(0)
    engine.finish()


def test_a_row_whose_request_is_paused_at_once_counts() -> None:
    """The step has it, though no longer among those that decode: two forks would be one row too many."""
    engine = forking(max_prefill_tokens=6, rows=2, slots=4)
    engine.admit(0, 10, n=3)
    engine.turn()
    engine.pause(0)
    engine.turn()
    assert len(fork_of(engine).slots) == 2
    engine.turns(1)
    engine.resume(0)
    engine.finish()


def test_evicted_answers_come_back_with_their_own_tokens() -> None:
    engine = forking(blocks=14)
    engine.admit(0, 9, n=4, max_tokens=14)
    engine.finish()
    assert engine.scheduler.counters.evictions > 0
    assert {engine.reason(i) for i in range(4)} == {FinishReason.LENGTH}


def test_the_prompt_of_the_first_answer_is_scored_and_the_others_join_it() -> None:
    engine = forking(mixed=MixedSteps(), max_prefill_tokens=6)
    engine.admit(0, 10, n=3, prompt_logprobs=0)
    engine.finish()
    scored = [chunk.scored for plan in engine.plans if plan is not None for chunk in plan.chunks]
    assert sum(len(one.token_ids) for one in scored if one is not None) == 9
    assert (engine.scheduler.counters.forks, engine.scheduler.counters.prefill_tokens) == (2, 10)


def test_answers_of_a_prompt_that_breaks_are_computed_again_by_themselves() -> None:
    """The first answer leaves NaN in the cache. All of the step break of it; the others did nothing wrong."""
    engine = forking()
    engine.device.poisons = {0: 9}
    engine.admit(0, 10, n=3)
    engine.finish()
    assert engine.reason(0) is FinishReason.ERROR
    assert [engine.reason(i) for i in (1, 2)] == [FinishReason.LENGTH] * 2
    assert engine.scheduler.counters.distrusted == 2


def test_others_find_what_a_prompt_wrote_that_forked() -> None:
    engine = forking()
    engine.admit(0, 10, n=2, max_tokens=9)
    engine.turn()
    engine.cancel(0)
    engine.admit(5, (*prompt_of(8), 1, 2))
    engine.turn()
    assert engine.sequence(5).blocks[:2] == engine.sequence(1).blocks[:2]
    engine.finish()


def test_answers_wait_in_the_queue_as_one_prompt() -> None:
    """The budget of a step looks at the tokens that wait: those of one answer, for the others compute none."""
    engine = forking(rows=1, slots=2, mixed=MixedSteps())
    engine.admit(9, 3, max_tokens=6)
    engine.turn()
    engine.admit(0, 20, n=8)
    ledger = engine.scheduler.ledger
    assert (ledger.waiting, ledger.waiting_arrivals, ledger.waiting_tokens) == (8, 8, 20)
    engine.finish()
