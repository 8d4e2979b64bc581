"""What the ranks of an exchange bring to it, and what each has to have after it, to the bit, by torch.

Knows: rows that nobody has, minus zeros, NaN, choices of nothing. Does not know: how rows travel, devices.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import Tensor

from parallel.comm.peer_buffers import SENTINEL

LOOKS_LIKE_SENTINEL = torch.tensor([SENTINEL, SENTINEL], dtype=torch.int16).view(torch.float32)
EXPERTS = 6


@dataclass(frozen=True, slots=True)
class Layer:
    """What all ranks bring to a gather of ``rows`` each and to a scatter-sum of as many, known to all.

    ``hidden`` [T, N], ``weights`` and ``ids`` [T, C] of every rank, T its own and at most ``rows``; ``terms``
    [ranks * rows, N] of every rank; ``numbers`` by id.
    """

    rows: int
    hidden: list[Tensor]
    weights: list[Tensor]
    ids: list[Tensor]
    terms: list[Tensor]
    numbers: Tensor

    def brought(self, rank: int) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
        """The arguments of a rank's gather, but for who does it."""
        return self.hidden[rank], self.weights[rank], self.ids[rank], self.rows, self.numbers

    def gathered(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows that nobody has are zeros of no choice; what looks empty, and nothing else, becomes zero."""
        hidden, weights, ids = (
            torch.cat([_filled(part, self.rows, rest) for part in parts])
            for parts, rest in ((self.hidden, 0), (self.weights, 0), (self.ids, -1))
        )
        return sendable(hidden), weights, torch.where(ids < 0, -1, self.numbers[ids.clamp(min=0)])

    def summed(self, rank: int) -> Tensor:
        """In float32, the first rank's first, rounded once."""
        total = torch.zeros(self.rows, self.terms[0].shape[1], device=self.terms[0].device)
        for part in self.terms:
            total += sendable(part[rank * self.rows : (rank + 1) * self.rows]).float()
        return total.to(self.terms[0].dtype)

    def on(self, device: torch.device) -> Layer:
        brought = (self.hidden, self.weights, self.ids, self.terms)
        hidden, weights, ids, terms = ([part.to(device) for part in parts] for parts in brought)
        return Layer(self.rows, hidden, weights, ids, terms, self.numbers.to(device))


def layer(
    seed: int, ranks: int, rows: int, width: int, choices: int, dtype: torch.dtype, *, full: bool = False
) -> Layer:
    """At least one rank has all of its ``rows``, ``full``: every one. ``width`` is at least 12."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    had = [draw.randint(rows if full else 1, rows) for _ in range(ranks)]
    had[seed % ranks] = rows
    hidden = [torch.randn(tokens, width, generator=generator).to(dtype) for tokens in had]
    weights = [torch.rand(tokens, choices, generator=generator) for tokens in had]
    ids = [torch.randint(-1, EXPERTS, (n, choices), generator=generator, dtype=torch.int32) for n in had]
    for rank in range(ranks):
        hidden[rank].view(torch.int16)[0, 4:8] = SENTINEL  # minus zeros, one beside the other
        hidden[rank].view(torch.int16)[-1, 11] = SENTINEL  # one alone
        weights[rank][-1] = torch.nan
        ids[rank][-1, -1] = -1
    terms = torch.randn(ranks, ranks * rows, width, generator=generator).to(dtype)
    terms[: ranks - seed % 2].view(torch.int16)[..., 6:8] = SENTINEL
    numbers = torch.randperm(EXPERTS, generator=generator).to(torch.int32) - 2
    return Layer(rows, hidden, weights, ids, [*terms], numbers.clamp(min=-1))  # those of others are -1


def same_bits(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    """NaN and zeros' signs included."""
    return len(found) == len(wanted) and all(starmap(_same, zip(found, wanted, strict=True)))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one.view(torch.int16), other.view(torch.int16))


def sendable(x: Tensor) -> Tensor:
    """With zero for every 32 bits that look empty."""
    words = x.view(torch.int32)
    return torch.where(words == LOOKS_LIKE_SENTINEL.view(torch.int32).to(x.device), 0, words).view(x.dtype)


def _filled(part: Tensor, rows: int, rest: int) -> Tensor:
    return torch.cat([part, part.new_full((rows - len(part), part.shape[1]), rest)])
