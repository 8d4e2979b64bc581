"""Which implementation of a step's two ends runs on a tensor: Triton on CUDA where it is installed, torch otherwise.

Knows: how to find the kernels. Does not know: what they compute; gather.py and commit.py hold their torch references.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from runtime.execute.step.step_io_triton import Begun
    from runtime.execute.step.window_io_triton import BegunWindow, CommittedWindow


class StepKernels(NamedTuple):
    """Entry points of runtime/execute/step/step_io_triton.py."""

    begin: Callable[..., Begun]
    begin_packed: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    finish: Callable[..., None]
    show: Callable[..., tuple[Tensor, Tensor, Tensor]]


class WindowKernels(NamedTuple):
    """Entry points of runtime/execute/step/window_io_triton.py."""

    begin: Callable[..., BegunWindow]
    commit: Callable[..., CommittedWindow]


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
    return StepKernels(step_io_triton.begin, step_io_triton.begin_packed, step_io_triton.finish, step_io_triton.show)


def window_kernels_for(tensor: Tensor) -> WindowKernels | None:
    """As ``kernels_for``, of windows."""
    return triton_window_kernels() if tensor.is_cuda else None


def kernels_write_results(tensor: Tensor) -> bool:
    """Whether kernels, and not torch code, write the ends of all steps on this tensor's device."""
    return kernels_for(tensor) is not None and window_kernels_for(tensor) is not None


@cache
def triton_window_kernels() -> WindowKernels | None:
    """The Triton kernels of windows, None without Triton."""
    try:
        from runtime.execute.step import window_io_triton
    except ImportError:
        return None
    return WindowKernels(window_io_triton.begin, window_io_triton.commit)
