"""Draft windows and trees of decode requests in steps with prefill chunks: speculative verification in mixed batches.

Knows: how a window's tokens lie in such a step, and what its parts hand over. Does not know: which proposer there is,
when decode requests of a mixed step speculate (runtime/schedule), the rest of the step (packed_pass.py).

Attention sees a window as a row of N tokens, W of a chain or all of a tree; only the device knows their positions.

    propose   by decode rows, and by kind of sampling if draft tokens are sampled: N - 1 draft tokens a row, by slot
    forward   by tokens, as without windows: N tokens a decode request, before the chunks
    tail      by rows and kind of sampling: N samples a row, of which rows with chunks and forks append one at most

Recurrent layers do not update their state with windows in the forward pass; they keep what they made of these tokens,
layer by layer. The tail applies the accepted ones. Chunks update state at once. Kernels of such layers take all rows of
a step as trees, or none, so models with them have no trees here.

What draft tokens were sampled from is kept by row, not by slot: decode requests come first in propose and in the tail.
It takes as much memory as the window's logits: a number for each draft id, draft token and row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from models.cache_layout import StateBanks
from models.inputs import StateRows, Undecided
from runtime.execute.cache.block_copy import EntryMover
from runtime.execute.launch_spec import GREEDY
from runtime.execute.proposer import Proposed, draws, guesses_for
from runtime.execute.sampling.draft_tree import lay_out
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.rejection import Drafted
from runtime.execute.staging import Chunks
from runtime.execute.step.commit import Committed
from runtime.execute.step.gather import Packed, Rows, gather_packed, gather_window
from runtime.execute.step.memory import StepParts
from runtime.execute.step.packed_pass import DecodeTokens
from runtime.execute.step.tail import Tail
from runtime.schedule.plan import PADDING_SLOT


class DraftTokens(DecodeTokens):
    """Up to ``width`` tokens a row, of a chain, or of the limits' tree if that is the limits' width.

    ValueError if the model's state cannot leave out tokens, or if it has any and windows are trees.
    """

    proposes = True

    def __init__(self, parts: StepParts, width: int) -> None:
        super().__init__(parts)
        tree = parts.limits.tree if width == parts.limits.width else 0
        if parts.proposer is None or parts.model.irrevocable:
            raise ValueError("windows beside chunks need a proposer, and state that can leave out tokens")
        if tree and parts.has_slot_state:
            raise ValueError("trees beside chunks need a model without state in slots")
        self.width, self.tokens = width, tree or width
        self.name = f"mixed tree of {tree}" if tree else f"mixed window of {width}"
        self._proposer = parts.proposer
        self._mover = EntryMover.of_paged(parts.caches, parts.model.cache_layout) if tree else None
        self._scripted = False
        self._make_memory()

    def _make_memory(self) -> None:
        """Not in a rehearsal, whose memory is free again after it: this is in use during every step."""
        memory, drafts = self._parts.memory, self.tokens - 1
        self.tokens_SQ, self._kept_S, self._tree = memory.tables(self._parts, drafts)
        self.made = memory.made(self._parts, self.width)  # rows i * W to i * W + W - 1 are row i's
        self.drafted = memory.drafted(self._parts, drafts)

    def proposal_variant(self, variant: SamplingVariant) -> SamplingVariant:
        """Sampled draft tokens need temperature and filters, masked and forced ones tables of grammars."""
        kind = SamplingVariant(random=True, filters=variant.filters) if draws(self._proposer, variant) else GREEDY
        return replace(kind, grammars=variant.grammars)

    def propose(self, rows: int, variant: SamplingVariant) -> None:
        staged = self._parts.staging.padded_chunks(rows)
        rows_B = torch.where(staged.decodes_R != 0, staged.slots_R, PADDING_SLOT)
        columns = self._parts.tables.gather(rows_B)
        proposed = guesses_for(self._proposer, self._parts.tables, rows_B, columns, self.tokens - 1, variant)
        # Rows of the padding slot write the same, so that what they sample is the same on every rank.
        real_B1 = (rows_B != PADDING_SLOT)[:, None]
        self.tokens_SQ.index_copy_(0, rows_B, torch.where(real_B1, proposed.tokens_BQ, 0))
        self._scripted = proposed.scripted_B is not None  # of a proposer always or never
        if proposed.scripted_B is not None:
            self._kept_S.index_copy_(0, rows_B, proposed.scripted_B)
        if self._tree is not None and proposed.parents_BQ is not None:
            tree = lay_out(torch.where(real_B1, proposed.parents_BQ, 0), self.width - 1)
            for kept_SN, found_BN in zip(self._tree, tree, strict=True):
                kept_SN.index_copy_(0, rows_B, found_BN)
        if self.drafted is not None and proposed.drafted is not None:
            self.drafted.probs_BQD[:rows].copy_(proposed.drafted.probs_BQD)
            self.drafted.index_BQ[:rows].copy_(proposed.drafted.index_BQ)

    def gather(self, chunks: Chunks) -> Packed:
        depth_SN = None if self._tree is None else self._tree.depth_BN
        return gather_packed(self._parts.tables, chunks, self._parts.limits.block_size, self.tokens_SQ, depth_SN)

    def tree(self, slots_B: Tensor) -> Tensor | None:
        return None if self._tree is None else self._tree.seen_BN.index_select(0, slots_B)

    def state_rows(self, chunks: Chunks, packed: Packed) -> StateRows:
        rows = chunks.state_rows(packed.ghosts_R)
        writes_R = torch.where(chunks.decodes_R != 0, PADDING_SLOT, rows.slots_B)
        return replace(rows, undecided=self.keep, writes_B=writes_R, window=self.width)

    def keep(self, undecided: Undecided) -> None:
        """Of the first tokens: windows come before chunks, of which all layers together would keep gigabytes."""
        made_XX, made_TX = self.made[undecided.layer], undecided.made_TX
        first = min(len(made_XX), len(made_TX))
        made_XX[:first].copy_(made_TX[:first])

    def sampled(self, chunks: Chunks) -> Tensor:
        """All tokens of a decode request; of other rows the last one W times."""
        after_N = torch.arange(1 - self.tokens, 1, device=chunks.logit_rows_R.device)
        return (chunks.logit_rows_R[:, None] + (chunks.decodes_R != 0)[:, None] * after_N).reshape(-1)

    def finish(
        self, tail: Tail, hidden_XN: Tensor, emitting_R: Tensor, variant: SamplingVariant
    ) -> tuple[Rows, Committed]:
        """Up to W tokens for decode requests, one for other rows that are not the padding slot's."""
        parts, width = self._parts, self.width
        decodes_R = parts.staging.padded_chunks(len(emitting_R)).decodes_R != 0
        proposed, columns = self.proposed(emitting_R, decodes_R, variant), parts.tables.gather(emitting_R)
        rows = gather_window(parts.tables, emitting_R, columns, proposed, parts.limits.block_size, width)
        committed = tail.finish(hidden_XN, rows, width, variant)
        accepted = committed.accepted
        if self._mover is not None and accepted.nodes_BW is not None:  # other rows' places may be in any block
            self._mover.move_path(rows.places, accepted.nodes_BW, torch.where(decodes_R, accepted.count_B, 0))
        if self.made:
            going_R = decodes_R & (columns.finished == 0)
            slots_R = torch.where(going_R, emitting_R, PADDING_SLOT)
            kept_R = torch.where(going_R, accepted.count_B, 0)
            self._update_state(StateRows(slots_R, kept_B=kept_R), rows.position_BW.reshape(-1))
        return rows, committed

    def proposed(self, emitting_R: Tensor, decodes_R: Tensor, variant: SamplingVariant) -> Proposed:
        """Draft tokens of decode requests; other rows have none, so that they append one sampled token."""

        def by_row(kept_SX: Tensor) -> Tensor:
            return torch.where(decodes_R[:, None], kept_SX.index_select(0, emitting_R), 0)

        drafted = None
        if self.drafted is not None and draws(self._proposer, variant):
            probs_BQD, index_BQ, ids_D, _ = self.drafted
            drafted = Drafted(probs_BQD[: len(emitting_R)], index_BQ[: len(emitting_R)], ids_D, decodes_R)
        return Proposed(
            by_row(self.tokens_SQ),
            limit_B=torch.where(decodes_R, self.width, 1).to(torch.int32),
            scripted_B=by_row(self._kept_S[:, None])[:, 0] if self._scripted else None,
            parents_BQ=None if self._tree is None else by_row(self._tree.parents_BN)[:, 1:],
            drafted=drafted,
        )

    def _update_state(self, rows: StateRows, positions_X: Tensor) -> None:
        """The accepted tokens, in every recurrent layer."""
        for number, mixer in self._parts.model.slot_mixers.items():
            made_XX = self.made[mixer][: len(positions_X)]
            mixer.advance(made_XX, rows, positions_X, cast(StateBanks, self._parts.caches[number]))
