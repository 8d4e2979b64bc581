"""Steady steps of an engine on a GPU: none synchronises, captures or allocates.

Knows: how long an engine takes to be steady. Does not know: which model, proposer or kind of step it has.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.engine import Engine
from runtime.schedule.request import Request
from tests.gpu.test_device_gpu import no_synchronisation

STEPS_BEFORE, STEPS_WATCHED = 6, 5


def run_without_a_sync(engine: Engine, requests: Iterable[Request]) -> None:
    """Runs ``requests`` to their ends; some steps in the middle must not synchronise, and none capture or allocate."""
    for one in requests:
        engine.add(one)
    for _ in range(STEPS_BEFORE):
        engine.step()
    with no_synchronisation():
        for _ in range(STEPS_WATCHED):
            engine.step()
    while engine.has_work:
        engine.step()
    assert engine.counters["graph_captures_after_warmup"] == 0
    assert engine.counters["device_allocs_after_warmup"] == 0
