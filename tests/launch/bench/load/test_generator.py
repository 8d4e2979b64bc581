"""The load generator against a backend of pure arithmetic, whose clock only moves when it is waited for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from launch.bench.load.generator import generate_load
from launch.bench.load.journal import Journal, Served


class Server:
    """Every request takes ``seconds`` from when it was sent, however many run; a step takes ``step``."""

    def __init__(self, seconds: Sequence[float], step: float = 0.25) -> None:
        self.now = 100.0
        self.most = 0
        self.idle: list[float] = []
        self.until: list[float] = []
        self._seconds, self._step = seconds, step
        self._running: dict[int, float] = {}

    def clock(self) -> float:
        return self.now

    def begin(self) -> None:
        pass

    def send(self, number: int) -> None:
        self._running[number] = self.now + self._seconds[number]
        self.most = max(self.most, len(self._running))

    def advance(self, until: float) -> Sequence[tuple[float, int]]:
        self.until.append(until)
        if not self._running:
            self.idle.append(until - self.now)
            self.now = until
            return ()
        self.now += self._step
        ended = sorted((end, number) for number, end in self._running.items() if end <= self.now)
        for _, number in ended:
            del self._running[number]
        return [(self.now, number) for _, number in ended]

    def journal(self, started: float, ended: float, requests: Sequence[Served]) -> Journal:
        assert not self._running
        return Journal(started, ended, requests)


def run(server: Server, offsets: Sequence[float], concurrency: int | None = None) -> list[tuple[float, float, float]]:
    """(due, began, sent) of each, after the start, to a microsecond."""
    told: list[int] = []
    journal = generate_load(server, [1] * len(offsets), offsets, concurrency, told.append, server.clock)
    assert told[-1] == len(offsets)
    assert told == sorted(set(told))
    start = journal.started
    times = [(one.due, one.began, one.sent) for one in journal.requests]
    return [(round(due - start, 6), round(began - start, 6), round(sent - start, 6)) for due, began, sent in times]


def test_an_open_loop_sends_when_due_whatever_became_of_the_others() -> None:
    server = Server([10.0] * 4)
    assert run(server, [0.0, 0.1, 0.5, 3.0]) == [(0.0, 0.0, 0.0), (0.1, 0.1, 0.25), (0.5, 0.5, 0.5), (3.0, 3.0, 3.0)]
    assert server.most == 4


def test_an_idle_engine_is_waited_for_until_exactly_the_next_arrival() -> None:
    server = Server([0.25] * 3)
    times = run(server, [1.1, 1.2, 7.0])
    assert [sent for _, _, sent in times] == pytest.approx([1.1, 1.35, 7.0])
    assert server.idle == pytest.approx([1.1, 5.4]), "slept once for each, never polled"


def test_a_closed_loop_lets_one_in_for_each_that_ends() -> None:
    server = Server([1.0, 2.0, 1.0, 0.25])
    times = run(server, [0.0] * 4, concurrency=2)
    assert [began for _, began, _ in times] == [0.0, 0.0, 1.0, 2.0], "latency counts from when a place was free"
    assert server.most == 2


def test_a_full_loop_waits_for_an_end_and_not_for_what_is_due() -> None:
    """A backend that returns at ``until`` would be asked again and again, and hold the interpreter's lock meanwhile."""
    server = Server([1.0, 2.0, 1.0, 0.25])
    run(server, [0.0] * 4, concurrency=2)
    assert set(server.until) == {float("inf")}
    late = Server([1.0, 1.0])
    run(late, [0.0, 0.5], concurrency=2)
    assert late.until[0] == late.now - 1.5 + 0.5, "a place is free: it waits for who is due"


def test_an_arrival_waits_for_a_place_only_while_there_is_none() -> None:
    server = Server([1.0, 1.0, 0.5, 0.25])
    times = run(server, [0.0, 0.5, 2.0, 2.25], concurrency=1)
    assert times == [(0.0, 0.0, 0.0), (0.5, 1.0, 1.0), (2.0, 2.0, 2.0), (2.25, 2.5, 2.5)]
    assert server.most == 1


class Slow(Server):
    """Handing a request over takes 0.6 ms."""

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__(seconds)
        self.sent_between_steps = [0]

    def send(self, number: int) -> None:
        super().send(number)
        self.now += 0.6e-3
        self.sent_between_steps[-1] += 1

    def advance(self, until: float) -> Sequence[tuple[float, int]]:
        self.sent_between_steps.append(0)
        return super().advance(until)


def test_a_burst_is_sent_in_portions_between_steps() -> None:
    server = Slow([0.1] * 5)
    times = run(server, [0.0] * 5)
    assert max(server.sent_between_steps) == 2, "no step waits for much more than a millisecond"
    assert [began for _, began, _ in times] == [0.0] * 5, "and its requests do not look younger for that"


def test_an_empty_place_at_the_start_is_no_reason_to_count_later() -> None:
    times = run(Server([5.0, 0.25, 0.25]), [0.0, 0.1, 0.6], concurrency=2)
    assert [began for _, began, _ in times] == pytest.approx([0.0, 0.1, 0.6])
