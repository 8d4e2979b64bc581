"""Windows, sinks and soft caps through Triton's interpreter, on a CPU: ``TRITON_INTERPRET=1 python -m ...``.

Decode by every split and over a list, chunks in pieces, draft trees, prompts, and the deterministic kernels, each
against the torch reference; those of a row have the same bits in decode and in prefill. Pages before every window are
NaN: they may be another request's by then. Exits with an error where one differs.

Knows: shapes that reach every branch that a kind adds. Does not know: what no kind changes (interpreted_decode.py,
interpreted_prefill.py, interpreted_invariant.py).
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from models.inputs import DecodeAttention, PrefillAttention
from models.kernels.attention import decode, decode_list, decode_work, invariant, prefill, prefill_tiles
from models.kernels.attention.decode_work import SplitRule
from models.kernels.attention.prefill import Blocks
from models.kernels.interface import AttentionKind, Rotation
from runtime.execute.sampling.draft_tree import lay_out_in_torch
from tests.models.kernels.interpreted_invariant import same
from tests.models.kernels.interpreted_kernels import REFERENCE, TRAITS, Cache, check, interpreted_kernels, randn
from tests.models.kernels.nvidia_kernels import check_counters, invariant_nvidia_kernels_on_cpu

SCALE = 0.3


def kinds(heads: int, *windows: int) -> list[AttentionKind]:
    """Sinks and a soft cap without a window, and with every other one of ``windows``."""
    sinks = torch.linspace(-1.0, 2.0, heads)
    found = [AttentionKind(window, 2.0, sinks) if n % 2 else AttentionKind(window) for n, window in enumerate(windows)]
    return [AttentionKind(None, 1.5, sinks), *found]


def cache_of(lengths: list[int], kv_heads: int, dim: int, page: int, dtype: torch.dtype, seen: int | None) -> Cache:
    """Of each row only the last ``seen`` tokens are there, in whole pages."""
    cache = Cache(lengths, kv_heads, dim, page, dtype)
    for row, length in enumerate(lengths):
        if seen is not None:
            cache.kv[:, cache.table[row, : max(0, length - seen) // page].long()] = math.nan
    return cache


def decoded() -> None:
    """One and several tokens a row, one split and many, merged in one level, in two and apart; the kernels' choice."""
    kernels = interpreted_kernels()
    memory = kernels.attention_sums, kernels.attention_counters
    launch: dict[str, Any] = {"stages": 2, "warps": 4, "pdl": False}
    for heads, kv_heads, dim, page, new, dtype in (
        (4, 2, 16, 16, 1, torch.float32),
        (6, 2, 24, 8, 3, torch.float16),  # blocks that straddle pages; heads that are no power of two
        (4, 2, 64, 32, 1, torch.float16),  # by TMA, too
    ):
        for kind in (*kinds(heads, 1, 20), AttentionKind(50, None, torch.linspace(-1.0, 2.0, heads))):
            lengths = [new, 150, 40]
            cache = cache_of(lengths, kv_heads, dim, page, dtype, kind.window and kind.window + new - 1)
            q = randn(len(lengths) * new, heads, dim, dtype=dtype)
            inputs = cache.inputs(new)
            expected = REFERENCE.decode_attention(q, cache.kv, inputs, SCALE, kind=kind)
            what = (heads, new, kind.key)
            for rule in (SplitRule(16, 1, 1024, 1), SplitRule(16, 2, 16, 20), SplitRule(32, 4, 64, 4)):
                attend = partial(decode.decode_attention, q, heads, cache.kv, inputs, rule, SCALE, *memory, kind=kind)
                check(attend(**launch), expected, dtype, ("every split", rule, what))
                check(attend(**launch, apart=True), expected, dtype, ("merged apart", rule, what))
                work = decode_work.plan_decode(inputs, rule, False, kind.window)
                by_tma = kind.softcap is None and new == 1 and decode_list.supports_tma(heads, cache.kv, inputs, 16)
                for block_n, tma in product({16, rule.block}, {False, by_tma}):
                    found = decode_list.attend_list(
                        q, heads, cache.kv, inputs, work, SCALE, *memory, kind=kind, tma=tma, block_n=block_n,
                        programs=5, **launch,
                    )  # fmt: skip
                    check(found, expected, dtype, ("list", rule, block_n, tma, what))
            for given in (inputs, kernels.plan_decode(inputs, heads, cache.kv, kind)):
                check(kernels.decode_attention(q, cache.kv, given, SCALE, kind=kind), expected, dtype, ("choice", what))
    check_counters(kernels)


def folded() -> None:
    """With rotation and cache write in the same launch."""
    kernels = interpreted_kernels()
    heads, kv_heads, dim, dtype = 4, 2, 16, torch.float32
    for kind in kinds(heads, 20):
        lengths = [1, 150, 40]
        cache = cache_of(lengths, kv_heads, dim, 16, dtype, None)
        slots = torch.cat([cache.slots(row, torch.tensor([n - 1])) for row, n in enumerate(lengths)])
        turn = Rotation(None, None, 1e-6, torch.randn(512, dim), torch.tensor(lengths) - 1, slots)
        qkv, written = randn(3, (heads + 2 * kv_heads) * dim, dtype=dtype), cache.kv.clone()
        expected = REFERENCE.rope_cache_attend(qkv, heads, written, turn, cache.inputs(1), SCALE, None, kind)
        found = kernels.rope_cache_attend(qkv, heads, cache.kv, turn, cache.inputs(1), SCALE, None, kind)
        check(found, expected, dtype, ("folded", kind.key))


def pieces_and_trees() -> None:
    """Rows with ``starts_B``, and trees whose nodes a window sees by their depth."""
    kernels = interpreted_kernels()
    heads, kv_heads, dim, dtype = 4, 2, 16, torch.float32
    for kind in kinds(heads, 20, 33):
        lengths, counts, starts = [150, 3, 0, 64, 33], [5, 3, 0, 1, 8], [2, 8, 0, 20, 11]
        cache = cache_of(lengths, kv_heads, dim, 16, dtype, kind.window and kind.window + 7)
        ragged = dataclasses.replace(
            cache.inputs(8), skip_empty=True, starts_B=torch.tensor(starts, dtype=torch.int32),
            queries_B=torch.tensor(counts, dtype=torch.int32),
        )  # fmt: skip
        q = randn(24, heads, dim, dtype=dtype)
        expected = REFERENCE.decode_attention(q, cache.kv, ragged, SCALE, torch.full_like(q, 9.0), kind=kind)
        planned = kernels.plan_decode(ragged, heads, cache.kv, kind)
        found = kernels.decode_attention(q, cache.kv, planned, SCALE, torch.full_like(q, 9.0), kind=kind)
        check(found, expected, dtype, ("pieces", kind.key))
        assert torch.equal(found == 9.0, expected == 9.0)
        new = 9
        seen_1N = lay_out_in_torch(torch.tensor([[0, 0, 1, 2, 2, 4, 0, 7]]), new).seen_BN
        cache = cache_of([new, 100, 40], kv_heads, dim, 16, dtype, kind.window and kind.window + new)
        tree = dataclasses.replace(cache.inputs(new), tree_BQ=seen_1N.expand(3, new).contiguous())
        q = randn(3 * new, heads, dim, dtype=dtype)
        expected = REFERENCE.decode_attention(q, cache.kv, tree, SCALE, kind=kind)
        for given in (tree, kernels.plan_decode(tree, heads, cache.kv, kind)):
            check(kernels.decode_attention(q, cache.kv, given, SCALE, kind=kind), expected, dtype, ("tree", kind.key))
        exact = invariant_nvidia_kernels_on_cpu(TRAITS)
        for narrow in (kind, replace(kind, window=kind.window and 2)):  # narrower than the tree, too
            expected = REFERENCE.decode_attention(q, cache.kv, tree, SCALE, kind=narrow)
            found = exact.decode_attention(q, cache.kv, tree, SCALE, kind=narrow)
            check(found, expected, dtype, ("deterministic tree", narrow.key))
    check_counters(kernels)
    assert not kernels.stood_in, "a kernel refused what it should take"


def a_tree_wider_than_the_window_is_refused() -> None:
    kernels, kind = interpreted_kernels(), AttentionKind(window=4)
    seen_1N = lay_out_in_torch(torch.tensor([[0, 1, 2, 3, 4]]), 6).seen_BN
    cache = cache_of([50], 2, 16, 16, torch.float32, None)
    inputs, q = dataclasses.replace(cache.inputs(6), tree_BQ=seen_1N), randn(6, 4, 16, dtype=torch.float32)
    expected = REFERENCE.decode_attention(q, cache.kv, inputs, SCALE, kind=kind)
    check(kernels.decode_attention(q, cache.kv, inputs, SCALE, kind=kind), expected, torch.float32, "in torch")
    assert kernels.stood_in == {"torch_attention": "a tree of 6 nodes is wider than a sliding window of 4"}


def prompts() -> None:
    """Whole and in chunks, tiles of many sizes; windows shorter and longer than tile and block."""
    for heads, kv_heads, dim, page, dtype in ((4, 2, 16, 16, torch.float32), (6, 1, 24, 24, torch.float16)):
        for kind in kinds(heads, 1, 5, 40, 70):
            rows = ((1, 1), (70, 70), (9, 200))
            cache = cache_of([n for _, n in rows], kv_heads, dim, page, dtype, kind.window and kind.window + 69)
            queries, lengths = tuple(new for new, _ in rows), tuple(n for _, n in rows)
            q, inputs = randn(sum(queries), heads, dim, dtype=dtype), PrefillAttention(cache.table, queries, lengths)
            expected = REFERENCE.prefill_attention(q, cache.kv, inputs, SCALE, kind)
            for blocks in (Blocks(32, 16, 2, 4), Blocks(64, 32, 2, 4), Blocks(16, 64, 2, 4)):
                tokens = blocks.m // prefill.heads_of_a_tile(heads // kv_heads, blocks.m)
                listed = prefill_tiles.list_tiles(queries, lengths, tokens)
                tiles = prefill_tiles.Tiles(torch.tensor(listed, dtype=torch.int32))
                found = prefill.prefill_attention(
                    q, cache.kv, cache.table, tiles, SCALE, blocks=blocks, programs=4, pdl=False, kind=kind
                )
                check(found, expected, dtype, ("prefill", blocks, heads, kind.key))


def deterministic() -> None:
    """As the reference; and each query's bits are those of its own decode step and of any chunk."""
    kernels = invariant_nvidia_kernels_on_cpu(TRAITS)
    memory = kernels.attention_sums, kernels.attention_counters
    for heads, kv_heads, dim, page, dtype, chunk in (
        (4, 2, 16, 32, torch.float32, 32),
        (6, 2, 24, 24, torch.float16, 64),
    ):
        for kind in kinds(heads, 1, 30):
            length = 100
            cache = cache_of([length], kv_heads, dim, page, dtype, None)
            q = randn(length, heads, dim, dtype=dtype)

            def of_chunk(
                first: int, end: int, c: Cache = cache, q: Tensor = q, k: AttentionKind = kind, n: int = chunk
            ) -> Tensor:
                inputs = PrefillAttention(c.table, (end - first,), (end,))
                planned = invariant.listed_tiles(inputs, q.shape[1], c.kv)
                return invariant.prefill_attention(
                    q[first:end], c.kv, c.table, planned, SCALE, programs=5, chunk=n, pdl=False, kind=k
                )

            whole, what = of_chunk(0, length), (heads, kind.key)
            inputs = PrefillAttention(cache.table, (length,), (length,))
            check(whole, REFERENCE.prefill_attention(q, cache.kv, inputs, SCALE, kind), dtype, ("prefill", what))
            same(of_chunk(33, 77), whole[33:77], ("chunk", what))
            for end, new in ((40, 1), (100, 1), (77, 5)):
                lengths = torch.tensor([end], dtype=torch.int32)
                row = DecodeAttention(cache.table, lengths, new, cache.table.shape[1] * page)
                for sharing in (1, 3):
                    found = invariant.decode_attention(
                        q[end - new : end], cache.kv, row, SCALE, *memory, multiprocessors=4, sharing=sharing,
                        chunk=chunk, pdl=False, kind=kind,
                    )  # fmt: skip
                    same(found, whole[end - new : end], ("decode", end, new, sharing, what))
    check_counters(kernels)


def main() -> None:
    torch.set_num_threads(1)
    for part in (decoded, folded, pieces_and_trees, a_tree_wider_than_the_window_is_refused, prompts, deterministic):
        torch.manual_seed(0)
        began = time.perf_counter()
        part()
        print(f"{part.__name__}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
