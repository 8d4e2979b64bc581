"""What holds for all tests: a budget in CPU seconds, one thread of torch a process, nothing that stays behind them, and
garbage collection that skips pytest's own objects.

Each engine that is built collects garbage twice, a benchmark several times, and each collection would look at all that
pytest has imported and collected (0.2 to 0.5 s, on a busy machine more than most of these tests take).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator

import pytest

from runtime.gc_freeze import freeze_heap
from tests import leftovers
from tests.budget import Budget

# Read when torch is imported, here and by child processes. Threads wait for each other busily: with two on a busy
# machine a draw over a large vocabulary took twenty times the CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_modules = 0  # that were imported when the heap was last frozen


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget())
    leftovers.pytest_configure(config)


def pytest_sessionfinish() -> None:
    """Before what is left behind is looked at."""
    if "tests.torchrun" in sys.modules:
        sys.modules["tests.torchrun"].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """A command that is called within a test leaves SIGTERM ignored after an error, as its process is about to end. All
    processes that later tests start would ignore it, too."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if len(sys.modules) >= _modules + 200:  # such as transformers'
            freeze_imported()


def pytest_collection_finish() -> None:
    freeze_heap()  # until the process ends
    freeze_imported()


def freeze_imported() -> None:
    """Further modules, too. Only while ``freeze_heap`` keeps engines from thawing the heap."""
    global _modules
    _modules = len(sys.modules)
    gc.collect()
    gc.freeze()
