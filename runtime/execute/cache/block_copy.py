"""Contents of KV blocks, or of rows of a bank of recurrent state, copied to others, in all tensors of one shape.

Knows: how such layers lie in memory, and which implementation runs on them: on CUDA one Triton launch for all layers
where Triton is installed, torch otherwise. Does not know: who owns a block, or when one is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from models.kv_group import bits_of


class _CopyKernel(Protocol):
    """block_copy_triton.copy_blocks."""

    def __call__(self, addresses_L: Tensor, pairs_2C: Tensor, blocks: int, words: int, halves: int = 2) -> None: ...


class BlockCopier:
    """``layers``: tensors [planes, blocks, S, K, D] of one KvGroup, at one address for good, contiguous.

    Or one bank of slot state [layers, rows, *shape]: what is said of blocks holds for its rows, and of halves for
    layers.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self._layers = [bits_of(layer) for layer in layers]
        first = layers[0]
        self._halves, self._blocks = first.shape[:2]
        block_bytes = first[0, 0].numel() * first.element_size()
        self._words = block_bytes // 4
        self._kernel = _triton_kernel() if first.is_cuda and block_bytes % 4 == 0 else None
        if self._kernel is not None:
            self._addresses_L = torch.tensor([layer.data_ptr() for layer in layers], device=first.device)

    def copy(self, pairs_2C: Tensor) -> None:
        """Blocks pairs_2C[1] get the contents of blocks pairs_2C[0], all planes. Graph-safe.

        int64 [2, C], each row contiguous, C at least 1. Only the trash block may be in both rows.
        """
        if self._kernel is not None:
            self._kernel(self._addresses_L, pairs_2C, self._blocks, self._words, self._halves)
            return
        sources_C, targets_C = pairs_2C
        for layer in self._layers:
            layer.index_copy_(1, targets_C, layer.index_select(1, sources_C))


@cache
def _triton_kernel() -> _CopyKernel | None:
    try:
        from runtime.execute.cache.block_copy_triton import copy_blocks
    except ImportError:
        return None
    return copy_blocks
