"""Chunks against single steps of the gated delta rule: rows of given lengths in one launch, from a state that is there.

Knows: what either launch may touch. Does not know: devices, or how near is near enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.inputs import StateRows
from models.kernels.recurrent.delta_chunk import delta_chunks
from models.kernels.recurrent.delta_step import delta_steps
from tests.models.kernels.recurrent.delta_cases import DeltaCase

# Of a chunk of 64, or of 32: none, one and two, alone and with 1 to 3 tokens more or less.
AT_EDGES = (63, 64, 65, 2, 128, 129, 31, 67, 0, 33)


def both(case: DeltaCase, most: int, pdl: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(out, states) of rows of more than ``most`` tokens by chunks, and the same of single steps. NaN is behind the
    last row. Checks that all other rows are left alone. Where all lengths are the same, rows have no ends."""
    made, device = case.made(), case.device
    rule, lengths = made.rule, torch.tensor(case.lengths)
    values, heads, nobody = rule.v_heads * rule.v_dim, rule.v_heads, 5
    ragged = len(set(case.lengths)) > 1
    projected = torch.cat(made.projected)
    if ragged:
        projected = torch.cat((projected, projected.new_full((nobody, projected.shape[1]), float("nan"))))
    channels = made.weight_CJ.shape[0]
    qkv_TC, b_TH = projected[:, :channels].contiguous(), projected[:, channels + values : channels + values + heads]
    a_TH = projected[:, channels + values + heads :]
    slots_B = torch.arange(len(lengths), 0, -1)
    rows = StateRows(slots_B.to(device), lengths.cumsum(0).to(device) if ragged else None)
    draw = torch.Generator().manual_seed(1)
    begun = torch.randn(made.state_SHVK.shape, generator=draw).to(device)
    long_B = lengths > most
    of_long_T = torch.cat((torch.repeat_interleave(long_B, lengths), torch.zeros(nobody * ragged, dtype=torch.bool)))
    found = []
    for launch, its_most in ((delta_chunks, most), (delta_steps, len(qkv_TC))):
        state, out_TV = begun.clone(), qkv_TC.new_full((len(qkv_TC), values), float("nan"))
        launch(qkv_TC, b_TH, a_TH, rule, state, rows, out_TV, pdl, most=its_most)
        if launch is delta_chunks:
            assert bool(out_TV[~of_long_T].isnan().all())
            left_S = torch.ones(len(state), dtype=torch.bool)
            left_S[slots_B[long_B]] = False
            assert torch.equal(state[left_S], begun[left_S])
        found.append((out_TV[of_long_T], state[slots_B[long_B]]))
    return found[0], found[1]
