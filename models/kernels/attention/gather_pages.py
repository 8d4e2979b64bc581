"""Keys and values of some rows, copied out of their pages into one contiguous run: one Triton launch a layer.

Knows: which tiles of keys are copied where, when that pays, and how a captured launch reads it anew before each replay.
Does not know: who attends to them (flashinfer_prefill.py).

Attention kernels load consecutive keys with the tensor memory accelerator, but gather pages thread by thread. Where a
step has many tokens the difference pays for the copy many times over.

Each row begins at a new tile of TILE keys, and what its last tile has no key for is zero. So an attention kernel that
loads whole tiles multiplies its zero weights by this row's padding only, never by what another row left there: a NaN
there would be the row's own.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.pinned_ring import PinnedRing, event_of, ring_places

# Batch-invariant: it copies
TILE = 128  # keys; a multiple of what any attention kernel loads at once
# Tokens of a launch that holds copies, and attention over pages besides: without work either takes some 4 us, which is
# 0.3% of a layer of an 8B model with so many tokens.
LEAST_TOKENS = 2048
# Query heads of a kv head times the tokens that attend to a key, so that its copy costs less than half of what it
# saves. On an H200 with four heads of 128 dims copies of 440 tokens' keys break even.
_HEADS_A_KEY = 4096
_PART = 16  # keys of a program's turn
_PROGRAMS_A_MULTIPROCESSOR = 4
_FIELDS = 3  # of a tile: row of the page table, its first key, keys of the row


@triton.jit
def _gather_kernel(
    keys_ptr, values_ptr, table_ptr,
    tiles_ptr,  # [1 + tiles, 3]; the first entry is how many follow
    keys_out_ptr, values_out_ptr, table_stride, page_stride,
    WIDTH: tl.constexpr,  # elements of a token's keys, all heads
    COLUMNS: tl.constexpr,  # of them at once
    PAGE: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = TILE // PART
    items = tl.load(tiles_ptr) * parts
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile_ptr = tiles_ptr + 3 * (1 + item // parts)
        row, length = tl.load(tile_ptr), tl.load(tile_ptr + 2)
        key = tl.load(tile_ptr + 1) + item % parts * PART + tl.arange(0, PART)
        here = key < length
        page = tl.load(table_ptr + row * table_stride + key // PAGE, mask=here, other=0).to(tl.int64)
        source = (page * page_stride + key % PAGE * WIDTH)[:, None]
        target = ((item * PART + tl.arange(0, PART)).to(tl.int64) * WIDTH)[:, None]
        for first in tl.static_range(0, WIDTH, COLUMNS):
            columns = (first + tl.arange(0, COLUMNS))[None, :]
            inside = columns < WIDTH
            there = here[:, None] & inside
            keys = tl.load(keys_ptr + source + columns, mask=there, other=0.0)
            values = tl.load(values_ptr + source + columns, mask=there, other=0.0)
            tl.store(keys_out_ptr + target + columns, keys, mask=inside)
            tl.store(values_out_ptr + target + columns, values, mask=inside)


class GatheredPages:
    """Room for keys and values of some rows of ``page_table_BP``, and the table of what is copied there.

    ``room``: bytes on the device; nothing else may write them between ``copy`` and attention. ``kv_layer`` [2, pages,
    page, kv_heads, head_dim] stands for every layer. ``group``: query heads of a kv head. ``depth``: see PinnedRing.
    """

    def __init__(
        self, room: Tensor, page_table_BP: Tensor, kv_layer: Tensor, group: int, multiprocessors: int, depth: int = 2
    ) -> None:
        _, _, self._page, kv_heads, head_dim = kv_layer.shape
        self._table_BP, self._group = page_table_BP, group
        self._programs = _PROGRAMS_A_MULTIPROCESSOR * multiprocessors
        elements = room.view(kv_layer.dtype)
        tiles = len(elements) // (2 * TILE * kv_heads * head_dim)
        self.capacity = tiles * TILE
        both = elements[: 2 * self.capacity * kv_heads * head_dim].view(2, self.capacity, kv_heads, head_dim)
        self._keys_SKD, self._values_SKD = both
        self._tiles = torch.zeros(1 + tiles, _FIELDS, dtype=torch.int32, device=room.device)
        on_gpu = room.device.type == "cuda"
        self.ring = PinnedRing(
            [torch.zeros(1 + tiles, _FIELDS, dtype=torch.int32, pin_memory=on_gpu) for _ in range(ring_places(depth))],
            event_of(room.device),
        )

    def pays(self, query_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], first_token: int = 0) -> bool:
        """Whether a step's keys should be copied, arguments as in PrefillAttention: its launch has copies, they have
        room, and enough tokens attend to each key."""
        if first_token + sum(query_lengths) < LEAST_TOKENS:
            return False
        keys = tile_starts(kv_lengths)[-1]
        attended = sum(new * length for new, length in zip(query_lengths, kv_lengths, strict=True))
        return 0 < keys <= self.capacity and self._group * attended >= _HEADS_A_KEY * keys

    def plan(self, kv_lengths: tuple[int, ...]) -> list[int]:
        """Enqueue what the next launches copy: so many keys of each of the first rows. Where each row begins, and where
        the last one's tiles end. ValueError where they have no room.
        """
        starts = tile_starts(kv_lengths)
        if starts[-1] > self.capacity:
            raise ValueError(
                f"rows of {kv_lengths} keys make {starts[-1]} in whole tiles: there is room for {self.capacity}"
            )
        listed = [(row, first, length) for row, length in enumerate(kv_lengths) for first in range(0, length, TILE)]
        table = torch.tensor([(len(listed), 0, 0), *listed], dtype=torch.int32)
        pinned = self.ring.take()
        pinned[: len(table)] = table
        self._tiles[: len(table)].copy_(pinned[: len(table)], non_blocking=True)
        self.ring.queued()
        return starts

    def copy(self, keys_pages: Tensor, values_pages: Tensor) -> tuple[Tensor, Tensor]:
        """Launch the copies of one layer, both [pages, page, kv_heads, head_dim]. Keys and values, [capacity, kv_heads,
        head_dim] each; what lies outside the rows' tiles is of earlier launches."""
        _, page, kv_heads, head_dim = keys_pages.shape
        width = kv_heads * head_dim
        inner = (width, head_dim, 1)
        if page != self._page or keys_pages.stride()[1:] != inner or values_pages.stride() != keys_pages.stride():
            raise ValueError(
                f"pages of {page} tokens with strides {keys_pages.stride()} and {values_pages.stride()}: expected "
                f"{self._page} and {inner} within a page"
            )
        _gather_kernel[(self._programs,)](
            keys_pages, values_pages, self._table_BP, self._tiles, self._keys_SKD, self._values_SKD,
            self._table_BP.stride(0), keys_pages.stride(0),
            WIDTH=width, COLUMNS=min(1024, triton.next_power_of_2(width)), PAGE=page, TILE=TILE, PART=_PART,
            num_warps=8,
        )  # fmt: skip
        return self._keys_SKD, self._values_SKD


def tile_starts(kv_lengths: tuple[int, ...]) -> list[int]:
    """Where each row begins when it takes whole tiles, and where the last one ends."""
    starts = [0]
    for length in kv_lengths:
        starts.append(starts[-1] + -(-length // TILE) * TILE)
    return starts
