"""prefill_tiles.py: how the host lists tiles, and what a launch finds after those of its plan.

Knows: the lists. Does not know: the kernel that reads them (interpreted_prefill.py, tests/gpu/test_prefill_kernels.py).
"""

from __future__ import annotations

import importlib
import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
prefill = importlib.import_module("models.kernels.attention.prefill_tiles")

CPU = torch.device("cpu")


def drawn(seed: int) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """New tokens and tokens of rows of every kind, tokens of a tile, and the first new token."""
    pick = random.Random(seed)
    tile = pick.choice((1, 3, 9, 16, 64))
    queries = tuple(pick.choice((0, 0, 1, 5, tile, 2 * tile, pick.randint(0, 300))) for _ in range(pick.randint(0, 20)))
    lengths = tuple(new + pick.choice((0, 7, 1000)) if new else pick.choice((0, 5)) for new in queries)
    return queries, lengths, tile, pick.choice((0, 11))


def test_tiles_come_with_the_most_keys_first() -> None:
    found = prefill.list_tiles((0, 20, 3, 0), (50, 20, 40, 0), 16, 2)
    assert found.tolist() == [[22, 3, 37, 2], [18, 4, 16, 1], [2, 16, 0, 1]]
    assert prefill.list_tiles((), (), 16).shape == (0, 4)


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_in_one_tile_and_long_lists_are_as_short_ones(seed: int) -> None:
    queries, lengths, tile, first = drawn(seed)
    found = prefill.list_tiles(queries, lengths, tile, first)
    assert found.dtype == np.int32
    for lists in (prefill._few_tiles, prefill._many_tiles):
        assert lists(queries, lengths, tile, first).tolist() == found.tolist()
    start = first
    for row, (new, length) in enumerate(zip(queries, lengths, strict=True)):
        of_row = sorted(entry for entry in found.tolist() if entry[3] == row)
        covered = [(token + i, position + i) for token, count, position, _ in of_row for i in range(min(count, tile))]
        assert covered == [(start + i, length - new + i) for i in range(new)]
        start += new
    keys = found[:, 1] + found[:, 2]
    assert (np.diff(keys) <= 0).all()
    assert len(found) <= prefill.most_tiles(sum(queries), len(queries), tile)


def test_a_launch_finds_no_tile_of_a_longer_plan_before() -> None:
    """Each plan is put over the one before, as staging puts it there: as much as launches of that size scan."""
    tiles = prefill.RepeatedTiles(CPU, 20, 6000, 16)
    for seed in range(40):
        queries, lengths, _, first = drawn(seed)
        tokens = first + sum(queries) + 5 * (seed % 3)
        entries = tiles.entries(queries, lengths, first, tokens)
        assert len(entries) <= tokens, "what staging has room for"
        assert entries.flags.c_contiguous
        tiles.place[: len(entries)].copy_(torch.tensor(entries))
        scanned = tiles.tiles[: tiles.count(tokens)].tolist()
        listed = prefill.list_tiles(queries, lengths, 16, first).tolist()
        assert scanned == listed + [[0, 0, 0, 0]] * (len(scanned) - len(listed))


def test_a_plan_of_start_up_is_for_launches_of_any_size() -> None:
    tiles = prefill.RepeatedTiles(CPU, 4, 90, 16)
    tiles.plan((60, 30), (60, 50))
    tiles.plan((5,), (9,), 3)
    assert tiles.tiles.tolist() == [[3, 5, 4, 0]] + [[0, 0, 0, 0]] * (tiles.count(90) - 1)
    assert tiles.table is tiles


@pytest.mark.parametrize(
    ("queries", "tokens"),
    [
        ((1, 1, 1), 64),  # rows
        ((200, 100), 64),
        ((40, 20), 20),  # of a smaller launch, which would not scan so many
    ],
)
def test_more_than_there_is_room_for_is_refused(queries: tuple[int, ...], tokens: int) -> None:
    tiles = prefill.RepeatedTiles(CPU, 2, 64, 16)
    with pytest.raises(ValueError, match=f"{sum(queries)} tokens in {len(queries)} rows .* there is room for"):
        tiles.entries(queries, queries, 0, tokens)
    assert not tiles.tiles.any()
