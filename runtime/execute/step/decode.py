"""The decode role: one new token for every running row, the whole step one captured graph a bucket.

Knows: what a decode step computes, from slot tables to the result ring; row_role.py has its graphs.
Does not know: plans, other roles, how rows are gathered and drawn (step_io.py, tail.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.inputs import DecodeAttention, StateRows, StepInputs
from runtime.execute.role import RoleParts
from runtime.execute.sampling.inputs import KERNEL_VARIANTS, SamplingVariant
from runtime.execute.step.proposer_feed import ProposerFeed
from runtime.execute.step.row_role import RowRole
from runtime.execute.step.step_io import gather_decode
from runtime.execute.step.tail import Tail
from runtime.schedule.plan import PADDING_SLOT


class DecodeRole(RowRole):
    """One token a row and step."""

    def __init__(self, parts: RoleParts, name: str = "decode") -> None:
        super().__init__(parts, name, width=1)
        self._tail = Tail(parts.model, parts.tables, parts.ring)
        self._feed = ProposerFeed(parts)

    def compile_sampling(self) -> None:
        """Run every sampling kernel once in every form, so that no request waits for a compiler; nothing on a CPU."""
        if self._parts.device.torch_device.type == "cpu":
            return
        ranks = self._parts.model.collectives.size
        for variant in dict.fromkeys(variant.on_ranks(ranks) for variant in KERNEL_VARIANTS):
            self._tail.rehearse(self._parts.config.decode_buckets[0], variant)

    def decode(self, rows_B: Tensor, variant: SamplingVariant, exchange_rows: int = 0) -> None:
        """One token for every row; ghost and padding rows are masked."""
        parts = self._parts
        rows = gather_decode(parts.tables, rows_B, parts.limits.block_size)
        attention = DecodeAttention(
            page_table_BP=rows.page_table_BP,
            kv_lengths_B=rows.kv_lengths_B,
            query_len=1,
            max_kv_length=rows.page_table_BP.shape[1] * parts.limits.block_size,
        )
        inputs = StepInputs(
            token_ids_T=rows.token_B,
            positions_T=rows.position_B,
            kv_slots_T=rows.kv_slots_B,
            attention=attention,
            real_T=rows.live_B,
            state=StateRows(torch.where(rows.live_B, rows_B, PADDING_SLOT)) if parts.has_slot_state else None,
            exchange_rows=exchange_rows or None,
        )
        hidden_BN = parts.model.forward(inputs, parts.caches, self._feed.tap)
        draw, verdict = self._tail.finish(hidden_BN, rows_B, rows.columns, rows.sampling, variant)
        if self._feed.on:
            self._feed.show_rows(inputs, rows_B, hidden_BN, self._feed.features_TF, draw, verdict)
