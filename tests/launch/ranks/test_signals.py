"""SIGTERM where there is nothing to finish first: an exception, once."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from launch.ranks.signals import notes_sigterm, raises_on_sigterm


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


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
