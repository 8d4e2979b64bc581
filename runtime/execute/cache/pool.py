"""The caches of a model: one place that allocates what its layers declare, and gives each layer its view.

Knows: how many blocks and slots there are. Does not know: who owns a block or a slot (runtime/schedule), how many fit
(sizing.py), or what a layer does with its view.

    declared     allocated                                   row 0
    PagedKV      a layer: [2, 1 + blocks, S, K, D]           the trash block: masked rows write there, nobody reads it
    SlotState    a kind: [layers, 1 + slots, *shape] a name  the null slot: rows that are not live share it
"""

from __future__ import annotations

from torch import Tensor

from models.cache_layout import CacheLayout, CacheView, PagedKV, SlotState
from runtime.execute.device.protocol import Device


class CachePool:
    """``views[i]`` is what layer i reads and writes (CacheView); everything is zeroed, and allocated once.

    ``blocks`` and ``slots`` exclude trash block and null slot. ``paged``: the views of paged layers, in their order.
    ``banks``: the tensors of slot state, as above.
    """

    def __init__(self, device: Device, layout: CacheLayout, *, block_size: int, blocks: int, slots: int) -> None:
        self.num_blocks = blocks
        self.views: list[CacheView] = [None] * len(layout.layers)
        self.paged: list[Tensor] = []
        self.banks: list[Tensor] = []
        for kind, _ in layout.kinds:
            numbers = [number for number, layer in enumerate(layout.layers) if layer == kind]
            if isinstance(kind, PagedKV):
                for number in numbers:
                    self.views[number] = device.zeros(*kind.shape(1 + blocks, block_size), dtype=kind.dtype)
            else:
                self._add_banks(device, kind, numbers, 1 + slots)
        self.paged = [view for view in self.views if isinstance(view, Tensor)]

    def _add_banks(self, device: Device, kind: SlotState, numbers: list[int], rows: int) -> None:
        """Layers of one kind share a tensor a name, so that a slot is reset in all of them at once."""
        banks = {
            name: device.zeros(len(numbers), rows, *shape, dtype=dtype) for name, (shape, dtype) in kind.tensors.items()
        }
        self.banks += banks.values()
        for index, number in enumerate(numbers):
            self.views[number] = {name: bank[index] for name, bank in banks.items()}

    def reset(self, slots_N: Tensor) -> None:
        """Zero the state of slots ``slots_N`` (int64), in which sequences are seated anew; graph-safe.

        Blocks need none of this: attention reads no further than a sequence has written.
        """
        for bank in self.banks:
            bank.index_fill_(1, slots_N, 0)
