"""Random lives of requests over every hybrid family, without guesses: each depth gives what the serial engine gives.

Knows: which seeds hold every event. Does not know: the events one by one (test_lifecycle.py), or speculation
(test_hybrid_lifecycle.py).
"""

from __future__ import annotations

import pytest

from runtime.schedule.request import FinishReason
from tests.runtime.engine.conftest import HYBRIDS
from tests.runtime.engine.test_lifecycle import drawn_life

pytestmark = pytest.mark.usefixtures("every_model")


LIVES = [
    pytest.param(family, seed, depth, marks=() if (number + of_seed + of_depth) % 2 else pytest.mark.long)
    for number, family in enumerate(HYBRIDS)
    for of_seed, seed in enumerate((46, 115))
    for of_depth, depth in enumerate((1, 3))
]  # each family has both seeds and both depths, each recurrence every pair of them


@pytest.mark.parametrize(("every_model", "seed", "depth"), LIVES, indirect=["every_model"])
def test_random_lives_of_every_hybrid_family(seed: int, depth: int) -> None:
    """Two short lives that hold all of it, each at one of two depths. More of them are ``long``."""
    life = drawn_life(seed, depth)
    assert min(life.counters[name] for name in ("evictions", "pauses", "ghost_rows", "mixed_steps")) > 0
    assert seed != 46 or FinishReason.CANCELLED in {reason for _, reason in life.answers.values()}
    assert any(entry[2] for entries in life.logprobs.values() for entry in entries), "top-n log-probabilities"
    assert any(score[2] for scores in life.scores.by_request.values() for score in scores.values()), "of prompts, too"
