"""A role whose rows may gain several tokens a step: a window of W tokens goes through the model, draws decide how many.

Knows: what such a step computes. Does not know: who proposes the window's tokens: a proposer is given
as a function of the rows. Of the scheduler it needs nothing but a plan of width W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from models.inputs import DecodeAttention, StepInputs
from runtime.execute.role import RoleParts
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.slot_state import SlotColumns
from runtime.execute.step.row_role import RowRole
from runtime.execute.step.step_io import gather_window
from runtime.execute.step.tail import Tail


class Proposed(NamedTuple):
    """tokens_BQ int64, ids of the vocabulary: what may follow each row's last token. ``limit_B`` (integers) or None:
    most tokens that each row may gain, proposals or not."""

    tokens_BQ: Tensor
    limit_B: Tensor | None = None


Propose = Callable[[SlotColumns, int], Proposed]  # from the rows' records, so many tokens; graph-safe


class WindowRole(RowRole):
    """Up to ``width`` tokens a row and step, at least 2. ValueError for a model with slot state."""

    def __init__(self, parts: RoleParts, width: int, propose: Propose, name: str | None = None) -> None:
        if parts.has_slot_state:
            raise ValueError(f"windows of {width}: state of slots cannot be taken back where a row keeps fewer tokens")
        super().__init__(parts, name or f"window of {width}", width)
        self._propose = propose
        self._tail = Tail(parts.model, parts.tables, parts.ring)

    def decode(self, rows_B: Tensor, variant: SamplingVariant, exchange_rows: int = 0) -> None:
        """Up to W tokens for every row; ghost and padding rows gain none."""
        parts = self._parts
        columns = parts.tables.gather(rows_B)
        proposed = self._propose(columns, self.width - 1)
        window = gather_window(
            parts.tables, rows_B, columns, proposed.tokens_BQ, parts.limits.block_size, proposed.limit_B
        )
        attention = DecodeAttention(
            page_table_BP=window.page_table_BP,
            kv_lengths_B=window.kv_lengths_B,
            query_len=self.width,
            max_kv_length=window.page_table_BP.shape[1] * parts.limits.block_size,
        )
        inputs = StepInputs(
            token_ids_T=window.tokens_BW.reshape(-1),
            positions_T=window.position_BW.reshape(-1),
            kv_slots_T=window.kv_slots_BW.reshape(-1),
            attention=attention,
            real_T=window.live_BW.reshape(-1),
            exchange_rows=exchange_rows * self.width or None,
        )
        self._tail.finish_window(parts.model.forward(inputs, parts.caches), window, variant)
