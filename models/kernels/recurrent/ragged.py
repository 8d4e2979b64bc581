"""Which row each token of a step belongs to, and where in that row it is: device tensors, whatever the lengths.

Knows: StateRows (models/inputs.py). Does not know: what a layer does with the rows' states.
Shape letters as in models/inputs.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.inputs import StateRows


@dataclass(frozen=True, slots=True)
class TokenRows:
    """row_T int64: each token's row (of padding: the last one). offset_T int64: how many of the row's new tokens come
    before it. starts_B, ends_B int64: row i's tokens are [starts_B[i], ends_B[i]). slots_B int64: as in StateRows.
    padding_T bool: the token is no row's. ``most``: no row has more tokens, as far as the host knows.
    """

    row_T: Tensor
    offset_T: Tensor
    starts_B: Tensor
    ends_B: Tensor
    slots_B: Tensor
    padding_T: Tensor
    most: int

    @property
    def lengths_B(self) -> Tensor:
        return self.ends_B - self.starts_B


def token_rows(rows: StateRows, tokens: int) -> TokenRows:
    """Of a step of ``tokens`` tokens; new tensors, no host read."""
    slots_B, ends_B = rows.slots_B, rows.ends_B
    count, device = len(slots_B), slots_B.device
    most = tokens
    if ends_B is None:
        most = tokens // count
        ends_B = torch.arange(1, count + 1, device=device) * most
    starts_B = torch.cat((ends_B.new_zeros(1), ends_B[:-1]))
    token_T = torch.arange(tokens, device=device)
    row_T = torch.searchsorted(ends_B, token_T, right=True)  # the number of rows for padding
    padding_T = row_T == count
    row_T = row_T.clamp(max=count - 1)
    offset_T = token_T - starts_B[row_T]
    if rows.kept_B is not None:
        ends_B = torch.minimum(ends_B, starts_B + rows.kept_B)
        padding_T = padding_T | (token_T >= ends_B[row_T])
    return TokenRows(row_T, offset_T, starts_B, ends_B, slots_B, padding_T, most)
