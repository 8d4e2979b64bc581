"""Sessions on the twin: quanta change nothing, and a turn is what a new request over the whole talk would be.

Every talk is compared, bit for bit, with requests of their own over the serial engine: tokens and log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from runtime.engine import Engine
from runtime.execute.slot_state import SlotTables
from runtime.schedule.plan import Evicted, Notice, Parked, Refused, StepOutput
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.runtime.engine.conftest import over_models
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import Life, oracle, prompt
from tests.runtime.engine.rig import VOCABULARY, request, rig
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.selection import covering

DEPTHS = (0, 1, 2, 4)
MOST_TURNS = 2000
STOPS = tuple(range(0, VOCABULARY, 15))


@dataclass
class Talk:
    """``first``, and then what is said, each with the most tokens of its answer. ``answers``: what came of it."""

    first: Request
    said: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    quantum: int = 3
    early: int = 0  # quanta that are granted before the first is over
    answers: list[tuple[tuple[int, ...], FinishReason]] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    epoch: int = 1
    closed: bool = False

    def requests(self, base: int) -> list[Request]:
        """Each turn as a request of its own, over all that was said and answered before."""
        known, found = tuple(self.first.prompt_token_ids), []
        for turn, (tokens, _) in enumerate(self.answers):
            said, most = self.said[turn - 1] if turn else ((), self.first.sampling.max_tokens)
            known = (*known, *said)
            least = min(self.first.sampling.min_tokens, most)
            sampling = replace(self.first.sampling, max_tokens=most, min_tokens=least)
            found.append(replace(self.first, request_id=base + turn, prompt_token_ids=known, sampling=sampling))
            known = (*known, *tokens)
        return found


def talks(quantum: int, early: int = 0) -> list[Talk]:
    """Greedy, random, penalised, with edited logits, stopped; some turns said to them."""
    said = [(prompt(3, 21), 7), (prompt(1, 22), 1), (prompt(17, 23), 6)]
    firsts = [
        request(0, prompt(21, 0), max_tokens=12, logprobs=2),
        request(1, prompt(16, 1), temperature=1.0, max_tokens=9, logprobs=1),
        request(2, prompt(5, 2), temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=11),
        request(3, prompt(30, 3), temperature=1.4, max_tokens=30, stops=STOPS, min_tokens=2, logprobs=0),
        request(4, prompt(8, 4), temperature=1.0, logit_bias=((5, 9.0),), bad_words_token_ids=((7,), (5, 5))),
    ]
    return [Talk(first, said[: index % 4], quantum, early) for index, first in enumerate(firsts)]


def converse(
    them: list[Talk],
    *,
    over: Callable[..., AbstractContextManager[Engine]] = rig,
    think: int = 0,
    **limits: Any,
) -> Life:
    """Start all, let each go on quantum by quantum, say the next turn when an answer is complete, close at the end.

    ``think``: turns of the engine between what one is told and what one says.
    """
    thinking: list[tuple[int, Parked]] = []
    life = Life(
        {one.first.request_id: one.first.sampling.logprobs for one in them if one.first.sampling.logprobs is not None}
    )
    by_id = {one.first.request_id: one for one in them}
    exact: dict[str, Any] = {"kernels": exact_kernels(), "dtype": torch.float64, "max_sessions": len(them) + 2}
    with over(**(exact | limits)) as engine:
        for one in them:
            engine.start(one.first, one.quantum, keep=True)
            for _ in range(one.early):
                engine.proceed(one.first.request_id, 1, one.quantum)
        turn = 0
        while not all(one.closed for one in them):
            assert engine.has_work or thinking, "somebody waits for ever"
            while thinking and thinking[0][0] <= turn:
                parked = thinking.pop(0)[1]
                _answer(engine, by_id[parked.request_id], parked)
            output = engine.step()
            life.watch(output)
            for row, (id_, count) in enumerate(zip(output.request_ids, output.counts, strict=True)):
                if id_ in by_id and count:
                    by_id[id_].current += output.tokens[row * output.width : row * output.width + count]
            for notice in output.notices:
                assert not isinstance(notice, Refused), notice
                if isinstance(notice, Parked):
                    thinking.append((turn + 1 + think, notice))
            for ended in output.finished:
                life.finished[ended.request_id] = ended
                by_id[ended.request_id].closed = True
            turn += 1
            assert turn < MOST_TURNS
        rest(engine)
        life.counters = dict(engine.counters)
    return life


def rest(engine: Engine) -> list[StepOutput]:
    """Turns until there is nothing to do."""
    outputs = []
    while engine.has_work:
        outputs.append(engine.step())
    return outputs


def notices_of(engine: Engine) -> list[Notice]:
    return [notice for output in rest(engine) for notice in output.notices]


def _answer(engine: Engine, talk: Talk, notice: Parked) -> None:
    id_ = notice.request_id
    assert notice.tokens == len(talk.current)
    if notice.reason is FinishReason.NONE:
        asked = talk.quantum * (1 + talk.early * (talk.epoch == 1))
        assert len(talk.current) >= asked
        assert len(talk.current) % talk.quantum == 0
        engine.proceed(id_, talk.epoch, talk.quantum)
        return
    talk.answers.append((tuple(talk.current), notice.reason))
    talk.current = []
    turn = len(talk.answers) - 1
    if turn < len(talk.said):
        said, most = talk.said[turn]
        engine.extend(id_, talk.epoch, said, most, talk.quantum)
        talk.epoch += 1
    else:
        engine.cancel(id_)


def same_as_requests(them: list[Talk], life: Life, **limits: Any) -> None:
    for index, talk in enumerate(them):
        assert len(talk.answers) == len(talk.said) + 1
        alone = oracle(talk.requests(100 * index), prefix_caching=False, **limits)
        assert [alone.answers[100 * index + turn] for turn in range(len(talk.answers))] == talk.answers
        entries = [entry for turn in range(len(talk.answers)) for entry in alone.logprobs.get(100 * index + turn, [])]
        assert life.logprobs.get(talk.first.request_id, []) == entries


@pytest.mark.parametrize(("every_model", "depth", "quantum"), over_models(DEPTHS, (1, 3, 64)), indirect=["every_model"])
@pytest.mark.usefixtures("every_model")
def test_quanta_and_turns_are_those_of_single_requests(depth: int, quantum: int) -> None:
    them = talks(quantum)
    life = converse(them, depth=depth, rows=3, max_prefill_tokens=11)
    same_as_requests(them, life)
    computed = sum(len(talk.first.prompt_token_ids) + sum(len(said) + 1 for said, _ in talk.said) for talk in them)
    hits = life.counters["prefix_hit_tokens"]
    assert life.counters["prefill_tokens"] == computed - hits, "what was said, and the newest token before it"
    assert hits == 0
    assert life.counters["session_extends"] == sum(len(talk.said) for talk in them)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.usefixtures("every_model")
def test_a_quantum_that_was_granted_early_does_not_break_the_chain(depth: int) -> None:
    them = [Talk(request(0, prompt(21, 0), max_tokens=40, logprobs=1, stops=()), quantum=4, early=9)]
    life = converse(them, depth=depth)
    same_as_requests(them, life)
    assert life.counters["session_parks"] == 1
    assert life.counters["steps"] == 40
    if depth:
        assert life.counters["chain_breaks{start}"] == 1


@pytest.mark.parametrize(
    ("every_model", "depth", "prefix_caching"),
    over_models((0, 2), (True, False)),
    indirect=["every_model"],
)
@pytest.mark.usefixtures("every_model")
def test_with_little_memory_parked_sessions_are_computed_again(depth: int, prefix_caching: bool) -> None:
    them = talks(2)
    life = converse(them, depth=depth, rows=2, blocks=14, max_model_len=96, think=5, prefix_caching=prefix_caching)
    same_as_requests(them, life)
    assert life.counters["session_evictions"] > 0


@pytest.mark.parametrize(("depth", "width"), covering((0, 2, 4), (2, 6), at_once=0, turned=3))
def test_windows_end_where_quanta_end(depth: int, width: int) -> None:
    """A quantum's end is the device's to keep, however many tokens a step could gain. Few tokens are allowed, so that
    answers repeat themselves and proposals are kept."""
    few = tuple(range(5, 9))
    fields: dict[str, Any] = {"temperature": 0.6, "allowed_token_ids": few, "logprobs": 1, "stops": ()}
    them = [
        Talk(
            request(i, [20 + i, *(few[j % 4] for j in range(i, i + 8))], max_tokens=30, **fields),
            [((few[0], few[1]), 20), (few, 9)],
            quantum=2 + 3 * i,
            early=i,
        )
        for i in range(3)
    ]
    keys = {"method": "ngram", "num_speculative_tokens": width - 1, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    proposer = proposer_for(speculative_config(keys))
    speculating: dict[str, Any] = {"proposer": proposer, "speculation": Speculation(width), "blocks": 400}
    life = converse(them, depth=depth, rows=2, **speculating)
    same_as_requests(them, life)
    assert life.counters["spec_num_accepted_tokens"] > 10


def test_every_rank_parks_and_goes_on_alike() -> None:
    them = talks(3)
    life = converse(them, over=lambda **limits: tensor_rig(2, **limits), depth=2, rows=3)
    same_as_requests(them, life)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.usefixtures("every_model")
def test_a_fork_goes_on_from_where_its_parent_was_parked(depth: int) -> None:
    """The same seed and the same positions: it says what its parent says, and neither disturbs the other."""
    first = request(0, prompt(21, 0), temperature=1.0, max_tokens=17, stops=())
    shown: dict[int, list[int]] = {0: [], 7: []}
    notices: list[Parked] = []
    with rig(depth=depth, kernels=exact_kernels(), dtype=torch.float64, max_sessions=2) as engine:
        engine.start(first, 6, keep=True)
        told = 0
        while engine.has_work:
            output = engine.step()
            for row, id_ in enumerate(output.request_ids):
                if id_ >= 0:
                    shown[id_] += output.tokens[row : row + output.counts[row]]
            notices += [notice for notice in output.notices if isinstance(notice, Parked)]
            if len(notices) > told:
                told = len(notices)
                if told == 1:
                    engine.fork(7, 0)
                elif told == 2:
                    engine.proceed(7, 1, 11)
                    engine.proceed(0, 1, 11)
        engine.cancel(0)
        engine.cancel(7)
        rest(engine)
    assert (len(shown[0]), shown[7]) == (17, shown[0][6:])
    assert [(notice.request_id, notice.tokens) for notice in notices[:2]] == [(0, 6), (7, 6)]
    assert sorted(notice.tokens for notice in notices[2:]) == [17, 17]


def test_sessions_share_what_they_begin_with() -> None:
    """A second session over the same 24 tokens computes its own end only, while the first is parked; so does a turn."""
    stem = prompt(24, 0)
    with rig(depth=2, max_sessions=2) as engine:
        engine.start(request(0, (*stem, 7), max_tokens=5, stops=()), 2, keep=True)
        rest(engine)
        engine.start(request(1, (*stem, 9), max_tokens=5, stops=()), 2, keep=True)
        rest(engine)
        assert engine.counters["prefix_hit_tokens"] == 24
        assert engine.counters["prefill_tokens"] == 25 + 1
        engine.cancel(0)
        engine.cancel(1)
        rest(engine)


def test_a_session_that_does_not_keep_ends_when_its_answer_is_complete() -> None:
    with rig(depth=2, max_sessions=1) as engine:
        engine.start(request(0, prompt(9, 0), max_tokens=5, stops=()), 5)
        ended = [one for output in rest(engine) for one in output.finished]
        assert [(one.reason, len(one.token_ids)) for one in ended] == [(FinishReason.LENGTH, 5)]
        assert engine.counters["session_parks"] == 0


def test_a_parked_engine_has_no_work() -> None:
    with rig(depth=2, max_sessions=1) as engine:
        engine.start(request(0, prompt(9, 0), max_tokens=5, stops=()), 2)
        rest(engine)
        assert (engine.scheduler.parked, engine.occupancy.running) == (1, 0)
        steps = engine.counters["steps"]
        engine.proceed(0, 7, 1)  # stale
        (notice,) = notices_of(engine)
        assert isinstance(notice, Refused)
        assert notice.detail == "stale: it was meant for epoch 7, the session is in epoch 1"
        assert engine.counters["steps"] == steps
        engine.cancel(0)
        rest(engine)


def test_memory_that_another_request_needs_is_told_to_the_session() -> None:
    """One session holds most blocks, and a long request comes."""
    with rig(depth=2, max_sessions=1, blocks=8, max_model_len=56, rows=2) as engine:
        engine.start(request(0, prompt(30, 0), max_tokens=5, stops=()), 2)
        rest(engine)
        engine.add(request(1, prompt(40, 1), max_tokens=4, stops=()))
        assert notices_of(engine) == [Evicted(0, 32)]
        engine.cancel(0)
        rest(engine)


def test_mutant_a_slot_that_is_rewritten_loses_what_the_device_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its update a parked session's row is a ghost for ever: the test above would hang, and says so."""
    monkeypatch.setattr(SlotTables, "move_ends", lambda *_: None)
    with rig(depth=2, max_sessions=1) as engine:
        engine.start(request(0, prompt(9, 0), max_tokens=5, stops=()), 2)
        rest(engine)
        engine.proceed(0, 1, 2)
        gained = 0
        for _ in range(20):
            gained += sum(engine.step().counts)
        assert gained == 0
        engine.cancel(0)
        rest(engine)
