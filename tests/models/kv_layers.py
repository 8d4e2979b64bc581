"""Caches for tests without a pool: of single layers, and of all layers of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from models.cache_layout import CacheLayout, CacheView
from models.kv_group import KvGroup, keys_and_values


def empty_kv_layer(pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """Keys and values of one layer, zeroed."""
    group = KvGroup((0,), keys_and_values(kv_heads, head_dim, dtype), page_size)
    return torch.zeros(group.shape(pages), dtype=dtype, device=device)


def caches_of(
    layout: CacheLayout, pages: int, page_size: int, slots: int = 2, device: str = "cpu", fill: float = 0.0
) -> list[CacheView]:
    """A view a layer: ``fill`` where it is paged, zeros where it is slot state."""
    found: list[CacheView] = [None] * len(layout.layers)
    for group in layout.groups(page_size):
        for number in group.layers:
            found[number] = torch.full(group.shape(pages), fill, dtype=group.dtype, device=device)
    for state, numbers in layout.states:
        for number in numbers:
            found[number] = {
                name: torch.zeros(slots, *shape, dtype=dtype, device=device)
                for name, (shape, dtype) in state.tensors.items()
            }
    return found


def kv_layers(layout: CacheLayout, pages: int, page_size: int, fill: float = 0.0) -> list[Tensor]:
    """Of the paged layers alone."""
    return [view for view in caches_of(layout, pages, page_size, fill=fill) if isinstance(view, Tensor)]
