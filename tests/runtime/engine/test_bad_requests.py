"""1,000 bad and border requests through each door of an engine of one rank and of two (5,000 with ``-m long``): nobody
else notices. What is refused is refused before another rank hears of it, so two ranks take the time for those that are
served.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.engine.bad_requests import CONTEXT, ROWS, check, model_folder
from tests.runtime.engine.rig import rig
from tests.torchrun import torchrun

COUNTS = pytest.mark.parametrize("count", [1000, pytest.param(5000, marks=pytest.mark.long)])


def enough(found: dict[str, int], count: int) -> None:
    """Most were refused, and a good part was not: the generator is about borders, too."""
    for door in ("complete", "add"):
        assert count // 2 < found[door] < count * 9 // 10, found
    assert found["steps"] > 100


@COUNTS
def test_one_rank(tmp_path: Path, count: int) -> None:
    with rig(rows=ROWS, max_model_len=CONTEXT, max_prefill_tokens=128) as engine:
        enough(check(engine, model_folder(tmp_path), count), count)


@pytest.mark.multiprocess
@COUNTS
def test_two_ranks(tmp_path: Path, count: int) -> None:
    folder, output = model_folder(tmp_path / "model"), tmp_path / "found.json"
    ran = torchrun(2, "tests.runtime.engine.bad_requests", str(folder), str(count), str(output))
    assert ran.returncode == 0, ran.said[-3000:]
    enough(json.loads(output.read_text()), count)
