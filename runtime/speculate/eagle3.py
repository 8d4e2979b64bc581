"""The EAGLE-3 proposer: as an MTP layer's, but it reads several layers of the target instead of the final state.

Knows: which state a slot keeps: that of the features at position length - 2. Does not know: the layer's mathematics
(models/drafters/eagle3.py), what lies in pages and how drafts follow each other (mtp.py), rounds, acceptance.
"""

from __future__ import annotations

from torch import Tensor

from models.drafters.draft_head import DraftHead
from models.drafters.eagle3 import Eagle3Draft
from runtime.execute.proposer import Observed, ProposerParts
from runtime.speculate.mtp import ChainProposer


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
