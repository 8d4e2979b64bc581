"""Steady rows against rows that are all looked at in each step."""

from __future__ import annotations

import random

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


def test_rows_are_told_of_when_and_in_the_order_in_which_looking_at_all_would_find_them() -> None:
    """Some are to be found again in the next step already, as rows are that are not trusted to have a full block."""
    for seed in range(20):
        told: list[list[int]] = [[], []]
        rows = [rows_of(random.Random(seed), 7) for _ in told]

        def gained(sequence: SequenceState, told: list[int]) -> None:
            told += (sequence.order[1], len(sequence.tokens))
            sequence.publish_at += 3 * (len(sequence.tokens) % 3)

        steady = SteadyRows(rows[0], lambda sequence, told=told: gained(sequence, told[0]))  # type: ignore[misc]
        for step in range(40):
            tokens = [100 * step + i for i in range(7)]
            steady.land(tokens)
            for sequence, token in zip(rows[1], tokens, strict=True):
                sequence.tokens.append(token)
                if len(sequence.tokens) > sequence.publish_at:
                    gained(sequence, told[1])
        assert told[0]
        assert told[0] == told[1]
        assert [s.tokens for s in rows[0]] == [s.tokens for s in rows[1]]
