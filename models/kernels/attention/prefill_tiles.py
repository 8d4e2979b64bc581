"""The tiles of packed prompts: how a step's new tokens are cut for a kernel whose programs take one tile after another.

Knows: how the host lists tiles, and the device buffer of a captured launch. Does not know: kernels (prefill.py,
invariant.py).

A tile is a few consecutive new tokens of a row, for the query heads that share a key and value head: they need the same
keys, so tokens times heads fill a tile of the matrix product. The host lists tiles (first token, tokens, position, row)
with the most keys first, and a few programs a multiprocessor take them in turn. A captured launch scans as many entries
as its tokens could ever need, and skips those without tokens: so many entries a plan has, zeros after its tiles, which
overwrite those of a longer plan before.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.inputs import PlanTable, PrefillAttention

_FIELDS = 4  # of a listed tile
_FEW_TILES = 64  # up to so many, Python lists them sooner than numpy


def list_tiles(
    query_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], tokens: int, first_token: int = 0
) -> npt.NDArray[np.int32]:
    """Tiles of at most ``tokens``, most keys first, int32 [tiles, 4]; the rest as in PrefillAttention."""
    rows = len(query_lengths) - query_lengths.count(0)
    lists = _few_tiles if most_tiles(sum(query_lengths), rows, tokens) <= _FEW_TILES else _many_tiles
    return lists(query_lengths, kv_lengths, tokens, first_token)


def _few_tiles(
    query_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], tokens: int, first_token: int
) -> npt.NDArray[np.int32]:
    tiles, start = [], first_token
    for row, new in enumerate(query_lengths):
        if new:
            known = kv_lengths[row] - new
            tiles += [(start + skip, min(tokens, new - skip), known + skip, row) for skip in range(0, new, tokens)]
            start += new
    tiles.sort(key=lambda tile: tile[1] + tile[2], reverse=True)
    return _integers(tuple(chain.from_iterable(tiles))).reshape(-1, _FIELDS)


def _many_tiles(
    query_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], tokens: int, first_token: int
) -> npt.NDArray[np.int32]:
    rows = len(query_lengths)
    new_R, known_R = _integers(query_lengths), _integers(kv_lengths)
    tiles_R = (new_R + (tokens - 1)) // tokens
    # Of each row as if all tiles before its own were of it, too: then those of all rows are one ladder.
    skipped_R = (tiles_R.cumsum(dtype=np.int32) - tiles_R) * tokens
    rows_4R = np.empty((_FIELDS, rows), np.int32)
    np.cumsum(new_R, out=rows_4R[0])
    rows_4R[0] += first_token - new_R - skipped_R
    rows_4R[1] = new_R + skipped_R
    rows_4R[2] = known_R - rows_4R[1]
    rows_4R[3] = np.arange(rows)
    tiles_4N = rows_4R.repeat(tiles_R, axis=1)
    ladder_N = np.arange(0, tiles_4N.shape[1] * tokens, tokens, dtype=np.int32)
    tiles_4N[0] += ladder_N
    tiles_4N[1] -= ladder_N
    tiles_4N[2] += ladder_N
    np.minimum(tiles_4N[1], tokens, out=tiles_4N[1])
    order_N = (-tiles_4N[1] - tiles_4N[2]).argsort(kind="stable")
    listed: npt.NDArray[np.int32] = tiles_4N.T[order_N]
    return listed


def _integers(numbers: Sequence[int]) -> npt.NDArray[np.int32]:
    """As int32 [n], read-only: in a third of the time that numpy needs to find out what a tuple holds."""
    return np.frombuffer(struct.pack(f"{len(numbers)}i", *numbers), np.int32)


def most_tiles(tokens: int, rows: int, tile_tokens: int) -> int:
    """The most tiles that ``tokens`` in up to ``rows`` rows can make."""
    return min(tokens, tokens // tile_tokens + rows)


class Tiles:
    """The tiles of one step, int32 [tiles, 4] on the device."""

    def __init__(self, tiles: Tensor) -> None:
        self.tiles = tiles

    @classmethod
    def of(cls, inputs: PrefillAttention, tile_tokens: int, device: torch.device) -> Self:
        """Tiles of at most ``tile_tokens``; their copy to the device is asynchronous."""
        listed = list_tiles(inputs.query_lengths, inputs.kv_lengths, tile_tokens, inputs.first_token)
        return cls(_sendable(listed, device).to(device, non_blocking=True))

    def count(self, tokens: int) -> int:
        """How many entries a launch over ``tokens`` scans."""
        return len(self.tiles)


class RepeatedTiles:
    """A RepeatedPrefill, and its PlanTable: a device buffer for the tiles of up to ``max_tokens`` in up to ``rows``
    rows."""

    def __init__(self, device: torch.device, rows: int, max_tokens: int, tile_tokens: int) -> None:
        self._rows, self._max_tokens, self._tile_tokens = rows, max_tokens, tile_tokens
        self.tiles = torch.zeros(self.count(max_tokens), _FIELDS, dtype=torch.int32, device=device)

    @property
    def table(self) -> PlanTable | None:
        return self

    @property
    def place(self) -> Tensor:
        return self.tiles

    def entries(
        self, query_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], first_token: int, tokens: int
    ) -> npt.NDArray[np.int32]:
        """See PlanTable: the tiles, and zeros up to as many entries as a launch over ``tokens`` scans."""
        listed, room = list_tiles(query_lengths, kv_lengths, self._tile_tokens, first_token), self.count(tokens)
        if len(listed) > room or len(query_lengths) > self._rows:
            raise ValueError(
                f"{sum(query_lengths)} tokens in {len(query_lengths)} rows make {len(listed)} tiles: there is room for "
                f"{room} of {self._rows} rows"
            )
        entries = np.zeros((room, _FIELDS), np.int32)
        entries[: len(listed)] = listed
        return entries

    def plan(self, query_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], first_token: int = 0) -> None:
        """See RepeatedPrefill; for launches of any number of tokens."""
        entries = self.entries(query_lengths, kv_lengths, first_token, self._max_tokens)
        self.tiles.copy_(_sendable(entries, self.tiles.device), non_blocking=True)

    def count(self, tokens: int) -> int:
        """How many entries a launch over ``tokens`` scans: enough for any plan that fits it."""
        return most_tiles(tokens, self._rows, self._tile_tokens)


def _sendable(listed: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """As a tensor on the host, of which a copy to ``device`` is asynchronous: that needs pinned memory."""
    tiles = torch.tensor(listed)
    return tiles.pin_memory() if device.type == "cuda" else tiles
