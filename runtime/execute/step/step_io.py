"""The two ends of a step: what it reads of its rows' slots before the forward pass, what it writes after the draw.

Knows: how a row's length and finished flag become positions, KV places and masks, and back; slot_state.py says what
they mean. Does not know: the forward pass or the draw between the two.

Everything is graph-safe. On CUDA one Triton launch does each end; the torch code is their reference and runs elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.inputs import PIECE, DecodeAttention
from runtime.execute.result_ring import ResultRing, check_shapes
from runtime.execute.sampling.inputs import SamplingInputs
from runtime.execute.sampling.logprobs import TokenLogprobs
from runtime.execute.sampling.sampler import Draw, Verdict
from runtime.execute.slot_state import NEWEST, SlotColumns, SlotTables
from runtime.execute.staging import Chunks
from runtime.execute.step.step_io_kernels import kernels_for
from runtime.schedule.plan import TRASH_BLOCK


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


class Packed(NamedTuple):
    """T tokens of R rows that decode or prefill. token_ids_T, positions_T, kv_slots_T int64: those of StepInputs.

    kv_lengths_R int32: of rows that decode, the tokens to attend to, guesses included (of ghosts 1, and these); 0 of
    others. ghosts_R bool: the
    row decodes, but has ended.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    kv_lengths_R: Tensor
    ghosts_R: Tensor


class Pieces(NamedTuple):
    """At most PIECE tokens of a chunk each: what DecodeAttention says of rows with ``starts_B``. Those that a step does
    not have are 0 long.
    """

    page_table_BP: Tensor
    kv_lengths_B: Tensor
    starts_B: Tensor
    queries_B: Tensor

    def attention(self, max_kv_length: int) -> DecodeAttention:
        return DecodeAttention(
            self.page_table_BP,
            self.kv_lengths_B,
            PIECE,
            max_kv_length,
            skip_empty=True,
            starts_B=self.starts_B,
            queries_B=self.queries_B,
        )


def gather_packed(
    tables: SlotTables,
    chunks: Chunks,
    block_size: int,
    guesses_SQ: Tensor | None = None,
    depth_SN: Tensor | None = None,
) -> Packed:
    """What a step with chunks needs of its slots; new tensors. Tokens at NEWEST are the slots' latest.

    ``guesses_SQ`` (int64): the Q tokens that may follow those, of rows that decode with Q + 1 tokens each. They lie
    where ``gather_window`` has them. ``depth_SN`` (int64): they are trees of N = Q + 1 nodes, each at such a depth.
    """
    if (kernels := kernels_for(chunks.slots_T)) is None:
        return gather_packed_in_torch(tables, chunks, block_size, guesses_SQ, depth_SN)
    slots = tables.columns
    staged = chunks.token_ids_T, chunks.positions_T, chunks.slots_T, chunks.slots_R, chunks.decodes_R
    columns = slots.last_token, slots.length, slots.finished, slots.max_length
    return Packed(*kernels.begin_packed(*staged, *columns, tables.block_table_SP, block_size, guesses_SQ, depth_SN))


def gather_packed_in_torch(
    tables: SlotTables,
    chunks: Chunks,
    block_size: int,
    guesses_SQ: Tensor | None = None,
    depth_SN: Tensor | None = None,
) -> Packed:
    """The reference of ``gather_packed``."""
    slots, slots_T, decoding_T = tables.columns, chunks.slots_T, chunks.positions_T <= NEWEST
    going_T, length_T = slots.finished[slots_T] == 0, slots.length[slots_T].to(torch.int64)
    guess_T = torch.where(decoding_T, NEWEST - chunks.positions_T, 0)  # which one behind the newest token; 0: itself
    kept_T = torch.where(decoding_T, torch.where(going_T, length_T - 1 + guess_T, 0), chunks.positions_T)
    pages_T = tables.block_table_SP[slots_T, kept_T // block_size].to(torch.int64)
    pages_T = torch.where(decoding_T & ~going_T, TRASH_BLOCK, pages_T)
    token_ids_T = torch.where(decoding_T, slots.last_token[slots_T], chunks.token_ids_T)
    positions_T, longer = kept_T, 0
    if guesses_SQ is not None:
        longer = guesses_SQ.shape[1]
        proposed_T = guesses_SQ[slots_T, (guess_T - 1).clamp(0, longer - 1)]
        token_ids_T = torch.where(guess_T > 0, proposed_T, token_ids_T)
        ahead_T = guess_T if depth_SN is None else torch.where(decoding_T, depth_SN[slots_T, guess_T], 0)
        past_T = decoding_T & (~going_T | (length_T + ahead_T >= slots.max_length[slots_T]))  # its draw would be
        positions_T = torch.where(past_T, 0, kept_T - guess_T + ahead_T)
    decodes_R, live_R = chunks.decodes_R != 0, slots.finished[chunks.slots_R] == 0
    return Packed(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        kv_slots_T=pages_T * block_size + kept_T % block_size,
        kv_lengths_R=torch.where(decodes_R, torch.where(live_R, slots.length[chunks.slots_R], 1) + longer, 0),
        ghosts_R=decodes_R & ~live_R,
    )


def pieces_of(chunks: Chunks, packed: Packed, page_table_RP: Tensor, most: int) -> Pieces:
    """The first ``most`` pieces of the chunks of a step, in the order of their tokens; new tensors, no host read."""
    tokens, device = chunks.positions_T.shape[0], chunks.positions_T.device
    token_T = torch.arange(tokens, device=device)
    ends_R = (chunks.logit_rows_R + 1).cummax(0).values  # rows past the real ones end where the last does
    row_T = torch.searchsorted(ends_R, token_T, right=True)
    inside_T = row_T < len(ends_R)  # the others are padding
    row_T = row_T.clamp(max=len(ends_R) - 1)
    start_T = torch.where(row_T > 0, ends_R[(row_T - 1).clamp(min=0)], 0)
    begins_T = inside_T & (chunks.decodes_R[row_T] == 0) & ((token_T - start_T) % PIECE == 0)
    number_T = torch.where(begins_T, begins_T.cumsum(0) - 1, most).clamp(max=most)
    begin_M = torch.full((most + 1,), tokens, dtype=torch.int64, device=device).scatter(0, number_T, token_T)[:most]
    there_M = torch.arange(most, device=device) < begins_T.sum()
    begin_M = torch.where(there_M, begin_M, 0)
    row_M = row_T[begin_M]
    count_M = torch.where(there_M, (ends_R[row_M] - begin_M).clamp(max=PIECE), 0)
    known_M = packed.positions_T[begin_M] + count_M
    return Pieces(
        page_table_BP=page_table_RP[row_M],
        kv_lengths_B=torch.where(there_M, known_M, 0).to(torch.int32),
        starts_B=begin_M.to(torch.int32),
        queries_B=count_M.to(torch.int32),
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
    """Write the draw of slots ``rows_B`` into their records and histories and report it. ``columns``: the records it
    began with.

    ``rows_B`` (int64 [B], contiguous) repeats no slot but 0, whose rows carry slot 0's own values back. ValueError
    where a shape does not fit the others, or the ring.
    """
    rows = (len(rows_B),)
    drawn = {"tokens": draw.token_B, "counts": verdict.count_B, "finish": verdict.finish_B, "lengths": columns.length}
    check_shapes(f"{rows[0]} rows", {name: (part, rows) for name, part in drawn.items()})
    ring.check(len(rows_B), 1, logprobs)
    kernels = kernels_for(rows_B) if logprobs is None else None  # the ring's torch code packs log-probabilities
    if kernels is None:
        write_back_in_torch(tables, ring, rows_B, columns, draw, verdict, logprobs)
        return
    old, table = ((c.last_token, c.length, c.finished) for c in (columns, tables.columns))
    history_SL, entries = tables.history_SL, (ring.stored_EX, ring.appended_1, ring.stamps)
    kernels.finish(rows_B, draw.token_B, *verdict, old, table, history_SL, *entries)


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
    tables.remember(rows_B, columns.length, draw.token_B[:, None], verdict.count_B)
