"""The two ends of a step: what it reads of its rows' slots before the forward pass, what it writes after the draw.

Knows: how a row's length and finished flag become positions, KV places and masks, and back; slot_state.py says what
they mean. Does not know: the forward pass or the draw between the two.

Everything is graph-safe. On CUDA one Triton launch does each end; the torch code is their reference and runs elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.execute.landing import ResultRing
from runtime.execute.sampling.inputs import SamplingInputs
from runtime.execute.sampling.logprobs import TokenLogprobs
from runtime.execute.sampling.sampler import Draw, Verdict
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.execute.step.step_io_kernels import kernels_for


@dataclass(frozen=True, slots=True)
class Gathered:
    """B rows of a decode step, copied from their slots. Rows that are not live: ghosts and padding.

    columns: their records; sampling: the sampler's view of these. page_table_BP int32, kv_lengths_B int32 (1 where not
    live). token_B int64: the input tokens; position_B int64: theirs, 0 where not live; kv_slots_B int64: where their KV
    goes, in the trash block where not live. live_B bool.
    """

    columns: SlotColumns
    sampling: SamplingInputs
    page_table_BP: Tensor
    kv_lengths_B: Tensor
    token_B: Tensor
    position_B: Tensor
    kv_slots_B: Tensor
    live_B: Tensor


def gather_decode(tables: SlotTables, rows_B: Tensor, block_size: int) -> Gathered:
    """What a decode step needs of slots ``rows_B`` (int64 [B], contiguous); new tensors."""
    if (kernels := kernels_for(rows_B)) is None:
        return gather_decode_in_torch(tables, rows_B, block_size)
    slots = tables.columns
    begun = kernels.begin(
        rows_B, slots.records, slots.last_token, slots.length, slots.finished, tables.block_table_SP, block_size
    )
    columns = SlotColumns(begun.records, tables.stop_ids)
    return Gathered(
        columns=columns,
        sampling=columns.sampling_at(begun.drawn, begun.ended),
        page_table_BP=begun.pages,
        kv_lengths_B=begun.kv_length,
        token_B=begun.token,
        position_B=begun.position,
        kv_slots_B=begun.kv_slot,
        live_B=begun.live,
    )


def gather_decode_in_torch(tables: SlotTables, rows_B: Tensor, block_size: int) -> Gathered:
    """The reference of ``gather_decode``."""
    columns = tables.gather(rows_B)
    page_table_BP = tables.gather_blocks(rows_B)
    live_B = columns.finished == 0
    position_B = torch.where(live_B, columns.length - 1, 0).to(torch.int64)
    page_B = page_table_BP.gather(1, position_B[:, None] // block_size)[:, 0].to(torch.int64)
    return Gathered(
        columns=columns,
        sampling=columns.sampling(),
        page_table_BP=page_table_BP,
        kv_lengths_B=torch.where(live_B, columns.length, 1),
        token_B=columns.last_token,
        position_B=position_B,
        kv_slots_B=torch.where(live_B, page_B, 0) * block_size + position_B % block_size,
        live_B=live_B,
    )


def write_back(
    tables: SlotTables,
    ring: ResultRing,
    rows_B: Tensor,
    columns: SlotColumns,
    draw: Draw,
    verdict: Verdict,
    logprobs: TokenLogprobs | None = None,
) -> None:
    """Write the draw of slots ``rows_B`` into their records and report it. ``columns``: the records it began with.

    ``rows_B`` (int64 [B], contiguous) repeats no slot but 0, whose rows carry slot 0's own values back.
    """
    kernels = kernels_for(rows_B) if logprobs is None else None  # the ring's torch code packs log-probabilities
    if kernels is None:
        write_back_in_torch(tables, ring, rows_B, columns, draw, verdict, logprobs)
        return
    old, table = ((c.last_token, c.length, c.finished) for c in (columns, tables.columns))
    kernels.finish(rows_B, draw.token_B, *verdict, old, table, ring.buffer_EX, ring.appended_1, ring.stamps)


def write_back_in_torch(
    tables: SlotTables,
    ring: ResultRing,
    rows_B: Tensor,
    columns: SlotColumns,
    draw: Draw,
    verdict: Verdict,
    logprobs: TokenLogprobs | None = None,
) -> None:
    """The reference of ``write_back``."""
    tables.store(
        rows_B,
        torch.where(verdict.count_B > 0, draw.token_B, columns.last_token),
        columns.length + verdict.count_B,
        torch.where(columns.finished == 0, verdict.finish_B, columns.finished),
    )
    ring.append(draw.token_B[:, None], verdict.count_B, verdict.finish_B, logprobs)
