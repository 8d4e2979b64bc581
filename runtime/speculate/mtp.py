"""The MTP and EAGLE-3 proposers: a layer beyond the target's drafts token after token, each from the one before.

Knows: what it keeps by slot and in pages. Does not know: the layer's mathematics (models/drafters/mtp.py, eagle3.py),
rounds, acceptance.

    kept by slot     the state at position length - 2: the target's final hidden state, or features of several layers
    kept in pages    entry p, of the hidden state at p and of the token at p + 1, for p up to length - 2

    draft 1 asks at position length - 2 with that hidden state and the last token: its entry is there already
    draft j asks at position length - 3 + j with the layer's own state and draft j - 1, and writes an entry, which the
            next observation writes again from true states or leaves after the sequence's end

An entry depends on the token after its own. So the last entry of a block that two sequences share is of the one that
computed it, whatever follows in the other: that changes which tokens are drafted there, never which are kept. Answers
that fork where a block ends share it and write that entry at once: one of them stays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor

from models.cache_layout import CacheLayout, SlotState, StateBanks
from models.drafters.draft_head import DraftHead
from models.drafters.eagle3 import Eagle3Draft
from models.drafters.mtp import MTPDraft
from models.inputs import StepInputs
from runtime.execute.proposer import Advanced, Observed, Proposed, ProposerParts
from runtime.execute.slot_state import SlotColumns
from runtime.speculate.draft_kernels import kernels_for
from runtime.speculate.draft_rows import chain_rows
from runtime.speculate.guesses import Drafter, Guesses


def keep_newest(bank_SN: Tensor, state_TN: Tensor, advanced: Advanced) -> None:
    """Slot rows_B[i] of ``bank_SN`` gets row last_B[i] of ``state_TN`` where gained_B[i]; both of one dtype."""
    if (kernels := kernels_for(bank_SN)) is None:
        keep_newest_in_torch(bank_SN, state_TN, advanced)
    else:
        kernels.keep(bank_SN, state_TN, advanced.rows_B, advanced.last_B, advanced.gained_B)


def keep_newest_in_torch(bank_SN: Tensor, state_TN: Tensor, advanced: Advanced) -> None:
    """The reference of ``keep_newest``."""
    old_BN = bank_SN.index_select(0, advanced.rows_B)
    new_BN = state_TN.index_select(0, advanced.last_B)
    bank_SN.index_copy_(0, advanced.rows_B, torch.where(advanced.gained_B[:, None], new_BN, old_BN))


class ChainDraft(Protocol):
    """A drafter that reads a token and a state of the token before it: models/drafters/mtp.py, eagle3.py."""

    cos_sin_LR: Tensor

    @property
    def cache_layout(self) -> CacheLayout: ...

    def append(
        self, embedded_TN: Tensor, hidden_TN: Tensor, positions_T: Tensor, kv_slots_T: Tensor, kv_layer: Tensor
    ) -> None: ...

    def step(
        self, embedded_TN: Tensor, hidden_TN: Tensor, inputs: StepInputs, kv_layer: Tensor
    ) -> tuple[Tensor, Tensor]: ...


class ChainProposer(Drafter):
    """What drafts one token after the other. ``embed``: of tokens that it reads. A subclass says which states."""

    name: str
    layers: tuple[int, ...] = ()
    reads_hidden: bool

    def __init__(
        self, parts: ProposerParts, draft: ChainDraft, head: DraftHead | None, embed: Callable[[Tensor], Tensor]
    ) -> None:
        self.tables, self._draft, self._embed = parts.tables, draft, embed
        self.head = head or DraftHead.of_target(parts.model)
        self._block_size = parts.limits.block_size
        state = SlotState({"hidden": ((parts.model.config.hidden_size,), parts.model.dtype)})
        kv_layer, banks = parts.pool.allocate(draft.cache_layout + CacheLayout((state,)))
        self._kv_layer = cast(Tensor, kv_layer)
        self._hidden_SN = cast(StateBanks, banks)["hidden"]

    @abstractmethod
    def states(self, observed: Observed) -> Tensor:
        """[T, N]: what the drafter reads of the tokens that were observed, as a new tensor or a view."""

    def guess(self, rows_B: Tensor, columns: SlotColumns, count: int, guesses: Guesses) -> Proposed:
        """Each place is after the token that ``guesses`` continues with, of the place before: where it has several, one
        of them, whichever a path takes."""
        how = {"block_size": self._block_size, "positions": len(self._draft.cos_sin_LR)}
        rows = chain_rows(self.tables, rows_B, columns, count, **how)
        state_BN, token_B = self._hidden_SN.index_select(0, rows_B), columns.last_token
        for number in range(count):
            inputs = rows.of_guess(number, token_B)
            hidden_BN, state_BN = self._draft.step(self._embed(token_B), state_BN, inputs, self._kv_layer)
            token_B = guesses.take(hidden_BN[:, None])[:, 0]
        return guesses.proposed()

    def observe(self, observed: Observed) -> None:
        state_TN = self.states(observed)
        followed_TN = self._embed(observed.next_ids_T)
        positions_T, kv_slots_T = observed.inputs.positions_T, observed.kept_kv_slots_T
        self._draft.append(followed_TN, state_TN, positions_T, kv_slots_T, self._kv_layer)
        if observed.advanced is not None:
            keep_newest(self._hidden_SN, state_TN, observed.advanced)


class MTPProposer(ChainProposer):
    """``draft``: this rank's share of the layer, for the parts' model. ``head``: its LM head; by default the
    model's."""

    name = "mtp"
    reads_hidden = True

    def __init__(self, parts: ProposerParts, draft: MTPDraft, head: DraftHead | None = None) -> None:
        super().__init__(parts, draft, head, parts.model.embedding)

    def states(self, observed: Observed) -> Tensor:
        assert observed.hidden_TN is not None
        return observed.hidden_TN


class Eagle3Proposer(ChainProposer):
    """``draft``: this rank's share, for the parts' model. ``head``: its LM head; by default the model's."""

    name = "eagle3"
    reads_hidden = False

    def __init__(self, parts: ProposerParts, draft: Eagle3Draft, head: DraftHead | None = None) -> None:
        super().__init__(parts, draft, head, draft.embedding or parts.model.embedding)
        self.layers: tuple[int, ...] = draft.config.layers_of(parts.model.config.layers)
        self._states = draft.states

    def states(self, observed: Observed) -> Tensor:
        assert observed.features_TF is not None
        return self._states(observed.features_TF)
