"""The program that times the control plane (agreement.py)."""

from __future__ import annotations

import pytest

from tests.bench.agreement import MEASURES, percentiles


@pytest.mark.multiprocess
@pytest.mark.parametrize("measure", MEASURES)
def test_two_ranks_agree_and_are_timed(measure: str) -> None:
    found = percentiles(measure, "unix sockets, blocking", world=2, turns=20)
    assert 0 < found["p50"] <= found["p99"]
