"""The pool: each layer gets a view of what it declared, and a slot is reset in all layers and in no other slot."""

from __future__ import annotations

import torch
from torch import Tensor

from models.cache_layout import CacheLayout, SlotState
from models.kv_group import keys_and_values
from runtime.execute.cache.pool import CachePool
from runtime.execute.device.cpu_twin import TwinDevice

ATTENTION = keys_and_values(2, 64, torch.bfloat16)
STATE = SlotState({"conv": ((6, 3), torch.bfloat16), "recurrent": ((2, 4, 4), torch.float32)})
OTHER = SlotState({"recurrent": ((5,), torch.float64)})
LAYOUT = CacheLayout((STATE, ATTENTION, OTHER, STATE, None, ATTENTION))


def test_a_view_a_layer() -> None:
    with TwinDevice() as device:
        pool = CachePool(device, block_size=16, blocks=9, slots=3)
        recurrent, attention, other, second, none, last = pool.allocate(LAYOUT)
        assert none is None
        assert isinstance(attention, Tensor)
        assert (attention.shape, attention.dtype) == ((2, 10, 16, 2, 64), torch.bfloat16)
        assert [view.data_ptr() for view in pool.paged] == [attention.data_ptr(), last.data_ptr()]  # type: ignore[union-attr]
        for view in (recurrent, second):
            assert isinstance(view, dict)
            assert {name: (bank.shape, bank.dtype) for name, bank in view.items()} == {
                "conv": ((4, 6, 3), torch.bfloat16),
                "recurrent": ((4, 2, 4, 4), torch.float32),
            }
            assert all(bank.is_contiguous() for bank in view.values())
        assert isinstance(other, dict)
        assert other["recurrent"].shape == (4, 5)
        assert not any(bool(tensor.any()) for tensor in (*pool.paged, *pool.banks))
        kept = 10 * 16 * LAYOUT.bytes_per_token + 4 * LAYOUT.bytes_per_slot
        assert device.memory_info().used == kept


def test_reset_clears_those_slots_in_every_layer_and_nothing_else() -> None:
    with TwinDevice() as device:
        pool = CachePool(device, block_size=16, blocks=2, slots=5)
        views = [*pool.allocate(LAYOUT), *pool.allocate(CacheLayout((STATE,)))]  # of two models
        assert pool.layout.layers == (*LAYOUT.layers, STATE)
        for tensor in (*pool.paged, *pool.banks):
            tensor.fill_(float("nan"))
        pool.reset(torch.tensor([4, 2]))
        for view in views:
            for bank in view.values() if isinstance(view, dict) else ():
                assert [bool(row.isnan().any()) for row in bank] == [True, True, False, True, False, True]
                assert not bank[[2, 4]].any()
        assert all(bool(kv.isnan().all()) for kv in pool.paged)


def test_blocks_are_copied_in_every_layer_and_states_in_every_bank() -> None:
    """Rows 4 and 5 are snapshots."""
    other = keys_and_values(1, 6, torch.float32)
    with TwinDevice() as device:
        pool = CachePool(device, block_size=4, blocks=9, slots=3, snapshots=2)
        pool.allocate(CacheLayout((STATE, ATTENTION, other)))
        pool.allocate(CacheLayout((ATTENTION, OTHER)))
        pool.warm_up_copies()
        for tensor in (*pool.paged, *pool.banks):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
        before = [tensor.clone() for tensor in (*pool.paged, *pool.banks)]
        pool.copy_blocks(torch.tensor([[2, 2, 7], [5, 9, 1]]))
        pool.copy_states(torch.tensor([[1, 1, 5], [3, 2, 4]]))
        for old, new in zip(before, (*pool.paged, *pool.banks), strict=True):
            pages = new.shape[1] == 10
            rows = [0, 7, 2, 3, 4, 2, 6, 7, 8, 2] if pages else [0, 1, 1, 1, 5, 5]
            assert torch.equal(new, old[:, rows])


def test_blocks_of_a_window_are_fewer_and_are_copied_apart() -> None:
    windowed = keys_and_values(1, 6, torch.float32, 8)
    with TwinDevice() as device:
        pool = CachePool(device, block_size=4, blocks=9, slots=3, windows=[(8, 4)])
        layout = CacheLayout((ATTENTION, windowed, windowed))
        assert layout.windows == (8,)
        assert [layout.group_of(number) for number in range(3)] == [0, 1, 1]
        pool.allocate(layout)
        assert [tensor.shape[1] for tensor in pool.paged] == [10, 5, 5]
        pool.warm_up_copies()
        for tensor in pool.paged:
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
        before = [tensor.clone() for tensor in pool.paged]
        pool.copy_blocks(torch.tensor([[7], [9], [3], [1]]))
        for old, new in zip(before, pool.paged, strict=True):
            rows = [0, 1, 2, 3, 4, 5, 6, 7, 8, 7] if new.shape[1] == 10 else [0, 3, 2, 3, 4]
            assert torch.equal(new, old[:, rows])


def test_layers_with_another_window_are_a_group_of_their_own() -> None:
    windowed = keys_and_values(2, 64, torch.bfloat16, window=128)
    groups = CacheLayout((windowed, ATTENTION, STATE, windowed)).groups(16)
    assert [(group.layers, group.window) for group in groups] == [((0, 3), 128), ((1,), None)]
    assert str(groups[0]).endswith("2 B, window 128")
