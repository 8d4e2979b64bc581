"""What can happen to a request happens in a group too: test_lifecycle.py beside another group that has its own life.

The suite's requests are the first group's. The second comes and goes: idle at first, then with one request after the
other, then idle again, with prefill and decode steps in the first's way. Nothing that the suite counts may change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.schedule.plan import Admit
from runtime.schedule.request import FinishReason
from tests.runtime.engine import lives, rig
from tests.runtime.engine.conftest import over_model
from tests.runtime.engine.group_rigs import accompanied_rig
from tests.runtime.engine.lives import live, oracle, same
from tests.runtime.engine.random_lives import random_life
from tests.runtime.engine.rig import TINY, request
from tests.runtime.engine.test_experts import EXPERTS
from tests.runtime.engine.test_lifecycle import *  # noqa: F403 - the whole suite, over the rig below

OTHERS = {
    turn: [Admit(request(9000 + turn, range(turn % 7, turn % 7 + 9), max_tokens=1 + turn % 5, stops=()))]
    for turn in (*range(4, 18, 5), *range(25, 90, 9))
}
DEPTHS_OF_GROUPS = [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 60))]


@pytest.fixture(params=["attention", pytest.param("hybrid", marks=pytest.mark.long)])  # type: ignore[no-redef]
def every_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both long: groups agree on steps, whatever a layer keeps."""
    return over_model(str(request.param), monkeypatch)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:  # type: ignore[no-redef]  # instead of the suite's own
    """Fixtures have all parameters."""


@pytest.fixture(params=DEPTHS_OF_GROUPS)  # type: ignore[no-redef]  # instead of the suite's own
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def accompanied(depth: int, **limits: Any) -> AbstractContextManager[Engine]:
    """What is compared with, the serial engine, is alone."""
    if depth == 0:
        return rig.rig(depth=depth, **limits)
    return accompanied_rig(depth=depth, arrivals=OTHERS, **limits)


@pytest.fixture(autouse=True, scope="module")
def engines_have_company() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig, "TINY", TINY | EXPERTS)
        patch.setattr(lives, "rig", accompanied)
        lives._alone.cache_clear()
        yield
    lives._alone.cache_clear()


@pytest.mark.parametrize("seed", SEEDS)  # type: ignore[no-redef]  # instead of the suite's own
def test_random_lives(seed: int) -> None:
    """Steps with chunks are launched one by one in two of three lives, replayed from graphs in the third."""
    drawn = random_life(seed)
    limits, rows = drawn.limits, drawn.limits["rows"]
    if seed % 3 == 1:
        limits["prefill_buckets"] = tuple(sorted({rows + 1, rows + limits["max_prefill_tokens"]}))
    life = live(drawn.first, drawn.act, depth=(2, 1, 4)[seed % 3], later=drawn.later, **limits)
    same(life, oracle(drawn.requests), but=[i for i in drawn.cut if life.answers[i][1] is FinishReason.CANCELLED])
