"""Activations as FP8 codes, in torch: what codes.py does to them, for CPUs and tests.

Knows: the arithmetic of a group of columns. Does not know: Triton, or which inputs are quantised.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MOST = 448.0  # the largest float8_e4m3fn
LEAST = 1e-10  # of magnitudes: zeros have a scale, too


def simulated(x_MK: Tensor, group: int, cap: float | None = None) -> Tensor:
    """x [M, K] as its codes mean it, in float32: what ``quantise`` loses. The last group may be shorter."""
    inner, x_MK = x_MK.shape[-1], x_MK.float()
    cut_MK = x_MK if cap is None else x_MK.clamp(-cap, cap)
    groups = F.pad(cut_MK, (0, -inner % group)).reshape(*x_MK.shape[:-1], -1, group)
    most = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    codes = (groups * (MOST / most)).to(torch.float8_e4m3fn).float()
    return (codes * (most * (1.0 / MOST))).flatten(-2)[..., :inner]
