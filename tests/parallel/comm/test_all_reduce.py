"""Which sums a kernel of our own takes, in how many steps, and what products are given for that."""

from __future__ import annotations

import pytest
import torch

from parallel.comm.symmetric_all_reduce import (
    ROW_BYTES,
    ROWS,
    SIZE_LIMITS,
    AllReduceDispatch,
    SizeLimits,
    all_reduce_buffer_bytes,
    buffer_rows,
)

BF16 = torch.bfloat16

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")


def made(size: int = 2, limits: SizeLimits | None = None) -> AllReduceDispatch:
    return AllReduceDispatch(
        [16 * rank for rank in range(size)], torch.zeros(buffer_rows(size)), 0, pdl=False, limits=limits
    )


def test_only_rows_that_the_kernel_can_load_wide_are_kernel_by_it() -> None:
    dispatch = made(limits=SizeLimits(2048, 0))
    full = torch.empty(2048, dtype=BF16)
    assert dispatch.kernel_for(full[:1024].view(4, 256))
    assert dispatch.kernel_for(full[8:16])
    assert not dispatch.kernel_for(full[:1032]), "larger than the limit"
    assert not dispatch.kernel_for(full[:7]), "not a multiple of 16 bytes"
    assert not dispatch.kernel_for(full[:28].view(7, 4)), "rows are not"
    assert not dispatch.kernel_for(full[1:9]), "does not start at a multiple of 16 bytes"
    assert not dispatch.kernel_for(full.view(32, 64)[:, :8]), "not contiguous"
    assert not dispatch.kernel_for(full[:0])
    assert not dispatch.kernel_for(full[0])
    assert dispatch.kernel_for(torch.empty(512))
    assert not dispatch.kernel_for(torch.empty(516)), "larger, in bytes"
    assert not dispatch.kernel_for(torch.empty(8, dtype=torch.float16)), "a dtype that the kernel was not tried with"


def test_there_is_memory_for_every_message_that_the_kernel_takes() -> None:
    dispatch = made(limits=SizeLimits(1 << 40, 0))
    assert dispatch.kernel_for(torch.empty(ROWS, 8))
    assert dispatch.kernel_for(torch.empty(3 * buffer_rows(2) + 1, 8)), "more rows than the buffers have go in launches"
    assert dispatch.kernel_for(torch.empty(2, ROW_BYTES // 4))
    assert not dispatch.kernel_for(torch.empty(2, ROW_BYTES // 4 + 4)), "rows that are longer"
    assert all_reduce_buffer_bytes(8) == 2 * 8 * ROWS * ROW_BYTES
    assert all_reduce_buffer_bytes(2) == 2 * 2 * 2048 * ROW_BYTES == 128 << 20
    assert all_reduce_buffer_bytes(4) == 256 << 20


def test_a_message_takes_the_first_way_whose_limit_it_does_not_pass() -> None:
    dispatch = made(limits=SizeLimits(one_shot=2048, two_shot=4096))
    rows = torch.empty(5, 512, dtype=BF16)  # of 1024 bytes each
    ways = [dispatch.kernel_for(rows[:count]) for count in range(1, 6)]
    assert ways == [dispatch.one_shot, dispatch.one_shot, dispatch.two_shot, dispatch.two_shot, None]


@pytest.mark.parametrize("size", sorted(SIZE_LIMITS))
def test_a_product_may_push_exactly_what_is_reduced_one_shot(size: int) -> None:
    dispatch = made(size)
    found = set()
    for dtype in (BF16, torch.float32, torch.float16):
        for tokens in (1, 8, 16, 32, 64, ROWS, ROWS + 1):
            for width in (4, 7, 8, 512, 4096, ROW_BYTES // 2, ROW_BYTES):
                buffers = dispatch.push_buffers(tokens, width, dtype)
                kernel = dispatch.kernel_for(torch.empty(tokens, width, dtype=dtype))
                pushes = tokens <= ROWS and kernel is dispatch.one_shot
                assert (buffers is not None) == pushes, (dtype, tokens, width)
                if buffers is not None:
                    assert tokens <= buffers.rows
                    assert width * dtype.itemsize <= buffers.row_bytes
                    assert buffers.memory == tuple(16 * rank for rank in range(size))
                found.add(buffers is not None)
    assert found == {True, False}
