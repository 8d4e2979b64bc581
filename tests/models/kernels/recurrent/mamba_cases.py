"""Random Mamba-2 mixers and the state of their slots, for tests of the kernels with and without a GPU.

Knows: Mamba2Weights and its banks. Does not know: which kernel is looked at.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from models.kernels.recurrent.mamba2 import Mamba2Weights

SLOTS = 9


def random_weights(
    heads: int,
    dim: int,
    groups: int,
    state: int,
    taps: int,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    device: str = "cpu",
) -> Mamba2Weights:
    random = partial(torch.randn, device=device)
    inner, channels = heads * dim, heads * dim + 2 * groups * state
    return Mamba2Weights(
        heads,
        dim,
        groups,
        state,
        (random(channels, taps) / taps**0.5).to(dtype),
        random(channels).to(dtype) / 4 if bias else None,
        random(heads) * 0.5,
        random(heads),
        random(heads),
        (1 + random(inner) / 4).to(dtype),
        1e-5,
        groups,
    )


def banks(weights: Mamba2Weights, dtype: torch.dtype, *, slots: int = SLOTS) -> tuple[Tensor, Tensor]:
    """(window, state), random; NaN in the null slot and in the last one, which is nobody's."""
    random = partial(torch.randn, device=weights.d_H.device)
    window = random(slots, weights.conv_CJ.shape[1], len(weights.conv_CJ)).to(dtype)
    state = random(slots, weights.heads, weights.head_dim, weights.state_size)
    for bank in (window, state):
        bank[0] = bank[-1] = math.nan
    return window, state


def check(found: Tensor, expected: Tensor, limit: float, what: object) -> None:
    assert found.isfinite().all(), what
    error = float((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-30))
    assert error < limit, f"{what}: relative error {error:.1e}"


def width(weights: Mamba2Weights) -> int:
    return weights.inner + len(weights.conv_CJ) + weights.heads
