"""KV cache geometry: the planes that a layer keeps of each token, and the layers that keep them in pages alike.

Knows: heads, dims, dtypes, bytes. Does not know: how many pages there are (runtime/execute/cache), which request holds
one (runtime/schedule), how attention reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Plane:
    """What a layer keeps of each token under one ``name``: ``heads`` of this rank with ``dim`` values each.

    ``window``: tokens that a query sees, its own included; None: all.
    """

    name: str
    heads: int
    dim: int
    dtype: torch.dtype
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """In one layer."""
        return self.heads * self.dim * self.dtype.itemsize


Planes = tuple[Plane, ...]
FP8 = torch.float8_e4m3fn
KV_SCALES = ("k_scale", "v_scale", "kv_scale", "output_scale")  # last parts of names of a float8 cache's scales


def bits_of(x: Tensor) -> Tensor:
    """``x``, or its codes as bytes where it is float8, which torch does not gather or scatter on every device."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def keys_and_values(heads: int, dim: int, dtype: torch.dtype, window: int | None = None) -> Planes:
    """The planes of grouped-query attention; ``heads``: key/value heads of this rank."""
    return Plane("key", heads, dim, dtype, window), Plane("value", heads, dim, dtype, window)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """The layers (their numbers) that keep the same planes, in pages of ``page_size`` tokens.

    A page has the same number in all layers. No page is released before its request ends.
    """

    layers: tuple[int, ...]
    planes: Planes
    page_size: int

    @property
    def bytes_per_token(self) -> int:
        """In all its layers."""
        return len(self.layers) * sum(plane.bytes_per_token for plane in self.planes)

    @property
    def page_bytes(self) -> int:
        """Of one page in all its layers."""
        return self.page_size * self.bytes_per_token

    @property
    def dtype(self) -> torch.dtype:
        return self.planes[0].dtype

    @property
    def window(self) -> int | None:
        """Tokens that a query of these layers sees, its own included; None: all."""
        return self.planes[0].window

    def shape(self, pages: int) -> tuple[int, ...]:
        """Of a layer's tensor, [planes, pages, S, K, D]: its planes have one shape and dtype. The NHD layout."""
        first = self.planes[0]
        return (len(self.planes), pages, self.page_size, first.heads, first.dim)

    def __str__(self) -> str:
        first = self.planes[0]
        seen = "" if self.window is None else f", window {self.window}"
        return (
            f"{len(self.layers)} layers x {len(self.planes)} x {self.page_size} tokens x "
            f"{first.heads} heads x {first.dim} x {first.dtype.itemsize} B{seen}"
        )
