"""Launches of GPUs with less shared memory than an H200: what they need fits, and larger GPUs see no difference.

Knows: the choices, and what Triton's pipeline needs for them on GPUs without wgmma. Does not know: what a compiled
kernel needs (compiled_kernels.py, part ``small-gpus``).
"""

from __future__ import annotations

import pytest
import torch

from models.kernels.experts.tiles import Tiles, default_tiles
from models.kernels.traits import fitting_steps

BF16 = torch.bfloat16
SMALL, LARGE = 99 << 10, (163 << 10, 227 << 10)  # an RTX 4090 and an L40S; an A100 and an H100
UNBOUNDED = 1 << 30
MEANS = (1, 16, 40, 64, 128, 512)  # average lengths of lists, one or two a room
EXPERTS = ((2048, 768), (4096, 14336), (2688, 1856), (2048, 96))  # hidden and intermediate


@pytest.mark.parametrize(
    ("rows", "columns", "stages", "expected"),
    [
        (64 + 128, 128, 4, (128, 3)),  # 144 KiB: a stage less
        (128 + 128, 128, 3, (64, 3)),  # 128 KiB: half the columns
        (128 + 256, 64, 4, (64, 3)),
        (256 + 256, 128, 5, (32, 3)),  # both
        (1024 + 1024, 128, 3, (32, 3)),  # no narrower than this, even if it does not fit
        (16 + 64, 128, 3, (128, 3)),
        (32 + 64, 64, 2, (64, 2)),  # never more stages than given
    ],
)
def test_steps_lose_stages_first_then_columns(rows: int, columns: int, stages: int, expected: tuple[int, int]) -> None:
    assert fitting_steps(columns, stages, rows=rows, element_bytes=2, shared_bytes=SMALL) == expected


def test_steps_that_just_fit_stay() -> None:
    assert fitting_steps(64, 3, rows=384, element_bytes=2, shared_bytes=96 << 10) == (64, 3)
    assert fitting_steps(64, 3, rows=384, element_bytes=2, shared_bytes=(96 << 10) - 1) == (32, 3)
    assert fitting_steps(64, 3, rows=384, element_bytes=4, shared_bytes=96 << 10) == (32, 3)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("sizes", EXPERTS)
def test_expert_tiles_fit(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    for mean in MEANS:
        for tiles in default_tiles(mean, *sizes, dtype, shared_bytes=SMALL):
            step = tiles.block_k * (tiles.block_m + tiles.block_o) * dtype.itemsize
            assert (tiles.stages - 1) * step <= SMALL
        as_ever = default_tiles(mean, *sizes, dtype, shared_bytes=UNBOUNDED)
        assert [default_tiles(mean, *sizes, dtype, shared_bytes=large) for large in LARGE] == [as_ever] * 2


def test_expert_tiles_of_small_gpus() -> None:
    assert default_tiles(512, 4096, 14336, shared_bytes=SMALL) == (
        Tiles(128, 256, 64, 3, 8),
        Tiles(128, 128, 64, 3, 8),
    )


def test_tiles_of_deterministic_products_fit() -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from models.kernels.matmul.invariant import Tile, tile_for

    for dtype in (BF16, torch.float32):
        for tokens in (1, 32, 64, 128, 8192):
            for segments in (1, 4):
                tile = tile_for(tokens, segments, dtype, SMALL)
                assert (tile.stages - 1) * tile.columns * (tile.tokens + tile.weights) * dtype.itemsize <= SMALL
                as_ever = tile_for(tokens, segments, dtype, UNBOUNDED)
                assert [tile_for(tokens, segments, dtype, large) for large in LARGE] == [as_ever] * 2
    assert tile_for(8192, 1, BF16, LARGE[1]) == Tile(128, 256, 64, 4, 8)
    assert tile_for(8192, 4, BF16, LARGE[1]) == Tile(128, 128, 128, 3, 8)
    assert tile_for(8192, 1, BF16, SMALL) == Tile(128, 256, 64, 3, 8)
    assert tile_for(8192, 4, BF16, SMALL) == Tile(128, 128, 64, 3, 8)


def test_prefill_attention_of_wide_heads_has_smaller_blocks() -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from models.kernels.attention.prefill import Blocks, blocks_for

    assert blocks_for(BF16, 256, SMALL) == Blocks(64, 32, 2, 8)
    for large in LARGE:
        assert blocks_for(BF16, 256, large) == Blocks(64, 64, 2, 8)
    assert [blocks_for(BF16, 512, shared).m for shared in (SMALL, *LARGE)] == [32, 32, 64]
    for dtype, head_dim in ((BF16, 128), (torch.float32, 128), (torch.float32, 256)):
        assert len({blocks_for(dtype, head_dim, shared) for shared in (SMALL, *LARGE)}) == 1


def test_scans_of_the_gated_delta_rule_have_a_stage_less() -> None:
    """The numbers of larger GPUs are those of before shared memory was asked for."""
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from models.kernels.recurrent.delta_chunk import scan_stages

    dims = (64, 128, 256, 512)  # K; a program has at most 64 values
    assert [scan_stages(dim, 64, BF16, SMALL) for dim in dims] == [3, 2, 1, 1]
    for large in LARGE:
        assert [scan_stages(dim, 64, BF16, large) for dim in dims] == [3, 3, 2, 1]
        assert [scan_stages(dim, 16, torch.float32, large) for dim in dims] == [1] * 4
