"""What the comparison with other libraries' recurrences gives them, without a GPU and without the libraries."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")

from tests.bench.recurrent_peers import of_heads


def test_a_number_a_head_is_seen_through_strides_of_zero() -> None:
    """What FlashInfer 0.6.13's selective_state_update.cu checks of dt, A, D and the bias of dt."""
    dt, decay, skip, bias = of_heads(3, 4, 5, 6, "cpu")
    assert (dt.shape, dt.stride()[1:]) == ((3, 4, 5), (1, 0))
    assert (decay.shape, decay.stride()) == ((4, 5, 6), (1, 0, 0))
    for one in (skip, bias):
        assert (one.shape, one.stride(), one.dtype) == ((4, 5), (1, 0), dt.dtype)
    assert decay.dtype == torch.float32
    assert (decay <= 0).all()
