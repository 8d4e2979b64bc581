"""Which implementation of a step's gather and commit runs on a tensor: Triton on CUDA if installed, otherwise torch.

Knows: how to find the kernels. Does not know: what they compute; gather.py and commit.py hold their torch references.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from runtime.execute.step.step_io_triton import Begun
    from runtime.execute.step.window_io_triton import CommittedWindow


class StepKernels(NamedTuple):
    """Entry points of step_io_triton.py and window_io_triton.py (``begin_window``, ``commit``)."""

    begin: Callable[..., Begun]
    begin_packed: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    begin_window: Callable[..., Begun]
    finish: Callable[..., None]
    commit: Callable[..., CommittedWindow]
    show: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernels_for(tensor: Tensor) -> StepKernels | None:
    """The Triton kernels if they run on this tensor's device; None: the torch code."""
    return triton_kernels() if tensor.is_cuda else None


@cache
def triton_kernels() -> StepKernels | None:
    """The Triton kernels, None without Triton."""
    try:
        from runtime.execute.step import step_io_triton as step
        from runtime.execute.step import window_io_triton as window
    except ImportError:
        return None
    return StepKernels(step.begin, step.begin_packed, window.begin, step.finish, window.commit, step.show)
