"""Steady rows against rows that are all looked at in each step."""

from __future__ import annotations

import random

import pytest

from runtime.schedule import prefix
from runtime.schedule.request import Request, SamplingParams
from runtime.schedule.scheduler import SteadyRows
from runtime.schedule.sequence import SequenceState


def rows_of(draw: random.Random, count: int) -> tuple[SequenceState, ...]:
    found = []
    for i in range(count):
        prompt = tuple(range(draw.randint(1, 9)))
        sequence = SequenceState(Request(i, prompt, SamplingParams(max_tokens=99), ()), i, 99)
        sequence.seated(i + 1, 1)
        sequence.publish_at = len(prompt) + draw.randint(-2, 7)
        found.append(sequence)
    return tuple(found)


def gained(seen: list[int], sequence: SequenceState) -> None:
    seen += (sequence.order[1], len(sequence.tokens))
    sequence.publish_at += 3 * (len(sequence.tokens) % 3)


def test_rows_publish_when_and_in_the_order_in_which_looking_at_all_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some publish again in the next step already, as rows do whose blocks are not trusted yet."""
    monkeypatch.setattr(prefix, "gained", gained)
    for seed in range(20):
        seen: list[list[int]] = [[], []]
        rows = [rows_of(random.Random(seed), 7) for _ in seen]
        steady = SteadyRows(rows[0], seen[0])  # type: ignore[arg-type]  # passed to ``gained``
        for step in range(40):
            tokens = [100 * step + i for i in range(7)]
            steady.land(tokens)
            for sequence, token in zip(rows[1], tokens, strict=True):
                sequence.tokens.append(token)
                if len(sequence.tokens) > sequence.publish_at:
                    gained(seen[1], sequence)
        assert seen[0]
        assert seen[0] == seen[1]
        assert [s.tokens for s in rows[0]] == [s.tokens for s in rows[1]]
