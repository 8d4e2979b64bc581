"""What each layer keeps of a sequence, as the layer declares it: keys and values in pages, or state in a slot's row.

Knows: shapes, dtypes and bytes of both kinds. Does not know: how many pages and slots there are, who allocates them
(runtime/execute/cache), or what a layer does with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of every token, in pages that one table assigns for all such layers.

    ``kv_heads`` are those of this rank. A query reads all tokens before it: there are no sliding windows.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def shape(self, pages: int, page_size: int) -> tuple[int, ...]:
        """[2, pages, S, K, D]: index 0 keys, 1 values; the NHD layout."""
        return (2, pages, page_size, self.kv_heads, self.head_dim)

    def __str__(self) -> str:
        return f"{self.kv_heads} heads x {self.head_dim} x {self.dtype.itemsize} B"


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of a fixed size, one a sequence: ``tensors`` maps a name to (shape, dtype), as held by this rank.

    Whoever allocates it adds a leading dim of slots, of which 0 is the null slot, and zeroes a slot's row when a
    sequence is seated in it.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def bytes_per_slot(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors.values())

    def __str__(self) -> str:
        parts = (
            f"{name} {' x '.join(map(str, (*shape, dtype.itemsize)))} B"
            for name, (shape, dtype) in self.tensors.items()
        )
        return " + ".join(parts)


LayerCache = PagedKV | SlotState | None  # None: the layer keeps nothing
StateBanks = Mapping[str, Tensor]  # by the names of a SlotState: [slots, *shape] each
CacheView = Tensor | StateBanks | None  # what a layer is given for its PagedKV (Tensor), SlotState or None


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What one rank keeps of a sequence: the declarations of all layers, in their order."""

    layers: tuple[LayerCache, ...]

    def __add__(self, other: CacheLayout) -> CacheLayout:
        """Of two models that serve the same sequences."""
        return CacheLayout(self.layers + other.layers)

    @property
    def kinds(self) -> list[tuple[PagedKV | SlotState, int]]:
        """Each different declaration and the number of layers that make it, in the order of the first of them."""
        different: list[PagedKV | SlotState] = []
        for layer in self.layers:
            if layer is not None and layer not in different:
                different.append(layer)
        return [(kind, self.layers.count(kind)) for kind in different]

    @property
    def paged(self) -> list[PagedKV]:
        """What the paged layers declare, in their order."""
        return [layer for layer in self.layers if isinstance(layer, PagedKV)]

    @property
    def bytes_per_token(self) -> int:
        """Of all paged layers."""
        return sum(layer.bytes_per_token for layer in self.paged)

    @property
    def bytes_per_slot(self) -> int:
        """Of all layers with slot state."""
        return sum(layer.bytes_per_slot for layer in self.layers if isinstance(layer, SlotState))

    def state_bytes(self, slots: int) -> int:
        """Slot state of ``slots`` sequences in all layers, that of the null slot included."""
        return (1 + slots) * self.bytes_per_slot

    @property
    def first_paged(self) -> int | None:
        """The number of the first paged layer; None where there is none."""
        return next((number for number, layer in enumerate(self.layers) if isinstance(layer, PagedKV)), None)

    @property
    def has_slot_state(self) -> bool:
        return any(isinstance(layer, SlotState) for layer in self.layers)
