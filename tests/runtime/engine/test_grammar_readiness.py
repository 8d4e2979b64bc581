"""A request is admitted when all ranks hold its grammar: until then no step waits, whichever rank is slow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.frontend.client import EngineClient, PromptRequest
from runtime.grammar import GrammarError, Grammars
from runtime.replicate.held_arrivals import HeldArrivals
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, Request, SamplingParams
from tests.runtime.engine import rig as rigs
from tests.runtime.engine.group_rigs import dealt_rig
from tests.runtime.engine.lives import oracle
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_grammar import DIGITS, EOS, GRAMMARS, JSON, NO_BLANKS, SHAPE, VOCABULARY
from tests.runtime.frontend import small_tokenizers

pytest.importorskip("llguidance")

pytestmark = pytest.mark.slow
OpenRig = Callable[..., AbstractContextManager[Engine]]
MANY_TURNS = 10**6  # which wait for a thread that compiles, on a machine that may be busy


@pytest.fixture(autouse=True)
def _over_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs, "TINY", rigs.TINY | SHAPE)


class Gated(Grammars):
    """A rank's. It compiles when ``gate`` is set, and then fails for the grammars in ``fails``."""

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        super().__init__(lambda: small_tokenizers.byte_level().to_json(), VOCABULARY, (EOS,))
        self.gate, self.fails = threading.Event(), fails

    def _compile(self, grammar: str, regular: bool) -> Any:
        assert self.gate.wait(600)
        if grammar in self.fails:
            raise GrammarError("out of work")
        return super()._compile(grammar, regular)


@pytest.fixture
def slow() -> Iterator[Gated]:
    """The grammars of the last rank."""
    grammars = Gated()
    yield grammars
    grammars.gate.set()
    grammars.close()


def ranks(slow: Gated, **how: Any) -> AbstractContextManager[Engine]:
    return tensor_rig(2, of_rank=lambda rank: {"grammars": slow if rank else GRAMMARS}, **how)


def groups(slow: Gated, **how: Any) -> AbstractContextManager[Engine]:
    return dealt_rig(grammars_of=lambda group: slow if group else GRAMMARS, **how)


def alone(slow: Gated, **how: Any) -> AbstractContextManager[Engine]:
    return rig(grammars=slow, **how)


def requests(free: int = 60) -> list[Request]:
    limits: dict[str, Any] = {"stops": (EOS,), "max_tokens": 60, "temperature": 1.0}
    return [
        request(0, [5, 6, 7], grammar=JSON, logit_bias=NO_BLANKS, **limits),
        request(1, [5, 6], stops=(), max_tokens=free),
        request(2, [9, 8, 7, 6], grammar=DIGITS, **limits),
        request(3, [9, 8, 7], grammar=JSON, logit_bias=NO_BLANKS, **limits),
    ]


def served(engine: Engine, slow: Gated, asked: list[Request]) -> dict[int, Finished]:
    """The gate opens when the request without a grammar has ended, before which no other one has a row."""

    def watch(output: StepOutput) -> None:
        if not slow.gate.is_set():
            assert {*output.request_ids} <= {1, -1}
            assert all(one.request_id == 1 for one in output.finished)
            if output.finished:
                assert engine.has_work
                slow.gate.set()

    return run(engine, asked, watch=watch, most_turns=MANY_TURNS)


MORE = ((ranks, 0, 0), (groups, 2, 0))


@pytest.mark.parametrize(
    ("over", "depth", "horizon"),
    [(alone, 2, 0), (ranks, 2, 3), (groups, 2, 2), *(pytest.param(*way, marks=pytest.mark.long) for way in MORE)],
)
def test_other_rows_run_while_one_rank_compiles(over: OpenRig, depth: int, horizon: int, slow: Gated) -> None:
    asked = requests()
    with over(slow, depth=depth, horizon=horizon) as engine:
        finished = served(engine, slow, asked)
        assert engine.counters["grammar_wait_seconds"] > 0
    expected = oracle(asked, grammars=GRAMMARS).finished
    for one, ended in finished.items():
        assert (ended.token_ids, ended.reason) == (expected[one].token_ids, expected[one].reason)


def test_a_leader_that_waits_for_itself_alone_is_noticed(slow: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test, with the fault planted."""
    told = HeldArrivals.reported

    def hasty(held: HeldArrivals, rank: int, message: bytes) -> None:
        if not rank:
            told(held, 0, message)
            told(held, 1, message)

    monkeypatch.setattr(HeldArrivals, "reported", hasty)

    def serve() -> None:
        with ranks(slow, depth=2) as engine, ExitStack() as stack:
            stack.callback(slow.gate.set)
            served(engine, slow, requests())

    with pytest.raises(AssertionError):
        serve()


def test_a_grammar_that_one_rank_cannot_use_ends_its_requests_alone(slow: Gated) -> None:
    slow.fails = (JSON,)
    with ranks(slow, depth=2) as engine:
        finished = served(engine, slow, requests())
        again = run(engine, [request(7, [5, 6], stops=(EOS,), grammar=JSON, n=2)])
    for one in (finished[0], finished[3], again[7], again[8]):
        assert (one.reason, one.token_ids) == (FinishReason.ERROR, ())
        assert one.detail == "rank 1 cannot use its grammar: out of work"
    assert (finished[1].reason, finished[2].reason) == (FinishReason.LENGTH, FinishReason.STOP)


@pytest.mark.parametrize("over", [alone, ranks, pytest.param(groups, marks=pytest.mark.long)])
def test_a_request_that_is_cancelled_while_it_waits_ends_at_once(over: OpenRig, slow: Gated) -> None:
    several = request(10, [5, 6, 7], stops=(EOS,), grammar=DIGITS, n=2, max_tokens=60)
    ended: list[int] = []

    def act(engine: Engine, turn: int) -> None:
        if turn == 3:
            engine.cancel(0)
            engine.pause(2)
            engine.resume(2)
            engine.cancel(11)

    def watch(output: StepOutput) -> None:
        ended.extend(one.request_id for one in output.finished)
        if ended == [0, 1]:
            slow.gate.set()

    with over(slow, depth=2) as engine:
        finished = run(engine, [*requests(), several], act, watch, most_turns=MANY_TURNS)
    assert ended[:2] == [0, 1]
    assert (finished[0].reason, finished[0].token_ids) == (FinishReason.CANCELLED, ())
    assert finished[11].reason is FinishReason.CANCELLED
    assert all(finished[one].reason is FinishReason.STOP for one in (2, 3, 10))


def test_requests_that_wait_take_no_room_of_others(slow: Gated) -> None:
    """As many of them as a client keeps with its engine, and one more, came first."""
    ended = list[Any]()
    with alone(slow, depth=2, rows=2) as engine, EngineClient(engine, small_tokenizers.byte_level()) as client:
        for grammar in [JSON] * (client.capacity + 1) + [""]:
            client.submit(PromptRequest([5, 6, 7], SamplingParams(max_tokens=5, grammar=grammar)))
        for _ in range(MANY_TURNS):
            ended += [one.key for one in client.turn().finished]
            if ended:
                slow.gate.set()
            if not client.live:
                break
    assert ended[0] == len(ended) - 1 == client.capacity + 1


def test_an_engine_may_stop_while_requests_wait(slow: Gated) -> None:
    with ranks(slow, depth=2) as engine:
        for one in requests():
            if one.sampling.grammar:
                engine.add(one)
        for _ in range(5):
            engine.step()
        slow.gate.set()  # or its thread would not end
