"""The tiles of grouped expert products: what the sweeps found, lists that fit into a block, shapes that are divided."""

from __future__ import annotations

from math import comb

import pytest
import torch

from models.kernels.experts.tiles import Tiles, default_tiles, long_list_tiles, room_for, without_lists
from parallel.layers.weight import Weight

QWEN, MIXTRAL = (128, 8), (8, 2)  # experts of a layer, chosen by a token
SIZES = {QWEN: (2048, 768), MIXTRAL: (4096, 14336)}  # hidden and intermediate
SHARED_BYTES = 227 << 10  # of a multiprocessor of an H200


@pytest.mark.parametrize(
    ("model", "rows", "gate_up", "down"),
    [
        (QWEN, 32, Tiles(16, 64, 128, 3, 4), Tiles(16, 64, 128, 3, 4)),
        (QWEN, 128, Tiles(16, 64, 128, 3, 4), Tiles(16, 64, 128, 3, 4)),
        (QWEN, 256, Tiles(32, 64, 128, 3, 4), Tiles(32, 128, 64, 5, 4)),
        (MIXTRAL, 32, Tiles(16, 64, 128, 3, 4), Tiles(16, 64, 128, 3, 4)),
        (MIXTRAL, 128, Tiles(64, 128, 128, 4, 8), Tiles(64, 128, 128, 4, 8)),
        (MIXTRAL, 256, Tiles(128, 128, 128, 3, 8), Tiles(128, 128, 128, 3, 8)),
        (MIXTRAL, 2048, Tiles(128, 256, 64, 4, 8), Tiles(128, 128, 128, 3, 8)),
    ],
)
def test_sizes_that_were_measured_have_the_tiles_that_were_found(
    model: tuple[int, int], rows: int, gate_up: Tiles, down: Tiles
) -> None:
    experts, choices = model
    assert default_tiles(rows * choices / experts, *SIZES[model]) == (gate_up, down)


def test_of_few_tokens_narrow_experts_have_all_columns_of_down_in_a_tile() -> None:
    streamed = pytest.importorskip("models.kernels.experts.streamed", reason="Triton is not installed")
    tiles = {(2048, 768): (4, 1024, 8), (2048, 512): (8, 512, 8), (2688, 1856): (4, 256, 4), (4096, 14336): (8, 256, 4)}
    for (hidden, inner), tile in tiles.items():
        down = Weight.of(torch.empty(1, hidden, inner, device="meta"))
        assert streamed._down_tile(down, 1, streamed.full_programs(132)) == tile


@pytest.mark.parametrize("model", [QWEN, MIXTRAL])
def test_nearly_every_list_is_one_block(model: tuple[int, int]) -> None:
    """Tokens that choose evenly give an expert a binomially distributed list; 2.5 deviations leave less than 1%."""
    experts, choices = model
    share = choices / experts
    seen = set()
    for rows in (1, 2, 5, 16, 33, 64, 80, 100, 137, 138, 139, 180, 256, 335, 400, 700, 760, 1000, 1600):
        room = room_for(rows * share)
        if room <= 128:
            longer = 1 - sum(comb(rows, n) * share**n * (1 - share) ** (rows - n) for n in range(min(rows, room) + 1))
            assert longer < 0.01, (rows, room)
            seen.add(room)
    assert seen == {16, 32, 64, 128}


def test_room_grows_with_the_mean_and_ends() -> None:
    rooms = [room_for(tenths / 10) for tenths in range(6000)]
    assert rooms == sorted(rooms)
    assert set(rooms) == {16, 32, 64, 128, 256}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("hidden", "inner"), [(2048, 768), (2048, 96), (48, 16), (4096, 14336), (4096, 1792)])
def test_tiles_divide_the_weights_and_fit(hidden: int, inner: int, dtype: torch.dtype) -> None:
    for mean in (0.1, 2, 16, 32, 64, 512):
        pair = default_tiles(mean, hidden, inner, dtype)
        for tiles, (outputs, length) in zip(pair, ((2 * inner, hidden), (hidden, inner)), strict=True):
            assert outputs % tiles.block_o == 0
            assert length % tiles.block_k == 0
            assert tiles.block_m <= (64 if dtype == torch.float32 else 128)
            loads = tiles.stages * tiles.block_k * (tiles.block_m + tiles.block_o)
            assert loads * dtype.itemsize < SHARED_BYTES


@pytest.mark.parametrize(
    ("model", "rows", "split"),
    [
        (QWEN, 1024, None),
        (QWEN, 2048, 1),
        (QWEN, 8192, 1),
        (MIXTRAL, 256, None),
        (MIXTRAL, 512, 1),
        (MIXTRAL, 1024, 2),
        (MIXTRAL, 2048, 2),
        (MIXTRAL, 3000, 2),
        (MIXTRAL, 8192, 1),
    ],
)
def test_long_lists_that_were_measured_are_cut_as_was_found(
    model: tuple[int, int], rows: int, split: int | None
) -> None:
    experts, choices = model
    tiles = long_list_tiles(rows * choices / experts, experts // 2, *SIZES[model])
    assert (tiles and tiles.split) == split
    assert tiles is None or {tiles.gate_up, tiles.down} == {Tiles(128, 256, 64, 4, 8)}


@pytest.mark.parametrize(("hidden", "inner"), [(2048, 768), (2048, 96), (4096, 1792), (5120, 4160), (48, 16)])
def test_tiles_of_long_lists_divide_the_weights(hidden: int, inner: int) -> None:
    for mean in (105, 300, 2000):
        for experts in (1, 4, 64):
            tiles = long_list_tiles(mean, experts, hidden, inner)
            assert tiles is not None
            assert 2 * inner % tiles.gate_up.block_o == hidden % tiles.gate_up.block_k == 0
            assert hidden % tiles.down.block_o == inner % (tiles.split * tiles.down.block_k) == 0


def test_few_tokens_go_without_lists_unless_they_share_experts() -> None:
    """30B-A3B's 4 tokens ask 29 experts for 32 choices, Mixtral's 3 ask 4.6 for 6."""

    def most(model: tuple[int, int]) -> int:
        experts, choices = model
        return max(tokens for tokens in range(1, 64) if without_lists(tokens, choices, experts))

    assert most(QWEN) == 4
    assert most(MIXTRAL) == 2
    assert most((8, 8)) == 1
    assert most((100_000, 2)) == 4
