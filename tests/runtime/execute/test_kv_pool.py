"""KV sizing: the sum is right to the byte, printed so that it can be checked, and its refusals say what to type."""

from __future__ import annotations

import re

import pytest
import torch

from runtime.execute.cache.kv_pool import KvMemoryError, KvPool, KvShape, KvSizing, size_kv
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.device.protocol import MemoryInfo

SHAPE = KvShape(layers=4, block_size=16, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
BLOCK = 4 * 2 * 16 * 2 * 64 * 2


def memory(total_blocks: int, used_blocks: int) -> MemoryInfo:
    return MemoryInfo(total=total_blocks * BLOCK, free=(total_blocks - used_blocks) * BLOCK, allocated=0)


def sized(total_blocks: int = 1000, used_blocks: int = 100, peak_blocks: int = 50, **options: int) -> KvSizing:
    given = {"max_model_len": 160, "reserve_tokens": 3} | options
    return size_kv(memory(total_blocks, used_blocks), peak_blocks * BLOCK, SHAPE, **given)


def test_block_bytes() -> None:
    assert SHAPE.block_bytes == BLOCK == 32768


def test_what_is_left_becomes_blocks_minus_the_trash_block() -> None:
    sizing = sized()
    assert sizing.budget == (900 - 100 - 50) * BLOCK
    assert sizing.num_blocks == 749
    assert sizing.tokens == 749 * 16


def test_the_pool_never_exceeds_the_budget() -> None:
    for peak in range(0, 5 * BLOCK, 10_007):
        sizing = size_kv(memory(1000, 100), peak, SHAPE, max_model_len=160, reserve_tokens=3)
        assert (sizing.num_blocks + 1) * BLOCK <= sizing.budget < (sizing.num_blocks + 2) * BLOCK


def test_the_printed_sum_adds_up() -> None:
    text = str(size_kv(memory(327_680, 32_768), 1 << 30, SHAPE, max_model_len=160, reserve_tokens=3))
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


def test_ranks_agree_on_fewer() -> None:
    sizing = sized()
    assert sizing.with_blocks(700).num_blocks == 700
    assert sizing.num_blocks == 749


def test_one_longest_request_must_fit_with_what_is_reserved_ahead() -> None:
    assert sized(num_blocks=11).num_blocks == 11  # 163 tokens need 11 blocks of 16
    with pytest.raises(
        KvMemoryError, match=r"needs 11 KV blocks, there are 10: type --max-model-len 157, or --num-b.* 11"
    ):
        sized(num_blocks=10)
    assert sized(num_blocks=10, max_model_len=157).num_blocks == 10


def test_too_little_memory_says_so() -> None:
    with pytest.raises(
        KvMemoryError, match=r"needs 11 KV blocks, there are 9: type --max-model-len 141, or a larger --mem"
    ):
        sized(used_blocks=840)
    with pytest.raises(KvMemoryError, match=r"there are 0: type a smaller model or a larger device"):
        sized(used_blocks=990)


def test_given_blocks_that_do_not_fit_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        KvMemoryError, match=r"--num-blocks 900 needs 29,523,968 bytes of KV, 29,491,200 are free.* 899 or"
    ):
        sized(num_blocks=900)


def test_the_pool_has_one_trash_block_more() -> None:
    with TwinDevice() as device:
        pool = KvPool(device, SHAPE, num_blocks=9)
        assert len(pool.layers) == 4
        assert pool.layers[0].shape == (2, 10, 16, 2, 64)
        assert pool.layers[0].dtype == torch.bfloat16
        assert not pool.layers[3].any()
        assert device.memory_info().allocated == 10 * SHAPE.block_bytes
