"""models/kernels/attention/gather_pages.py: when a step's keys are copied, and where rows begin.

Knows: the arithmetic. Does not know: the copies themselves (interpreted_prefill.py, tests/gpu/test_prefill_kernels.py).
"""

from __future__ import annotations

import pytest
import torch

from models.kernels.attention.gather_pages import LEAST_TOKENS, TILE, GatheredPages, tile_starts


def pages(tiles: int, group: int = 4) -> GatheredPages:
    """With room for so many tiles of keys."""
    kv_layer = torch.zeros(2, 3, 64, 2, 16, dtype=torch.bfloat16)
    room = torch.zeros(tiles * 2 * TILE * 2 * 16 * 2, dtype=torch.uint8)
    return GatheredPages(room, torch.ones(8, 4, dtype=torch.int32), kv_layer, group, multiprocessors=1)


def test_rows_begin_at_tiles_of_their_own() -> None:
    assert tile_starts(()) == [0]
    assert tile_starts((1, 0, 128, 129)) == [0, 128, 128, 256, 512]


@pytest.mark.parametrize(
    ("queries", "lengths", "first", "pays"),
    [
        ((LEAST_TOKENS,), (LEAST_TOKENS,), 0, True),
        ((LEAST_TOKENS - 1,), (LEAST_TOKENS - 1,), 0, False),  # its launch holds no copies
        ((LEAST_TOKENS - 1,), (LEAST_TOKENS - 1,), 1, True),  # a row decodes before it
        ((1024, 1024), (1024, 1024), 0, True),
        ((512, 512, 512, 512), (512,) * 4, 0, False),  # too few tokens read each key
        ((0, 2048, 0), (0, 8192, 0), 0, True),
        ((2048,), (8193,), 0, False),  # more than there is room for
        ((2040, 8), (2048, 6144), 0, False),  # a few tokens behind many keys
        ((), (), LEAST_TOKENS, False),
    ],
)
def test_keys_are_copied_where_that_pays(
    queries: tuple[int, ...], lengths: tuple[int, ...], first: int, pays: bool
) -> None:
    assert pages(64).pays(queries, lengths, first) == pays


def test_more_heads_of_a_key_pay_sooner() -> None:
    queries = (512,) * 4
    assert pages(64, group=8).pays(queries, queries)
    assert not pages(64, group=1).pays((LEAST_TOKENS,), (LEAST_TOKENS,))


def test_more_keys_than_there_is_room_for_are_refused() -> None:
    one = pages(7)
    assert one.capacity == 7 * TILE
    one.plan((300, 300, 128))
    with pytest.raises(ValueError, match="there is room for 896"):
        one.plan((300, 300, 129))
