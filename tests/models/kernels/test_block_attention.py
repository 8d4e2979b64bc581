"""Attention of blocks: all of the context and the block, what is not behind a token, what is near it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.inputs import DecodeAttention
from tests.plant import Kernels, invariant_kernels, reference_kernels

HEADS, KV_HEADS, DIM, PAGE, SCALE = 6, 2, 16, 4, 0.3
LENGTHS = (5, 31, 12)  # blocks included


def cache_of(block: int) -> tuple[Tensor, DecodeAttention]:
    """Shuffled pages with NaN wherever nothing was written."""
    generator = torch.Generator().manual_seed(3)
    pages = -(-max(LENGTHS) // PAGE)
    table = torch.randperm(len(LENGTHS) * pages, generator=generator).view(len(LENGTHS), pages) + 1
    kv = torch.full((2, 1 + table.numel(), PAGE, KV_HEADS, DIM), float("nan"))
    for row, length in enumerate(LENGTHS):
        place = torch.arange(length)
        slots = table[row, place // PAGE] * PAGE + place % PAGE
        kv.flatten(1, 2)[:, slots] = torch.randn(2, length, KV_HEADS, DIM, generator=generator)
    lengths_B = torch.tensor(LENGTHS, dtype=torch.int32)
    return kv, DecodeAttention(table.to(torch.int32), lengths_B, block, pages * PAGE)


def plain(q_THD: Tensor, kv: Tensor, inputs: DecodeAttention, causal: bool, window: int | None) -> Tensor:
    """One query of one head at a time."""
    out, block = torch.empty_like(q_THD), inputs.query_len
    for row, length in enumerate(LENGTHS):
        place = torch.arange(length)
        slots = inputs.page_table_BP[row, place // PAGE].long() * PAGE + place % PAGE
        keys, values = kv.flatten(1, 2)[:, slots]
        for i in range(block):
            at = length - block + i
            seen = [j for j in range(length) if not (causal and j > at) and not (window and abs(at - j) >= window)]
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                weights = (keys[seen, group] @ q_THD[row * block + i, head] * SCALE).softmax(0)
                out[row * block + i, head] = weights @ values[seen, group]
    return out


@pytest.mark.parametrize("kernels", [reference_kernels(), invariant_kernels()], ids=lambda k: k.name)
@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [1, 2, 5])
def test_blocks_see_what_they_should(block: int, causal: bool, window: int | None, kernels: Kernels) -> None:
    kv, inputs = cache_of(block)
    q_THD = torch.randn(len(LENGTHS) * block, HEADS, DIM, generator=torch.Generator().manual_seed(block))
    expected = plain(q_THD, kv, inputs, causal, window)
    inputs = replace(inputs, causal=causal)
    for planned in (inputs, kernels.plan_decode(inputs, HEADS, kv)):
        if window is None:
            found = kernels.decode_attention(q_THD, kv, planned, SCALE)
        else:
            found = kernels.window_attention(q_THD, kv, planned, SCALE, window)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_row_that_is_not_live_disturbs_nobody() -> None:
    """Its pages are the trash page, and as many entries as its block has."""
    kv, inputs = cache_of(4)
    table = inputs.page_table_BP.clone()
    table[1] = 0
    kv[:, 0] = 0.0
    lengths_B = torch.tensor([5, 4, 12], dtype=torch.int32)
    inputs = replace(inputs, page_table_BP=table, kv_lengths_B=lengths_B, causal=False)
    q_THD = torch.randn(12, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    kernels = reference_kernels()
    assert bool(kernels.decode_attention(q_THD, kv, inputs, SCALE).isfinite().all())
    assert bool(kernels.window_attention(q_THD, kv, inputs, SCALE, 3).isfinite().all())
