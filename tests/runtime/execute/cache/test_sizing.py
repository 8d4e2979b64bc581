"""Sizing of caches: the sum is right to the byte and printed term by term, and refusals say what to type."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from models.cache_layout import CacheLayout, SlotState
from models.kv_group import keys_and_values
from runtime.execute.cache.sizing import (
    CacheMemoryError,
    CacheShape,
    CacheSizing,
    WindowDemand,
    require_share,
    size_cache,
    snapshots_that_fit,
)
from runtime.execute.device.protocol import MemoryInfo
from runtime.schedule.config import StepLimits

ATTENTION = keys_and_values(2, 64, torch.bfloat16)
SHAPE = CacheShape(CacheLayout((ATTENTION,) * 4), block_size=16, slots=8)
BLOCK = 4 * 2 * 16 * 2 * 64 * 2


def memory(total_blocks: int, used_blocks: int, others: int = 0) -> MemoryInfo:
    """``others``: blocks of other processes."""
    free = total_blocks - used_blocks - others
    return MemoryInfo(total=total_blocks * BLOCK, free=free * BLOCK, used=used_blocks * BLOCK)


def sized(total_blocks: int = 1000, used_blocks: int = 100, peak_blocks: int = 50, **options: int) -> CacheSizing:
    given = {"max_model_len": 160, "reserve_tokens": 3} | options
    return size_cache(memory(total_blocks, used_blocks), peak_blocks * BLOCK, SHAPE, **given)


def test_block_bytes() -> None:
    assert SHAPE.block_bytes == BLOCK == 32768


def test_what_is_left_becomes_blocks_minus_the_trash_block() -> None:
    sizing = sized()
    assert sizing.budget == (900 - 100 - 50) * BLOCK
    assert sizing.num_blocks == 749
    assert sizing.tokens == 749 * 16


def test_the_pool_never_exceeds_the_budget() -> None:
    for peak in range(0, 5 * BLOCK, 10_007):
        sizing = size_cache(memory(1000, 100), peak, SHAPE, max_model_len=160, reserve_tokens=3)
        assert (sizing.num_blocks + 1) * BLOCK <= sizing.budget < (sizing.num_blocks + 2) * BLOCK


def test_the_printed_sum_adds_up() -> None:
    text = str(size_cache(memory(327_680, 32_768), 1 << 30, SHAPE, max_model_len=160, reserve_tokens=3))
    terms = [float(match) for match in re.findall(r"([\d.]+) GiB", text)]
    share, used, activations, left = terms[1:5]
    assert terms[0] == 10.0
    assert share == 9.0
    assert left == share - used - activations == 7.0
    assert "229,375" in text  # 7 GiB / 32 KiB, minus the trash block
    assert "--max-model-len 160" in text


def test_given_blocks_override_the_sum() -> None:
    sizing = sized(num_blocks=20)
    assert sizing.num_blocks == 20
    assert "--num-blocks" in str(sizing)


def test_memory_of_other_processes_is_not_this_engines() -> None:
    """Four engines of a fifth each: the fourth has what the first has."""
    given: dict[str, int] = {"max_model_len": 160, "reserve_tokens": 3}
    sizes = [
        size_cache(memory(1000, 100, 200 * n), 0, SHAPE, memory_fraction=0.2, **given).num_blocks for n in range(4)
    ]
    assert sizes == [200 - 100 - 1] * 4


def test_a_share_that_is_not_free_is_refused_with_the_numbers() -> None:
    for others, used in ((100, 0), (98, 2), (0, 100)):
        require_share(memory(1000, used, others), 0.9)
    require_share(memory(1000, 950), 0.9)  # sizing says what is missing
    with pytest.raises(
        CacheMemoryError, match=r"fraction 0\.9 of .*31\.25 MiB is .*28\.12 MiB, of which 27\.19 .*0\.87 or"
    ):
        require_share(memory(1000, 10, 130), 0.9)


def test_memory_that_others_took_since_the_start_is_missed() -> None:
    assert sized(used_blocks=100).num_blocks == 749
    with pytest.raises(CacheMemoryError, match=r"--num-blocks 749 needs .* are free: type --num-blocks 599 or less"):
        size_cache(memory(1000, 100, 250), 50 * BLOCK, SHAPE, max_model_len=160, reserve_tokens=3)


def test_ranks_agree_on_fewer() -> None:
    sizing = sized()
    assert sizing.with_blocks(700).num_blocks == 700
    assert sizing.num_blocks == 749


def test_one_longest_request_must_fit_with_what_is_reserved_ahead() -> None:
    assert sized(num_blocks=11).num_blocks == 11  # 163 tokens need 11 blocks of 16
    with pytest.raises(
        CacheMemoryError, match=r"needs 11 KV blocks, there are 10: type --max-model-len 157, or --num-b.* 11"
    ):
        sized(num_blocks=10)
    assert sized(num_blocks=10, max_model_len=157).num_blocks == 10


def test_too_little_memory_says_so() -> None:
    with pytest.raises(
        CacheMemoryError, match=r"needs 11 KV blocks, there are 9: type --max-model-len 141, or a larger --mem"
    ):
        sized(used_blocks=840)
    with pytest.raises(CacheMemoryError, match=r"there are 0: type a smaller model or a larger device"):
        sized(used_blocks=990)


def test_given_blocks_that_do_not_fit_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        CacheMemoryError, match=r"--num-blocks 900 needs 29,523,968 bytes of KV, 29,491,200 are free.* 899 or"
    ):
        sized(num_blocks=900)


# ---- several kinds ----

STATE = SlotState({"conv": ((24, 3), torch.bfloat16), "recurrent": ((4, 16, 16), torch.float32)})
SLOT = 24 * 3 * 2 + 4 * 16 * 16 * 4
HYBRID = CacheShape(
    CacheLayout((STATE, STATE, STATE, ATTENTION, None, keys_and_values(1, 32, torch.float32))),
    block_size=16,
    slots=8,
)


def test_each_kind_is_counted_and_has_its_line() -> None:
    assert HYBRID.state_bytes == 9 * 3 * SLOT
    assert HYBRID.block_bytes == 16 * (2 * 2 * 64 * 2 + 2 * 1 * 32 * 4)
    sizing = size_cache(memory(1000, 100), 50 * BLOCK, HYBRID, max_model_len=160, reserve_tokens=3)
    assert sizing.budget == (900 - 100 - 50) * BLOCK - HYBRID.state_bytes
    assert (sizing.num_blocks + 1) * HYBRID.block_bytes <= sizing.budget < (sizing.num_blocks + 2) * HYBRID.block_bytes
    state, *blocks = (line for line in str(sizing).splitlines() if " layers x " in line)
    assert state.endswith(
        "3 layers x 9 slots x (conv 24 x 3 x 2 B + recurrent 4 x 16 x 16 x 4 B), the null slot included"
    )
    assert [line.split("MiB  ")[1] for line in blocks] == [
        "1 layers x 2 x 16 tokens x 2 heads x 64 x 2 B",
        "1 layers x 2 x 16 tokens x 1 heads x 32 x 4 B",
    ]


def test_snapshots_are_in_the_sum() -> None:
    shape = replace(HYBRID, snapshots=5)
    assert shape.state_bytes == HYBRID.state_bytes + 5 * 3 * SLOT
    given: dict[str, int] = {"max_model_len": 160, "reserve_tokens": 3}
    with_them, without = (size_cache(memory(1000, 100), 0, kind, **given) for kind in (shape, HYBRID))
    assert without.budget - with_them.budget == 5 * 3 * SLOT
    assert f"5 x {3 * SLOT:,} B, for prefixes" in str(with_them)
    assert "prefixes" not in str(without)


def test_snapshots_take_a_quarter_and_leave_room_for_a_request() -> None:
    each, block = HYBRID.layout.bytes_per_slot, HYBRID.block_bytes
    assert snapshots_that_fit(80 * each, HYBRID, rows=8, blocks=0) == 20
    assert snapshots_that_fit(80 * each, HYBRID, rows=4, blocks=0) == 16, "four a row"
    left = 11 * block + each  # a quarter of it is more
    assert left // 4 > each
    assert snapshots_that_fit(left, HYBRID, rows=8, blocks=10) == 1
    assert snapshots_that_fit(11 * block, HYBRID, rows=8, blocks=10) == 0
    assert snapshots_that_fit(-5, HYBRID, rows=8, blocks=10) == 0


def test_a_model_of_state_alone_has_blocks_for_every_slot() -> None:
    """Blocks cost nothing there, but the scheduler counts in them."""
    shape = CacheShape(CacheLayout((STATE,)), block_size=16, slots=8)
    assert size_cache(memory(10, 0), 0, shape, max_model_len=160, reserve_tokens=3).num_blocks == 8 * 11


def test_slots_whose_state_does_not_fit_are_refused() -> None:
    shape = CacheShape(HYBRID.layout, block_size=16, slots=4000)
    with pytest.raises(
        CacheMemoryError, match=r"there are 0: type a smaller .* a lower --max-num-seqs, or a larger --mem"
    ):
        size_cache(memory(1000, 100), 0, shape, max_model_len=160, reserve_tokens=3)
    with pytest.raises(CacheMemoryError, match="there are 0"):
        size_cache(memory(1000, 100), 0, CacheShape(CacheLayout((STATE,)), 16, 9000), max_model_len=9, reserve_tokens=3)
    with pytest.raises(CacheMemoryError, match=r"--num-blocks 20 needs .* bytes of KV, .* are free"):
        size_cache(memory(1000, 100), 0, shape, max_model_len=160, reserve_tokens=3, num_blocks=20)


# ---- windows ----


def windowed(layers: tuple[int, int], window: int, limits: StepLimits) -> CacheShape:
    """``layers``: that attend to all tokens, and to a window."""
    planes = [keys_and_values(2, 64, torch.bfloat16, seen) for seen in (None, window)]
    layout = CacheLayout((planes[0],) * layers[0] + (planes[1],) * layers[1])
    return CacheShape(layout, limits.block_size, limits.slots, windows=(WindowDemand.of(window, limits),))


@pytest.mark.parametrize(("window", "layers"), [(1024, (10, 52)), (128, (12, 12)), (4096, (0, 32))], ids=str)
def test_the_longest_request_takes_its_window_and_no_more(window: int, layers: tuple[int, int]) -> None:
    """At 128k tokens: at most a tenth more than its window and what the other layers need."""
    limits = StepLimits(rows=1, slots=1, block_size=16, max_model_len=131_072, depth=2)
    shape = windowed(layers, window, limits)
    (demand,) = shape.windows
    held = limits.max_blocks * shape.block_bytes + demand.least * shape.bytes_of(window)
    needed = (131_072 * layers[0] + window * layers[1]) * 2 * 2 * 64 * 2
    assert needed <= held <= 1.1 * needed


@pytest.mark.parametrize(("window", "layers"), [(1024, (10, 52)), (128, (12, 12))], ids=str)
@pytest.mark.parametrize("length", [2_000, 16_000, 131_072])
def test_at_least_half_as_many_requests_fit_as_with_the_best_split(
    length: int, window: int, layers: tuple[int, int]
) -> None:
    """Whatever their length is, though the memory was split for --max-model-len 131072 and 256 rows."""
    limits = StepLimits(rows=256, slots=512, block_size=16, max_model_len=131_072, depth=2)
    shape = windowed(layers, window, limits)
    there = MemoryInfo(total=100 << 30, free=90 << 30, used=10 << 30)
    sizing = size_cache(there, 0, shape, max_model_len=131_072, reserve_tokens=3)
    ((seen, blocks),) = sizing.windows
    assert seen == window
    assert blocks <= sizing.num_blocks
    spent = (sizing.num_blocks + 1) * shape.block_bytes + shape.window_bytes(sizing.window_blocks)
    assert spent <= sizing.budget < spent + shape.block_bytes
    pages = -(-(length + limits.tokens_ahead) // 16), min(shape.windows[0].least, -(-(length + 3) // 16))
    fit = min(sizing.num_blocks / pages[0], blocks / pages[1])
    best = sizing.budget / (pages[0] * shape.block_bytes + pages[1] * shape.bytes_of(window))
    assert fit >= min(0.49 * best, 256)
    assert f"blocks of window {window}" in str(sizing)


def test_windows_give_way_to_one_request_of_the_longest_length() -> None:
    limits = StepLimits(rows=64, slots=128, block_size=16, max_model_len=16_384, depth=2)
    shape = windowed((10, 52), 1024, limits)
    needed = (1 + limits.max_blocks) * shape.block_bytes + shape.window_bytes((shape.windows[0].least,))
    for spare in (0, 50, 400):
        there = MemoryInfo(total=needed + spare * BLOCK, free=needed + spare * BLOCK, used=0)
        sizing = size_cache(there, 0, shape, max_model_len=16_384, reserve_tokens=3, memory_fraction=1.0)
        assert sizing.num_blocks >= -(-16_387 // 16)
        assert sizing.window_blocks[0] >= shape.windows[0].least
    there = MemoryInfo(total=needed // 2, free=needed // 2, used=0)
    with pytest.raises(CacheMemoryError, match="--max-model-len"):
        size_cache(there, 0, shape, max_model_len=16_384, reserve_tokens=3, memory_fraction=1.0)


def test_given_blocks_are_those_of_all_layers() -> None:
    limits = StepLimits(rows=4, slots=8, block_size=16, max_model_len=512, depth=2, max_prefill_tokens=64)
    shape = windowed((4, 4), 32, limits)
    sizing = size_cache(memory(9000, 0), 0, shape, max_model_len=512, reserve_tokens=3, num_blocks=500)
    assert sizing.windows == ((32, shape.windows[0].most),)
    assert sizing.with_blocks(400, (30,)).windows == ((32, 30),)
