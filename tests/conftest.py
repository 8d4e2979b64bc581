"""What holds for all tests: a budget in CPU seconds each, and garbage collection that skips pytest's own objects.

Each engine that is built collects garbage twice, a benchmark several times, and each collection would look at all that
pytest has imported and collected (0.2 to 0.5 s, on a busy machine more than most of these tests take).
"""

from __future__ import annotations

import pytest

from runtime.gc_freeze import freeze_heap
from tests.budget import Budget


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget())


def pytest_collection_finish() -> None:
    freeze_heap()  # until the process ends
