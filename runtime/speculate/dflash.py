"""The DFlash proposer: a small decoder drafts a whole block at once, from the target's features of all tokens before.

Knows: what it keeps in pages. Does not know: the decoder's mathematics (models/drafters/dflash.py), rounds, acceptance.

    kept in pages    entry p of every layer, of the target's features at position p, for p up to length - 2
    a block          the last token and W - 1 mask tokens, at positions length - 1 to length - 2 + W; its own entries
                     lie where the context's will be written when the target has verified it

An entry depends on the tokens up to its own only, so what a prefix hit restores is what would have been computed.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from models.drafters.dflash import DFlashDraft
from models.drafters.draft_config import DFlashConfig
from models.drafters.draft_head import DraftHead
from runtime.execute.proposer import Observed, Proposed, ProposerParts
from runtime.execute.slot_state import SlotColumns
from runtime.speculate.draft_rows import block_rows
from runtime.speculate.guesses import Drafter, Guesses


class DFlashProposer(Drafter):
    """``draft``: this rank's share, for the parts' model. ``head``: its LM head; by default the model's.

    ValueError for windows wider than its blocks.
    """

    name = "dflash"
    reads_hidden = False

    def __init__(self, parts: ProposerParts, draft: DFlashDraft, head: DraftHead | None = None) -> None:
        require_blocks(draft.config, parts.limits.width)
        self.layers: tuple[int, ...] = draft.config.target_layer_ids
        self._model, self.tables, self._draft = parts.model, parts.tables, draft
        self.head = head or DraftHead.of_target(parts.model)
        self._block_size = parts.limits.block_size
        self._caches = [cast(Tensor, view) for view in parts.pool.allocate(draft.cache_layout)]

    def guess(self, rows_B: Tensor, columns: SlotColumns, count: int, guesses: Guesses) -> Proposed:
        width = count + 1
        inputs = block_rows(
            *(self.tables, rows_B, columns, width),
            mask_token=self._draft.config.mask_token_id,
            block_size=self._block_size,
            positions=len(self._draft.cos_sin_LR),
        ).of_block()
        hidden_TN = self._draft(self._model.embedding(inputs.token_ids_T), inputs, self._caches)
        guesses.take(hidden_TN.view(len(rows_B), width, -1)[:, 1:])
        return guesses.proposed()

    def observe(self, observed: Observed) -> None:
        assert observed.features_TF is not None
        positions_T = observed.inputs.positions_T
        self._draft.append_context(observed.features_TF, positions_T, observed.kept_kv_slots_T, self._caches)


def require_blocks(config: DFlashConfig, width: int) -> None:
    """ValueError, saying what to type, where the drafter's blocks have fewer than ``width`` tokens."""
    block = config.block_size
    if width > block:
        raise ValueError(
            f"num_speculative_tokens is {width - 1}, but the DFlash drafter's blocks have {block} tokens, one known: "
            f'type "num_speculative_tokens": {block - 1} or less'
        )
