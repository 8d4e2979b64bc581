"""The two ends of a window: what it reads of its rows' slots before the forward pass, what its draws change behind it.

Knows: how lengths and guesses become positions, KV places and masks; how draws become tokens that rows gained, records,
histories, an entry of the result ring, and what a proposer is shown of them. Does not know: the forward pass or the
draw between the two, the rule of acceptance (sampling/acceptance.py).

Everything is graph-safe. On CUDA one Triton launch does each end; the torch code is their reference and runs elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.execute.proposer import Proposed
from runtime.execute.result_ring import ResultRing, check_shapes
from runtime.execute.sampling.acceptance import Acceptance, accept, accept_path
from runtime.execute.sampling.draft_tree import NO_GUESS, DraftTree, lay_out, walk
from runtime.execute.sampling.inputs import SamplingInputs
from runtime.execute.sampling.logprobs import TokenLogprobs
from runtime.execute.sampling.rejection import Drafted
from runtime.execute.sampling.sampler import Draw, Verdict
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.execute.step.step_io_kernels import window_kernels_for
from runtime.schedule.plan import TRASH_BLOCK
from runtime.schedule.request import FinishReason

_CODES = (int(FinishReason.STOP), int(FinishReason.ERROR))


@dataclass(frozen=True, slots=True)
class Window:
    """B rows of a step in which each may gain up to W tokens, W >= 2, copied from their slots.

    rows_B int64: their slots. columns: their records. sampling: the sampler's view of the B * W draws, row-major; those
    past a row's ``max_length`` count as finished. tokens_BW int64: the last token and W - 1 proposals. position_BW
    int64: theirs, 0 where not live. live_BW bool: not of a ghost, of padding, or past ``max_length``. kv_slots_BW
    int64: where their KV goes; in the trash block for ghosts and padding. page_table_BP int32; kv_lengths_B int32, the
    window included. ``limit_B``: most tokens that a row may gain in this step; None where there is no limit but W.
    ``scripted_B``: proposals that are kept whatever is drawn (Proposed); None where draws decide. ``drafted``: what the
    proposals were drawn from; None where they are compared with draws.

    ``tree``: the tokens are the nodes of a tree, the last token its root, of which a row gains a path of at most W;
    then there are N of them, and N takes the place of W in all shapes. None: each follows the one before it.
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

    @property
    def tokens(self) -> int:
        """Of a row: W, or N."""
        return self.tokens_BW.shape[1]


class Shown(NamedTuple):
    """What a proposer is told of a window's T = B * W tokens, row-major; of a tree, of the path that was drawn.

    As Observed and Advanced have them: slots_T, next_T int64, kept_T bool, kept_kv_slots_T int64, last_B int64,
    gained_B bool. As StepInputs has them: token_ids_T, positions_T, kv_slots_T int64. path_T int64: of a tree, which of
    the B * N tokens those are; None of a chain, whose T are all of them.
    """

    slots_T: Tensor
    next_T: Tensor
    kept_T: Tensor
    kept_kv_slots_T: Tensor
    last_B: Tensor
    gained_B: Tensor
    token_ids_T: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    path_T: Tensor | None = None


class Committed(NamedTuple):
    """What came of a window."""

    accepted: Acceptance
    shown: Shown


def gather_window(
    tables: SlotTables,
    rows_B: Tensor,
    columns: SlotColumns,
    proposed: Proposed,
    block_size: int,
    width: int,
) -> Window:
    """What a step of Q + 1 tokens a row needs of slots ``rows_B``; new tensors. ``columns``: ``tables.gather`` of them.
    ``proposed``: the Q tokens that may follow each row's last one. A row may gain ``width`` tokens, fewer than Q + 1
    where they are a tree; a node's position follows from its depth, its KV place from its number.

    A row begins before its sequence's end and may reach past it. Tokens there draw nothing. Their KV goes into the
    row's own blocks nevertheless, for attention loads all that ``kv_lengths_B`` covers, and memory that nobody wrote
    may hold NaN.
    """
    if (kernels := window_kernels_for(rows_B)) is None:
        return gather_window_in_torch(tables, rows_B, columns, proposed, block_size, width)
    tree = None if proposed.parents_BQ is None else lay_out(proposed.parents_BQ, width - 1)
    begun = kernels.begin(
        rows_B,
        columns.records,
        (columns.last_token, columns.length, columns.finished, columns.max_length),
        proposed.tokens_BQ,
        None if tree is None else tree.depth_BN,
        tables.block_table_SP,
        block_size,
    )
    repeated = SlotColumns(begun.records, tables.stop_ids)
    return Window(
        rows_B=rows_B,
        columns=columns,
        sampling=repeated.sampling_at(begun.drawn, begun.ended),
        page_table_BP=begun.pages,
        kv_lengths_B=begun.kv_length,
        tokens_BW=begun.token,
        position_BW=begun.position,
        kv_slots_BW=begun.kv_slot,
        live_BW=begun.live,
        limit_B=proposed.limit_B,
        scripted_B=proposed.scripted_B,
        drafted=proposed.drafted,
        tree=tree,
    )


def gather_window_in_torch(
    tables: SlotTables,
    rows_B: Tensor,
    columns: SlotColumns,
    proposed: Proposed,
    block_size: int,
    width: int,
) -> Window:
    """The reference of ``gather_window``."""
    tokens_BW = torch.cat((columns.last_token[:, None], proposed.tokens_BQ), 1)
    offsets_W = torch.arange(tokens_BW.shape[1], device=rows_B.device)
    going_B, length_B = columns.finished == 0, columns.length.to(torch.int64)
    tree = None if proposed.parents_BQ is None else lay_out(proposed.parents_BQ, width - 1)
    # The position that each token's draw is for.
    drawn_BW = length_B[:, None] + (offsets_W if tree is None else tree.depth_BN)
    live_BW = going_B[:, None] & (drawn_BW < columns.max_length[:, None])
    kept_BW = torch.where(going_B[:, None], length_B[:, None] + offsets_W - 1, 0)
    page_table_BP = tables.gather_blocks(rows_B)
    page_BW = page_table_BP.gather(1, kept_BW // block_size).to(torch.int64)
    sampling = columns.sampling().select(
        torch.arange(len(rows_B), device=rows_B.device).repeat_interleave(len(offsets_W))
    )
    return Window(
        rows_B=rows_B,
        columns=columns,
        sampling=replace(sampling, position=drawn_BW.reshape(-1), finished=~live_BW.reshape(-1)),
        page_table_BP=page_table_BP,
        kv_lengths_B=torch.where(going_B, columns.length, 1) + (tokens_BW.shape[1] - 1),
        tokens_BW=tokens_BW,
        position_BW=torch.where(live_BW, drawn_BW - 1, 0),
        kv_slots_BW=torch.where(going_B[:, None], page_BW, 0) * block_size + kept_BW % block_size,
        live_BW=live_BW,
        limit_B=proposed.limit_B,
        scripted_B=proposed.scripted_B,
        drafted=proposed.drafted,
        tree=tree,
    )


def commit_window(
    tables: SlotTables,
    ring: ResultRing,
    window: Window,
    draw: Draw,
    verdict: Verdict,
    width: int,
    logprobs: TokenLogprobs | None = None,
) -> Committed:
    """Decide by the draws of all tokens of a window which of them its rows gain (at most ``width``), write these into
    records and histories, and report them.

    ``logprobs``: of all draws, reported with them; the host reads as many as a row gained. Rows repeat no slot but 0,
    whose rows carry slot 0's own values back. ValueError where a shape does not fit the others, or the ring.
    """
    _check_shapes(window, draw, verdict, width)
    ring.check(len(window.rows_B), width)
    # The ring's torch code packs log-probabilities.
    kernels = window_kernels_for(window.rows_B) if logprobs is None else None
    if kernels is None:
        return commit_window_in_torch(tables, ring, window, draw, verdict, width, logprobs)
    columns, guesses_BQ, nodes_BW = window.columns, window.tokens_BW[:, 1:], None
    if window.tree is not None:
        drawn_BN = draw.token_B.view(window.tokens_BW.shape)
        scripted = window.scripted_B is not None
        nodes_BW, guesses_BQ = walk(window.tokens_BW, window.tree, drawn_BN, width - 1, scripted=scripted)
    old, table = ((c.last_token, c.length, c.finished) for c in (columns, tables.columns))
    committed = kernels.commit(
        window.rows_B,
        (draw.token_B, *verdict),
        guesses_BQ,
        nodes_BW,
        (window.limit_B, window.scripted_B),
        (window.tokens_BW, window.position_BW, window.kv_slots_BW),
        old,
        table,
        tables.history_SL,
        (ring.stored_EX, ring.appended_1, ring.stamps),
        codes=_CODES,
        no_guess=NO_GUESS,
    )
    accepted = Acceptance(committed.token, committed.counts, committed.finish, nodes_BW)
    shown = Shown(
        slots_T=committed.slot.view(-1),
        next_T=committed.token.view(-1),
        kept_T=committed.kept.view(-1),
        kept_kv_slots_T=committed.kept_kv_slot.view(-1),
        last_B=committed.last,
        gained_B=committed.gained,
        token_ids_T=committed.token_id.view(-1),
        positions_T=committed.position.view(-1),
        kv_slots_T=committed.kv_slot.view(-1),
        path_T=None if committed.path is None else committed.path.view(-1),
    )
    return Committed(accepted, shown)


def _check_shapes(window: Window, draw: Draw, verdict: Verdict, width: int) -> None:
    """A kernel takes them as they come. When a step is captured, and in the few that are not."""
    rows, tokens = window.tokens_BW.shape
    if width > tokens or (window.tree is None and width != tokens):
        raise ValueError(f"rows of {tokens} tokens may not gain {width}")
    each, row, drawn = (rows, tokens), (rows,), (rows * tokens,)
    parts: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "slots": (window.rows_B, row),
        "lengths": (window.columns.length, row),
        "positions": (window.position_BW, each),
        "KV places": (window.kv_slots_BW, each),
        "limits": (window.limit_B, row),
        "scripted": (window.scripted_B, row),
        "draws": (draw.token_B, drawn),
        "counts": (verdict.count_B, drawn),
        "finish": (verdict.finish_B, drawn),
    }
    check_shapes(f"{rows} rows x {tokens} tokens", parts)


def commit_window_in_torch(
    tables: SlotTables,
    ring: ResultRing,
    window: Window,
    draw: Draw,
    verdict: Verdict,
    width: int,
    logprobs: TokenLogprobs | None = None,
) -> Committed:
    """The reference of ``commit_window``."""
    columns, limits = window.columns, (window.limit_B, window.scripted_B)
    if window.tree is None:
        accepted = accept(draw, verdict, window.tokens_BW[:, 1:], *limits)
    else:
        accepted, logprobs = accept_path(draw, verdict, logprobs, window.tokens_BW, window.tree, width, *limits)
    count_B = accepted.count_B
    newest_B1 = (count_B.to(torch.int64)[:, None] - 1).clamp(min=0)
    newest_B = accepted.tokens_BW.gather(1, newest_B1)[:, 0]
    tables.store(
        window.rows_B,
        torch.where(count_B > 0, newest_B, columns.last_token),
        columns.length + count_B,
        torch.where(columns.finished == 0, accepted.finish_B, columns.finished),
    )
    ring.append(accepted.tokens_BW, count_B, accepted.finish_B, logprobs)
    tables.remember(window.rows_B, columns.length, accepted.tokens_BW, count_B)
    return Committed(accepted, _shown(window, accepted))


def _shown(window: Window, accepted: Acceptance) -> Shown:
    (rows, width), device = accepted.tokens_BW.shape, accepted.tokens_BW.device
    row_B, nodes_BW, path_T = torch.arange(rows, device=device), accepted.nodes_BW, None
    token_ids_BW, position_BW, kv_slots_BW = window.tokens_BW, window.position_BW, window.kv_slots_BW[:, :width]
    if nodes_BW is not None:
        path_T = (row_B[:, None] * window.tokens + nodes_BW).reshape(-1)
        token_ids_BW, position_BW = token_ids_BW.gather(1, nodes_BW), position_BW.gather(1, nodes_BW)
    kept_BW = torch.arange(width, device=device) < accepted.count_B[:, None]
    return Shown(
        slots_T=window.rows_B.repeat_interleave(width),
        next_T=accepted.tokens_BW.reshape(-1),
        kept_T=kept_BW.reshape(-1),
        kept_kv_slots_T=torch.where(kept_BW, kv_slots_BW, TRASH_BLOCK).reshape(-1),
        last_B=row_B * width + (accepted.count_B.to(torch.int64) - 1).clamp(min=0),
        gained_B=accepted.count_B > 0,
        token_ids_T=token_ids_BW.reshape(-1),
        positions_T=position_BW.reshape(-1),
        kv_slots_T=kv_slots_BW.reshape(-1),
        path_T=path_T,
    )
