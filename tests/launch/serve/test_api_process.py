"""What an API process makes of the system that it runs on."""

from __future__ import annotations

import logging
import resource

import pytest

from launch.serve import api_process

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "wanted", "warns"),
    [
        ((1024, 1 << 20), (65535, 1 << 20), False),
        ((1024, 20_000), (20_000, 20_000), False),
        ((1024, INFINITE), (65535, INFINITE), False),
        ((1024, 1024), None, True),
        ((256, 2048), (2048, 2048), True),
        ((1 << 20, 1 << 20), None, False),
        ((INFINITE, INFINITE), None, False),
    ],
)
def test_connections_may_be_as_many_as_the_system_allows(
    limits: tuple[int, int],
    wanted: tuple[int, int] | None,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A soft limit of 1,024 is usual, and a server that has none left resets even probes."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, made: asked.append(made))
    with caplog.at_level(logging.WARNING):
        api_process._allow_connections()
    assert asked == ([] if wanted is None else [wanted])
    assert bool(caplog.records) == warns
