"""Tiles of the grouped GEMMs of experts, and for how few tokens lists do not pay.

Knows: what was fast on an H200 for lists of an average length, in bfloat16 (docs/lab/measurements/experts.md). Does not
know: the kernels that take them (grouped.py, grouped_tma.py, streamed.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from models.kernels.traits import H200, DeviceTraits, fitting_steps


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one grouped GEMM: tokens a block, weight rows and columns a tile, pipeline stages, warps, and ``group``:
    how many blocks of an expert use a tile of weights one right after the other.
    """

    block_m: int
    block_o: int
    block_k: int
    stages: int
    warps: int
    group: int = 8  # 1, block after block, was nowhere faster


_LONG = Tiles(128, 256, 64, 4, 8)

# Tiles of gate-up and of down, by the room that a list needs.
_BY_ROOM = {
    16: (Tiles(16, 64, 128, 3, 4), Tiles(16, 64, 128, 3, 4)),
    32: (Tiles(32, 64, 128, 3, 4), Tiles(32, 128, 64, 5, 4)),
    64: (Tiles(64, 128, 128, 4, 8), Tiles(64, 128, 128, 4, 8)),
    128: (Tiles(128, 128, 128, 3, 8), Tiles(128, 128, 128, 3, 8)),
    256: (_LONG, Tiles(128, 128, 128, 3, 8)),  # several blocks; 256 rows of down would not fit the registers
}
_MOST_WITHOUT_LISTS = 4  # tokens; 8 of 30B-A3B were slower, though they ask for nearly as many experts as pairs
_INNER_OF_HALVES = 4096  # 14336 was faster in halves, 768 was slower


def without_lists(tokens: int, choices: int, experts: int) -> bool:
    """Whether each pair should stream its expert's weights for itself (streamed.py).

    So it is where pairs outnumber the distinct experts that they are expected to choose by at most a quarter, if all
    ``experts`` are equally likely.
    """
    asked = experts * (1 - (1 - choices / experts) ** tokens)
    return tokens <= _MOST_WITHOUT_LISTS and tokens * choices <= 1.25 * asked


def default_tiles(
    mean: float, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16, up_rows: int | None = None, *,
    shared_bytes: int = H200.shared_bytes,
) -> tuple[Tiles, Tiles]:  # fmt: skip
    """Tiles of gate-up [G, 2 * inner, hidden] and down [G, hidden, inner] for lists of ``mean`` tokens on average.

    ``up_rows``: rows of an expert's first matrix, ``inner`` where it has no gate. ``shared_bytes``: the most shared
    memory of a program (DeviceTraits).

    Up to 128 tokens nearly every list is one block, since each block of an expert reads its weights again. float32,
    without tensor cores, gets at most 64 rows: larger tiles fit neither registers nor shared memory.
    """
    room = room_for(mean)
    gate_up, down = _BY_ROOM[room]
    if dtype == torch.float32:
        gate_up = down = Tiles(min(room, 64), 64, 32, 3, 4)
    gate_up, down = _dividing(gate_up, up_rows or 2 * inner, hidden), _dividing(down, hidden, inner)
    return _fitting(gate_up, dtype.itemsize, shared_bytes), _fitting(down, dtype.itemsize, shared_bytes)


@dataclass(frozen=True, slots=True)
class LongListTiles:
    """Tiles of both GEMMs over long lists (grouped_tma.py). ``split``: parts of down's inner dimension (split K), which
    the sum over a token's experts adds up. ``programs``: one a multiprocessor.
    """

    gate_up: Tiles
    down: Tiles
    split: int = 1
    programs: int = H200.multiprocessors


def long_list_tiles(
    mean: float, experts: int, hidden: int, inner: int, traits: DeviceTraits = H200, up_rows: int | None = None
) -> LongListTiles | None:
    """Tiles for ``experts`` lists of ``mean`` tokens on average; None where lists are too short for them.

    ``up_rows`` as in default_tiles.

    Each multiprocessor takes tiles of down in turn. With one to four turns, of which the last occupies only some, half
    tiles waste less of it, unless they are so short that writing and adding them costs more.
    """
    if room_for(mean) < max(_BY_ROOM):
        return None
    gate_up, down = _dividing(_LONG, up_rows or 2 * inner, hidden), _dividing(_LONG, hidden, inner)
    turns = experts * (mean / down.block_m + 0.5) * (hidden // down.block_o) / traits.multiprocessors
    halves = inner >= _INNER_OF_HALVES and inner % (2 * down.block_k) == 0 and 1 < turns < 4
    return LongListTiles(gate_up, down, 2 if halves else 1, traits.multiprocessors)


def _dividing(tiles: Tiles, outputs: int, inner: int) -> Tiles:
    block_o, block_k = min(tiles.block_o, largest_power(outputs)), min(tiles.block_k, largest_power(inner))
    return replace(tiles, block_o=block_o, block_k=block_k)


def _fitting(tiles: Tiles, element_bytes: int, shared_bytes: int) -> Tiles:
    rows = tiles.block_m + tiles.block_o
    block_k, stages = fitting_steps(
        tiles.block_k, tiles.stages, rows=rows, element_bytes=element_bytes, shared_bytes=shared_bytes
    )
    return replace(tiles, block_k=block_k, stages=stages)


def room_for(mean: float) -> int:
    """The power of two from 16 to 256 that holds nearly every list: the variance of a length is at most its mean."""
    needed = mean + 2.5 * math.sqrt(mean)
    return next((room for room in _BY_ROOM if room >= needed), max(_BY_ROOM))


def largest_power(number: int) -> int:
    """The largest power of two that divides ``number``."""
    return number & -number
