"""Prefill attention, FlashInfer's and ours, against float64 formulas: random shapes, dtypes, prefixes, graphs.

Run: python3 -m pytest -m gpu tests/gpu/test_prefill_kernels.py
FlashInfer's is compiled where it is not there yet, which takes a minute or two.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.inputs import PrefillAttention
from tests.gpu.test_kernels import ALL, DEVICE, HALF, Case, captured, check, randn

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from models.kernels.attention import prefill as prefill_kernel
    from models.kernels.attention.prefill import Blocks
    from models.kernels.attention.prefill_tiles import Tiles, list_tiles
    from tests.models.kernels.nvidia_kernels import Nvidia, nvidia_kernels

BF16 = torch.bfloat16
NAMES = ["flashinfer", "triton"]


@pytest.fixture(scope="module")
def held() -> dict[str, Nvidia]:
    """Made when first asked for: a test of ours alone does not wait for nvcc."""
    return {}


@pytest.fixture
def kernels(request: pytest.FixtureRequest, held: dict[str, Nvidia]) -> Nvidia:
    name = request.param
    if name not in held:
        held[name] = nvidia_kernels(DEVICE, prefill=name)
        held[name].prepare_prefill(BF16, 128)
        held[name].agree_on_kernels(int)
        assert held[name].prefill_name == name
    return held[name]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    poison = torch.full((64 << 20,), math.nan, device=DEVICE)  # freed at once: torch.empty finds NaN, not zeros
    del poison


def prefilled(made: Case, q: Tensor, queries: tuple[int, ...], lengths: tuple[int, ...], scale: float) -> Tensor:
    """What the formulas give for packed rows over the pages of ``made``."""
    heads, dim = q.shape[1:]
    _, _, page, kv_heads, _ = made.kv.shape
    expected = []
    for row, part in enumerate(torch.split(q, list(queries))):
        if not len(part):
            continue
        one = Case(1, heads, kv_heads, dim, page, max(lengths), q.dtype, query_len=part.shape[0])
        one.table, one.kv = made.table[row : row + 1], made.kv
        one.set_lengths([lengths[row]])
        expected.append(one.attention(part, scale))
    return torch.cat(expected)


PREFILL = [
    (32, 8, 128, 64, [(512, 512)], BF16),
    (16, 8, 128, 16, [(5, 100), (1, 33), (200, 200), (64, 900)], BF16),
    (16, 8, 128, 64, [(5, 100), (130, 130)], torch.float16),
    (14, 2, 64, 32, [(40, 77), (128, 128)], BF16),
    (6, 2, 24, 16, [(9, 30), (4, 4)], torch.float32),  # FlashInfer has none: ours, whoever was asked for
    (32, 8, 128, 64, [(300, 1500), (1, 1)], torch.float32),
]


@pytest.mark.parametrize("kernels", NAMES, indirect=True)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page", "rows", "dtype"), PREFILL)
def test_prefill_attention(
    kernels: Nvidia,
    heads: int,
    kv_heads: int,
    dim: int,
    page: int,
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    queries, lengths = tuple(q for q, _ in rows), tuple(n for _, n in rows)
    made = Case(len(rows), heads, kv_heads, dim, page, max(lengths), dtype)
    made.set_lengths(list(lengths))
    inputs = PrefillAttention(made.table, queries, lengths)
    for scale in (dim**-0.5, 0.05):
        for _ in range(6):  # more plans than the ring holds
            planned = kernels.plan_prefill(inputs, heads, made.kv)
        q = randn(sum(queries), heads, dim, dtype=dtype)
        out = kernels.prefill_attention(q, made.kv, planned, scale)
        check(out, prefilled(made, q, queries, lengths, scale), dtype)


@pytest.mark.parametrize("kernels", NAMES, indirect=True)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page"), [(32, 8, 128, 64), (14, 2, 64, 32)])
def test_captured_prefill_is_planned_anew_for_each_replay(
    kernels: Nvidia, heads: int, kv_heads: int, dim: int, page: int
) -> None:
    """One graph of 320 tokens and at most six rows; more plans than a ring holds, of other rows each time. Where a plan
    is a table, every other one is put there as a step brings it: what this launch reads, over the one before.
    """
    tokens, most = 320, 512
    made = Case(6, heads, kv_heads, dim, page, most, BF16)
    q, scale = randn(tokens, heads, dim, dtype=BF16), dim**-0.5
    repeated = kernels.repeat_prefill(made.table, 2 * tokens, heads, made.kv)
    assert repeated is not None
    inputs = PrefillAttention(made.table, (tokens,), (tokens,), repeated)
    repeated.plan((tokens,), (tokens,))
    replay, out = captured(lambda: kernels.prefill_attention(q, made.kv, inputs, scale))
    for seed in range(8):
        pick = random.Random(seed)
        nobody = seed in (3, 4)  # rows of a group that decodes while another has a chunk: all that there may be
        queries = (0,) * 6 if nobody else tuple(pick.randint(1, 50) for _ in range(pick.randint(1, 6)))
        lengths = tuple(query and query + pick.choice([0, 0, pick.randint(1, most - 50)]) for query in queries)
        first = tokens if nobody else 0
        q.copy_(randn(tokens, heads, dim, dtype=BF16))
        if (table := repeated.table) is not None and seed % 2:
            entries = torch.tensor(table.entries(queries, lengths, first, tokens), device=DEVICE)
            table.place[: len(entries)].copy_(entries)
        else:
            repeated.plan(queries, lengths, first)
        out.fill_(math.nan)
        replay()
        if nobody:
            assert out.isnan().all(), "a tile of an earlier plan"
            continue
        check(out[: sum(queries)], prefilled(made, q[: sum(queries)], queries, lengths, scale), BF16)


@pytest.mark.parametrize("kernels", ["flashinfer"], indirect=True)
def test_captured_prefill_copies_keys_where_that_pays(kernels: Nvidia) -> None:
    """One graph of 3,000 tokens: plans that copy and plans that do not, in every order, with NaN behind every row."""
    heads, kv_heads, dim, page, tokens, most = 8, 2, 128, 64, 3000, 5000
    made = Case(5, heads, kv_heads, dim, page, most, BF16)
    lengths_of = [3000, 1, 4900, 1200, 130]
    made.set_lengths(lengths_of)
    made.poison_beyond()
    q, scale = randn(tokens, heads, dim, dtype=BF16), dim**-0.5
    repeated = kernels.repeat_prefill(made.table, tokens, heads, made.kv)
    assert repeated is not None
    inputs = PrefillAttention(made.table, (tokens,), (tokens,), repeated)
    repeated.plan((tokens,), (tokens,))
    kernels.prefill_attention(q, made.kv, inputs, scale)
    replay, out = captured(lambda: kernels.prefill_attention(q, made.kv, inputs, scale))
    copying = ((3000,), (1700, 0, 1300), (0, 0, 2500), (1200, 0, 1100, 500), (1999, 1, 0, 999, 1))
    paged = ((1500,), (0, 1, 40), (100, 1, 100, 600, 130), (2047,))
    gathered = repeated._gathered  # type: ignore[attr-defined]
    both = set()
    for seed in range(12):
        pick = random.Random(seed)
        queries = pick.choice(copying if seed % 3 else paged) if seed != 7 else (0,) * 5
        first = pick.choice([0, 0, tokens - sum(queries)])
        lengths = tuple(length if query else 0 for query, length in zip(queries, lengths_of, strict=False))
        both.add(gathered.pays(queries, lengths, first))
        q.copy_(randn(tokens, heads, dim, dtype=BF16))
        repeated.plan(queries, lengths, first)
        out.fill_(math.nan)
        replay()
        end = first + sum(queries)
        if any(queries):
            check(out[first:end], prefilled(made, q[first:end], queries, lengths, scale), BF16)
        assert out[end:].isnan().all()
        assert out[:first].isnan().all()
    assert both == {True, False}


@pytest.mark.parametrize("kernels", ["flashinfer"], indirect=True)
def test_a_broken_row_leaves_rows_beside_it_alone(kernels: Nvidia) -> None:
    """Rows whose keys are copied side by side: those of the broken ones are NaN."""
    heads, kv_heads, dim, page, rows, each = 8, 2, 128, 64, 4, 1100
    made = Case(rows, heads, kv_heads, dim, page, each, BF16)
    made.set_lengths([each] * rows)
    q, scale = randn(rows * each, heads, dim, dtype=BF16), dim**-0.5
    repeated = kernels.repeat_prefill(made.table, rows * each, heads, made.kv)
    assert repeated is not None
    queries = (each,) * rows
    assert repeated._gathered.pays(queries, queries, 0)  # type: ignore[attr-defined]
    repeated.plan(queries, queries)
    inputs = PrefillAttention(made.table, queries, queries, repeated)
    expected = kernels.prefill_attention(q, made.kv, inputs, scale).clone().view(rows, -1)
    for broken in (0, 2):
        made.kv[:, made.table[broken].long()] = math.nan
    found = kernels.prefill_attention(q, made.kv, inputs, scale).view(rows, -1)
    assert torch.equal(found[1::2], expected[1::2])
    assert found[::2].isnan().all()


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("seed", range(16))
def test_random_rows_over_pages_with_nan_around_them(kernels: Nvidia, dtype: torch.dtype, seed: int) -> None:
    pick = random.Random(seed)
    kv_heads, group = pick.choice([1, 2, 8]), pick.choice([1, 2, 3, 4, 5, 7, 8, 16])
    dim, page = pick.choice([16, 24, 64, 80, 96, 128, 128, 192, 256]), pick.choice([1, 8, 16, 48, 64, 64, 96, 128])
    queries = tuple(pick.choice([1, pick.randint(2, 40), pick.randint(41, 400)]) for _ in range(pick.randint(1, 7)))
    lengths = tuple(new + pick.choice([0, 0, page, pick.randint(1, 700)]) for new in queries)
    made = Case(len(queries), kv_heads * group, kv_heads, dim, page, max(lengths), dtype)
    made.set_lengths(list(lengths))
    made.poison_beyond()
    q = randn(sum(queries), kv_heads * group, dim, dtype=dtype)
    inputs = PrefillAttention(made.table, queries, lengths)
    planned = kernels.plan_prefill(inputs, kv_heads * group, made.kv)
    out = kernels.prefill_attention(q, made.kv, planned, dim**-0.5)
    check(out, prefilled(made, q, queries, lengths, dim**-0.5), dtype)


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize("dtype", HALF)
def test_long_rows(kernels: Nvidia, dtype: torch.dtype) -> None:
    """Many full blocks, of which large scores and small ones alternate: the running maximum must be followed."""
    heads, kv_heads, dim, page = 32, 8, 128, 64  # more tiles than programs
    queries, lengths = (2048, 700), (2048, 6000)
    made = Case(2, heads, kv_heads, dim, page, max(lengths), dtype)
    made.set_lengths(list(lengths))
    made.kv[0] *= torch.where(torch.arange(made.kv.shape[1], device=DEVICE) % 2 == 0, 4.0, 0.25)[:, None, None, None]
    q = randn(sum(queries), heads, dim, dtype=dtype)
    inputs = PrefillAttention(made.table, queries, lengths)
    planned = kernels.plan_prefill(inputs, heads, made.kv)
    out = kernels.prefill_attention(q, made.kv, planned, dim**-0.5)
    check(out, prefilled(made, q, queries, lengths, dim**-0.5), dtype)


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize("dtype", ALL)
def test_ours_waits_for_the_launch_before_it(kernels: Nvidia, dtype: torch.dtype) -> None:
    """Programmatic dependent launch: queries come from a norm right before, the next norm reads what comes out."""
    heads, kv_heads, dim, page, tokens = 8, 2, 128, 64, 500
    made = Case(3, heads, kv_heads, dim, page, 1500, dtype)
    repeated = kernels.repeat_prefill(made.table, tokens, heads, made.kv)
    assert repeated is not None
    inputs = PrefillAttention(made.table, (tokens,), (tokens,), repeated)
    x, weight = randn(tokens, heads * dim, dtype=dtype), randn(heads * dim, dtype=dtype)

    def chain(between: Callable[[], object] = lambda: None) -> Tensor:
        hidden = x
        for _ in range(6):
            normed = kernels.rms_norm(hidden, weight, 1e-6)
            between()
            hidden = kernels.prefill_attention(normed.view(tokens, heads, dim), made.kv, inputs, 0.1).flatten(1)
            between()
        return kernels.rms_norm(hidden, weight, 1e-6)

    queries, lengths = (200, 250, 50), (1400, 250, 900)
    repeated.plan(queries, lengths)
    replay, out = captured(chain)
    for _ in range(4):
        x.copy_(randn(tokens, heads * dim, dtype=dtype))
        repeated.plan(queries, lengths)
        expected = chain(torch.cuda.synchronize)  # the same launches, none of which can begin too early
        out.fill_(math.nan)
        replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "blocks", [(128, 64, 2, 8), (128, 64, 4, 8), (128, 128, 2, 8), (128, 32, 3, 8), (64, 64, 3, 4), (64, 32, 2, 4)]
)
def test_every_tile(blocks: tuple[int, int, int, int]) -> None:
    heads, kv_heads, dim, page = 32, 8, 128, 64
    queries, lengths = (513, 1, 77), (513, 900, 200)
    made = Case(3, heads, kv_heads, dim, page, max(lengths), BF16)
    made.set_lengths(list(lengths))
    made.poison_beyond()
    q, one = randn(sum(queries), heads, dim, dtype=BF16), Blocks(*blocks)
    listed = list_tiles(queries, lengths, one.m // 4)
    tiles = Tiles(torch.tensor(listed, dtype=torch.int32, device=DEVICE))
    out = prefill_kernel.prefill_attention(
        q, made.kv, made.table, tiles, dim**-0.5, blocks=one, programs=528, pdl=False
    )
    check(out, prefilled(made, q, queries, lengths, dim**-0.5), BF16)


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_more_than_there_is_room_for_is_refused(kernels: Nvidia) -> None:
    made = Case(2, 8, 2, 128, 64, 300, BF16)
    repeated = kernels.repeat_prefill(made.table, 64, 8, made.kv)
    assert repeated is not None
    with pytest.raises(ValueError, match="there is room for"):
        repeated.plan((1, 1, 1), (1, 1, 1))
    with pytest.raises(ValueError, match="there is room for"):
        repeated.plan((200, 100), (200, 100))
