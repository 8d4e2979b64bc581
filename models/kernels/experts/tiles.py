"""How the grouped products of experts are cut into tiles, and for how few tokens there are no lists to group.

Knows: what was fast on an H200 for lists of a mean length, in bfloat16 (docs/measurements-kernels.md). Does not know:
the kernels that take them (grouped.py, grouped_tma.py), or the one without lists
(streamed.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from models.kernels.traits import H200, DeviceTraits


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of one grouped product: tokens a block, weight rows and columns a tile, loads in flight, warps, and how many
    blocks of an expert pass a tile one right after the other.
    """

    block_m: int
    block_o: int
    block_k: int
    stages: int
    warps: int
    group: int = 8  # 1, block after block, was nowhere faster


_LONG = Tiles(128, 256, 64, 4, 8)

# Of gate-up and of down, by the room that a list needs.
_BY_ROOM = {
    16: (Tiles(16, 64, 128, 3, 4), Tiles(16, 64, 128, 3, 4)),
    32: (Tiles(32, 64, 128, 3, 4), Tiles(32, 128, 64, 5, 4)),
    64: (Tiles(64, 128, 128, 4, 8), Tiles(64, 128, 128, 4, 8)),
    128: (Tiles(128, 128, 128, 3, 8), Tiles(128, 128, 128, 3, 8)),
    256: (_LONG, Tiles(128, 128, 128, 3, 8)),  # several blocks; down has no registers for 256 rows
}
_MOST_WITHOUT_LISTS = 4  # tokens; 8 of 30B-A3B were slower, though their pairs ask nearly as many experts
_INNER_OF_HALVES = 4096  # 14336 was faster in halves, 768 was slower


def without_lists(tokens: int, choices: int, experts: int) -> bool:
    """Whether every pair of token and choice had better read its expert's weights for itself: where there are at most a
    quarter more pairs than experts that they ask, which of all ``experts`` are as many as if choices were even.
    """
    asked = experts * (1 - (1 - choices / experts) ** tokens)
    return tokens <= _MOST_WITHOUT_LISTS and tokens * choices <= 1.25 * asked


def default_tiles(mean: float, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tiles, Tiles]:
    """Of gate-up [G, 2 * inner, hidden] and down [G, hidden, inner], for lists of ``mean`` tokens on average: nearly
    every list is one block, up to 128 tokens, since each block of an expert reads its weights again.

    In float32, which the tensor cores do not multiply, at most 64: larger tiles find neither registers nor memory.
    """
    room = room_for(mean)
    gate_up, down = _BY_ROOM[room]
    if dtype == torch.float32:
        gate_up = down = Tiles(min(room, 64), 64, 32, 3, 4)
    return _dividing(gate_up, 2 * inner, hidden), _dividing(down, hidden, inner)


@dataclass(frozen=True, slots=True)
class LongListTiles:
    """Of both products over lists of many tokens (grouped_tma.py); down cuts its inner dimension into ``split``
    parts, which the sum of a token's experts adds up. ``programs``: one for each multiprocessor.
    """

    gate_up: Tiles
    down: Tiles
    split: int = 1
    programs: int = H200.multiprocessors


def long_list_tiles(
    mean: float, experts: int, hidden: int, inner: int, traits: DeviceTraits = H200
) -> LongListTiles | None:
    """For lists of ``mean`` tokens on average of so many experts; None where they are too short for these tiles.

    Each multiprocessor, takes a tile of down in turns. With one to four turns, the last of
    which few of them have, parts of half the length lose less, unless they are so short that it takes longer to write
    and read them.
    """
    if room_for(mean) < max(_BY_ROOM):
        return None
    gate_up, down = _dividing(_LONG, 2 * inner, hidden), _dividing(_LONG, hidden, inner)
    turns = experts * (mean / down.block_m + 0.5) * (hidden // down.block_o) / traits.multiprocessors
    halves = inner >= _INNER_OF_HALVES and inner % (2 * down.block_k) == 0 and 1 < turns < 4
    return LongListTiles(gate_up, down, 2 if halves else 1, traits.multiprocessors)


def _dividing(tiles: Tiles, outputs: int, inner: int) -> Tiles:
    block_o, block_k = min(tiles.block_o, largest_power(outputs)), min(tiles.block_k, largest_power(inner))
    return replace(tiles, block_o=block_o, block_k=block_k)


def room_for(mean: float) -> int:
    """The power of two from 16 to 256 that holds nearly every list: a list's variance is at most its mean."""
    needed = mean + 2.5 * math.sqrt(mean)
    return next((room for room in _BY_ROOM if room >= needed), max(_BY_ROOM))


def largest_power(number: int) -> int:
    """The largest power of two that divides ``number``."""
    return number & -number
