"""The clock of an engine's turns (turn_clock.py): its phases, and the bytes that they copy."""

from __future__ import annotations

import pytest

from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.turn_clock import TurnClock


@pytest.mark.parametrize("depth", [0, 2])
def test_steady_turns_have_all_phases(depth: int) -> None:
    prompts = [[row, *range(5, 14)] for row in range(3)]
    with rig(depth=depth, rows=4) as engine:
        clock = TurnClock(engine)
        run(engine, [request(i, p, stops=(), max_tokens=21) for i, p in enumerate(prompts)], watch=clock.end_turn)
        copied, copies = sum(turn.copied_bytes for turn in clock.turns), sum(turn.copies for turn in clock.turns)
        assert copied == engine.counters["host_to_device_bytes"]
        assert copies == engine.counters["host_to_device_copies"]
    steady = clock.steady
    assert len(steady) == 21 - depth, "the last ones launch nothing"
    for turn in steady:
        assert turn.spent.keys() == {"turn", "exchange", "plan", "launch", "wait", "land"}
        assert turn.spent["turn"] >= sum(turn.spent[phase] for phase in turn.spent if phase != "turn")
    assert any(not turn.copies for turn in steady), "a steady step copies nothing"
