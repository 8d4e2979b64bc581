"""Two models take turns in one engine on a GPU: captured once each, no allocation, the target's own tokens.

Knows: the toy role of tests/runtime/engine/test_second_role.py, whose model has another depth and width, and a KV cache
of its own in the same blocks. Does not know: what roles of real drafters do (test_drafters_gpu.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.ops.select import select_kernels
from runtime.execute.step.memory import StepParts
from tests.gpu.test_engine_gpu import gpu_rig
from tests.runtime.engine.lives import live
from tests.runtime.engine.test_second_role import LIMITS, DraftedDecode, arrivals, take_turns

pytestmark = pytest.mark.gpu

TOY = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}


@pytest.mark.parametrize("depth", [0, 2, 4])
def test_two_models_take_turns_without_a_capture_or_an_allocation(depth: int) -> None:
    """In float32, against an engine that has the target alone."""
    made: list[DraftedDecode] = []

    def make(parts: StepParts) -> DraftedDecode:
        made.append(DraftedDecode(parts, TOY))
        return made[-1]

    kernels = select_kernels(torch.device("cuda:0"), torch.float32, 128, "triton")
    exact: dict[str, Any] = LIMITS | {"over": gpu_rig, "prefill": "triton", "dtype": torch.float32, "kernels": kernels}
    requests, later = arrivals()
    alone = live(requests, depth=0, later=later, **exact)
    requests, later = arrivals()
    life = live(requests, depth=depth, later=later, further_roles=(make,), **exact)
    assert life.answers == alone.answers
    take_turns(life, made[-1], depth)
