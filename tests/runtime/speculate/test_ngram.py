"""Prompt lookup against the search that a person would write, over lists."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from runtime.speculate.ngram import look_up_in_torch


def expected(tokens: Sequence[int], count: int, low: int, high: int) -> list[int]:
    """The longest run that ends ``tokens`` and stands earlier, at its earliest place; what follows, repeated."""
    for length in range(min(high, len(tokens) - 1), low - 1, -1):
        tail = list(tokens[-length:])
        for begin in range(len(tokens) - length):
            if list(tokens[begin : begin + length]) == tail:
                follows = list(tokens[begin + length :])
                return [follows[i % len(follows)] for i in range(count)]
    return [tokens[-1]] * count


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 3), (2, 2), (2, 5), (5, 5)])
@pytest.mark.parametrize("count", [1, 4, 31])
def test_random_sequences(count: int, low: int, high: int) -> None:
    draw = random.Random(count * 100 + low * 10 + high)
    rows = [[draw.randrange(draw.choice((2, 4, 30))) for _ in range(draw.randrange(1, 60))] for _ in range(40)]
    history_SL = torch.randint(0, 3, (50, 64), dtype=torch.int32)  # what lies past a length is not read
    slots = draw.sample(range(50), 40)
    for slot, tokens in zip(slots, rows, strict=True):
        history_SL[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    lengths_B = torch.tensor([len(tokens) for tokens in rows], dtype=torch.int32)
    found_BQ = look_up_in_torch(history_SL, torch.tensor(slots), lengths_B, count, low, high)
    assert found_BQ.dtype == torch.int64
    assert found_BQ.tolist() == [expected(tokens, count, low, high) for tokens in rows]


def test_the_example_of_vllm() -> None:
    """[2, 3] stands in [1, 2, 3, 4, 2, 3], and 4, 2, 3 follow it; then they follow again."""
    history_SL = torch.tensor([[1, 2, 3, 4, 2, 3, 0, 0]], dtype=torch.int32)
    found = look_up_in_torch(history_SL, torch.tensor([0]), torch.tensor([6], dtype=torch.int32), 4, 2, 3)
    assert found.tolist() == [[4, 2, 3, 4]]


def test_an_empty_slot_gets_some_token() -> None:
    history_SL = torch.full((1, 8), 7, dtype=torch.int32)
    found = look_up_in_torch(history_SL, torch.tensor([0]), torch.tensor([0], dtype=torch.int32), 3, 1, 2)
    assert found.tolist() == [[7, 7, 7]]
