"""Where the guesses of B rows lie: positions, places in paged caches and lengths of tokens behind a row's last one.

Knows: what a slot's length means (slot_state.py), which places a proposer may write (proposer.py). Does not know: any
proposer. Graph-safe.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.inputs import DecodeAttention
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.schedule.plan import TRASH_BLOCK


@dataclass(frozen=True, slots=True)
class DraftRows:
    """``live_B``: neither ghost nor padding. ``length_B`` int64: tokens known, the last one included; 2 where not live.
    ``positions``: how many of them a rotation knows; drafts may reach past the end of a context.
    """

    live_B: Tensor
    length_B: Tensor
    page_table_BP: Tensor
    block_size: int
    positions: int

    @classmethod
    def of(cls, tables: SlotTables, rows_B: Tensor, columns: SlotColumns, block_size: int, positions: int) -> DraftRows:
        """Of slots ``rows_B`` (int64), whose records are ``columns``."""
        live_B = columns.finished == 0
        length_B = torch.where(live_B, columns.length.to(torch.int64), 2)
        return cls(live_B, length_B, tables.gather_blocks(rows_B), block_size, positions)

    def position(self, offset: int | Tensor) -> Tensor:
        """Of the tokens ``offset`` (broadcast against [B] or [B, 1]) behind the last one, for their rotation."""
        return (self._place(offset)).clamp(max=self.positions - 1)

    def kv_slots(self, offset: int | Tensor) -> Tensor:
        """Where their entries go: in the trash block where not live."""
        place = self._place(offset)
        shape = place.shape
        page = self.page_table_BP.gather(1, (place // self.block_size).view(len(self.live_B), -1)).view(shape)
        live = self.live_B.view(-1, *(1 for _ in shape[1:]))
        return torch.where(live, page.to(torch.int64), TRASH_BLOCK) * self.block_size + place % self.block_size

    def trash_slots(self) -> Tensor:
        """For entries [B] that are there already."""
        return TRASH_BLOCK * self.block_size + self.length_B % self.block_size

    def attention(self, entries_B: Tensor, query_len: int) -> DecodeAttention:
        """Over so many entries, those of the ``query_len`` new ones included."""
        longest = self.page_table_BP.shape[1] * self.block_size
        return DecodeAttention(self.page_table_BP, entries_B.to(torch.int32), query_len, longest)

    def _place(self, offset: int | Tensor) -> Tensor:
        length = self.length_B[:, None] if isinstance(offset, Tensor) else self.length_B
        return length - 1 + offset
