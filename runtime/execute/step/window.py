"""A role whose rows may gain several tokens a step: a window of W tokens goes through the model, draws decide how many.

Knows: what such a step computes: propose, verify, accept, observe (runtime/execute/proposer.py). Does not know: which
proposer there is. Of the scheduler it needs nothing but a plan of width W.

The tokens of a window are a chain, or with ``limits.tree`` a tree of more tokens, of which a row gains a path. A tree's
KV entries lie in the order of its nodes; those of the path are moved to where a chain's would be, behind the draw.
Layers with slot state follow a node's parent, and take the path's tokens in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from models.inputs import DecodeAttention, StateRows, StateTree, StepInputs, Undecided
from runtime.execute.cache.entry_move import EntryMover
from runtime.execute.proposer import Proposer, guesses_for
from runtime.execute.role import RoleParts
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.step.proposer_feed import ProposerFeed
from runtime.execute.step.row_role import RowRole
from runtime.execute.step.tail import Tail
from runtime.execute.step.window_io import gather_window
from runtime.schedule.plan import PADDING_SLOT


class WindowRole(RowRole):
    """Up to ``width`` tokens a row and step, at least 2. ValueError for a model whose state cannot leave out tokens."""

    def __init__(self, parts: RoleParts, width: int, proposer: Proposer, name: str | None = None) -> None:
        if stuck := parts.model.irrevocable:
            raise ValueError(
                f"windows of {width}: state of slots cannot be taken back where a row keeps fewer tokens, by "
                f"{', '.join(stuck)}"
            )
        tree = parts.limits.tree if width == parts.limits.width else 0
        super().__init__(parts, name or (f"tree of {tree}" if tree else f"window of {width}"), width)
        self._tree = tree
        self._mover = EntryMover.of_paged(parts.caches) if tree else None
        self._proposer = proposer
        self._feed = ProposerFeed(parts)
        self._tail = Tail(parts.model, parts.tables, parts.ring)

    @property
    def tokens(self) -> int:
        return self._tree or self.width

    @classmethod
    def of_proposer(cls, parts: RoleParts, width: int | None = None) -> Self:
        """With the proposer that the parts come with; of the limits' width where none is given."""
        if parts.proposer is None:
            raise ValueError("a window needs a proposer")
        return cls(parts, width or parts.limits.width, parts.proposer)

    def decode(self, rows_B: Tensor, variant: SamplingVariant, exchange_rows: int = 0) -> None:
        """Up to W tokens for every row; ghost and padding rows gain none."""
        parts = self._parts
        columns = parts.tables.gather(rows_B)
        proposed = guesses_for(self._proposer, rows_B, columns, self.tokens - 1, variant)
        window = gather_window(parts.tables, rows_B, columns, proposed, parts.limits.block_size, self.width)
        tree = None if window.tree is None else StateTree(window.tree.parents_BN, window.tree.seen_BN)
        attention = DecodeAttention(
            page_table_BP=window.page_table_BP,
            kv_lengths_B=window.kv_lengths_B,
            query_len=self.tokens,
            max_kv_length=window.page_table_BP.shape[1] * parts.limits.block_size,
            tree_BQ=None if tree is None else tree.seen_BN,
        )
        # State takes tokens in when it is decided which of them are kept.
        undecided: list[Undecided] = []
        state = None
        if parts.has_slot_state:
            going_B = torch.where(columns.finished == 0, rows_B, PADDING_SLOT)
            state = StateRows(going_B, undecided=undecided.append, tree=tree)
        inputs = StepInputs(
            token_ids_T=window.tokens_BW.reshape(-1),
            positions_T=window.position_BW.reshape(-1),
            kv_slots_T=window.kv_slots_BW.reshape(-1),
            attention=attention,
            real_T=window.live_BW.reshape(-1),
            state=state,
            exchange_rows=exchange_rows or None,
        )
        hidden_TN = parts.model.forward(inputs, parts.caches, self._feed.tap)
        accepted, shown = self._tail.finish_window(hidden_TN, window, self.width, variant)
        if self._mover is not None and accepted.nodes_BW is not None:
            self._mover.move_path(window.kv_slots_BW, accepted.nodes_BW, accepted.count_B)
        if state is not None:
            kept = replace(state, undecided=None, kept_B=accepted.count_B, path_BW=accepted.nodes_BW)
            for layer in undecided:
                layer.advance(layer.made_TX, kept, inputs.positions_T)
        if self._feed.on:
            self._feed.show_window(inputs, window, hidden_TN, self._feed.features_TF, shown)
