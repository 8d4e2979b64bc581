"""Decode attention over a work list, on a GPU: ragged rows against float64, lengths that change between replays, bits.

Run: python3 -m pytest -m gpu tests/gpu/test_balanced_attention.py
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import DecodeAttention
from tests.gpu.test_kernels import ALL, ATTENTION, DEVICE, HALF, Case, captured, check, randn

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from models.kernels.attention import decode_list, decode_work
    from models.kernels.attention.decode_work import SplitRule
    from models.kernels.interface import Rotation
    from tests.models.kernels.nvidia_kernels import Nvidia, nvidia_kernels

LONG = [
    # rows, heads, kv_heads, dim, page, longest, query_len
    (1, 4, 1, 128, 64, 131072, 1),
    (1, 32, 8, 128, 64, 40000, 1),
    (64, 32, 8, 128, 64, 9000, 1),
    (256, 16, 8, 128, 64, 5000, 1),
    (7, 32, 4, 128, 16, 20000, 1),
    (33, 14, 2, 64, 32, 3000, 2),
    (2, 32, 8, 128, 64, 12000, 32),
]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Nvidia]:
    held = nvidia_kernels(DEVICE)
    held.attention_sums.fill_(math.nan)
    yield held
    assert not held.attention_counters.any(), "attention left its counters set"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    poison = torch.full((64 << 20,), math.nan, device=DEVICE)  # freed at once: torch.empty finds NaN, not zeros
    del poison


def ragged(made: Case, seed: int) -> None:
    """One row as long as can be, the others short, at borders or anything."""
    pick, least = random.Random(seed), made.query_len
    page = made.page
    lengths = [
        max(least, pick.choice([1, page, page + 1, pick.randint(1, min(600, made.most)), pick.randint(1, made.most)]))
        for _ in range(made.rows)
    ]
    lengths[pick.randrange(made.rows)] = made.most
    made.set_lengths(lengths)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_every_shape(kernels: Nvidia, dtype: torch.dtype, case: tuple[int, ...]) -> None:
    rows, heads, kv_heads, dim, page, most, query_len = case
    made = Case(rows, heads, kv_heads, dim, page, most, dtype, query_len)
    q = randn(rows * query_len, heads, dim, dtype=dtype)
    ragged(made, 1)
    expected = made.attention(q, dim**-0.5)
    made.poison_beyond()
    check(kernels.decode_attention(q, made.kv, planned(kernels, made), dim**-0.5), expected, dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_rows_among_short_ones_replayed_with_other_lengths(
    kernels: Nvidia, dtype: torch.dtype, case: tuple[int, ...]
) -> None:
    """The list is made inside the graph, as in a step."""
    rows, heads, kv_heads, dim, page, most, query_len = case
    made = Case(rows, heads, kv_heads, dim, page, most, dtype, query_len)
    source = randn(rows * query_len, heads, dim, dtype=dtype)

    def step() -> Tensor:
        inputs = kernels.plan_decode(made.inputs, heads, made.kv)
        return kernels.decode_attention(source.clone(), made.kv, inputs, 0.1)

    replay, out = captured(step)
    for seed in range(3):
        ragged(made, seed)
        out.fill_(math.nan)
        replay()
        check(out, made.attention(source, 0.1), dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", [c for c in [*LONG, *ATTENTION] if c[-1] == 1], ids=str)
def test_rotation_and_cache_write_folded_in(kernels: Nvidia, dtype: torch.dtype, case: tuple[int, ...]) -> None:
    rows, heads, kv_heads, dim, page, most, _ = case
    made = Case(rows, heads, kv_heads, dim, page, most, dtype)
    norms = randn(dim, dtype=dtype), randn(dim, dtype=dtype)
    positions, slots = made.last_positions, made.last_slots
    turn = Rotation(*norms, 1e-6, made.cos_sin, positions, slots)
    source = randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)

    def step() -> Tensor:
        inputs = kernels.plan_decode(made.inputs, heads, made.kv)
        return kernels.rope_cache_attend(source.clone(), heads, made.kv, turn, inputs, dim**-0.5)

    replay, out = captured(step)
    for seed in range(2):
        ragged(made, seed)
        positions.copy_(made.last_positions)
        slots.copy_(made.last_slots)
        kv = made.kv.clone()
        q = kernels.rope_and_cache(source, heads, kv, turn)
        expected = made.attention(q, dim**-0.5, kv)
        out.fill_(math.nan)
        replay()
        check(out, expected, dtype, times=2)
        found, wanted = made.kv.flatten(1, 2), kv.flatten(1, 2)
        check(found[:, slots], wanted[:, slots], dtype)
        found[:, slots] = wanted[:, slots]
        assert torch.equal(found, wanted), "an older key or value changed"
        made.kv.copy_(kv)


@pytest.mark.parametrize("programs", [5, 132, 2000])
@pytest.mark.parametrize("tma", [False, True])
def test_bits_depend_on_nobody_else(kernels: Nvidia, tma: bool, programs: int) -> None:
    """Row 0 beside others of any lengths, by any number of programs, fifty times."""
    rows, heads, kv_heads, dim, dtype = 24, 32, 8, 128, torch.bfloat16
    made = Case(rows, heads, kv_heads, dim, 64, 6000, dtype)
    q = randn(rows, heads, dim, dtype=dtype)
    attend = partial(decode_list.attend_list, tma=tma)
    rule = SplitRule(64, 2, 256, 24)

    def row_0(lengths: list[int], by: int) -> Tensor:
        made.set_lengths(lengths)
        work = decode_work.plan_decode(made.inputs, rule, pdl=False)
        torch.cuda.synchronize()  # attention may read the list before its predecessor ends
        found = attend(
            q, heads, made.kv, made.inputs, work, 0.1, kernels.attention_sums, kernels.attention_counters,
            block_n=32, stages=3, warps=2, programs=by, pdl=kernels.pdl,
        )  # fmt: skip
        return found[0].clone()

    for length in (1, 520, 700, 5999):  # of 520, splits have fewer keys than those of most others
        alone = row_0([length] + [1] * (rows - 1), 400)
        pick = random.Random(length)
        for _ in range(50):
            others = [pick.choice([1, 64, pick.randint(1, 6000)]) for _ in range(rows - 1)]
            assert torch.equal(row_0([length, *others], programs), alone)


@pytest.mark.parametrize("programs", [5, 132, 528])
@pytest.mark.parametrize("tma", [False, True])
def test_programs_with_several_splits_of_unlike_rows(kernels: Nvidia, tma: bool, programs: int) -> None:
    """A program's later splits have fewer keys than its first one."""
    rows, heads, kv_heads, dim, dtype = 16, 32, 8, 128, torch.bfloat16
    made = Case(rows, heads, kv_heads, dim, 64, 2000, dtype)
    made.set_lengths([random.Random(row).randint(1, 2000) for row in range(rows - 3)] + [539, 883, 182])
    q = randn(rows, heads, dim, dtype=dtype)
    attend = partial(decode_list.attend_list, tma=tma)
    for longest in (128, 256):
        work = decode_work.plan_decode(made.inputs, SplitRule(32, 1, longest, 16), pdl=False)
        torch.cuda.synchronize()  # attention may read the list before its predecessor ends
        found = attend(
            q, heads, made.kv, made.inputs, work, 0.1, kernels.attention_sums, kernels.attention_counters,
            block_n=32, stages=3, warps=2, programs=programs, pdl=kernels.pdl,
        )  # fmt: skip
        check(found, made.attention(q, 0.1), dtype)


def test_rows_without_tokens_are_left_alone(kernels: Nvidia) -> None:
    """As in a step that prefills, too: the output has other tokens, and rows behind the last decode row are empty."""
    rows, heads, kv_heads, dim, dtype = 64, 32, 8, 128, torch.bfloat16
    made = Case(rows, heads, kv_heads, dim, 64, 2000, dtype)
    q = randn(300, heads, dim, dtype=dtype)
    out = torch.empty(300, heads, dim, dtype=dtype, device=DEVICE)

    def step() -> Tensor:
        inputs = dataclasses.replace(made.inputs, skip_empty=True)
        inputs = kernels.plan_decode(inputs, heads, made.kv)
        return kernels.decode_attention(q.clone(), made.kv, inputs, 0.1, out)

    replay, found = captured(step)
    assert found is out
    for live in (64, 17, 1, 0):
        lengths = [random.Random(live + row).randint(1, 2000) for row in range(live)]
        made.set_lengths([*lengths, *[1] * (rows - live)])
        expected = made.attention(q[:rows], 0.1)
        made.set_lengths([*lengths, *[0] * (rows - live)])
        out.fill_(math.nan)
        replay()
        if live:
            check(out[:live], expected[:live], dtype)
        assert out[live:].isnan().all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("heads", "kv_heads", "longest"), [(32, 8, 32), (16, 8, 16), (16, 2, 16)])
def test_short_suffixes_behind_long_prefixes(
    kernels: Nvidia, dtype: torch.dtype, heads: int, kv_heads: int, longest: int
) -> None:
    """Each row as a row of as many tokens alone; the tokens between are left alone."""
    dim, known = 128, [30000, 5000, 0, 64, 700]
    counts = [min(20, longest), longest, 0, 1, 3]
    starts = [3, 40, 0, 90, 100]
    made = Case(len(known), heads, kv_heads, dim, 64, 30100, dtype)
    lengths = [before + new for before, new in zip(known, counts, strict=True)]
    made.set_lengths(lengths)
    inputs = dataclasses.replace(
        made.inputs,
        query_len=longest,
        skip_empty=True,
        starts_B=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        queries_B=torch.tensor(counts, dtype=torch.int32, device=DEVICE),
    )
    source = randn(120, heads, dim, dtype=dtype)
    out = torch.full_like(source, math.nan)

    def step() -> Tensor:
        planned = kernels.plan_decode(inputs, heads, made.kv)
        return kernels.decode_attention(source.clone(), made.kv, planned, 0.1, out)  # behind a launch of its own

    replay, _ = captured(step)
    out.fill_(math.nan)
    replay()
    used = torch.zeros(120, dtype=torch.bool, device=DEVICE)
    for row, (start, new, length) in enumerate(zip(starts, counts, lengths, strict=True)):
        if new:
            used[start : start + new] = True
            alone = Case(1, heads, kv_heads, dim, 64, 30100, dtype, new)
            alone.set_lengths([length])
            alone.table, alone.kv = made.table[row : row + 1], made.kv
            check(out[start : start + new], alone.attention(source[start : start + new], 0.1), dtype)
    assert out[~used].isnan().all()


def planned(kernels: Nvidia, made: Case) -> DecodeAttention:
    inputs: Any = kernels.plan_decode(made.inputs, made.heads, made.kv)
    torch.cuda.synchronize()  # attention may read the list before its predecessor ends
    return inputs  # type: ignore[no-any-return]
