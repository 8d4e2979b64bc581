"""The caches of all models: one place that allocates what their layers declare, and gives each layer its view.

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
    """``blocks`` and ``slots`` exclude trash block and null slot; all models have the same ones, by the same numbers.

    ``layout``: everything that was allocated. ``paged``: the tensors of paged layers; ``banks``: those of slot state.
    """

    def __init__(self, device: Device, *, block_size: int, blocks: int, slots: int) -> None:
        self.num_blocks = blocks
        self.layout = CacheLayout(())
        self.paged: list[Tensor] = []
        self.banks: list[Tensor] = []
        self._device = device
        self._block_size = block_size
        self._slots = slots

    def allocate(self, layout: CacheLayout) -> list[CacheView]:
        """Caches of one more model, zeroed: what each of its layers reads and writes. Before the first step only."""
        self.layout += layout
        views: list[CacheView] = [None] * len(layout.layers)
        for kind, _ in layout.kinds:
            numbers = [number for number, layer in enumerate(layout.layers) if layer == kind]
            if isinstance(kind, PagedKV):
                shape = kind.shape(1 + self.num_blocks, self._block_size)
                for number in numbers:
                    views[number] = paged = self._device.zeros(*shape, dtype=kind.dtype)
                    self.paged.append(paged)
            else:
                banks = self._new_banks(kind, len(numbers))
                for index, number in enumerate(numbers):
                    views[number] = {name: bank[index] for name, bank in banks.items()}
        return views

    def _new_banks(self, kind: SlotState, layers: int) -> dict[str, Tensor]:
        """Layers of one kind share a tensor a name, so that a slot is reset in all of them at once."""
        banks = {
            name: self._device.zeros(layers, 1 + self._slots, *shape, dtype=dtype)
            for name, (shape, dtype) in kind.tensors.items()
        }
        self.banks += banks.values()
        return banks

    def reset(self, slots_N: Tensor) -> None:
        """Zero the state of slots ``slots_N`` (int64), in which sequences are seated anew; graph-safe.

        Blocks need none of this: attention reads no further than a sequence has written.
        """
        for bank in self.banks:
            bank.index_fill_(1, slots_N, 0)
