"""Windows, sinks, soft caps and scales in the reference and its deterministic form, against their formulas."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from models.inputs import DecodeAttention, PrefillAttention
from models.kernels.interface import AttentionKind
from tests.models.kernels.attention_kinds import KINDS, attention_of
from tests.plant import Kernels, invariant_kernels, reference_kernels

HEADS, KV_HEADS, DIM, PAGE, PAGES = 6, 2, 10, 4, 6
SCALE = 0.4
SETS = {"plain": reference_kernels(), "deterministic": invariant_kernels()}
EACH = pytest.mark.parametrize("kernels", SETS.values(), ids=SETS)
OF_EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cache_and_tables(rows: int, lengths: list[int], kind: AttentionKind, queries: int) -> tuple[Tensor, Tensor]:
    """Pages that no query of a row sees are NaN: they may belong to other requests by now."""
    cache = rand(2, 1 + rows * PAGES, PAGE, KV_HEADS, DIM, seed=1)
    tables = 1 + torch.arange(rows * PAGES, dtype=torch.int32).view(rows, PAGES)
    for table, length in zip(tables, lengths, strict=True):
        cache[:, table[-(-length // PAGE) :].long()] = float("nan")
        if kind.window is not None:
            cache[:, table[: max(0, length - queries - kind.window + 1) // PAGE].long()] = float("nan")
    return cache, tables


def seen_by(cache: Tensor, table: Tensor, places: list[int]) -> tuple[Tensor, Tensor]:
    keys, values = (
        x[torch.tensor([int(table[p // PAGE]) * PAGE + p % PAGE for p in places])] for x in cache.flatten(1, 2)
    )
    return keys, values


def check(found: Tensor, expected: list[Tensor]) -> None:
    torch.testing.assert_close(found.double(), torch.stack(expected), atol=1e-5, rtol=1e-5)


@EACH
@OF_EVERY_KIND
@pytest.mark.parametrize("query_len", [1, 3])
def test_decode(kernels: Kernels, kind: AttentionKind, query_len: int) -> None:
    lengths = [3, 23, 9]
    cache, tables = cache_and_tables(3, lengths, kind, query_len)
    q = rand(3 * query_len, HEADS, DIM)
    inputs = DecodeAttention(tables, torch.tensor(lengths, dtype=torch.int32), query_len, PAGE * PAGES)
    found = kernels.decode_attention(q, cache, inputs, SCALE, kind=kind)
    expected = [
        attention_of(q[row * query_len + i], *seen_by(cache, tables[row], [*range(n - query_len + i + 1)]), SCALE, kind)
        for row, n in enumerate(lengths)
        for i in range(query_len)
    ]
    check(found, expected)


@EACH
@OF_EVERY_KIND
def test_prompts_whole_in_chunks_and_in_pieces(kernels: Kernels, kind: AttentionKind) -> None:
    """Chunks of 5 tokens give what the whole prompt gives; so do rows with ``starts_B``."""
    length = 22
    cache, tables = cache_and_tables(1, [length], replace(kind, window=None), length)
    q = rand(length, HEADS, DIM, seed=3)
    expected = [attention_of(q[i], *seen_by(cache, tables[0], [*range(i + 1)]), SCALE, kind) for i in range(length)]
    for cuts in ([0, length], [*range(0, length, 5), length]):
        for begin, end in pairwise(cuts):
            inputs = PrefillAttention(tables, (end - begin,), (end,))
            found = kernels.prefill_attention(q[begin:end], cache, inputs, SCALE, kind)
            check(found, expected[begin:end])
    counts, ends = [5, 3], torch.tensor([9, length], dtype=torch.int32)
    pieces = DecodeAttention(
        tables.expand(2, -1), ends, 5, PAGE * PAGES,
        starts_B=torch.tensor([0, 5], dtype=torch.int32), queries_B=torch.tensor(counts, dtype=torch.int32),
    )  # fmt: skip
    found = kernels.decode_attention(torch.cat((q[4:9], q[19:22])), cache, pieces, SCALE, kind=kind)
    check(found, expected[4:9] + expected[19:22])


@EACH
@pytest.mark.parametrize("window", [1, 2, 3, 6])
def test_a_node_of_a_tree_sees_by_its_depth(kernels: Kernels, window: int) -> None:
    """Nodes 1 and 2 follow the root, 3 follows 2, 4 follows 1: a window of 1 is the node alone."""
    kind = replace(KINDS["all"], window=window)
    paths = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]
    seen = torch.tensor([[sum(1 << n - 1 for n in path if n) for path in paths]], dtype=torch.int32)
    length = 13
    cache, tables = cache_and_tables(1, [length], replace(kind, window=None), len(paths))
    q = rand(len(paths), HEADS, DIM, seed=4)
    inputs = DecodeAttention(tables, torch.tensor([length], dtype=torch.int32), len(paths), PAGE * PAGES, tree_BQ=seen)
    found = kernels.decode_attention(q, cache, inputs, SCALE, kind=kind)
    root = length - len(paths)
    places = [[*range(root), *(root + node for node in path)] for path in paths]
    check(found, [attention_of(q[i], *seen_by(cache, tables[0], at), SCALE, kind) for i, at in enumerate(places)])


@EACH
def test_rows_that_are_not_live_stay_finite(kernels: Kernels) -> None:
    cache, tables = cache_and_tables(2, [0, 9], KINDS["all"], 2)
    cache[:, 0] = 0
    inputs = DecodeAttention(torch.zeros_like(tables), torch.tensor([0, 1], dtype=torch.int32), 2, PAGE * PAGES)
    found = kernels.decode_attention(rand(4, HEADS, DIM), cache, inputs, SCALE, kind=KINDS["all"])
    assert bool(found.isfinite().all())
