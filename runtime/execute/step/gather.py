"""Gathers a step's inputs by slot from the device tables, together with each row's draft tokens.

Knows: how a row's length and finished flag (slot_state.py) become positions, KV places and masks. Does not know: the
forward pass, sampling, what is written back (commit.py). Everything is graph-safe. On CUDA one Triton launch gathers
all; the torch code is the reference and runs elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from models.inputs import PIECE, DecodeAttention, StateRows, StepInputs
from runtime.execute.proposer import Proposed
from runtime.execute.sampling.draft_tree import DraftTree, lay_out
from runtime.execute.sampling.inputs import SamplingInputs
from runtime.execute.sampling.rejection import Drafted
from runtime.execute.slot_state import NEWEST, SlotColumns, SlotTables
from runtime.execute.staging import Chunks
from runtime.execute.step import step_io_kernels
from runtime.schedule.plan import TRASH_BLOCK

if TYPE_CHECKING:
    from runtime.execute.step.step_io_triton import Begun


@dataclass(frozen=True, slots=True)
class Rows:
    """B rows of W tokens each, copied from their slots: the newest token, and W - 1 draft tokens.

    rows_B int64: their slots. columns: their records. sampling: the sampler's view of the B * W samples, row-major;
    those past a row's ``max_length`` count as finished. tokens_BW int64. position_BW int64, 0 if not live. live_BW
    bool: no ghost or padding, and not past ``max_length``. kv_slots_BW int64: KV places; of ghosts and padding in the
    trash block. page_table_BP int32. kv_lengths_B int32: tokens to attend to, the W included (of ghosts 1, and W - 1).
    ``limit_B``, ``scripted_B``, ``drafted``: as in Proposed. ``groups``: page tables [G, B, P] and KV places [G, B, W]
    of every group of layers, the first of which the fields above are; None for one group.

    ``tree``: the tokens are the N nodes of a draft tree, the newest token its root, of which a row appends a path of at
    most W; then N takes the place of W in all shapes. None: a chain.
    """

    rows_B: Tensor
    columns: SlotColumns
    sampling: SamplingInputs
    page_table_BP: Tensor
    kv_lengths_B: Tensor
    tokens_BW: Tensor
    position_BW: Tensor
    kv_slots_BW: Tensor
    live_BW: Tensor
    limit_B: Tensor | None = None
    scripted_B: Tensor | None = None
    drafted: Drafted | None = None
    tree: DraftTree | None = None
    groups: tuple[Tensor, Tensor] | None = None

    @property
    def tokens(self) -> int:
        """Of a row: W, or N."""
        return self.tokens_BW.shape[1]

    @property
    def places(self) -> Tensor:
        """KV places [B, W], or of every group [G, B, W]."""
        return self.kv_slots_BW if self.groups is None else self.groups[1]

    def inputs(self, block_size: int, state: StateRows | None = None, exchange: int = 0) -> StepInputs:
        """Of a forward pass over these tokens. ``exchange``: as in StepShape."""
        return StepInputs(
            token_ids_T=self.tokens_BW.reshape(-1),
            positions_T=self.position_BW.reshape(-1),
            kv_slots_T=self.places.flatten(-2),
            attention=DecodeAttention(
                page_table_BP=self.page_table_BP if self.groups is None else self.groups[0],
                kv_lengths_B=self.kv_lengths_B,
                query_len=self.tokens,
                max_kv_length=self.page_table_BP.shape[1] * block_size,
                tree_BQ=None if self.tree is None else self.tree.seen_BN,
            ),
            real_T=self.live_BW.reshape(-1),
            state=state,
            exchange_rows=exchange or None,
        )


def gather_decode(tables: SlotTables, rows_B: Tensor, block_size: int) -> Rows:
    """One token for each of the slots ``rows_B`` (int64 [B], contiguous); new tensors."""
    if (kernels := step_io_kernels.kernels_for(rows_B)) is None:
        return gather_decode_in_torch(tables, rows_B, block_size)
    slots = tables.columns
    columns = slots.records, slots.last_token, slots.length, slots.finished
    begun = kernels.begin(rows_B, columns, tables.block_tables_GSP, block_size)
    return _rows_of(begun, rows_B, SlotColumns(begun.records, tables.stop_ids), tables)


def _rows_of(
    begun: Begun, rows_B: Tensor, columns: SlotColumns, tables: SlotTables, proposed: Proposed | None = None,
    tree: DraftTree | None = None,
) -> Rows:  # fmt: skip
    return Rows(
        rows_B=rows_B, columns=columns,
        sampling=SlotColumns(begun.records, tables.stop_ids).sampling_at(begun.drawn, begun.ended),
        page_table_BP=begun.pages[0], kv_lengths_B=begun.kv_length, tokens_BW=begun.token, position_BW=begun.position,
        kv_slots_BW=begun.kv_slot[0], live_BW=begun.live, limit_B=None if proposed is None else proposed.limit_B,
        scripted_B=None if proposed is None else proposed.scripted_B,
        drafted=None if proposed is None else proposed.drafted, tree=tree,
        groups=(begun.pages, begun.kv_slot) if len(begun.pages) > 1 else None,
    )  # fmt: skip


def _places_of(
    tables: SlotTables, rows_B: Tensor, going_B: Tensor, kept_BW: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Page tables and KV places of tokens ``kept_BW`` of slots, those of ghosts in the trash block, of every group."""
    pages_GBP = tables.block_tables_GSP.index_select(1, rows_B)
    page_GBW = pages_GBP.gather(2, (kept_BW // block_size).expand(len(pages_GBP), -1, -1)).to(torch.int64)
    return pages_GBP, torch.where(going_B[:, None], page_GBW, TRASH_BLOCK) * block_size + kept_BW % block_size


def gather_decode_in_torch(tables: SlotTables, rows_B: Tensor, block_size: int) -> Rows:
    """The reference of ``gather_decode``."""
    columns = tables.gather(rows_B)
    live_B = columns.finished == 0
    position_B = torch.where(live_B, columns.length - 1, 0).to(torch.int64)
    pages_GBP, places_GBW = _places_of(tables, rows_B, live_B, position_B[:, None], block_size)
    return Rows(
        rows_B=rows_B, columns=columns, sampling=columns.sampling(), page_table_BP=pages_GBP[0],
        kv_lengths_B=torch.where(live_B, columns.length, 1), tokens_BW=columns.last_token[:, None],
        position_BW=position_B[:, None], kv_slots_BW=places_GBW[0], live_BW=live_B[:, None],
        groups=(pages_GBP, places_GBW) if len(pages_GBP) > 1 else None,
    )  # fmt: skip


def gather_window(
    tables: SlotTables, rows_B: Tensor, columns: SlotColumns, proposed: Proposed, block_size: int, width: int
) -> Rows:
    """Q + 1 tokens for each of the slots ``rows_B``, with the Q draft tokens of ``proposed``; new tensors. ``columns``:
    ``tables.gather`` of them. A row may append ``width`` tokens, fewer than Q + 1 for a tree; a node's position follows
    from its depth, its KV place from its number.

    A row may reach past its sequence's end. Tokens there sample nothing, but their KV goes into the row's own blocks:
    attention loads all that ``kv_lengths_B`` covers, and memory that was never written may hold NaN.
    """
    if (kernels := step_io_kernels.kernels_for(rows_B)) is None:
        return gather_window_in_torch(tables, rows_B, columns, proposed, block_size, width)
    tree = None if proposed.parents_BQ is None else lay_out(proposed.parents_BQ, width - 1)
    begun = kernels.begin_window(
        rows_B, columns.records, (columns.last_token, columns.length, columns.finished, columns.max_length),
        proposed.tokens_BQ, None if tree is None else tree.depth_BN, tables.block_tables_GSP, block_size,
    )  # fmt: skip
    return _rows_of(begun, rows_B, columns, tables, proposed, tree)


def gather_window_in_torch(
    tables: SlotTables, rows_B: Tensor, columns: SlotColumns, proposed: Proposed, block_size: int, width: int
) -> Rows:
    """The reference of ``gather_window``."""
    tokens_BW = torch.cat((columns.last_token[:, None], proposed.tokens_BQ), 1)
    offsets_W = torch.arange(tokens_BW.shape[1], device=rows_B.device)
    going_B, length_B = columns.finished == 0, columns.length.to(torch.int64)
    tree = None if proposed.parents_BQ is None else lay_out(proposed.parents_BQ, width - 1)
    # The position that each token's sample is for.
    drawn_BW = length_B[:, None] + (offsets_W if tree is None else tree.depth_BN)
    live_BW = going_B[:, None] & (drawn_BW < columns.max_length[:, None])
    kept_BW = torch.where(going_B[:, None], length_B[:, None] + offsets_W - 1, 0)
    pages_GBP, places_GBW = _places_of(tables, rows_B, going_B, kept_BW, block_size)
    sampling = columns.sampling().select(
        torch.arange(len(rows_B), device=rows_B.device).repeat_interleave(len(offsets_W))
    )
    return Rows(
        rows_B=rows_B, columns=columns,
        sampling=replace(sampling, position=drawn_BW.reshape(-1), finished=~live_BW.reshape(-1)),
        page_table_BP=pages_GBP[0], kv_lengths_B=torch.where(going_B, columns.length, 1) + (tokens_BW.shape[1] - 1),
        tokens_BW=tokens_BW, position_BW=torch.where(live_BW, drawn_BW - 1, 0), kv_slots_BW=places_GBW[0],
        live_BW=live_BW, limit_B=proposed.limit_B, scripted_B=proposed.scripted_B, drafted=proposed.drafted, tree=tree,
        groups=(pages_GBP, places_GBW) if len(pages_GBP) > 1 else None,
    )  # fmt: skip


class Packed(NamedTuple):
    """T tokens of R decode requests and prefill chunks. token_ids_T, positions_T int64: as in StepInputs. places_GT
    int64: KV places, of every group.

    kv_lengths_R int32: of decode requests, the tokens to attend to, draft tokens included (of ghosts 1, and these); 0
    of others. ghosts_R bool: a decode request that has ended.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    places_GT: Tensor
    kv_lengths_R: Tensor
    ghosts_R: Tensor

    @property
    def kv_slots_T(self) -> Tensor:
        """As in StepInputs."""
        return self.places_GT if len(self.places_GT) > 1 else self.places_GT[0]


def gather_packed(
    tables: SlotTables, chunks: Chunks, block_size: int, drafts_SQ: Tensor | None = None, depth_SN: Tensor | None = None
) -> Packed:
    """What a packed step needs of its slots; new tensors. Tokens at NEWEST are the slots' newest.

    ``drafts_SQ`` (int64): the Q draft tokens after those, of decode requests with Q + 1 tokens each, at the places that
    ``gather_window`` gives them. ``depth_SN`` (int64): they are trees of N = Q + 1 nodes, each at such a depth.
    """
    if (kernels := step_io_kernels.kernels_for(chunks.slots_T)) is None:
        return gather_packed_in_torch(tables, chunks, block_size, drafts_SQ, depth_SN)
    slots = tables.columns
    staged = chunks.token_ids_T, chunks.positions_T, chunks.slots_T, chunks.slots_R, chunks.decodes_R
    columns = slots.last_token, slots.length, slots.finished, slots.max_length
    return Packed(*kernels.begin_packed(staged, columns, tables.block_tables_GSP, block_size, drafts_SQ, depth_SN))


def gather_packed_in_torch(
    tables: SlotTables, chunks: Chunks, block_size: int, drafts_SQ: Tensor | None = None, depth_SN: Tensor | None = None
) -> Packed:
    """The reference of ``gather_packed``."""
    slots, slots_T, decoding_T = tables.columns, chunks.slots_T, chunks.positions_T <= NEWEST
    going_T, length_T = slots.finished[slots_T] == 0, slots.length[slots_T].to(torch.int64)
    draft_T = torch.where(decoding_T, NEWEST - chunks.positions_T, 0)  # its number after the newest token, which is 0
    kept_T = torch.where(decoding_T, torch.where(going_T, length_T - 1 + draft_T, 0), chunks.positions_T)
    pages_GT = tables.block_tables_GSP[:, slots_T, kept_T // block_size].to(torch.int64)
    pages_GT = torch.where(decoding_T & ~going_T, TRASH_BLOCK, pages_GT)
    token_ids_T = torch.where(decoding_T, slots.last_token[slots_T], chunks.token_ids_T)
    positions_T, longer = kept_T, 0
    if drafts_SQ is not None:
        longer = drafts_SQ.shape[1]
        proposed_T = drafts_SQ[slots_T, (draft_T - 1).clamp(0, longer - 1)]
        token_ids_T = torch.where(draft_T > 0, proposed_T, token_ids_T)
        ahead_T = draft_T if depth_SN is None else torch.where(decoding_T, depth_SN[slots_T, draft_T], 0)
        past_T = decoding_T & (~going_T | (length_T + ahead_T >= slots.max_length[slots_T]))  # its sample would be
        positions_T = torch.where(past_T, 0, kept_T - draft_T + ahead_T)
    decodes_R, live_R = chunks.decodes_R != 0, slots.finished[chunks.slots_R] == 0
    return Packed(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        places_GT=pages_GT * block_size + kept_T % block_size,
        kv_lengths_R=torch.where(decodes_R, torch.where(live_R, slots.length[chunks.slots_R], 1) + longer, 0),
        ghosts_R=decodes_R & ~live_R,
    )


def pieces_of(chunks: Chunks, packed: Packed, page_table_RP: Tensor, most: int, max_kv_length: int) -> DecodeAttention:
    """Attention of a step's chunks cut into at most ``most`` pieces of PIECE tokens, each a separate row with
    ``starts_B``, in the order of their tokens; pieces that a step does not have are 0 long. New tensors, no host read.
    """
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
    return DecodeAttention(
        page_table_RP[..., row_M, :], torch.where(there_M, known_M, 0).to(torch.int32), PIECE, max_kv_length,
        skip_empty=True, starts_B=begin_M.to(torch.int32), queries_B=count_M.to(torch.int32),
    )  # fmt: skip
