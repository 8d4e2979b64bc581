"""What the comparison with other libraries' recurrences gives them, without a GPU and without the libraries."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")

from models.kernels.recurrent.mamba2 import Mamba2Weights
from models.kernels.reference import ReferenceKernels
from tests.bench import recurrent_peers
from tests.bench.recurrent_peers import MambaCase, mamba, of_heads
from tests.models.kernels.recurrent.mamba_cases import banks, random_weights


def weights_of(dtype: torch.dtype) -> Mamba2Weights:
    torch.manual_seed(1)
    return random_weights(4, 5, 2, 6, 4, dtype)


def test_a_number_a_head_is_seen_through_strides_of_zero() -> None:
    """What FlashInfer 0.6.13's selective_state_update.cu checks of dt, A, D and the bias of dt."""
    dt, decay, skip, bias = of_heads(weights_of(torch.bfloat16), torch.randn(3, 9, dtype=torch.bfloat16)[:, 5:])
    assert (dt.shape, dt.stride()) == ((3, 4, 5), (4, 1, 0))
    assert (decay.shape, decay.stride()) == ((4, 5, 6), (1, 0, 0))
    for one in (skip, bias):
        assert (one.shape, one.stride(), one.dtype) == ((4, 5), (1, 0), dt.dtype)
    assert decay.dtype == torch.float32
    assert (decay <= 0).all()


def update(
    state: Tensor, x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor, **options: Any
) -> Tensor:
    """The formula of selective_state_update, in float32."""
    assert options["dt_softplus"]
    at, heads = options["state_batch_indices"].long(), x.shape[1]
    step = torch.nn.functional.softplus(dt.float() + options["dt_bias"].float())[..., None]
    b, c = (part.float().repeat_interleave(heads // part.shape[1], 1)[:, :, None] for part in (b, c))
    state[at] = state[at] * (step * decay).exp() + step * x.float()[..., None] * b
    return (state[at] * c).sum(-1) + skip * x


def of_another_sign(state: Tensor, x: Tensor, *others: Any, **options: Any) -> Tensor:
    return update(state, -x, *others, **options)


@pytest.mark.parametrize("theirs", [update, of_another_sign])
def test_mamba_is_timed_where_its_state_is_ours(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flashinfer.mamba", SimpleNamespace(selective_state_update=theirs))
    monkeypatch.setattr(recurrent_peers, "us_of", lambda launch: 7.0)
    weights = weights_of(torch.bfloat16)
    layers = [banks(weights, torch.bfloat16) for _ in range(2)]
    found = mamba(MambaCase(ReferenceKernels(), weights, layers, 3))
    assert (found["mamba rows"], found["whole"]) == (3, 7.0)
    if theirs is update:
        assert found["flashinfer"] == 7.0
    else:
        assert "differs from ours" in str(found["flashinfer"])
