"""Random gated delta nets, and sequences that go through them in pieces.

Knows: shapes, slots and what lies in those of nobody. Does not know: which kernels compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.kernels.interface import DeltaRule
from tests.models.kernels.recurrent.ragged_sequences import steps
from tests.plant import Kernels

TAPS = 4


class Made(NamedTuple):
    """``projected``: of each sequence, [length, q | k | v | z | b | a]. Slots of nobody are NaN."""

    projected: list[Tensor]
    weight_CJ: Tensor
    window_SJC: Tensor
    state_SHVK: Tensor
    rule: DeltaRule


@dataclass(frozen=True, slots=True)
class DeltaCase:
    """``repeats``: every token is nearly the same, and little decays: where the triangle is hardest to invert."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    repeats: bool = False
    device: str = "cpu"

    def made(self) -> Made:
        draw = torch.Generator().manual_seed(sum(self.lengths))
        keys, values = self.k_heads * self.k_dim, self.v_heads * self.v_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        def given(x: Tensor) -> Tensor:
            return x.to(self.device, self.dtype)

        channels, width = 2 * keys + values, 2 * keys + 2 * values + 2 * self.v_heads
        sequences = [normal(length, width) for length in self.lengths]
        decay_bias = normal(self.v_heads)
        if self.repeats:
            sequences = [x[:1] + 1e-3 * x for x in sequences]
            decay_bias -= 8.0
        slots = len(self.lengths) + 3
        window_SJC = torch.zeros(slots, TAPS, channels, dtype=self.dtype, device=self.device)
        state_SHVK = torch.zeros(slots, self.v_heads, self.v_dim, self.k_dim, device=self.device)
        for bank in (window_SJC, state_SHVK):
            bank[0] = bank[-2:] = float("nan")
        rule = DeltaRule(
            self.k_heads,
            self.v_heads,
            self.k_dim,
            self.v_dim,
            normal(self.v_heads).to(self.device),
            decay_bias.to(self.device),
            (1 + 0.2 * normal(self.v_dim)).to(self.device),
            1e-6,
        )
        weight_CJ = given(0.7 * normal(channels, TAPS))
        return Made([given(x) for x in sequences], weight_CJ, window_SJC, state_SHVK, rule)


def run_pieces(kernels: Kernels, case: DeltaCase, most: int, seed: int = 1) -> tuple[list[Tensor], Tensor]:
    """Results [length, v_heads * v_dim] of each sequence, cut into pieces of up to ``most`` tokens, and the states."""
    made = case.made()
    found: list[list[Tensor]] = [[] for _ in case.lengths]
    for step in steps(list(case.lengths), seed, most):
        rows = step.rows
        assert rows.ends_B is not None
        rows = type(rows)(rows.slots_B.to(case.device), rows.ends_B.to(case.device))
        projected_TX = step.tokens(made.projected)
        out_TV = kernels.conv_gated_delta(
            projected_TX,
            made.weight_CJ,
            made.window_SJC,
            made.rule,
            made.state_SHVK,
            rows,
            step.positions_T.to(case.device),
        )
        first = 0
        for piece in step.pieces:
            found[piece.sequence].append(out_TV[first : first + piece.count])
            first += piece.count
    assert bool(made.state_SHVK[-2:].isnan().all())
    assert bool(made.window_SJC[-2:].isnan().all())
    return [torch.cat(parts) for parts in found], made.state_SHVK[1:-2]
