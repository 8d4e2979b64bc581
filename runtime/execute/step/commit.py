"""Writes a step's samples back: slot records, token histories, an entry of the result ring, what a drafter observes.

Knows: how samples become appended tokens (the rule of acceptance is in sampling/acceptance.py), and how these are laid
out as Observed. Does not know: the forward pass, sampling, what a proposer makes of it. Everything is graph-safe. On
CUDA one Triton launch writes it all back; the torch code is the reference and runs elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.inputs import DecodeAttention, StepInputs
from models.layers.layer_tap import LayerTap
from runtime.execute.proposer import Advanced, Observed, Proposer, observes
from runtime.execute.result_ring import ResultRing, check_shapes
from runtime.execute.sampling.acceptance import Acceptance, accept, accept_path
from runtime.execute.sampling.draft_tree import NO_GUESS, walk
from runtime.execute.sampling.sampler import Draw, Verdict
from runtime.execute.slot_state import SlotTables
from runtime.execute.step import step_io_kernels
from runtime.execute.step.gather import Rows
from runtime.schedule.plan import TRASH_BLOCK
from runtime.schedule.request import FinishReason

_CODES = (int(FinishReason.STOP), int(FinishReason.ERROR))


class Shown(NamedTuple):
    """The T = B * W tokens of a step, row-major, as a proposer observes them; of a tree, those of the accepted path.

    As in Observed and Advanced: slots_T, next_T int64, kept_T bool, kept_kv_slots_T int64, last_B int64, gained_B bool.
    As in StepInputs: token_ids_T, positions_T, kv_slots_T int64. path_T int64: for a tree, which of the B * N tokens
    they are; None for a chain, whose T are all of them.
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
    """``shown`` is None for rows of one token: ``shown_token`` makes it where a proposer observes them."""

    accepted: Acceptance
    shown: Shown | None = None


def commit(
    tables: SlotTables, ring: ResultRing, rows: Rows, draw: Draw, verdict: Verdict, width: int,
    reported: Sequence[Tensor] = (),
) -> Committed:  # fmt: skip
    """Append to each row those of its samples that count, at most ``width``: write them into records and histories, and
    report them.

    ``reported``: of all samples (SlotFeature.report); the host reads as many as a row appended. ``rows`` repeat no slot
    but 0, whose rows carry slot 0's own values back. ValueError if a shape does not fit the others, or the ring.
    """
    _check_shapes(rows, draw, verdict, width)
    ring.check(len(rows.rows_B), width, reported if rows.tree is None else ())  # of a tree, those of its path
    columns, drafts_BQ, nodes_BW = rows.columns, rows.tokens_BW[:, 1:], None
    old, table = ((c.last_token, c.length, c.finished) for c in (columns, tables.columns))
    entries = ring.stored_EX, ring.appended_1, ring.stamps
    kernels = None if reported else step_io_kernels.kernels_for(rows.rows_B)
    if kernels is None:  # the ring's torch code packs what is reported
        return commit_in_torch(tables, ring, rows, draw, verdict, width, reported)
    if rows.tokens == 1:
        kernels.finish(rows.rows_B, draw.token_B, *verdict, old, table, tables.history_SL, *entries)
        return Committed(Acceptance(draw.token_B[:, None], *verdict))
    if rows.tree is not None:
        drawn_BN, scripted = draw.token_B.view(rows.tokens_BW.shape), rows.scripted_B is not None
        nodes_BW, drafts_BQ = walk(rows.tokens_BW, rows.tree, drawn_BN, width - 1, scripted=scripted)
    committed = kernels.commit(
        rows.rows_B, (draw.token_B, *verdict), drafts_BQ, nodes_BW, (rows.limit_B, rows.scripted_B),
        (rows.tokens_BW, rows.position_BW, rows.kv_slots_BW), old, table, tables.history_SL, entries,
        codes=_CODES, no_guess=NO_GUESS,
    )  # fmt: skip
    accepted = Acceptance(committed.token, committed.counts, committed.finish, nodes_BW)
    each = committed.slot, committed.token, committed.kept, committed.kept_kv_slot, committed.last, committed.gained
    flat = *each, committed.token_id, committed.position, committed.kv_slot, committed.path
    shown = Shown._make(part if part is None else part.view(-1) for part in flat)
    return Committed(accepted, shown)


def _check_shapes(rows: Rows, draw: Draw, verdict: Verdict, width: int) -> None:
    """A kernel does not. At a capture, and in the few steps that are not captured."""
    count, tokens = rows.tokens_BW.shape
    if width > tokens or (rows.tree is None and width != tokens):
        raise ValueError(f"rows of {tokens} tokens may not gain {width}")
    each, row, drawn = (count, tokens), (count,), (count * tokens,)
    parts: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "slots": (rows.rows_B, row),
        "lengths": (rows.columns.length, row),
        "positions": (rows.position_BW, each),
        "KV places": (rows.kv_slots_BW, each),
        "limits": (rows.limit_B, row),
        "scripted": (rows.scripted_B, row),
        "draws": (draw.token_B, drawn),
        "counts": (verdict.count_B, drawn),
        "finish": (verdict.finish_B, drawn),
    }
    check_shapes(f"{count} rows x {tokens} tokens", parts)


def commit_in_torch(
    tables: SlotTables, ring: ResultRing, rows: Rows, draw: Draw, verdict: Verdict, width: int,
    reported: Sequence[Tensor] = (),
) -> Committed:  # fmt: skip
    """The reference of ``commit``."""
    columns, limits = rows.columns, (rows.limit_B, rows.scripted_B)
    if rows.tokens == 1:
        accepted, newest_B = Acceptance(draw.token_B[:, None], *verdict), draw.token_B
    else:
        if rows.tree is None:
            accepted = accept(draw, verdict, rows.tokens_BW[:, 1:], *limits)
        else:
            accepted, reported = accept_path(draw, verdict, reported, rows.tokens_BW, rows.tree, width, *limits)
        newest_B1 = (accepted.count_B.to(torch.int64)[:, None] - 1).clamp(min=0)
        newest_B = accepted.tokens_BW.gather(1, newest_B1)[:, 0]
    count_B = accepted.count_B
    tables.store(
        rows.rows_B,
        torch.where(count_B > 0, newest_B, columns.last_token),
        columns.length + count_B,
        torch.where(columns.finished == 0, accepted.finish_B, columns.finished),
    )
    ring.append(accepted.tokens_BW, count_B, accepted.finish_B, reported)
    tables.remember(rows.rows_B, columns.length, accepted.tokens_BW, count_B)
    return Committed(accepted, None if rows.tokens == 1 else _shown(rows, accepted))


def _shown(rows: Rows, accepted: Acceptance) -> Shown:
    (count, width), device = accepted.tokens_BW.shape, accepted.tokens_BW.device
    row_B, nodes_BW, path_T = torch.arange(count, device=device), accepted.nodes_BW, None
    token_ids_BW, position_BW, kv_slots_BW = rows.tokens_BW, rows.position_BW, rows.kv_slots_BW[:, :width]
    if nodes_BW is not None:
        path_T = (row_B[:, None] * rows.tokens + nodes_BW).reshape(-1)
        token_ids_BW, position_BW = token_ids_BW.gather(1, nodes_BW), position_BW.gather(1, nodes_BW)
    kept_BW = torch.arange(width, device=device) < accepted.count_B[:, None]
    return Shown(
        slots_T=rows.rows_B.repeat_interleave(width), next_T=accepted.tokens_BW.reshape(-1), kept_T=kept_BW.reshape(-1),
        kept_kv_slots_T=torch.where(kept_BW, kv_slots_BW, TRASH_BLOCK).reshape(-1),
        last_B=row_B * width + (accepted.count_B.to(torch.int64) - 1).clamp(min=0), gained_B=accepted.count_B > 0,
        token_ids_T=token_ids_BW.reshape(-1), positions_T=position_BW.reshape(-1), kv_slots_T=kv_slots_BW.reshape(-1),
        path_T=path_T,
    )  # fmt: skip


def show_in_torch(count_B: Tensor, kv_slots_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of step_io_triton.show."""
    gained_B = count_B > 0
    return gained_B, torch.where(gained_B, kv_slots_B, TRASH_BLOCK), torch.arange(len(count_B), device=count_B.device)


def shown_token(rows: Rows, accepted: Acceptance) -> Shown:
    """Of rows of one token."""
    kernels, kv_slots_B = step_io_kernels.kernels_for(rows.rows_B), rows.kv_slots_BW[:, 0]
    gained_B, kept_B, last_B = (show_in_torch if kernels is None else kernels.show)(accepted.count_B, kv_slots_B)
    next_B, token_B, position_B = accepted.tokens_BW[:, 0], rows.tokens_BW[:, 0], rows.position_BW[:, 0]
    return Shown(rows.rows_B, next_B, gained_B, kept_B, last_B, gained_B, token_B, position_B, kv_slots_B)


class ProposerFeed:
    """Shows the proposer what a step computed; one per step. ``on``: whether the proposer observes anything. ``tap``:
    collects the layers that it reads, None for none."""

    def __init__(self, proposer: Proposer | None) -> None:
        self._proposer = proposer
        self.on = observes(proposer)
        self.tap = LayerTap(proposer.layers) if proposer is not None and proposer.layers else None

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads the final hidden states of all tokens, those within chunks included."""
        return self._proposer is not None and self._proposer.reads_hidden

    @property
    def features_TF(self) -> Tensor | None:
        """Of the latest forward pass with ``tap``."""
        return None if self.tap is None else self.tap.features_TF

    def show(
        self, inputs: StepInputs, rows: Rows, hidden_TN: Tensor, features_TF: Tensor | None, committed: Committed
    ) -> None:
        """The tokens of ``rows``, whose successors are sampled: those before a row's last one were accepted."""
        accepted, shown = committed
        if shown is None:
            shown = shown_token(rows, accepted)
        width, seen_TN = len(shown.slots_T) // len(rows.rows_B), hidden_TN if self.reads_hidden else None
        if shown.path_T is not None:
            inputs = _along_path(inputs, rows, shown, width)
            seen_TN = None if seen_TN is None else seen_TN.index_select(0, shown.path_T)
            features_TF = None if features_TF is None else features_TF.index_select(0, shown.path_T)
        advanced = Advanced(rows.rows_B, shown.last_B, shown.gained_B, width)
        own = shown.slots_T, shown.next_T, shown.kept_T, shown.kept_kv_slots_T
        self.observe(Observed(inputs.of_group(0), *own, seen_TN, features_TF, advanced))

    def observe(self, observed: Observed) -> None:
        assert self._proposer is not None
        self._proposer.observe(observed)


def _along_path(inputs: StepInputs, rows: Rows, shown: Shown, width: int) -> StepInputs:
    """Of W tokens a row, a path through its tree, as if they were a chain."""
    bound = inputs.attention
    assert isinstance(bound, DecodeAttention)
    attention = DecodeAttention(
        page_table_BP=rows.page_table_BP,
        kv_lengths_B=rows.kv_lengths_B - (rows.tokens - width),
        query_len=width,
        max_kv_length=bound.max_kv_length,
    )
    return StepInputs(shown.token_ids_T, shown.positions_T, shown.kv_slots_T, attention)
