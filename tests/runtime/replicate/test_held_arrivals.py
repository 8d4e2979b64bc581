"""Which grammars ranks are asked to compile, and when the requests that wait for them are announced."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from runtime.replicate.held_arrivals import REPORT, HeldArrivals, reports
from runtime.schedule.plan import Admit, Cancel, Compile, Event, Finished, Pause
from runtime.schedule.request import FinishReason
from tests.runtime.engine.rig import request

RANKS = 2


class Checker:
    """``verdict`` gives one on what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self._verdicts: list[tuple[int, bool, str]] = []

    def ask(self, number: int, grammar: str) -> None:
        self.asked.append((number, grammar))

    def verdict(self, number: int, regular: bool = False, error: str = "") -> None:
        self._verdicts.append((number, regular, error))

    def verdicts(self) -> list[tuple[int, bool, str]]:
        found, self._verdicts = self._verdicts, []
        return found

    def close(self) -> None: ...


class Held:
    """``said``: events since it was read."""

    def __init__(self, most: int = 8, checker: Checker | None = None) -> None:
        self._said: list[Event] = []
        self.held = HeldArrivals(self._said.append, RANKS, most, checker)

    def add(self, request_id: int, grammar: str, n: int = 1) -> Admit:
        arrival = Admit(request(request_id, [5], grammar=grammar, n=n))
        self.held.add(arrival)
        return arrival

    def compiled(self, number: int, *ranks: int, error: str = "") -> None:
        future: Future[None] = Future()
        if error:
            future.set_exception(ValueError(error))
        else:
            future.set_result(None)
        for rank in ranks or range(RANKS):
            (message,) = reports({number: future})
            self.held.reported(rank, message)

    def over(self, *request_ids: int) -> None:
        self.held.over([Finished(one, FinishReason.STOP, ()) for one in request_ids])

    @property
    def said(self) -> list[Event]:
        said = list(self._said)
        self._said.clear()
        return said


@pytest.fixture
def held() -> Held:
    return Held()


def test_a_request_is_announced_when_the_last_rank_has_reported(held: Held) -> None:
    first, second = held.add(0, "a"), held.add(1, "a")
    assert held.said == [Compile(0, "a")], "once for both"
    held.compiled(0, 1)
    assert (held.said, len(held.held), held.held.expects) == ([], 2, 1)
    held.compiled(0, 0)
    assert (held.said, len(held.held), held.held.expects) == ([first, second], 0, 0)
    third = held.add(2, "a")
    assert held.said == [third], "its grammar is there"


def test_what_is_about_a_request_follows_it(held: Held) -> None:
    arrival = held.add(4, "a", n=3)
    pause, cancel = Pause(4), Cancel(5)
    assert held.held.about(pause)
    assert held.held.about(cancel)
    assert not held.held.about(Cancel(7))
    held.compiled(0)
    assert held.said == [Compile(0, "a"), arrival, pause, cancel]
    assert not held.held.about(Cancel(5)), "it is announced"


def test_a_request_whose_answers_are_all_cancelled_is_never_announced(held: Held) -> None:
    held.add(4, "a", n=2)
    for cancel in (Cancel(5, FinishReason.STOP), Cancel(4)):
        assert held.held.about(cancel)
    assert held.held.ended == [Finished(4, FinishReason.CANCELLED, ()), Finished(5, FinishReason.STOP, ())]
    assert (held.said, len(held.held)) == ([Compile(0, "a")], 0)
    held.compiled(0)
    later = held.add(6, "a")
    assert held.said == [later]


def test_requests_with_a_grammar_that_a_rank_cannot_use_end(held: Held) -> None:
    held.add(0, "a", n=2)
    held.compiled(0, 0)
    held.compiled(0, 1, error="no package")
    held.add(3, "a")
    why = "rank 1 cannot use its grammar: no package"
    assert held.held.ended == [Finished(one, FinishReason.ERROR, (), why) for one in (0, 1, 3)]
    assert held.said == [Compile(0, "a")]


def test_ranks_drop_the_grammar_that_was_used_longest_ago_and_none_in_use() -> None:
    held = Held(most=2)
    first, second = held.add(0, "a", n=2), held.add(2, "b")
    held.compiled(0)
    held.compiled(1)
    third = held.add(3, "a")
    held.add(4, "c")
    assert held.said == [Compile(0, "a"), Compile(1, "b"), first, second, third]
    held.over(0, 1)
    assert held.said == []
    held.over(2, 3)
    assert held.said == [Compile(2, "c", dropped=(1,))], "both are idle now, and a was used later"
    last = held.add(5, "b")
    assert held.said == [Compile(3, "b", dropped=(0,))]
    held.compiled(3)
    assert held.said == [last]


def test_a_grammar_that_is_not_compiled_yet_goes_with_its_last_request() -> None:
    held = Held(most=1)
    held.add(0, "a")
    held.add(1, "b")
    held.add(2, "c")
    assert held.held.about(Cancel(1))
    held.compiled(0)
    held.said  # noqa: B018
    held.over(0)
    assert held.said == [Compile(2, "c", dropped=(0,))]
    held.compiled(2)
    held.over(2)
    held.add(3, "b")
    assert held.said[1:] == [Compile(3, "b", dropped=(2,))]


def test_a_report_begins_with_a_byte_that_no_output_has() -> None:
    future: Future[None] = Future()
    future.set_result(None)
    pending: Future[None] = Future()
    compiling = {0: future, 1: pending}
    (message,) = reports(compiling)
    assert message.startswith(REPORT)
    assert REPORT[0] < 0x80, "msgpack: a number"
    assert compiling == {1: pending}


def test_ranks_compile_what_the_process_of_rank_0_has_checked() -> None:
    checker = Checker()
    held = Held(checker=checker)
    first = held.add(0, "a")
    held.add(1, "bad", n=2)
    held.add(3, "gone")
    assert held.held.about(Cancel(3))
    assert (held.said, held.held.expects) == ([], 3)
    assert checker.asked == [(0, "a"), (1, "bad"), (2, "gone")]
    checker.verdict(1, error="no such keyword")
    checker.verdict(0, regular=True)
    checker.verdict(2)
    held.held.read_verdicts()
    assert held.said == [Compile(0, "a", regular=True)]
    errors = [Finished(one, FinishReason.ERROR, (), "no such keyword") for one in (1, 2)]
    assert held.held.ended == [Finished(3, FinishReason.CANCELLED, ()), *errors]
    held.compiled(0)
    assert (held.said, held.held.expects, len(held.held)) == ([first], 0, 0)
    held.add(4, "bad")
    assert checker.asked[3:] == [(3, "bad")], "it is asked again"
