"""Windows beside chunks of prompts: rows that decode have W tokens each in a step that prefills, too.

Knows: how a window's tokens lie in such a step, and how its rows gain tokens while rows with chunks gain one. Does not
know: which proposer there is, when rows beside chunks have windows (runtime/schedule).

To attention a window is a row of W tokens at places that only the device knows. So a step is at most three launches:

    propose   by rows that decode: W - 1 guesses for each, kept by slot
    forward   by tokens, as without windows: W tokens a row that decodes, in front of the chunks
    tail      by rows and kind of sampling: W draws a row, of which those with chunks and forks gain one at most

Layers with slot state leave out windows in the forward pass, and keep what they made of their tokens: a row of memory a
token of a window, layer by layer. The tail, which knows how many are kept, takes them in. Chunks are taken in at once.

Guesses are a chain, and compared with the model's own draws: trees and drawn guesses have one token a row in these
steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from models.cache_layout import StateBanks
from models.inputs import DecodeAttention, StateRows, StepInputs, Undecided
from runtime.execute.proposer import Proposed
from runtime.execute.role import RoleParts
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.staging import Chunks
from runtime.execute.step.prefill import PrefillRole
from runtime.execute.step.step_io import Packed, gather_packed
from runtime.execute.step.window_io import gather_window
from runtime.schedule.plan import PADDING_SLOT


class MixedWindowRole(PrefillRole):
    """Serves plans with chunks beside rows of the limits' width.

    ValueError where windows are no chains, or the model's state cannot leave out tokens.
    """

    proposes = True

    def __init__(self, parts: RoleParts) -> None:
        limits = parts.limits
        if parts.proposer is None or limits.tree or parts.model.irrevocable:
            raise ValueError("windows beside chunks need a proposer of chains, and state that can leave out tokens")
        self.name = f"mixed window of {limits.width}"
        self.width = limits.width
        self._proposer = parts.proposer
        # By slot, of those that decode, from the proposal of a step to its tail.
        slots, device = parts.tables.slots, parts.device
        self._guesses_SQ = device.zeros(slots, limits.width - 1, dtype=torch.int64)
        self._kept_S = device.zeros(slots, dtype=torch.int32)  # guesses to be kept whatever is drawn, if scripted
        self._scripted = False
        # By layer with slot state: [rows * W, X], those of row i from i * W on.
        self._made: dict[object, Tensor] = {}
        super().__init__(parts)

    def rehearse(self) -> None:
        self._make_memory()
        super().rehearse()

    def warm_up(self) -> None:
        self._make_memory()
        super().warm_up()

    def _make_memory(self) -> None:
        """Not when the role is made: a rehearsal is what the role's memory is measured by."""
        parts, tokens = self._parts, self._parts.staging.max_rows * self.width
        for mixer in parts.model.slot_mixers.values():
            if mixer not in self._made:
                self._made[mixer] = parts.device.zeros(tokens, mixer.made_size, dtype=parts.model.dtype)

    def propose(self, rows: int) -> None:
        staged = self._parts.staging.padded_chunks(rows)
        rows_B = torch.where(staged.decodes_R != 0, staged.slots_R, PADDING_SLOT)
        proposed = self._proposer.propose(rows_B, self._parts.tables.gather(rows_B), self.width - 1)
        # Rows of the padding slot write the same, so that what they draw is the same on every rank.
        guesses_BQ = torch.where((rows_B != PADDING_SLOT)[:, None], proposed.tokens_BQ, 0)
        self._guesses_SQ.index_copy_(0, rows_B, guesses_BQ)
        self._scripted = proposed.scripted_B is not None  # of a proposer always or never
        if proposed.scripted_B is not None:
            self._kept_S.index_copy_(0, rows_B, proposed.scripted_B)

    def gather(self, chunks: Chunks) -> Packed:
        return gather_packed(self._parts.tables, chunks, self._parts.limits.block_size, self._guesses_SQ)

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
        behind_W = torch.arange(1 - self.width, 1, device=chunks.logit_rows_R.device)
        return (chunks.logit_rows_R[:, None] + (chunks.decodes_R != 0)[:, None] * behind_W).reshape(-1)

    def finish(
        self, hidden_XN: Tensor, features_XF: Tensor | None, emitting_R: Tensor, variant: SamplingVariant
    ) -> None:
        """Up to W tokens for rows that decode, one for others that are not the padding slot's."""
        parts, width = self._parts, self.width
        decodes_R = parts.staging.padded_chunks(len(emitting_R)).decodes_R != 0
        proposed = Proposed(
            torch.where(decodes_R[:, None], self._guesses_SQ.index_select(0, emitting_R), 0),
            limit_B=torch.where(decodes_R, width, 1).to(torch.int32),
            scripted_B=torch.where(decodes_R, self._kept_S.index_select(0, emitting_R), 0) if self._scripted else None,
        )
        size, columns = parts.limits.block_size, parts.tables.gather(emitting_R)
        window = gather_window(parts.tables, emitting_R, columns, proposed, size, width)
        accepted, shown = self._tail.finish_window(hidden_XN, window, width, variant)
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
            attention=DecodeAttention(window.page_table_BP, window.kv_lengths_B, width, longest),
            real_T=window.live_BW.reshape(-1),
        )
        self._feed.show_window(inputs, window, hidden_XN, features_XF, shown)

    def _take_in(self, rows: StateRows, positions_X: Tensor) -> None:
        """The tokens of windows that are kept, into the state of every layer."""
        for number, mixer in self._parts.model.slot_mixers.items():
            made_XX = self._made[mixer][: len(positions_X)]
            mixer.advance(made_XX, rows, positions_X, cast(StateBanks, self._parts.caches[number]))
