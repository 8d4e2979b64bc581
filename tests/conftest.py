"""What holds for all tests: a budget in CPU seconds each, nothing that stays behind them, and garbage collection that
skips pytest's own objects.

Each engine that is built collects garbage twice, a benchmark several times, and each collection would look at all that
pytest has imported and collected (0.2 to 0.5 s, on a busy machine more than most of these tests take).
"""

from __future__ import annotations

import sys

import pytest

from runtime.gc_freeze import freeze_heap
from tests import leftovers
from tests.budget import Budget


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget())
    leftovers.pytest_configure(config)


def pytest_sessionfinish() -> None:
    """Before what is left behind is looked at."""
    if "tests.torchrun" in sys.modules:
        sys.modules["tests.torchrun"].close()


def pytest_collection_finish() -> None:
    freeze_heap()  # until the process ends
