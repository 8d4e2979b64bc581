"""What the layers of a decode step share is made once a step, before the first of them.

Knows: plan_decode's place in a forward pass. Does not know: what a plan holds (interpreted_decode.py).
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from models.inputs import DecodeAttention
from models.kernels.interface import AttentionKind
from tests.models.kv_layers import empty_kv_layer
from tests.plant import Op, kernels_with, reference_kernels
from tests.runtime.engine.rig import request, rig, run

LAYERS = 3


class Recorded:
    """Every plan is another number."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def plan_decode(
        self, _: Op, inputs: DecodeAttention, heads: int, kv_layer: Tensor, kind: AttentionKind
    ) -> DecodeAttention:
        assert (heads, kv_layer.shape[3], kv_layer.shape[4]) == (4, 2, 16)
        self.calls.append(("plan", len(self.calls)))
        return dataclasses.replace(inputs, work=len(self.calls) - 1)

    def rope_cache_attend(self, attend: Op, *given: Any) -> Any:
        self.calls.append(("attend", given[4].work))
        return attend(*given)


def test_one_plan_a_step_serves_all_layers() -> None:
    recorded = Recorded()
    kernels = kernels_with(plan_decode=recorded.plan_decode, rope_cache_attend=recorded.rope_cache_attend)
    with rig(kernels=kernels, shape={"num_hidden_layers": LAYERS}) as engine:
        run(engine, [request(0, range(9), max_tokens=4)])
    calls = recorded.calls
    plans = [at for at, (name, _) in enumerate(calls) if name == "plan"]
    assert len(plans) >= 3
    for at, after in pairwise([*plans, len(calls)]):
        assert calls[at + 1 : after] == [("attend", calls[at][1])] * LAYERS


def test_an_output_that_is_given_keeps_the_tokens_of_nobody() -> None:
    """The contract of ``out_THD`` and ``skip_empty``, by the reference."""
    kernels = reference_kernels()
    kv = empty_kv_layer(5, 4, 2, 8, torch.float32, "cpu").normal_()
    lengths = torch.tensor([3, 0, 7], dtype=torch.int32)
    inputs = DecodeAttention(torch.tensor([[1, 2], [0, 0], [3, 4]], dtype=torch.int32), lengths, 1, 8)
    q = torch.randn(5, 4, 8)
    expected = kernels.decode_attention(q[:3], kv, inputs, 0.3)
    for skip_empty, kept in ((True, [1, 3, 4]), (False, [3, 4])):
        out = torch.full((5, 4, 8), 7.0)
        given = dataclasses.replace(inputs, skip_empty=skip_empty)
        assert kernels.decode_attention(q, kv, given, 0.3, out) is out
        assert torch.equal(out[[0, 2]], expected[[0, 2]])
        assert (out[kept] == 7.0).all()
        assert skip_empty or (out[1] != 7.0).all()
