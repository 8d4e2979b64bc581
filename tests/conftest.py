"""What pytest has imported and collected is hidden from Python's garbage collector while the tests run.

Each engine that is built collects garbage twice, a benchmark several times, and each collection would look at all of it
(0.2 to 0.5 s, on a busy machine more than most of these tests take).
"""

from __future__ import annotations

from runtime.gc_freeze import freeze_heap


def pytest_collection_finish() -> None:
    freeze_heap()  # until the process ends
