"""The table of slot features.

Knows: which there are, in the order in which they change logits. Does not know: what they do.
"""

from __future__ import annotations

from typing import Any, Final

from runtime.execute.sampling.logit_edits import EditFeature
from runtime.execute.sampling.logprobs import LogprobFeature
from runtime.execute.sampling.penalties import PenaltyFeature
from runtime.execute.slots.feature import SlotFeature

FEATURES: Final[tuple[type[SlotFeature[Any]], ...]] = (
    EditFeature,  # before penalties, as in vLLM
    PenaltyFeature,
    LogprobFeature,
)
