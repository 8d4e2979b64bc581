"""Which implementation of a step's gather and commit runs on a tensor: Triton on CUDA if installed, otherwise torch.

Knows: how to find the kernels. Does not know: what they compute; gather.py and commit.py hold their torch references.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from runtime.execute.step.window_io_triton import CommittedWindow


class Begun(NamedTuple):
    """Rows of N tokens, gathered by slot: records int32 [B * N, words], each row's once per token; pages int32
    [B, max_blocks]; token, position, kv_slot int64 and live bool [B, N]; kv_length int32 [B]; drawn int64 and ended
    bool [B * N]. For gather.Rows.
    """

    records: Tensor
    pages: Tensor
    token: Tensor
    position: Tensor
    kv_slot: Tensor
    live: Tensor
    kv_length: Tensor
    drawn: Tensor
    ended: Tensor

    @classmethod
    def empty(cls, rows: int, tokens: int, words: int, max_blocks: int, device: torch.device) -> Self:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        return cls(
            records=empty(rows * tokens, words, dtype=torch.int32),
            pages=empty(rows, max_blocks, dtype=torch.int32),
            token=empty(rows, tokens),
            position=empty(rows, tokens),
            kv_slot=empty(rows, tokens),
            live=empty(rows, tokens, dtype=torch.bool),
            kv_length=empty(rows, dtype=torch.int32),
            drawn=empty(rows * tokens),
            ended=empty(rows * tokens, dtype=torch.bool),
        )


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
