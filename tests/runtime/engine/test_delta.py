"""Gated delta nets through an engine: families with them give at every depth the tokens of the serial engine.

What every model with state in slots must keep (test_hybrid.py has a model as small as can be), and what every model
goes through (test_lifecycle.py), these go through here.
"""

from __future__ import annotations

import pytest
import torch

from tests.models.tiny_delta import FAMILIES
from tests.runtime.engine.exact_kernels import ExactKernels
from tests.runtime.engine.lives import prompt
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.test_hybrid import whole

FAMILY = pytest.mark.parametrize("family", FAMILIES)


@FAMILY
def test_token_by_token_equals_all_at_once(family: str) -> None:
    """Chunks of 8 tokens, then steps of one, against one forward pass over everything."""
    one = request(0, prompt(50), max_tokens=12, stops=())
    with rig(shape=FAMILIES[family], max_prefill_tokens=8, kernels=ExactKernels(), dtype=torch.float64) as engine:
        answer = run(engine, [one])[0].token_ids
        likely = whole(engine.executor._model, tuple(one.prompt_token_ids) + answer).argmax(1)
    assert likely[49:-1].tolist() == list(answer)
