"""Windows beside chunks of prompts: rows that decode have W tokens each, or a draft tree, in a step that prefills, too.

Knows: how a window's tokens lie in such a step, and how its rows gain tokens while rows with chunks gain one. Does not
know: which proposer there is, when rows beside chunks have windows (runtime/schedule).

To attention a window is a row of N tokens at places that only the device knows: W of a chain, or all of a tree. So a
step is at most three launches:

    propose   by rows that decode, and by kind of sampling where guesses are drawn: N - 1 guesses for each, kept by slot
    forward   by tokens, as without windows: N tokens a row that decodes, in front of the chunks
    tail      by rows and kind of sampling: N draws a row, of which those with chunks and forks gain one at most

Layers with slot state leave out windows in the forward pass, and keep what they made of their tokens: a row of memory a
token of a window, layer by layer. The tail, which knows how many are kept, takes them in. Chunks are taken in at once.

Kernels of such layers take all rows of a step as trees, or none: over them trees have one token a row in these steps.

What guesses were drawn from is kept by row, not by slot: rows that decode come first in the launch that draws and in
the tail. It takes as much as the window's logits do: a number for each draft id, guess and row.

There may be roles of several widths. Each has tables and graphs of its own. What layers made, and what guesses were
drawn from, lies in memory that they share: it is written and read within one step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from models.cache_layout import StateBanks
from models.inputs import DecodeAttention, StateRows, StepInputs, Undecided
from runtime.execute.cache.entry_move import EntryMover
from runtime.execute.launch_spec import GREEDY
from runtime.execute.proposer import DrawingProposer, Proposed, draws, guesses_for
from runtime.execute.role import RoleParts
from runtime.execute.sampling.draft_tree import DraftTree, lay_out
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.rejection import Drafted
from runtime.execute.staging import Chunks
from runtime.execute.step.prefill import PrefillRole
from runtime.execute.step.step_io import Packed, gather_packed
from runtime.execute.step.window_io import gather_window
from runtime.schedule.plan import PADDING_SLOT


class MixedWindowRole(PrefillRole):
    """Serves plans with chunks beside rows of ``width``, of the limits' where none is given: trees are of that width.

    ValueError where the model's state cannot leave out tokens, or has any where windows are trees.
    """

    proposes = True

    def __init__(self, parts: RoleParts, width: int | None = None) -> None:
        limits = parts.limits
        self.width = width or limits.width
        tree = limits.tree if self.width == limits.width else 0
        if parts.proposer is None or parts.model.irrevocable:
            raise ValueError("windows beside chunks need a proposer, and state that can leave out tokens")
        if tree and parts.has_slot_state:
            raise ValueError("trees beside chunks need a model without state in slots")
        self.name = f"mixed tree of {tree}" if tree else f"mixed window of {self.width}"
        self.row_tokens = tree or self.width
        self._proposer = parts.proposer
        # By slot, of those that decode, from the proposal of a step to its tail.
        slots, device = parts.tables.slots, parts.device
        self._guesses_SQ = device.zeros(slots, self.row_tokens - 1, dtype=torch.int64)
        self._kept_S = device.zeros(slots, dtype=torch.int32)  # guesses to be kept whatever is drawn, if scripted
        self._scripted = False
        self._tree: DraftTree | None = None  # of the guesses, where they are none of chains
        self._mover: EntryMover | None = None
        if tree:
            parents_SN, depth_SN = (device.zeros(slots, tree, dtype=torch.int64) for _ in range(2))
            self._tree = DraftTree(parents_SN, depth_SN, device.zeros(slots, tree, dtype=torch.int32))
            self._mover = EntryMover.of_paged(parts.caches)
        self._drafted: Drafted | None = None  # what guesses were drawn from, by row
        # By layer with slot state: [rows * W, X], those of row i from i * W on.
        self._made: dict[object, Tensor] = {}
        super().__init__(parts)
        self._make_memory()

    def rehearse(self) -> None:
        super().rehearse()
        if self._drafted is not None and self._parts.device.torch_device.type != "cpu":
            self._rehearse_tails()

    def _make_memory(self) -> None:
        """What is large is made once, for the widest windows, by whichever role comes first; the others use part of it.

        Not by a rehearsal, whose memory is free again behind it: this is in use during every role's steps."""
        parts, rows = self._parts, self._parts.staging.max_rows
        shared, device = parts.beside_chunks, parts.device
        for mixer in parts.model.slot_mixers.values():
            if mixer not in shared.made:
                most = rows * parts.limits.width
                shared.made[mixer] = device.zeros(most, mixer.made_size, dtype=parts.model.dtype)
            self._made[mixer] = shared.made[mixer][: rows * self.width]
        if isinstance(self._proposer, DrawingProposer):
            if shared.drafted is None:
                shared.drafted = self._proposer.room(rows, parts.limits.window - 1)
            self._drafted = _of_fewer(shared.drafted, self.row_tokens - 1)

    def _rehearse_tails(self) -> None:
        """Of as many rows as there may be, over padding: beside what their guesses were drawn from there must be room
        for all of their logits."""
        parts, size = self._parts, self.feature_size
        device, rows, tokens = parts.device, parts.staging.max_rows, parts.staging.max_rows * self.row_tokens
        hidden_XN = device.zeros(tokens, parts.model.config.hidden_size, dtype=parts.model.dtype)
        features_XF = device.zeros(tokens, size, dtype=parts.model.dtype) if size else None
        for variant in parts.config.warm_variants:
            if draws(self._proposer, variant):
                self.finish(hidden_XN, features_XF, device.zeros(rows, dtype=torch.int64), variant)
                parts.ring.undo()

    def guessed_by(self, variant: SamplingVariant) -> SamplingVariant:
        """Of what rows ask for, drawn guesses heed temperature and filters."""
        return SamplingVariant(random=True, filters=variant.filters) if draws(self._proposer, variant) else GREEDY

    def propose(self, rows: int, variant: SamplingVariant) -> None:
        staged = self._parts.staging.padded_chunks(rows)
        rows_B = torch.where(staged.decodes_R != 0, staged.slots_R, PADDING_SLOT)
        columns = self._parts.tables.gather(rows_B)
        proposed = guesses_for(self._proposer, rows_B, columns, self.row_tokens - 1, variant)
        # Rows of the padding slot write the same, so that what they draw is the same on every rank.
        real_B1 = (rows_B != PADDING_SLOT)[:, None]
        self._guesses_SQ.index_copy_(0, rows_B, torch.where(real_B1, proposed.tokens_BQ, 0))
        self._scripted = proposed.scripted_B is not None  # of a proposer always or never
        if proposed.scripted_B is not None:
            self._kept_S.index_copy_(0, rows_B, proposed.scripted_B)
        if self._tree is not None and proposed.parents_BQ is not None:
            tree = lay_out(torch.where(real_B1, proposed.parents_BQ, 0), self.width - 1)
            for kept_SN, found_BN in zip(self._tree, tree, strict=True):
                kept_SN.index_copy_(0, rows_B, found_BN)
        if self._drafted is not None and proposed.drafted is not None:
            self._drafted.probs_BQD[:rows].copy_(proposed.drafted.probs_BQD)
            self._drafted.index_BQ[:rows].copy_(proposed.drafted.index_BQ)

    def gather(self, chunks: Chunks) -> Packed:
        depth_SN = None if self._tree is None else self._tree.depth_BN
        return gather_packed(self._parts.tables, chunks, self._parts.limits.block_size, self._guesses_SQ, depth_SN)

    def tree(self, slots_B: Tensor) -> Tensor | None:
        return None if self._tree is None else self._tree.seen_BN.index_select(0, slots_B)

    def state_rows(self, chunks: Chunks, packed: Packed) -> StateRows:
        rows = chunks.state_rows(packed.ghosts_R)
        writes_R = torch.where(chunks.decodes_R != 0, PADDING_SLOT, rows.slots_B)
        return replace(rows, undecided=self.keep, writes_B=writes_R, window=self.width)

    def keep(self, undecided: Undecided) -> None:
        """Of the first tokens: windows come before chunks, of which all layers together would keep gigabytes."""
        made_XX, made_TX = self._made[undecided.layer], undecided.made_TX
        first = min(len(made_XX), len(made_TX))
        made_XX[:first].copy_(made_TX[:first])

    def drawing(self, chunks: Chunks) -> Tensor:
        """Of a row that decodes all its tokens, of others the last one again and again."""
        behind_N = torch.arange(1 - self.row_tokens, 1, device=chunks.logit_rows_R.device)
        return (chunks.logit_rows_R[:, None] + (chunks.decodes_R != 0)[:, None] * behind_N).reshape(-1)

    def finish(
        self, hidden_XN: Tensor, features_XF: Tensor | None, emitting_R: Tensor, variant: SamplingVariant
    ) -> None:
        """Up to W tokens for rows that decode, one for others that are not the padding slot's."""
        parts, width = self._parts, self.width
        decodes_R = parts.staging.padded_chunks(len(emitting_R)).decodes_R != 0
        proposed = self._proposed(emitting_R, decodes_R, variant)
        size, columns = parts.limits.block_size, parts.tables.gather(emitting_R)
        window = gather_window(parts.tables, emitting_R, columns, proposed, size, width)
        accepted, shown = self._tail.finish_window(hidden_XN, window, width, variant)
        if self._mover is not None and accepted.nodes_BW is not None:  # of other rows a place may be anybody's
            self._mover.move_path(window.kv_slots_BW, accepted.nodes_BW, torch.where(decodes_R, accepted.count_B, 0))
        if parts.has_slot_state:
            going_R = decodes_R & (columns.finished == 0)
            self._take_in(
                StateRows(
                    torch.where(going_R, emitting_R, PADDING_SLOT),
                    kept_B=torch.where(going_R, accepted.count_B, 0),
                ),
                window.position_BW.reshape(-1),
            )
        if not self._feed.on:
            return
        longest = window.page_table_BP.shape[1] * size
        inputs = StepInputs(
            token_ids_T=window.tokens_BW.reshape(-1),
            positions_T=window.position_BW.reshape(-1),
            kv_slots_T=window.kv_slots_BW.reshape(-1),
            attention=DecodeAttention(window.page_table_BP, window.kv_lengths_B, self.row_tokens, longest),
            real_T=window.live_BW.reshape(-1),
        )
        self._feed.show_window(inputs, window, hidden_XN, features_XF, shown)

    def _proposed(self, emitting_R: Tensor, decodes_R: Tensor, variant: SamplingVariant) -> Proposed:
        """What was proposed for rows that decode; of the others nothing, so that they draw one token of their own."""

        def by_row(kept_SX: Tensor) -> Tensor:
            return torch.where(decodes_R[:, None], kept_SX.index_select(0, emitting_R), 0)

        drafted = None
        if self._drafted is not None and draws(self._proposer, variant):
            probs_BQD, index_BQ, ids_D, _ = self._drafted
            drafted = Drafted(probs_BQD[: len(emitting_R)], index_BQ[: len(emitting_R)], ids_D, decodes_R)
        return Proposed(
            by_row(self._guesses_SQ),
            limit_B=torch.where(decodes_R, self.width, 1).to(torch.int32),
            scripted_B=by_row(self._kept_S[:, None])[:, 0] if self._scripted else None,
            parents_BQ=None if self._tree is None else by_row(self._tree.parents_BN)[:, 1:],
            drafted=drafted,
        )

    def _take_in(self, rows: StateRows, positions_X: Tensor) -> None:
        """The tokens of windows that are kept, into the state of every layer."""
        for number, mixer in self._parts.model.slot_mixers.items():
            made_XX = self._made[mixer][: len(positions_X)]
            mixer.advance(made_XX, rows, positions_X, cast(StateBanks, self._parts.caches[number]))


def _of_fewer(drafted: Drafted, guesses: int) -> Drafted:
    """The beginning of the same memory, of so many guesses a row."""
    rows, _, ids = drafted.probs_BQD.shape
    probs_BQD = drafted.probs_BQD.view(-1)[: rows * guesses * ids].view(rows, guesses, ids)
    return drafted._replace(
        probs_BQD=probs_BQD, index_BQ=drafted.index_BQ.view(-1)[: rows * guesses].view(rows, guesses)
    )
