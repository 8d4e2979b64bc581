"""Convolution windows and recurrences in plain torch, token by token: what the Triton kernels are tested against.

Knows: the arithmetic, in float32 (float64 where activations are). Does not know: speed.
Shape letters as in models/inputs.py; S slots, C channels, J taps of a convolution.

Rows that are not live share the null slot, whose contents belong to nobody. What belongs to nobody may be NaN: it is
left out by selection, never by a product with zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import StateRows
from models.kernels.recurrent.ragged import token_rows


def causal_conv(
    x_TC: Tensor,
    weight_CJ: Tensor,
    bias_C: Tensor | None,
    window_SJC: Tensor,
    rows: StateRows,
    positions_T: Tensor,
) -> Tensor:
    """See Kernels.causal_conv. A token's result does not depend, in any bit, on who shares the step."""
    where, taps = token_rows(rows, len(x_TC)), weight_CJ.shape[1]
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    slot_T = where.slots_B[where.row_T]
    sum_TC = torch.zeros(x_TC.shape, dtype=wide, device=x_TC.device)
    for back in reversed(range(taps)):  # the oldest input first
        held_TC = window_SJC[slot_T, (positions_T - back) % taps]
        new_T1 = (where.offset_T >= back).unsqueeze(1)
        sum_TC = sum_TC + torch.where(new_T1, x_TC.roll(back, 0), held_TC).to(wide) * weight_CJ[:, taps - 1 - back].to(
            wide
        )
    if bias_C is not None:
        sum_TC = sum_TC + bias_C.to(wide)
    last_B = (where.ends_B - 1).clamp(min=0)
    for back in range(taps):
        there_B1 = (where.lengths_B > back).unsqueeze(1)
        tap_B = (positions_T[last_B] - back) % taps
        old_BC = window_SJC[where.slots_B, tap_B]
        window_SJC[where.slots_B, tap_B] = torch.where(there_B1, x_TC[(last_B - back).clamp(min=0)], old_BC)
    return F.silu(sum_TC).to(x_TC.dtype)
