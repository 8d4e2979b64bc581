"""Acceptance by a script, for measurements: what a round costs and gains when so many proposals are kept.

Knows: how a round's number of kept proposals follows from rates, and tokens that cost nothing to propose. Does not
know: where rates come from (runtime/speculative_config.py), who may ask for this: only benchmarks, for texts of such an
engine mean nothing.

A round's number is a function of (seed, position) of its row, as draws are: the same at any depth, on any rank, and
whatever else runs. Request seeds differ, so rows keep different numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.execute.proposer import (
    Candidates,
    MakeProposer,
    MaskingProposer,
    Observed,
    Proposed,
    Proposer,
    ProposerParts,
)
from runtime.execute.sampling.counter_rng import Purpose, uniform_draws
from runtime.execute.slot_state import SlotColumns
from runtime.speculate.draft_kernels import kernels_for

_STRIDE = 7919  # a prime: proposals of neighbouring positions are other tokens


class AnyTokens:
    """Proposes tokens by their positions, at no cost. Without weights or caches."""

    name = "synthetic"
    layers: tuple[int, ...] = ()
    reads_hidden = False

    def __init__(self, parts: ProposerParts) -> None:
        self._vocab_size = parts.model.config.vocab_size

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        position_BQ = columns.length.to(torch.int64)[:, None] + torch.arange(count, device=rows_B.device)
        return Proposed((columns.last_token[:, None] + position_BQ * _STRIDE) % self._vocab_size)

    def candidates(self, rows_B: Tensor, columns: SlotColumns, count: int, top_k: int) -> Candidates:
        """Each half as likely as the one before it."""
        rank_C = torch.arange(1, top_k + 1, device=rows_B.device)
        ids_BQC = self.propose(rows_B, columns, count).tokens_BQ[:, :, None] + rank_C - 1
        logprobs_C = rank_C * -math.log(2.0)
        return Candidates(ids_BQC % self._vocab_size, logprobs_C.expand_as(ids_BQC))

    def observe(self, observed: Observed) -> None:
        """It reads nothing."""


class ScriptedAcceptance:
    """``proposer`` at work, but what is kept of its proposals is decided by ``rates``: in a share ``rates[i]`` of all
    rounds the first i + 1 of them, whatever the target draws."""

    def __init__(self, parts: ProposerParts, proposer: Proposer, rates: Sequence[float]) -> None:
        self._proposer = proposer
        self.name = proposer.name if proposer.name == "synthetic" else f"{proposer.name} (synthetic)"
        self.layers = proposer.layers
        self.reads_hidden = proposer.reads_hidden
        self._rates_Q = torch.tensor(list(rates), dtype=torch.float32, device=parts.device.torch_device)

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return self._scripted(self._proposer.propose(rows_B, columns, count), columns)

    def allowed(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        proposer = self._proposer
        propose = proposer.allowed if isinstance(proposer, MaskingProposer) else proposer.propose
        return self._scripted(propose(rows_B, columns, count), columns)

    def _scripted(self, proposed: Proposed, columns: SlotColumns) -> Proposed:
        # Of a tree more tokens are proposed than there are places.
        rates_Q = self._rates_Q[: proposed.tokens_BQ.shape[1]]
        return proposed._replace(scripted_B=kept_by_script(columns.seed, columns.length, rates_Q))

    def observe(self, observed: Observed) -> None:
        self._proposer.observe(observed)


def kept_by_script(seed_B: Tensor, length_B: Tensor, rates_Q: Tensor) -> Tensor:
    """int32 [B]: how many drafts a step keeps, by ``rates_Q`` (float32), none larger than the one before it."""
    if (kernels := kernels_for(seed_B)) is None:
        return kept_in_torch(seed_B, length_B, rates_Q)
    return kernels.script(seed_B, length_B, rates_Q, purpose=int(Purpose.ACCEPT))


def kept_in_torch(seed_B: Tensor, length_B: Tensor, rates_Q: Tensor) -> Tensor:
    """The reference of ``kept_by_script``."""
    coin_B1 = uniform_draws(seed_B, length_B, Purpose.ACCEPT)[:, None]
    return (coin_B1 < rates_Q).sum(1, dtype=torch.int32)


def scripted(make: MakeProposer, rates: Sequence[float]) -> MakeProposer:
    """What ``make`` makes, with acceptance by ``rates``."""
    return lambda parts: ScriptedAcceptance(parts, make(parts), rates)
