"""An engine whose rows have windows, also beside chunks of prompts in captured steps, for what is observed of both."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Unpack

from runtime.engine import Engine
from runtime.schedule.speculation import Speculation
from tests.runtime.engine.rig import RigLimits, rig
from tests.runtime.engine.test_speculation import ngram


def speculative_rig(**limits: Unpack[RigLimits]) -> AbstractContextManager[Engine]:
    """Three guesses a round, by lookup; steps with chunks are launched in parts."""
    given: RigLimits = {
        "depth": 2,
        "rows": 6,
        "blocks": 400,
        "max_prefill_tokens": 36,
        "prefill_buckets": (16, 24, 40, 60),
        "proposer": ngram(4),
        "speculation": Speculation(4, mixed_percent=100),
        **limits,
    }
    return rig(**given)
