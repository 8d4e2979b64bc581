"""At default settings a request that arrives on two ranks is in the next step that is planned; the chain goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.engine.arrival_ranks import ARRIVALS
from tests.runtime.engine.rig import tiny_folder
from tests.torchrun import torchrun


@pytest.mark.multiprocess
def test_from_arrival_to_plan_is_one_step_and_the_depth(tmp_path: Path) -> None:
    """Counted from the step that the device is busy with when the request arrives."""
    output = tmp_path / "found.json"
    ran = torchrun(2, "tests.runtime.engine.arrival_ranks", str(tiny_folder(tmp_path / "model")), str(output))
    assert ran.returncode == 0, ran.said[-3000:]
    found = json.loads(output.read_text())
    assert len(found["rows"]) == ARRIVALS
    for row in found["rows"]:
        assert row["planned"] - row["running"] <= 1 + found["chain_depth"], row
        assert row["planned"] == row["turn"] + 1 + found["horizon"], row
    others = json.loads(output.with_suffix(".last").read_text())
    assert [row["planned"] for row in others] == [row["planned"] for row in found["rows"]]
    breaks = {name: count for name, count in found["counters"].items() if name.startswith("chain_breaks")}
    assert breaks == {"chain_breaks{start}": 1}
