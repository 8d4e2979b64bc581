"""Forks of parked sessions: they go on from a copy of what their parents hold, and nothing is computed again.

Each says what a request of its own says over the serial engine, in every bit of float64; so does its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product, starmap
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.engine import Engine
from runtime.schedule.plan import Refused
from runtime.schedule.request import Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.runtime.engine.conftest import long, over_model
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import check_all_is_back, live, prompt
from tests.runtime.engine.rig import request, rig
from tests.runtime.engine.test_hybrid import on_banks
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks
from tests.selection import covering

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
PARENT, CHILD, OTHER = 0, 7, 8
BUDGET, QUANTUM = 20, 7


class Talk:
    """An engine with one session that was parked after its first quantum, and what sessions say from then on."""

    def __init__(self, engine: Engine, first: Request) -> None:
        self.engine, self.said = engine, dict[int, list[int]]()
        engine.start(first, QUANTUM, keep=True)
        self.rest()
        self.computed = engine.counters["prefill_tokens"]

    def rest(self) -> None:
        """Turns until there is nothing to do, with NaN before each of them wherever nobody has anything."""
        engine = self.engine
        while engine.has_work:
            on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))
            fill_with_nan(engine, idle_blocks(engine))
            output = engine.step()
            for row, (id_, count) in enumerate(zip(output.request_ids, output.counts, strict=True)):
                if count and id_ >= 0:
                    self.said.setdefault(id_, []).extend(output.tokens[row * output.width : row * output.width + count])
            assert not any(isinstance(notice, Refused) for notice in output.notices), output.notices
        engine.executor.device.compute.synchronize()

    def state(self, id_: int) -> list[Tensor]:
        slot = self.engine.scheduler.ledger.sequences[id_].slot
        assert slot
        return [bank[:, slot].clone() for bank in self.engine.executor.pool.banks]

    def go_on(self, *ids: int) -> None:
        for id_ in ids:
            self.engine.proceed(id_, 1, BUDGET)


@contextmanager
def parked(
    depth: int, temperature: float = 1.0, *, windows: bool = False, **limits: Any
) -> Iterator[tuple[Talk, tuple[int, ...]]]:
    """A talk, and the whole answer of its session."""
    few = tuple(range(5, 11))  # answers repeat themselves
    first = request(
        PARENT, (*prompt(14, 3), *few), max_tokens=BUDGET, temperature=temperature, stops=(), allowed_token_ids=few
    )
    how: dict[str, Any] = {"kernels": exact_kernels(), "dtype": torch.float64, "max_sessions": 3, "rows": 3}
    if windows:
        how |= {"proposer": proposer_for(speculative_config(NGRAM)), "speculation": Speculation(4)}
    alone = live([first], depth=0).finished[PARENT].token_ids
    with rig(depth=depth, **(how | limits)) as engine:
        talk = Talk(engine, first)
        yield talk, alone
        for id_ in (PARENT, CHILD, OTHER):
            engine.cancel(id_)
        talk.rest()
        engine.stop()
        check_all_is_back(engine)


@pytest.mark.parametrize(
    ("model", "temperature", "depth"),
    [("attention", 0.0, 0), ("nemotron-h", 1.0, 2), *starmap(long, product(("hybrid", "qwen3.5"), (0.0, 1.0), (0, 2)))],
)
def test_a_fork_computes_nothing_and_leaves_its_parent_as_it_is(
    model: str, temperature: float, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the prefix cache, without and with windows; a fork goes on before its parent, and one behind it."""
    over_model(model, monkeypatch)
    with parked(depth, temperature, windows=model != "hybrid") as (talk, alone):
        engine, before = talk.engine, talk.state(PARENT)
        engine.fork(CHILD, PARENT)
        talk.rest()
        for id_ in (PARENT, CHILD):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(talk.state(id_), before, strict=True))
        talk.go_on(CHILD)
        talk.rest()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(talk.state(PARENT), before, strict=True))
        engine.fork(OTHER, PARENT)
        talk.rest()
        talk.go_on(PARENT)
        talk.rest()
        talk.go_on(OTHER)
        talk.rest()
        assert talk.said == {PARENT: list(alone), CHILD: list(alone[QUANTUM:]), OTHER: list(alone[QUANTUM:])}
        counters = engine.counters
        assert counters["prefill_tokens"] == talk.computed
        assert (counters["session_forks"], counters["session_forks_without_copy"]) == (2, 0)
        assert model == "hybrid" or counters["spec_num_accepted_tokens"] > 0


Say = Callable[[Engine], None]


def _and_goes_on(engine: Engine) -> None:
    engine.proceed(CHILD, 1, BUDGET)
    engine.proceed(PARENT, 1, BUDGET)


def _and_forks_again(engine: Engine) -> None:
    engine.fork(OTHER, CHILD)
    engine.proceed(OTHER, 1, BUDGET)


def _and_its_parent_goes(engine: Engine) -> None:
    engine.cancel(PARENT)
    engine.add(request(90, prompt(40, 9), max_tokens=3, stops=()))


def _and_goes_itself(engine: Engine) -> None:
    engine.cancel(CHILD)
    engine.add(request(90, prompt(40, 9), max_tokens=3, stops=()))


@pytest.mark.parametrize(
    ("model", "say"),
    covering(
        ("attention", "hybrid"),
        (_and_goes_on, _and_forks_again, _and_its_parent_goes, _and_goes_itself),
        at_once=1,
    ),
)
def test_more_is_said_in_the_turn_of_a_fork(model: str, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever that is, the copy is made before it: also from a slot that is given back, into one that is."""
    over_model(model, monkeypatch)
    with parked(2, prefix_caching=False) as (talk, alone):
        talk.engine.fork(CHILD, PARENT)
        say(talk.engine)
        talk.rest()
        rest, sequences = list(alone[QUANTUM:]), talk.engine.scheduler.ledger.sequences
        for id_ in (PARENT, CHILD, OTHER):
            said = talk.said.get(id_, [])[QUANTUM if id_ == PARENT else 0 :]
            if id_ in sequences and not said:
                talk.go_on(id_)
                talk.rest()
                said = talk.said[id_][QUANTUM if id_ == PARENT else 0 :]
            assert said == (rest if id_ in sequences else []), id_
        assert talk.engine.counters["prefill_tokens"] == talk.computed + (40 if 90 in talk.said else 0)
        assert talk.engine.counters["session_forks_without_copy"] == 0


@pytest.mark.usefixtures("every_model")
def test_a_fork_is_told_more_in_its_turn() -> None:
    """What is said to it is computed, and its newest token."""
    with parked(2) as (talk, alone):
        talk.engine.fork(CHILD, PARENT)
        talk.engine.extend(CHILD, 1, (7, 8, 9), 6, 6)
        talk.rest()
        whole = (*talk.engine.scheduler.ledger.sequences[PARENT].tokens, 7, 8, 9)
        sampling = talk.engine.scheduler.ledger.sequences[CHILD].request.sampling
        alone_again = live([Request(PARENT, whole, sampling, ())], depth=0).finished[PARENT].token_ids
        assert tuple(talk.said[CHILD]) == alone_again
        assert talk.engine.counters["prefill_tokens"] == talk.computed + 4
        assert talk.said[PARENT] == list(alone[:QUANTUM])


def test_a_fork_of_an_evicted_session_is_computed_again() -> None:
    with parked(2, blocks=16, max_model_len=104, prefix_caching=False) as (talk, alone):
        talk.engine.add(request(90, prompt(98, 9), max_tokens=5, stops=()))
        talk.rest()
        talk.engine.fork(CHILD, PARENT)
        talk.go_on(CHILD)
        talk.rest()
        assert talk.said[CHILD] == list(alone[QUANTUM:])
        assert talk.engine.counters["session_forks_without_copy"] == 1


def test_mutant_a_state_that_is_not_copied_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    over_model("hybrid", monkeypatch)
    with parked(0) as (talk, alone):
        talk.engine.executor.staging.on_forked = lambda rows_2C, blocks_2C: None
        talk.engine.fork(CHILD, PARENT)
        talk.go_on(CHILD)
        talk.rest()
        assert talk.said.get(CHILD, []) != list(alone[QUANTUM:])
