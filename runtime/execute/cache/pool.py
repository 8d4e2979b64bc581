"""The caches of all models: one place that allocates what their layers declare, and gives each layer its view.

Knows: how many blocks and slots there are, how what one holds is copied to another. Does not know: who owns a block or
a slot (runtime/schedule), how many fit (sizing.py), or what a layer does with its view.

    declared     allocated                                   row 0
    KvGroup      a layer: [planes, 1 + blocks, S, K, D]      the trash block: masked rows write there, no row reads it
    SlotState    a kind: [layers, 1 + slots + snapshots, *shape] a name
                                                             the null slot: rows that are not live share it

Snapshots of state are further rows of the same banks, after those of slots: no step of a model knows them, and a state
that is kept, restored or forked is a row that is copied to another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from models.cache_layout import CacheLayout, CacheView, SlotState
from runtime.execute.cache.block_copy import BlockCopier
from runtime.execute.device.protocol import Device


def give_back(tensors: Iterable[Tensor]) -> None:
    """Free the memory of ``tensors``, even if references to them remain. Nothing reads them from now on."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.resizable():
            storage.resize_(0)


class CachePool:
    """``blocks`` and ``slots`` exclude trash block and null slot; all models have the same ones, by the same numbers.
    ``windows``: (W, blocks) of layers that see a window, by ascending W; ``blocks`` are of the others. Snapshot k of
    ``snapshots``, from 1 on, is row slots + k of each bank.

    ``layout``: everything that was allocated. ``paged``: the tensors of paged layers; ``banks``: those of slot state.
    """

    def __init__(
        self,
        device: Device,
        *,
        block_size: int,
        blocks: int,
        slots: int,
        snapshots: int = 0,
        windows: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.num_blocks = blocks
        self._blocks: dict[int | None, int] = {None: blocks, **dict(windows)}  # a key's place is its group's number
        self.layout = CacheLayout(())
        self.paged: list[Tensor] = []
        self.banks: list[Tensor] = []
        self._views: list[CacheView] = []
        self._device = device
        self._block_size = block_size
        self._rows = 1 + slots + snapshots
        self._copiers: list[tuple[int, BlockCopier]] = []  # with the numbers of their groups
        self._bank_copiers: list[BlockCopier] = []

    def allocate(self, layout: CacheLayout) -> list[CacheView]:
        """Caches of one more model, zeroed: what each of its layers reads and writes. Before the first step only."""
        self.layout += layout
        views: list[CacheView] = [None] * len(layout.layers)
        for group in layout.groups(self._block_size):
            for number in group.layers:
                views[number] = paged = self._device.zeros(
                    *group.shape(1 + self._blocks[group.window]), dtype=group.dtype
                )
                self.paged.append(paged)
        for state, numbers in layout.states:
            banks = self._new_banks(state, len(numbers))
            for index, number in enumerate(numbers):
                views[number] = {name: bank[index] for name, bank in banks.items()}
        self._views += views
        return views

    def _new_banks(self, kind: SlotState, layers: int) -> dict[str, Tensor]:
        """Layers of one kind share a tensor a name, so that a slot is reset in all of them at once."""
        banks = {
            name: self._device.zeros(layers, self._rows, *shape, dtype=dtype)
            for name, (shape, dtype) in kind.tensors.items()
        }
        self.banks += banks.values()
        return banks

    def release(self) -> None:
        """Give all memory back, when the last step has ended."""
        give_back((*self.paged, *self.banks))

    def reset(self, slots_N: Tensor) -> None:
        """Zero the state of slots ``slots_N`` (int64), in which sequences are seated anew; graph-safe.

        Blocks need none of this: attention reads no further than a sequence has written.
        """
        for bank in self.banks:
            bank.index_fill_(1, slots_N, 0)

    def copy_states(self, pairs_2C: Tensor) -> None:
        """Give rows pairs_2C[1] of every bank the contents of rows pairs_2C[0] (int64). No row is in both."""
        for copier in self._bank_copiers:
            copier.copy(pairs_2C)

    def copy_blocks(self, pairs_2C: Tensor) -> None:
        """Give blocks pairs_2C[1] the contents of blocks pairs_2C[0] (int64) in every layer; two more rows for each
        group with a window. No block is in both."""
        for number, copier in self._copiers:
            copier.copy(pairs_2C[2 * number : 2 * number + 2])

    def fork(self, rows_2C: Tensor, blocks_2C: Tensor | None) -> None:
        """Both at once, for slots that go on from where others are; blocks where there are any to copy."""
        self.copy_states(rows_2C)
        if blocks_2C is not None:
            self.copy_blocks(blocks_2C)

    def warm_up_copies(self) -> None:
        """Once, after the last ``allocate``: prepare both copies, and run them over trash block and null slot."""
        groups = self.layout.groups(self._block_size)
        numbers = {window: number for number, window in enumerate(self._blocks)}
        self._copiers = [
            (numbers[group.window], BlockCopier([cast(Tensor, self._views[n]) for n in group.layers]))
            for group in groups
        ]
        self._bank_copiers = [BlockCopier([bank]) for bank in self.banks]
        trash_21 = self._device.zeros(2 * len(self._blocks), 1, dtype=torch.int64)
        self._device.compute.submit(lambda: self.copy_blocks(trash_21))
        self._device.compute.submit(lambda: self.copy_states(trash_21[:2]))
        self._device.compute.synchronize()
