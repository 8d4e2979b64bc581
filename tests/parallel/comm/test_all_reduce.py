"""Which sums a kernel of our own takes, in how many steps, and what products are given for that."""

from __future__ import annotations

import pytest
import torch

from parallel.comm.all_reduce_dispatch import LIMITS, ROW_BYTES, ROWS, Limits, Sums, memory_bytes

BF16 = torch.bfloat16

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")


def made(size: int = 2, limits: Limits | None = None) -> Sums:
    return Sums([16 * rank for rank in range(size)], torch.zeros(ROWS), 0, pdl=False, limits=limits)


def test_only_rows_that_the_kernel_can_load_wide_are_summed_by_it() -> None:
    sums = made(limits=Limits(2048, 0))
    full = torch.empty(2048, dtype=BF16)
    assert sums.of(full[:1024].view(4, 256))
    assert sums.of(full[8:16])
    assert not sums.of(full[:1032]), "larger than the limit"
    assert not sums.of(full[:7]), "not a multiple of 16 bytes"
    assert not sums.of(full[:28].view(7, 4)), "rows are not"
    assert not sums.of(full[1:9]), "does not start at a multiple of 16 bytes"
    assert not sums.of(full.view(32, 64)[:, :8]), "not contiguous"
    assert not sums.of(full[:0])
    assert not sums.of(full[0])
    assert sums.of(torch.empty(512))
    assert not sums.of(torch.empty(516)), "larger, in bytes"
    assert not sums.of(torch.empty(8, dtype=torch.float16)), "a dtype that the kernel was not tried with"


def test_there_is_memory_for_every_message_that_the_kernel_takes() -> None:
    sums = made(limits=Limits(1 << 40, 0))
    assert sums.of(torch.empty(ROWS, 8))
    assert not sums.of(torch.empty(ROWS + 1, 8)), "more rows than there is memory for"
    assert sums.of(torch.empty(2, ROW_BYTES // 4))
    assert not sums.of(torch.empty(2, ROW_BYTES // 4 + 4)), "rows that are longer"
    assert memory_bytes(8) == 2 * 8 * ROWS * ROW_BYTES


def test_a_message_takes_the_first_way_whose_limit_it_does_not_pass() -> None:
    sums = made(limits=Limits(one_step=2048, two_steps=4096))
    rows = torch.empty(5, 512, dtype=BF16)  # of 1024 bytes each
    ways = [sums.of(rows[:count]) for count in range(1, 6)]
    assert ways == [sums.one_step, sums.one_step, sums.two_steps, sums.two_steps, None]


@pytest.mark.parametrize("size", sorted(LIMITS))
def test_a_product_has_places_for_what_is_summed_in_one_step(size: int) -> None:
    sums = made(size)
    found = set()
    for dtype in (BF16, torch.float32, torch.float16):
        for tokens in (1, 8, 16, 32, 64, ROWS, ROWS + 1):
            for width in (4, 7, 8, 512, 4096, ROW_BYTES // 2, ROW_BYTES):
                places = sums.places_for(tokens, width, dtype)
                summed = sums.of(torch.empty(tokens, width, dtype=dtype))
                assert (places is not None) == (summed is sums.one_step), (dtype, tokens, width)
                if places is not None:
                    assert tokens <= places.rows
                    assert width * dtype.itemsize <= places.row_bytes
                    assert places.memory == tuple(16 * rank for rank in range(size))
                found.add(places is not None)
    assert found == {True, False}
