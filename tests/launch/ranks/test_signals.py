"""SIGTERM where there is nothing to finish first: an exception, once."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from launch.ranks.signals import Interrupts, notes_sigterm, raises_on_sigterm


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a run of the tests under nohup ignores it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_sigterm_raises_once_and_is_ignored_from_then_on() -> None:
    with pytest.raises(SystemExit) as caught, raises_on_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143
    signal.raise_signal(signal.SIGTERM)  # the launcher's, while the ranks tell each other why


def test_another_error_ignores_sigterm_too() -> None:
    with pytest.raises(ValueError, match="bad"), raises_on_sigterm():
        raise ValueError("bad")
    signal.raise_signal(signal.SIGTERM)


def test_without_an_error_everything_is_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with raises_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sigterm_in_the_middle_of_something_is_noted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with notes_sigterm() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
    with notes_sigterm() as signals:
        pass
    assert signals == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_asks_to_finish_up(number: signal.Signals, code: int) -> None:
    """A closed terminal's, too: it ended a server at once, with all that ran."""
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        signal.raise_signal(number)
        assert (interrupts.signal, interrupts.exit_code, interrupts.hurry) == (number, code, False)
    assert signal.getsignal(number) is before


def test_sighup_raises_where_there_is_nothing_to_finish() -> None:
    with pytest.raises(SystemExit) as caught, raises_on_sigterm():
        signal.raise_signal(signal.SIGHUP)
    assert caught.value.code == 129
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.raise_signal(number)
    with notes_sigterm() as signals:
        signal.raise_signal(signal.SIGTERM)
    assert signals == [signal.SIGTERM]


def test_what_nohup_has_a_process_ignore_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with raises_on_sigterm(), notes_sigterm() as signals, Interrupts() as interrupts:
        signal.raise_signal(signal.SIGHUP)
    assert interrupts.signal is None
    assert signals == []
