"""Which implementation of a step's two ends runs on a tensor: Triton on CUDA where it is installed, torch otherwise.

Knows: how to find the kernels. Does not know: what they compute; step_io.py holds their torch reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from runtime.execute.step.step_io_triton import Begun


class StepKernels(NamedTuple):
    """Entry points of runtime/execute/step/step_io_triton.py."""

    begin: Callable[..., Begun]
    begin_packed: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    finish: Callable[..., None]


def kernels_for(tensor: Tensor) -> StepKernels | None:
    """The Triton kernels if they run on this tensor's device, None where the torch code is to be used."""
    return triton_kernels() if tensor.is_cuda else None


@cache
def triton_kernels() -> StepKernels | None:
    """The Triton kernels, None without Triton."""
    try:
        from runtime.execute.step import step_io_triton
    except ImportError:
        return None
    return StepKernels(step_io_triton.begin, step_io_triton.begin_packed, step_io_triton.finish)
