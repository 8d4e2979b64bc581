"""Steps with chunks at the corners of their memory: one row that decodes, or as many as there may be, beside a chunk of
the most tokens, or of one.

Knows: who comes when, so that a step of one corner is followed by one of another; how steps with chunks are replayed
and launched kernel by kernel in turn, so that each path finds what the other one left. Does not know: the model, the
width, or what must come out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice, pairwise
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.execute.launch_spec import LaunchNeeds, LaunchResolver, LaunchSpec
from runtime.schedule.config import MixedSteps
from runtime.schedule.plan import StepPlan
from runtime.schedule.request import Request
from tests.runtime.engine.lives import Life, prompt
from tests.runtime.engine.rig import VOCABULARY, request

ROWS, MOST = 8, 48  # rows of a step, tokens of its chunks
NEXT_TURN = ROWS + 1


class Corners:
    """``first``, then everybody else through ``act``; ``limits``: the rig's. Rows that decode have ``width`` tokens."""

    def __init__(self, width: int, vocabulary: int = VOCABULARY) -> None:
        self._width, ids = width, count()
        self.limits: dict[str, Any] = {
            "rows": ROWS,
            "buckets": (1, 2, 4, 8),
            "max_prefill_tokens": MOST,
            "prefill_buckets": (ROWS * width + 4, MOST + ROWS * width),
            "mixed": MixedSteps(long_prompt=2 * MOST),
            "prefix_caching": False,
        }

        def some(many: int, length: int, max_tokens: int) -> list[Request]:
            found = []
            for i in islice(ids, many):
                tokens = [token % vocabulary for token in prompt(length, i)]
                found.append(request(i, tokens, max_tokens=max_tokens, temperature=1.0, stops=()))
            return found

        self.first = some(1, MOST, 1)
        lasting, answer = some(1, 1, 110), 2 * width + 2
        # Each as soon as so many requests are left.
        self._waves = [(NEXT_TURN, [*lasting, *some(ROWS - 1, 1, answer)])]
        for _ in range(2):
            self._waves += [
                (1, some(1, MOST, 1)),
                (1, some(ROWS - 2, 1, answer)),
                (NEXT_TURN, some(1, 1, 1)),
                (NEXT_TURN, some(1, MOST, 1)),
                (1, some(1, 1, 1)),
            ]
        self.everybody = [*self.first, *(one for _, wave in self._waves for one in wave)]

    def act(self, engine: Engine, turn: int) -> None:
        if turn and self._waves and engine.scheduler.unfinished <= self._waves[0][0]:
            for one in self._waves.pop(0)[1]:
                engine.add(one)

    def check(self, life: Life) -> None:
        """Each corner was met by both paths, behind another corner by the other path."""
        assert not self._waves, "everything was over before the last requests came"
        width = self._width
        met = [
            (spec.plan.decode_rows, len(spec.plan.chunks), spec.plan.packed_tokens, spec.captured > 0)
            for spec in life.specs
            if spec.plan.chunks
        ]
        assert len(met) == 12
        assert all(before[3] is not after[3] for before, after in pairwise(met))
        for path in (True, False):
            for decoding in (1, ROWS - 1):
                for tokens in (1, MOST):
                    assert (decoding, 1, decoding * width + tokens, path) in met
        assert {(0, 1, MOST), (0, ROWS, ROWS)} == {step[:3] for step in met[:2]}


def paths_in_turn(monkeypatch: pytest.MonkeyPatch, *, replayed_first: bool) -> None:
    """From here on every other step with chunks is replayed, the others are launched kernel by kernel."""
    resolve, steps = LaunchResolver._resolve, count(0 if replayed_first else 1)

    def in_turn(resolver: LaunchResolver, plan: StepPlan, agreed: LaunchNeeds | None) -> LaunchSpec:
        sizes = resolver._sizes
        if plan.chunks and next(steps) % 2:
            resolver._sizes = replace(sizes, prefill=())
        try:
            return resolve(resolver, plan, agreed)
        finally:
            resolver._sizes = sizes

    monkeypatch.setattr(LaunchResolver, "_resolve", in_turn)
