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
    parent_T int64: where tokens are trees, the one that each follows; a root's is itself. path_BW: as in StateRows.
    """

    row_T: Tensor
    offset_T: Tensor
    starts_B: Tensor
    ends_B: Tensor
    slots_B: Tensor
    padding_T: Tensor
    most: int
    parent_T: Tensor | None = None
    path_BW: Tensor | None = None

    @property
    def lengths_B(self) -> Tensor:
        return self.ends_B - self.starts_B

    def token_B(self, number_B: Tensor | int) -> Tensor:
        """Each row's token of that number, of those that count; token 0 where a row has none."""
        there_B, place_B = self.lengths_B > number_B, number_B
        if isinstance(number_B, Tensor):
            there_B = there_B & (number_B >= 0)
        if self.path_BW is not None:
            column_B = torch.zeros_like(self.starts_B) + number_B
            place_B = self.path_BW.gather(1, column_B.clamp(0, self.path_BW.shape[1] - 1)[:, None])[:, 0]
        return torch.where(there_B, self.starts_B + place_B, 0)

    def before(self, count: int) -> tuple[Tensor, Tensor]:
        """(token, there): the one that lies ``count`` before each token, and whether it is among the new ones of its
        row."""
        token_T = torch.arange(len(self.row_T), device=self.row_T.device)
        if self.parent_T is None:
            return (token_T - count) % len(token_T), self.offset_T >= count
        there_T = torch.ones_like(self.padding_T)
        for _ in range(count):
            parent_T = self.parent_T[token_T]
            token_T, there_T = parent_T, there_T & (parent_T != token_T)
        return token_T, there_T


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
    if rows.path_BW is not None:
        most = rows.path_BW.shape[1]
    if rows.kept_B is not None:
        ends_B = torch.minimum(ends_B, starts_B + rows.kept_B.clamp(max=most))
        if rows.path_BW is None:
            padding_T = padding_T | (token_T >= ends_B[row_T])
    parent_T = None
    if rows.tree is not None:
        parent_T = starts_B[row_T] + rows.tree.parents_BN.reshape(-1)
    return TokenRows(row_T, offset_T, starts_B, ends_B, slots_B, padding_T, most, parent_T, rows.path_BW)


class NodeStates:
    """The states after the nodes of trees, one node of every row after the other: each continues its parent's."""

    def __init__(self, rows: StateRows, first: Tensor) -> None:
        """``first`` [B, ...]: the state before the root."""
        if rows.tree is None:
            raise ValueError("these rows have no trees")
        self._parents_BN, self._first = rows.tree.parents_BN, first
        self._behind = first.new_empty(self._parents_BN.shape[1], *first.shape)
        self._row_B = torch.arange(len(first), device=first.device)

    def before(self, node: int) -> Tensor:
        """The state that node number ``node`` of each row starts from, [B, ...]; those before it are set."""
        return self._first if node == 0 else self._behind[self._parents_BN[:, node], self._row_B]

    def set(self, node: int, behind: Tensor) -> None:
        self._behind[node] = behind
