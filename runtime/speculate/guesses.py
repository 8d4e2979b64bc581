"""How a drafter's hidden states become guesses: the likeliest token of each, or one drawn from its distribution.

Knows: both, and what a round hands on of them. Does not know: which drafter there is, how it computes, what is kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from models.drafters.draft_head import DraftHead
from runtime.execute.proposer import Observed, Proposed, Proposer
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.rejection import Drafted, draw_guesses
from runtime.execute.slot_state import SlotColumns
from runtime.speculate.likeliest import likeliest


class Guesses(Protocol):
    """Those of one round, in order. Graph-safe."""

    def take(self, hidden_BQN: Tensor) -> Tensor:
        """The next Q guesses of each row, int64 [B, Q], from the drafter's final hidden states for them."""
        ...

    def proposed(self) -> Proposed:
        """All that were taken."""
        ...


class LikeliestGuesses:
    """``draft_sample_method`` greedy. Ranks exchange 8 bytes a guess."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self._taken: list[Tensor] = []

    def take(self, hidden_BQN: Tensor) -> Tensor:
        tokens_BQ = likeliest(self._head, hidden_BQN.flatten(0, 1)).view(hidden_BQN.shape[:2])
        self._taken.append(tokens_BQ)
        return tokens_BQ

    def proposed(self) -> Proposed:
        return Proposed(torch.cat(self._taken, 1))


class DrawnGuesses:
    """``draft_sample_method`` probabilistic, for rows with such records. Ranks exchange all logits of a guess."""

    def __init__(self, head: DraftHead, columns: SlotColumns, variant: SamplingVariant) -> None:
        self._head, self._variant = head, variant
        self._sampling = columns.sampling()
        self._taken: list[tuple[Tensor, Tensor]] = []

    def take(self, hidden_BQN: Tensor) -> Tensor:
        batch, count = hidden_BQN.shape[:2]
        before = sum(index_BQ.shape[1] for index_BQ, _ in self._taken)
        device = hidden_BQN.device
        rows = self._sampling.select(torch.arange(batch, device=device).repeat_interleave(count))
        offset_T = torch.arange(before, before + count, device=device).repeat(batch)
        rows = replace(rows, position=rows.position.to(torch.int64) + offset_T)
        logits_TD = self._head.all_logits(hidden_BQN.flatten(0, 1))
        index_T, probs_TD = draw_guesses(logits_TD, self._head.ids_V, rows, self._variant)
        index_BQ = index_T.view(batch, count)
        self._taken.append((index_BQ, probs_TD.view(batch, count, -1)))
        return self._head.target_ids(index_BQ)

    def proposed(self) -> Proposed:
        index_BQ, probs_BQD = (torch.cat(parts, 1) for parts in zip(*self._taken, strict=True))
        drafted = Drafted(probs_BQD, index_BQ, self._head.ids_V)
        return Proposed(self._head.target_ids(index_BQ), drafted=drafted)


class Drafter(Proposer, Protocol):
    """A proposer with weights."""

    @property
    def head(self) -> DraftHead: ...

    def guess(self, rows_B: Tensor, columns: SlotColumns, count: int, guesses: Guesses) -> Proposed:
        """As ``propose``, with guesses of that kind."""
        ...


class ProbabilisticProposer:
    """``drafter``, whose guesses are drawn in steps in which some row draws at random."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.layers, self.reads_hidden = drafter.name, drafter.layers, drafter.reads_hidden

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return self._drafter.propose(rows_B, columns, count)

    def draw(self, rows_B: Tensor, columns: SlotColumns, count: int, variant: SamplingVariant) -> Proposed:
        return self._drafter.guess(rows_B, columns, count, DrawnGuesses(self._drafter.head, columns, variant))

    def observe(self, observed: Observed) -> None:
        self._drafter.observe(observed)
