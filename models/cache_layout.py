"""What each layer keeps of a sequence, as the layer declares it: planes in pages (kv_group.py), or a slot's state.

Knows: shapes, dtypes and bytes of both kinds. Does not know: how many pages and slots there are, who allocates them
(runtime/execute/cache), or what a layer does with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.kv_group import KvGroup, Planes


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of a fixed size, one a sequence: ``tensors`` maps a name to (shape, dtype), as held by this rank.

    Its allocator adds a leading dim of slots, of which 0 is the null slot, and zeroes a slot's row when a
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


LayerCache = Planes | SlotState | None  # None: the layer keeps nothing
StateBanks = Mapping[str, Tensor]  # by the names of a SlotState: [slots, *shape] each
CacheView = Tensor | StateBanks | None  # what a layer is given for its planes (Tensor), SlotState or None


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What one rank keeps of a sequence: the declarations of all layers, in their order."""

    layers: tuple[LayerCache, ...]

    def __add__(self, other: CacheLayout) -> CacheLayout:
        """Of two models that serve the same sequences."""
        return CacheLayout(self.layers + other.layers)

    def groups(self, page_size: int) -> list[KvGroup]:
        """The paged layers, those with equal planes together, in the order of the first of them."""
        return [KvGroup(numbers, planes, page_size) for planes, numbers in self._alike() if isinstance(planes, tuple)]

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of its layers, ascending: the groups that have separate page tables."""
        return tuple(sorted({group.window for group in self.groups(1) if group.window is not None}))

    def group_of(self, number: int) -> int:
        """The group of a paged layer's page table: 0 for layers that attend to all tokens, n for the n-th window."""
        planes = self.layers[number]
        assert isinstance(planes, tuple)
        window = planes[0].window
        return 0 if window is None else 1 + self.windows.index(window)

    @property
    def states(self) -> list[tuple[SlotState, tuple[int, ...]]]:
        """Each different slot state, with the numbers of its layers, in the order of the first of them."""
        return [(state, numbers) for state, numbers in self._alike() if isinstance(state, SlotState)]

    def _alike(self) -> list[tuple[Planes | SlotState, tuple[int, ...]]]:
        different: list[Planes | SlotState] = []
        for layer in self.layers:
            if layer is not None and layer not in different:
                different.append(layer)
        return [(kind, tuple(n for n, layer in enumerate(self.layers) if layer == kind)) for kind in different]

    @property
    def bytes_per_token(self) -> int:
        """Of all paged layers."""
        return sum(group.bytes_per_token for group in self.groups(1))

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
        return next((number for number, layer in enumerate(self.layers) if isinstance(layer, tuple)), None)

    @property
    def has_slot_state(self) -> bool:
        return any(isinstance(layer, SlotState) for layer in self.layers)
