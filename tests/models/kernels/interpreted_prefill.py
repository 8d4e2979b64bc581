"""Prefill attention through Triton's interpreter, on a CPU: ``TRITON_INTERPRET=1 python -m ...``.

Each step against the torch reference, with NaN wherever no row may look: planned for one launch, and planned anew into
the place that captured launches read. And copies of keys out of their pages, bit for bit. Exits with an error where one
differs.

Knows: shapes that reach every branch of the kernel. Does not know: GPUs (tests/gpu/test_prefill_kernels.py), where the
same kernel runs compiled, in bfloat16, and at real sizes.
"""

from __future__ import annotations

import dataclasses
import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from models.inputs import PrefillAttention
from models.kernels.attention import prefill, prefill_tiles
from models.kernels.attention.gather_pages import TILE, GatheredPages
from models.kernels.attention.prefill import Blocks, TiledPrefill
from models.kernels.traits import DeviceTraits
from tests.models.kernels.interpreted_kernels import TRAITS, Cache, check, randn
from tests.plant import reference_kernels

REFERENCE = reference_kernels()


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    dim: int
    page: int
    dtype: torch.dtype
    rows: tuple[tuple[int, int], ...]  # new tokens, tokens

    @property
    def queries(self) -> tuple[int, ...]:
        return tuple(new for new, _ in self.rows)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(length for _, length in self.rows)


CASES = (
    Case(4, 1, 16, 64, torch.float32, ((1, 1), (70, 70), (9, 200))),  # blocks inside of a page
    Case(4, 4, 64, 16, torch.float16, ((130, 130), (1, 64), (5, 65), (64, 128))),  # each over several pages
    Case(6, 2, 24, 8, torch.float16, ((33, 90), (3, 3))),  # heads that are no power of two, nor is the group
    Case(14, 2, 32, 48, torch.float32, ((17, 100), (50, 50))),  # seven heads a tile; blocks that straddle pages
    Case(32, 1, 16, 32, torch.float16, ((5, 70),)),
    Case(4, 1, 512, 16, torch.float16, ((20, 40),)),  # full layers of Gemma 4
    Case(96, 2, 16, 32, torch.float32, ((3, 20), (1, 9))),  # more heads of a kv head than a tile has rows
)


def expected(case: Case, cache: Cache, q: Tensor, scale: float) -> Tensor:
    inputs = PrefillAttention(cache.table, case.queries, case.lengths)
    return REFERENCE.prefill_attention(q, cache.kv, inputs, scale)


def ordinary(traits: DeviceTraits = TRAITS) -> None:
    """Planned once, with the blocks that a GPU gets and with smaller ones, of which a row has many."""
    for case in CASES:
        cache = Cache(list(case.lengths), case.kv_heads, case.dim, case.page, case.dtype)
        q, scale = randn(sum(case.queries), case.heads, case.dim, dtype=case.dtype), 0.3
        inputs = PrefillAttention(cache.table, case.queries, case.lengths)
        tiled = TiledPrefill(torch.device("cpu"), traits)
        planned = tiled.plan(inputs, case.heads, cache.kv)
        wanted = expected(case, cache, q, scale)
        check(tiled.run(q, cache.kv, inputs, planned, scale), wanted, case.dtype, case)
        for blocks in (Blocks(32, 16, 2, 4), Blocks(64, 32, 2, 4)):
            tokens = blocks.m // prefill.heads_of_a_tile(case.heads // case.kv_heads, blocks.m)
            listed = prefill_tiles.list_tiles(case.queries, case.lengths, tokens)
            tiles = prefill_tiles.Tiles(torch.tensor(listed, dtype=torch.int32))
            out = prefill.prefill_attention(
                q, cache.kv, cache.table, tiles, scale, blocks=blocks, programs=4 * traits.multiprocessors, pdl=False
            )
            check(out, wanted, case.dtype, (case, blocks))


def repeated() -> None:
    """One place for the tiles of steps of up to 90 tokens in four rows; what a launch over fewer tokens reads is put
    there alone, over the plan of a full one."""
    case = Case(4, 2, 16, 16, torch.float32, ())
    cache = Cache([120, 120, 120, 120], case.kv_heads, case.dim, case.page, case.dtype)
    tiled = TiledPrefill(torch.device("cpu"), TRAITS)
    place = tiled.repeated(cache.table, 90, case.heads, cache.kv)
    all_q = randn(90, case.heads, case.dim, dtype=case.dtype)
    read = PrefillAttention(cache.table, (90,), (90,), place)  # as a capture has it: lengths are the plan's
    for seed in range(6):
        pick = random.Random(seed)
        queries = tuple(pick.randint(1, 22) for _ in range(pick.randint(1, 4)))
        one = Case(4, 2, 16, 16, torch.float32, tuple((new, new + pick.choice([0, 16, 90])) for new in queries))
        new = sum(one.queries)
        q = all_q[: next(tokens for tokens in (16, 40, 90) if tokens >= new)]
        place.plan((22, 22, 22, 24), (120, 119, 118, 117))
        entries = torch.tensor(place.entries(one.queries, one.lengths, 0, len(q)))
        place.place[: len(entries)].copy_(entries)
        out = tiled.run(q, cache.kv, read, place, 0.25)
        check(out[:new], expected(one, cache, q[:new], 0.25), one.dtype, one)


def gathered() -> None:
    """Keys of rows copied out of pages full of NaN elsewhere, by more plans than the ring holds, over what was there:
    each row's as they are, zeros up to the end of its last tile."""
    for kv_heads, dim, page, dtype in (
        (2, 16, 16, torch.float32),
        (3, 24, 48, torch.float16),
        (8, 128, 64, torch.float16),
    ):
        cache = Cache([300, 300, 300], kv_heads, dim, page, dtype)
        room = torch.full((2 * 7 * TILE * kv_heads * dim,), float("nan"), dtype=dtype).view(torch.uint8)
        copies = GatheredPages(room, cache.table, cache.kv, 4, multiprocessors=3)
        assert copies.capacity == 7 * TILE, copies.capacity
        for lengths in ((300, 0, 129), (1, 128, 300), (), (0, 0, 7), (300, 256, 127), (128, 128, 128)):
            starts = copies.plan(lengths)
            found = copies.copy(cache.kv[0], cache.kv[1])
            for row, (length, start, end) in enumerate(zip(lengths, starts, starts[1:], strict=False)):
                key = torch.arange(length)
                pages = cache.table[row].long()[key // page]
                for copied, layer in zip(found, cache.kv, strict=True):
                    assert torch.equal(copied[start : start + length], layer[pages, key % page]), (lengths, row)
                    assert not copied[start + length : end].any(), (lengths, row)
                assert end == start + -(-length // TILE) * TILE


def few_programs() -> None:
    """Several turns for each program, the last of which does not go round."""
    ordinary(dataclasses.replace(TRAITS, multiprocessors=1))


def main() -> None:
    torch.set_num_threads(1)
    for part in (ordinary, repeated, few_programs, gathered):
        torch.manual_seed(0)
        began = time.perf_counter()
        part()
        print(f"{part.__name__}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
