"""Sequences that go through steps in pieces of any length, as a scheduler would cut them.

Knows: slots, pieces, rows without tokens and padding. Does not know: what is computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.inputs import StateRows


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, start + count) of a sequence."""

    sequence: int
    start: int
    count: int


class RaggedStep(NamedTuple):
    """``pieces``: by row, then as many tokens of padding. Row i's slot is its sequence's number + 1."""

    pieces: tuple[Piece, ...]
    padding: int

    @property
    def rows(self) -> StateRows:
        slots = torch.tensor([piece.sequence + 1 for piece in self.pieces] + [0])  # a row of nobody, without tokens
        ends = torch.tensor([piece.count for piece in self.pieces] + [0]).cumsum(0)
        return StateRows(slots, ends)

    @property
    def positions_T(self) -> Tensor:
        known = [torch.arange(piece.start, piece.start + piece.count) for piece in self.pieces]
        return torch.cat([*known, torch.zeros(self.padding, dtype=torch.int64)])

    def tokens(self, of_sequences: list[Tensor]) -> Tensor:
        """The pieces of tensors [length, ...] in order; NaN for padding."""
        parts = [of_sequences[piece.sequence][piece.start : piece.start + piece.count] for piece in self.pieces]
        nobody_TX = of_sequences[0].new_full((self.padding, *of_sequences[0].shape[1:]), float("nan"))
        return torch.cat([*parts, nobody_TX])


def steps(lengths: list[int], seed: int, most: int = 5) -> Iterator[RaggedStep]:
    """Until every sequence of ``lengths`` is through: pieces of 0 to ``most`` tokens, in changing orders of rows."""
    draw, done = random.Random(seed), [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        pieces = []
        for sequence in draw.sample(range(len(lengths)), len(lengths)):
            count = min(draw.randint(0, most), lengths[sequence] - done[sequence])
            pieces.append(Piece(sequence, done[sequence], count))
            done[sequence] += count
        step = RaggedStep(tuple(pieces), draw.randint(0, 3))
        if len(step.positions_T):
            yield step
