"""Records that are read L steps early hide a slow link: a rank finds in its socket what it needs, and never waits.

No times are asserted: what counts is how often the record of a turn was not there when a rank came to it.
"""

from __future__ import annotations

import pytest

from tests.network.hosts import TwoHosts
from tests.network.turns import RANKS, take_turns

pytestmark = pytest.mark.multiprocess

STEP = 0.02  # seconds


@pytest.mark.parametrize(
    ("delay_ms", "horizon", "hidden"),
    [pytest.param(5.0, 2, True, marks=pytest.mark.long), (50.0, 8, True), (200.0, 1, False)],
)
def test_a_horizon_hides_a_delay_shorter_than_its_steps(
    hosts: TwoHosts, delay_ms: float, horizon: int, hidden: bool
) -> None:
    found = take_turns(hosts, delay_ms, horizon, turns=25, step_seconds=STEP)
    assert len(set(found.effects)) == 1, "the ranks did not act on the same events"
    beyond = max(found.waited[RANKS:])
    assert (beyond < 0.5) is hidden, found
