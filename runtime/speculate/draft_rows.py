"""Where the drafts of B rows lie: positions, places in paged caches and lengths of tokens after a row's last one.

Knows: what a slot's length means (slot_state.py), which places a proposer may write (proposer.py), and in what order a
chain of drafts and a block of them ask. Does not know: any proposer. Graph-safe; one launch on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.inputs import DecodeAttention, StepInputs
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.schedule.plan import TRASH_BLOCK
from runtime.speculate.draft_kernels import kernels_for


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Of Q tokens of B rows. ``live_B``: neither ghost nor padding. page_table_BP int32.

    positions, kv_slots int64: for the rotation, and where entries go (in the trash block where not live): [Q, B] of a
    chain, whose tokens are asked for one after the other, [B, Q] of a block. entries int32: to attend to, the new ones
    included: [Q, B] of a chain, [B] of a block. tokens_BQ int64: of a block its tokens; None of a chain.
    """

    live_B: Tensor
    page_table_BP: Tensor
    positions: Tensor
    kv_slots: Tensor
    entries: Tensor
    block_size: int
    tokens_BQ: Tensor | None = None

    def of_guess(self, number: int, token_B: Tensor) -> StepInputs:
        """What draft ``number`` of a chain, from 0, asks with."""
        attention = self._attention(self.entries[number], 1)
        return StepInputs(token_B, self.positions[number], self.kv_slots[number], attention, real_T=self.live_B)

    def of_block(self) -> StepInputs:
        """What a block asks with."""
        assert self.tokens_BQ is not None
        attention = self._attention(self.entries, self.tokens_BQ.shape[1])
        return StepInputs(self.tokens_BQ.view(-1), self.positions.view(-1), self.kv_slots.view(-1), attention)

    def _attention(self, entries_B: Tensor, query_len: int) -> DecodeAttention:
        longest = self.page_table_BP.shape[1] * self.block_size
        return DecodeAttention(self.page_table_BP, entries_B, query_len, longest)


def chain_rows(
    tables: SlotTables, rows_B: Tensor, columns: SlotColumns, count: int, *, block_size: int, positions: int
) -> DraftRows:
    """Of ``count`` drafts of slots ``rows_B`` (int64), whose records are ``columns``. The first asks at position
    length - 2, where its entry is already; it writes none. ``positions``: how many of them a rotation knows; drafts may
    reach past the end of a context.
    """
    if (kernels := kernels_for(rows_B)) is None:
        return chain_rows_in_torch(tables, rows_B, columns, count, block_size=block_size, positions=positions)
    laid = kernels.lay_out(
        *(rows_B, columns.last_token, columns.length, columns.finished, tables.block_table_SP, count),
        block_size=block_size,
        positions=positions,
    )
    live_B, pages_BP, positions_QB, kv_slots_QB, entries_QB, _ = laid
    return DraftRows(live_B, pages_BP, positions_QB, kv_slots_QB, entries_QB, block_size)


def block_rows(
    tables: SlotTables, rows_B: Tensor, columns: SlotColumns, width: int, *, mask_token: int, block_size: int,
    positions: int,
) -> DraftRows:  # fmt: skip
    """Of blocks of ``width`` tokens: each row's last one, at position length - 1, and mask tokens after it."""
    if (kernels := kernels_for(rows_B)) is None:
        sizes = {"block_size": block_size, "positions": positions}
        return block_rows_in_torch(tables, rows_B, columns, width, mask_token=mask_token, **sizes)
    live_B, pages_BP, positions_BW, kv_slots_BW, entries_B, tokens_BW = kernels.lay_out(
        *(rows_B, columns.last_token, columns.length, columns.finished, tables.block_table_SP, width),
        block_size=block_size,
        positions=positions,
        mask_token=mask_token,
    )
    return DraftRows(live_B, pages_BP, positions_BW, kv_slots_BW, entries_B, block_size, tokens_BW)


def chain_rows_in_torch(
    tables: SlotTables, rows_B: Tensor, columns: SlotColumns, count: int, *, block_size: int, positions: int
) -> DraftRows:
    """The reference of ``chain_rows``."""
    offsets_Q1 = torch.arange(count, device=rows_B.device)[:, None] - 2
    live_B, length_B = _lengths(columns)
    place_QB, pages_BP = length_B + offsets_Q1, tables.gather_blocks(rows_B)
    kv_slots_QB = _kv_slots(pages_BP, place_QB.t(), live_B, block_size).t().contiguous()
    kv_slots_QB[0] = TRASH_BLOCK * block_size + length_B % block_size
    entries_QB = (place_QB + 1).to(torch.int32)
    return DraftRows(live_B, pages_BP, place_QB.clamp(max=positions - 1), kv_slots_QB, entries_QB, block_size)


def block_rows_in_torch(
    tables: SlotTables, rows_B: Tensor, columns: SlotColumns, width: int, *, mask_token: int, block_size: int,
    positions: int,
) -> DraftRows:  # fmt: skip
    """The reference of ``block_rows``."""
    live_B, length_B = _lengths(columns)
    pages_BP = tables.gather_blocks(rows_B)
    place_BW = length_B[:, None] - 1 + torch.arange(width, device=rows_B.device)
    masks_BQ = torch.full((len(rows_B), width - 1), mask_token, device=rows_B.device)
    return DraftRows(
        live_B, pages_BP, place_BW.clamp(max=positions - 1), _kv_slots(pages_BP, place_BW, live_B, block_size),
        (length_B - 1 + width).to(torch.int32), block_size, torch.cat((columns.last_token[:, None], masks_BQ), 1),
    )  # fmt: skip


def _lengths(columns: SlotColumns) -> tuple[Tensor, Tensor]:
    """(live bool, tokens known, the last one included, int64; 2 where not live), [B] each."""
    live_B = columns.finished == 0
    return live_B, torch.where(live_B, columns.length.to(torch.int64), 2)


def _kv_slots(page_table_BP: Tensor, place_BQ: Tensor, live_B: Tensor, block_size: int) -> Tensor:
    page_BQ = page_table_BP.gather(1, place_BQ // block_size).to(torch.int64)
    return torch.where(live_B[:, None], page_BQ, TRASH_BLOCK) * block_size + place_BQ % block_size
