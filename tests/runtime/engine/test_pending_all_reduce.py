"""Sums over ranks that are left to the norm behind them give what sums of their own give, in every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.plant import kernels_with
from tests.runtime.engine.conftest import long
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.rig import rig, run
from tests.runtime.engine.tensor_ranks import LateSums, PushedSums, pushed, tensor_rig
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.engine.test_experts import EXPERTS, MIXTRAL

EXACT: dict[str, Any] = {"kernels": exact_kernels(), "dtype": torch.float64}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MLP_BIAS = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": True, "attention_bias": True}


@pytest.mark.parametrize(
    "shape",
    [long({}), long(QWEN2), long(MIXTRAL), MLP_BIAS, EXPERTS],
    ids=str,
)
def test_every_layer_can_take_an_unfinished_all_reduce(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateSums, "late", 0)
    requests = mixture(5, count=8)
    with rig(depth=0, shape=shape, **EXACT) as engine:
        alone = outcome(run(engine, requests))
    with tensor_rig(2, depth=2, shape=shape, collectives=LateSums, **EXACT) as engine:
        assert outcome(run(engine, requests)) == alone
    assert LateSums.late > 0


@pytest.mark.parametrize("shape", [long({}), long(MLP_BIAS), EXPERTS], ids=str)
def test_nothing_comes_between_a_part_that_was_pushed_and_its_all_reduce(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for counter in ("late", "pushed"):
        monkeypatch.setattr(PushedSums, counter, 0)
    requests = mixture(5, count=8)
    with rig(depth=0, shape=shape, **EXACT) as engine:
        alone = outcome(run(engine, requests))
    pushing: dict[str, Any] = EXACT | {"kernels": kernels_with(exact_kernels(), linear_push=pushed)}
    with tensor_rig(2, depth=2, shape=shape, collectives=PushedSums, **pushing) as engine:
        assert outcome(run(engine, requests)) == alone
    assert 0 < PushedSums.pushed < PushedSums.late
