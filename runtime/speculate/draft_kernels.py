"""Which implementation of a drafter's bookkeeping runs on a tensor: Triton on CUDA where it is installed, torch
otherwise.

Knows: how to find the kernels. Does not know: what they compute; draft_rows.py, guesses.py, mtp.py and
synthetic.py hold their torch references.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from torch import Tensor


class DraftKernels(NamedTuple):
    """Entry points of draft_triton.py and draft_triton.py."""

    lay_out: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]
    choose: Callable[[Tensor, Tensor | None, int], Tensor]
    shortlist: Callable[..., Tensor]
    ranked: Callable[[Tensor, int, Tensor | None, int], tuple[Tensor, Tensor]]
    keep: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    script: Callable[..., Tensor]


def kernels_for(tensor: Tensor) -> DraftKernels | None:
    """The Triton kernels if they run on this tensor's device, None where the torch code is to be used."""
    return triton_kernels() if tensor.is_cuda else None


@cache
def triton_kernels() -> DraftKernels | None:
    """The Triton kernels, None without Triton."""
    try:
        from runtime.speculate import draft_triton
    except ImportError:
        return None
    return DraftKernels(
        lay_out=draft_triton.lay_out,
        choose=draft_triton.choose,
        shortlist=draft_triton.shortlist,
        ranked=draft_triton.ranked,
        keep=draft_triton.keep,
        script=draft_triton.script,
    )
