"""Contents of KV blocks, or of rows of a bank of recurrent state, copied to others, in all tensors of one shape; KV
entries of a draft tree's accepted path, moved to where a chain's would be.

Knows: how such layers lie in memory, and which implementation runs on them: on CUDA one Triton launch for all layers
where Triton is installed, torch otherwise. Does not know: who owns a block, when one is copied, which
entries stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol, Self, cast

import torch
from torch import Tensor

from models.cache_layout import CacheLayout, CacheView
from models.kv_group import bits_of

_TRASH = 0  # an entry of the trash block, which is never read


class _MoveKernel(Protocol):
    """entry_move_triton.move_entries."""

    def __call__(
        self, addresses_L: Tensor, sources_BW: Tensor, targets_BW: Tensor, count_B: Tensor, places: int, words: int
    ) -> None: ...


class EntryMover:
    """``layers``: tensors [2, pages, S, K, D] of any KvGroups, contiguous, at one address for good. ``numbers``: those
    of their groups (StepInputs.of_group); None: all are of one."""

    def __init__(self, layers: Sequence[Tensor], numbers: Sequence[int] | None = None) -> None:
        kinds: dict[tuple[int, torch.Size, torch.dtype], list[Tensor]] = {}
        for layer, number in zip(layers, numbers or [0] * len(layers), strict=True):
            kinds.setdefault((number, layer.shape, layer.dtype), []).append(layer)
        self._movers = [(number, _OneShape(same)) for (number, _, _), same in kinds.items()]

    @classmethod
    def of_paged(cls, caches: Sequence[CacheView], layout: CacheLayout) -> Self:
        """Of those of a model's layers that are paged."""
        paged = [number for number, view in enumerate(caches) if isinstance(view, Tensor)]
        numbers = [layout.group_of(number) for number in paged]
        return cls([cast(Tensor, caches[number]) for number in paged], numbers)

    def move(self, sources_BW: Tensor, targets_BW: Tensor, count_B: Tensor) -> None:
        """Entry targets_BW[b, i] gets what sources_BW[b, i] holds, for i below count_B[b]; both have a leading dim of
        groups if there are several. Graph-safe.

        Both int64, page * S + offset; count_B int32. All of a row is read before any of it is written; rows share no
        entry. What the others name is neither read nor written: a row that moves nothing may name any entry.
        """
        several = sources_BW.dim() > 2
        for number, mover in self._movers:
            both = (sources_BW[number], targets_BW[number]) if several else (sources_BW, targets_BW)
            mover.move(*both, count_B)

    def move_path(self, places_BN: Tensor, nodes_BW: Tensor, count_B: Tensor) -> None:
        """The first count_B[b] nodes of a row's path through its tree go where those of single steps would be.

        ``places_BN``: where the tree's entries are, in the order of its nodes, or of every group; ``nodes_BW``: the
        path's, from the root.
        """
        nodes = nodes_BW.expand(*places_BN.shape[:-1], -1)
        self.move(places_BN.gather(-1, nodes), places_BN[..., : nodes_BW.shape[1]], count_B)


class _OneShape:
    def __init__(self, layers: Sequence[Tensor]) -> None:
        first = layers[0]
        self._layers = [bits_of(layer).flatten(1, 2) for layer in layers]  # [2, pages * S, K, D], views
        self._places = first.shape[1] * first.shape[2]
        entry_bytes = first[0, 0, 0].numel() * first.element_size()
        self._words = entry_bytes // 4
        self._kernel = _move_kernel() if first.is_cuda and entry_bytes % 16 == 0 else None
        if self._kernel is not None:
            self._addresses_L = torch.tensor([layer.data_ptr() for layer in layers], device=first.device)

    def move(self, sources_BW: Tensor, targets_BW: Tensor, count_B: Tensor) -> None:
        if self._kernel is not None:
            self._kernel(self._addresses_L, sources_BW, targets_BW, count_B, self._places, self._words)
            return
        moved_BW = torch.arange(sources_BW.shape[1], device=sources_BW.device) < count_B[:, None]
        sources_X = torch.where(moved_BW, sources_BW, _TRASH).reshape(-1)
        targets_X = torch.where(moved_BW, targets_BW, _TRASH).reshape(-1)  # the others: of it, onto itself
        for layer in self._layers:
            layer.index_copy_(1, targets_X, layer.index_select(1, sources_X))


@cache
def _move_kernel() -> _MoveKernel | None:
    try:
        from runtime.execute.cache.block_copy_triton import move_entries
    except ImportError:
        return None
    return move_entries


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
