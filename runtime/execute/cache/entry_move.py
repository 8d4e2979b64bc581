"""KV entries of a draft tree's accepted path, moved to where a chain's would be, in all layers.

Knows: how entries lie in paged layers, and which implementation runs on them: on CUDA one Triton launch for all layers
of one shape where Triton is installed, torch otherwise. Does not know: which entries stay, or whose they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor


class _MoveKernel(Protocol):
    """entry_move_triton.move_entries."""

    def __call__(
        self, addresses_L: Tensor, sources_BW: Tensor, targets_BW: Tensor, count_B: Tensor, places: int, words: int
    ) -> None: ...


class EntryMover:
    """``layers``: PagedKV tensors [2, pages, S, K, D] of any shapes, contiguous, and of one place for good."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        kinds: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        for layer in layers:
            kinds.setdefault((layer.shape, layer.dtype), []).append(layer)
        self._movers = [_OneShape(same) for same in kinds.values()]

    def move(self, sources_BW: Tensor, targets_BW: Tensor, count_B: Tensor) -> None:
        """Entry targets_BW[b, i] gets what sources_BW[b, i] holds, for i below count_B[b]. Graph-safe.

        Both int64, page * S + offset; count_B int32. All of a row is read before any of it is written; rows share no
        entry.
        """
        for mover in self._movers:
            mover.move(sources_BW, targets_BW, count_B)


class _OneShape:
    def __init__(self, layers: Sequence[Tensor]) -> None:
        first = layers[0]
        self._layers = [layer.flatten(1, 2) for layer in layers]  # [2, pages * S, K, D], views
        self._places = first.shape[1] * first.shape[2]
        entry_bytes = first[0, 0, 0].numel() * first.element_size()
        self._words = entry_bytes // 4
        self._kernel = _triton_kernel() if first.is_cuda and entry_bytes % 16 == 0 else None
        if self._kernel is not None:
            self._addresses_L = torch.tensor([layer.data_ptr() for layer in layers], device=first.device)

    def move(self, sources_BW: Tensor, targets_BW: Tensor, count_B: Tensor) -> None:
        if self._kernel is not None:
            self._kernel(self._addresses_L, sources_BW, targets_BW, count_B, self._places, self._words)
            return
        moved_BW = torch.arange(sources_BW.shape[1], device=sources_BW.device) < count_B[:, None]
        sources_X = torch.where(moved_BW, sources_BW, targets_BW).reshape(-1)  # the others onto themselves
        targets_X = targets_BW.reshape(-1)
        for layer in self._layers:
            layer.index_copy_(1, targets_X, layer.index_select(1, sources_X))


@cache
def _triton_kernel() -> _MoveKernel | None:
    try:
        from runtime.execute.cache.entry_move_triton import move_entries
    except ImportError:
        return None
    return move_entries
