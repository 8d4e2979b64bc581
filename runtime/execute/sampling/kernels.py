"""Which implementation of sampling runs on a tensor: Triton on CUDA where it is installed, torch otherwise.

Knows: how to find the kernels. Does not know: what they compute; their files say so, and name their torch references.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from torch import Tensor


class SamplingKernels(NamedTuple):
    """Entry points of {draw,shares,logprobs,logit_edits,rejection,token_tables}_triton.py."""

    advance_edits: Callable[..., None]
    bar: Callable[..., Tensor]
    best_candidates: Callable[..., Tensor]
    conclude: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    draw_guesses: Callable[..., tuple[Tensor, Tensor]]
    edit_logits: Callable[..., Tensor]
    filtered_candidates: Callable[..., tuple[Tensor, Tensor, Tensor]]
    local_share: Callable[..., Tensor]
    merge_shares: Callable[..., tuple[Tensor, Tensor]]
    shape_logits: Callable[..., Tensor]
    table_states: Callable[..., Tensor]
    token_logprobs: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    window_candidates: Callable[..., tuple[Tensor, Tensor]]


def kernels_for(tensor: Tensor) -> SamplingKernels | None:
    """The Triton kernels if they run on this tensor's device, None where the torch code is to be used."""
    return triton_kernels() if tensor.is_cuda else None


@cache
def triton_kernels() -> SamplingKernels | None:
    """The Triton kernels, None without Triton."""
    try:
        from runtime.execute.sampling import (
            draw_triton,
            logit_edits_triton,
            logprobs_triton,
            rejection_triton,
            shares_triton,
            token_tables_triton,
        )
    except ImportError:
        return None
    return SamplingKernels(
        advance_edits=logit_edits_triton.advance_edits,
        bar=token_tables_triton.bar,
        best_candidates=draw_triton.best_candidates,
        conclude=draw_triton.conclude,
        draw_guesses=rejection_triton.draw_guesses,
        edit_logits=logit_edits_triton.edit_logits,
        filtered_candidates=shares_triton.filtered_candidates,
        local_share=shares_triton.local_share,
        merge_shares=shares_triton.merge_shares,
        shape_logits=logit_edits_triton.shape_logits,
        table_states=token_tables_triton.table_states,
        token_logprobs=logprobs_triton.token_logprobs,
        window_candidates=rejection_triton.window_candidates,
    )
