"""Balanced decode attention through Triton's interpreter, on a CPU: ``TRITON_INTERPRET=1 python -m ...``.

The work list against a dumb one, all its kernels against the torch reference, with rows of very different lengths.
Exits with an error where one differs.

Knows: how to reach every branch of decode_work.py, decode_merge.py and the kernels over a list. Does not know: which
variant or rule a GPU's steps take (models/kernels/attention/decode_choice.py).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from models.inputs import DecodeAttention
from models.kernels.attention import (
    decode,
    decode_list,
    decode_window,
    decode_work,
)
from models.kernels.attention.decode_work import DecodeWork, SplitRule
from models.kernels.interface import Rotation
from runtime.execute.sampling.draft_tree import lay_out_in_torch
from tests.models.kernels.interpreted_kernels import REFERENCE, Cache, check, interpreted_kernels, randn
from tests.models.kernels.nvidia_kernels import Nvidia, check_counters
from tests.models.kernels.quick_interpreter import ALL

VARIANTS: tuple[Callable[..., Tensor], ...] = (
    partial(decode_list.attend_list, tma=False, stages=2, warps=4, pdl=False),
    partial(decode_list.attend_list, tma=True, stages=2, warps=4, pdl=False),
)


def every_split(
    q: Tensor,
    heads: int,
    kv: Tensor,
    inputs: DecodeAttention,
    work: DecodeWork,
    *rest: Any,
    block_n: int,
    programs: int,
    **more: Any,
) -> Tensor:
    """decode.py as if it had a list: it goes by the rule alone."""
    return decode.decode_attention(q, heads, kv, inputs, work.rule, *rest, stages=2, warps=4, pdl=False, **more)


BY_RULE: tuple[Callable[..., Tensor], ...] = (every_split, partial(every_split, apart=True))


def windows_by_tma(
    q: Tensor,
    heads: int,
    kv: Tensor,
    inputs: DecodeAttention,
    work: DecodeWork,
    *rest: Any,
    rotation: None,
    block_n: int,
    **more: Any,
) -> Tensor:
    """decode_window.py, whose blocks are those of the list."""
    return decode_window.attend_windows(q, kv, inputs, work, *rest, stages=2, warps=4, pdl=False, **more)


def work_of(inputs: DecodeAttention, rule: SplitRule) -> DecodeWork:
    return decode_work.plan_decode(inputs, rule, pdl=False)


def attend(
    kernels: Nvidia,
    variant: Callable[..., Tensor],
    q: Tensor,
    heads: int,
    kv: Tensor,
    *rest: Any,
    **more: Any,
) -> Tensor:
    return variant(
        q, heads, kv, *rest, kv.shape[-1] ** -0.5, kernels.attention_sums, kernels.attention_counters, **more
    )


def variants_for(heads: int, cache: Cache, query_len: int) -> tuple[Callable[..., Tensor], ...]:
    """Without a GPU, TMA takes float32 too."""
    half = cache.kv.half() if cache.kv.dtype == torch.float32 else cache.kv
    found = VARIANTS[: 1 + decode_list.supports_tma(heads, half, cache.inputs(query_len), 16)]
    return (*found, windows_by_tma) if decode_window.supports(heads, half, cache.inputs(query_len), 16) else found


# -- the list -------------------------------------------------------------------------------------------------------


def lists(kernels: Nvidia) -> None:
    """Every key of every row in exactly one split, the most keys first, as a few lines of Python would have it."""
    for rule in (
        SplitRule(16, 1, 64, 100),
        SplitRule(16, 4, 128, 5),
        SplitRule(64, 2, 1024, 2),
        SplitRule(32, 1, 32, 256),
    ):
        for lengths in ([5], [0, 0, 0], [1, 0, 16, 17, 2000, 64, 65, 300, 2000], list(range(0, 700, 41)) * 2):
            for skip_empty in (False, True):
                held = torch.tensor(lengths, dtype=torch.int32)
                inputs = DecodeAttention(held[:, None], held, 1, 2048, skip_empty=skip_empty)
                units = work_of(inputs, rule).units_U4
                expected = []
                for row, length in enumerate(lengths):
                    wanted = min(max(rule.fewest, -(-length // rule.longest)), rule.most)
                    blocks = -(-length // rule.block)
                    keys = max(1, -(-blocks // wanted)) * rule.block
                    splits = -(-length // keys) if length or skip_empty else 1
                    assert splits <= rule.most
                    assert sum(min(length - s * keys, keys) for s in range(splits)) == length
                    expected += [[row, length, split + (splits << 16), keys] for split in range(splits)]
                expected.sort(key=lambda unit: -unit[3])
                assert int(units[0, 0]) == len(expected)
                assert units[1 : 1 + len(expected)].tolist() == expected, (rule, lengths)


def rules(kernels: Nvidia) -> None:
    """No bucket's rule asks for more room than there is, whatever its rows' lengths."""
    for rows, kv_heads, query_rows, dim, longest in (
        (1, 1, 4, 128, 131072),
        (64, 8, 4, 128, 131072),
        (256, 8, 4, 128, 40960),
        (256, 8, 32, 128, 131072),
        (1024, 1, 256, 256, 1 << 20),
        (3, 2, 7, 24, 50),
    ):
        for room in (0, 1 << 20, 1 << 24):
            rule = decode_work.choose_rule(
                rows, kv_heads, query_rows, dim, longest, block=64, longest=512, fewest=8, room=room
            )
            assert decode_work.workspace_floats(rows, kv_heads, query_rows, dim, rule.most) <= room
            assert decode_work.counters_of(rows, kv_heads, rule.most) <= decode_work.COUNTERS
            assert 1 <= rule.fewest <= rule.most <= decode_work.MOST_SPLITS
            assert rule.longest % rule.block == 0
            if room == 0:
                assert rule.most == 1
    one = decode_work.choose_rule(1, 1, 4, 128, 131072, block=64, longest=512, fewest=64, room=1 << 24)
    assert one.most == 256, "a long row alone is spread over the whole GPU"


# -- attention ------------------------------------------------------------------------------------------------------

SHAPES = (  # heads, kv heads, head size, page, query_len, dtype
    (4, 2, 64, 16, 2, torch.float32),
    (2, 1, 64, 16, 1, torch.float16),
    (6, 2, 24, 8, 1, torch.float32),  # pages smaller than blocks of keys
    (4, 1, 64, 64, 5, torch.float32),
    (3, 3, 16, 48, 1, torch.float32),  # blocks of keys that straddle pages
)


def ragged(query_len: int) -> list[int]:
    """Page borders, the shortest there are, and one row as long as all others together."""
    return [query_len, 330, 15 + query_len, 16, 64, 65, 33]


def attention(kernels: Nvidia) -> None:
    """Ragged rows by both kernels: one split a row, several, more than are merged at once; any number of programs."""
    grouped, fewer = 0, [(SplitRule(16, 1, 1024, 1), 20), (SplitRule(32, 2, 64, 64), 90)]
    shapes = SHAPES if ALL else SHAPES[:3]
    for heads, kv_heads, dim, page, query_len, dtype in shapes:
        cache = Cache(ragged(query_len), kv_heads, dim, page, dtype)
        inputs = cache.inputs(query_len)
        q = randn(len(cache.lengths) * query_len, heads, dim, dtype=dtype)
        expected = REFERENCE.decode_attention(q, cache.kv, inputs, dim**-0.5)
        by_list = variants_for(heads, cache, query_len)
        for variant in (*by_list, BY_RULE[1]):
            fewer.reverse()  # each of the two by each variant, and many splits by both
            for rule, programs in (fewer[0], (SplitRule(16, 1, 16, 64), 5)):
                work = work_of(inputs, rule)
                grouped += int((work.units_U4[1 : 1 + work.units_U4[0, 0], 2] >> 16).max()) > 16
                found = attend(
                    kernels, variant, q, heads, cache.kv, inputs, work, rotation=None, block_n=16, programs=programs
                )
                check(found, expected, dtype, ("balanced", heads, dim, query_len, rule, programs))
                check_counters(kernels)
    assert grouped >= len(shapes), "no row had so many splits that they were merged in groups"


def every_number_of_new_tokens(kernels: Nvidia) -> None:
    """1 to 32 a row: over the border of a split, and up to one. Three queries a token near where their sum is padded
    to another power of two. By TMA at most 16 queries of a head, and as windows at least."""
    rule, taken = SplitRule(16, 1, 16, 8), Counter[str]()
    alone = range(1, 33) if ALL else (1, 2, 4, 9, 15, 16, 17, 31, 32)
    threes = (1, 2, 3, 5, 6, 10, 11, 21, 22, 32) if ALL else (1, 5, 6, 21, 32)
    for heads, new in (*((1, new) for new in alone), *((3, new) for new in threes)):
        cache = Cache([15 + new, 48], 1, 64, 16, torch.float32)
        inputs = cache.inputs(new)
        q = randn(2 * new, heads, 64, dtype=torch.float32)
        expected = REFERENCE.decode_attention(q, cache.kv, inputs, 64**-0.5)
        for variant in variants_for(heads, cache, new):
            work = work_of(inputs, rule)
            found = attend(kernels, variant, q, heads, cache.kv, inputs, work, rotation=None, block_n=16, programs=5)
            name = ("pointers", "TMA", "windows")[(*VARIANTS, windows_by_tma).index(variant)]
            check(found, expected, torch.float32, (name, heads, new))
            taken[name] += 1
    counts = (32 + 10, 16 + 4, 17 + 6) if ALL else (9 + 5, 6 + 2, 4 + 3)
    assert taken == dict(zip(("pointers", "TMA", "windows"), counts, strict=True))
    check_counters(kernels)


def rotation(kernels: Nvidia) -> None:
    """The newest key is written by who reads it, once, and nothing else is written."""
    for heads, kv_heads, dim, rotary, norm, dtype in (
        (4, 2, 64, 64, True, torch.float32),
        (6, 3, 24, 8, False, torch.float32),
    ):
        cache = Cache(lengths := [1, 33, 90, 16], kv_heads, dim, 16, dtype)
        positions = torch.tensor(lengths) - 1
        slots = torch.cat([cache.slots(row, positions[row : row + 1]) for row in range(len(lengths))])
        qkv = randn(len(lengths), (heads + 2 * kv_heads) * dim, dtype=dtype)
        q_norm, k_norm = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if norm else (None, None)
        turn = Rotation(q_norm, k_norm, 1e-6, torch.randn(512, rotary), positions, slots)
        written, inputs = cache.kv.clone(), cache.inputs(1)
        q = REFERENCE.rope_and_cache(qkv, heads, written, turn)
        expected = REFERENCE.decode_attention(q, written, inputs, dim**-0.5)
        work = work_of(inputs, SplitRule(16, 1, 16, 64))
        for variant in (*variants_for(heads, cache, 1), *BY_RULE):
            for programs in (3, 64) if norm and ALL else (3,):  # with 3, later rounds need the angles of other rows
                kv = cache.kv.clone()
                found = attend(
                    kernels, variant, qkv, heads, kv, inputs, work, rotation=turn, block_n=16, programs=programs
                )
                check(found, expected, dtype, ("balanced, folded", heads, dim, programs))
                check(kv.nan_to_num(), written.nan_to_num(), dtype, ("cache", heads, dim))
                assert torch.equal(kv.isnan(), written.isnan()), "written where nobody asked"
    check_counters(kernels)


def neighbours(kernels: Nvidia) -> None:
    """A row's bits are those it has alone in the same bucket, whatever the others' lengths and its place: of one token,
    of windows, of trees. Were rows split by the longest of all, they would not be.
    """
    tree = lay_out_in_torch(torch.tensor([[0, 0, 1, 2, 2, 4, 0, 7]]), 9).seen_BN
    some = VARIANTS[0], BY_RULE[1], windows_by_tma
    cases = (
        (1, None, (33, 150) if ALL else (150,), (*VARIANTS, *BY_RULE)),
        (8, None, (150,), some),
        (9, tree, (150,), some),
    )
    for new, seen_1N, lengths, variants in cases:
        for variant, length in product(variants, lengths):
            bits = partial(bits_of_a_row, kernels, variant, new, seen_1N, length)
            seen = [bits(*where, SplitRule(16, 2, 16, 40)) for where in places_among(new)]
            assert all(torch.equal(one, seen[0]) for one in seen), (
                f"a row of {length} tokens, {new} of them new, depends on its neighbours"
            )
    bits = partial(bits_of_a_row, kernels, VARIANTS[0], 9, tree, 33)
    mutant = [
        bits(place, others, programs, SplitRule(16, 1, 16 * -(-max(33, *others) // 64), 40))
        for place, others, programs in places_among(9)
    ]
    assert not all(torch.equal(one, mutant[0]) for one in mutant), "this would show it"


def places_among(new: int) -> tuple[tuple[int, list[int], int], ...]:
    """(place of a row, lengths of those beside it, programs). Beside windows there is no row without tokens: that is
    another launch (windows_beside_others).
    """
    return (0, [new, new], 200), (1, [160, max(3, new)], 2), (2, [150, 0 if new == 1 else new], 3)


def bits_of_a_row(
    kernels: Nvidia,
    variant: Callable[..., Tensor],
    new: int,
    seen_1N: Tensor | None,
    length: int,
    place: int,
    others: list[int],
    programs: int,
    rule: SplitRule,
) -> Tensor:
    """Of ``new`` queries of the row at ``place`` among ``others``, always the same row for one ``length``."""
    heads, kv_heads, dim, page, dtype = 2, 1, 64, 16, torch.float32
    lengths = [*others[:place], length, *others[place:]]
    torch.manual_seed(1)
    row_kv, row_q = randn(2, 304, kv_heads, dim, dtype=dtype), randn(new, heads, dim, dtype=dtype)
    cache = Cache(lengths, kv_heads, dim, page, dtype)
    cache.kv.flatten(1, 2)[:, cache.slots(place, torch.arange(length))] = row_kv[:, :length]
    q = randn(len(lengths), new, heads, dim, dtype=dtype)
    q[place] = row_q
    tree_BQ = None if seen_1N is None else seen_1N.expand(len(lengths), new).contiguous()
    inputs = dataclasses.replace(cache.inputs(new), tree_BQ=tree_BQ)
    work = work_of(inputs, rule)
    found = attend(
        kernels, variant, q.flatten(0, 1), heads, cache.kv, inputs, work, rotation=None, block_n=16, programs=programs
    )
    return found.view(len(lengths), new, heads, dim)[place]


def empties(kernels: Nvidia) -> None:
    """Rows of length 0 are zeros, or nothing at all in an output of more tokens that was given."""
    heads, kv_heads, dim, dtype = 4, 2, 64, torch.float32
    cache = Cache([0, 90, 0, 16, 0], kv_heads, dim, 16, dtype)
    q = randn(9, heads, dim, dtype=dtype)
    plain = cache.inputs(1)
    skipping = dataclasses.replace(plain, skip_empty=True)
    expected = REFERENCE.decode_attention(q[:5], cache.kv, plain, dim**-0.5)
    real = torch.tensor([1, 3])
    nothing = dataclasses.replace(skipping, kv_lengths_B=torch.zeros_like(cache.lengths))
    for variant in (*VARIANTS, *BY_RULE):
        launch = partial(attend, kernels, variant, q, heads, cache.kv, rotation=None, block_n=16, programs=9)
        rule = SplitRule(16, 1, 32, 8)
        found = launch(plain, work_of(plain, rule))
        check(found[real], expected[real], dtype, "beside empty rows")
        assert not found[[0, 2, 4]].any()
        out = torch.full((9, heads, dim), math.nan, dtype=dtype)
        assert launch(skipping, work_of(skipping, rule), out_THD=out) is out
        check(out[real], expected[real], dtype, "into what was given")
        assert out[[0, 2, 4, 5, 6, 7, 8]].isnan().all()
        launch(nothing, work_of(nothing, rule), out_THD=out.fill_(math.nan))
        assert out.isnan().all()
    for inputs in (skipping, kernels.plan_decode(skipping, heads, cache.kv)):  # without a list, and the kernels' own
        out = torch.full((9, heads, dim), math.nan, dtype=dtype)
        kernels.decode_attention(q, cache.kv, inputs, dim**-0.5, out)
        check(out[real], expected[real], dtype, "by the kernels' choice")
        assert out[[0, 2, 4, 5, 6, 7, 8]].isnan().all()
    check_counters(kernels)


def windows_beside_others(kernels: Nvidia) -> None:
    """Rows of three tokens before rows without any, in an output with tokens of others: as windows alone."""
    dtype, new = torch.float32, 3
    for heads, kv_heads, dim, more in ((4, 2, 16, ()), (12, 2, 64, (windows_by_tma,))):
        cache = Cache([70, 3, 0, 33, 0], kv_heads, dim, 16, dtype)
        q = randn(5 * new + 4, heads, dim, dtype=dtype)
        inputs = dataclasses.replace(cache.inputs(new), skip_empty=True)
        expected = REFERENCE.decode_attention(q[: 5 * new], cache.kv, cache.inputs(new), dim**-0.5)
        live_T = (cache.lengths > 0).repeat_interleave(new)
        rule = SplitRule(16, 1, 32, 8)
        found = [
            attend(
                kernels, variant, q, heads, cache.kv, inputs, work_of(inputs, rule), rotation=None,
                out_THD=torch.full_like(q, math.nan), block_n=16, programs=9,
            )
            for variant in (*VARIANTS[: 2 - len(more)], *more)
        ]  # fmt: skip
        for given in (inputs, kernels.plan_decode(inputs, heads, cache.kv)):  # without a list, and the kernels' own
            found.append(kernels.decode_attention(q, cache.kv, given, dim**-0.5, torch.full_like(q, math.nan)))
        for out in found:
            check(out[: 5 * new][live_T], expected[live_T], dtype, "windows beside others")
            assert out[: 5 * new][~live_T].isnan().all()
            assert out[5 * new :].isnan().all()
    check_counters(kernels)


def suffixes(kernels: Nvidia) -> None:
    """Rows with different numbers of new tokens, anywhere in a step; the step's other tokens are left alone."""
    for heads, kv_heads, dim, page, dtype in ((4, 2, 16, 16, torch.float32), (6, 2, 24, 8, torch.float32)):
        lengths, counts, starts = [300, 3, 0, 64, 33], [5, 3, 0, 1, 8], [2, 8, 0, 20, 11]
        cache = Cache(lengths, kv_heads, dim, page, dtype)
        inputs = dataclasses.replace(
            cache.inputs(8),
            skip_empty=True,
            starts_B=torch.tensor(starts, dtype=torch.int32),
            queries_B=torch.tensor(counts, dtype=torch.int32),
        )
        q = randn(24, heads, dim, dtype=dtype)
        expected = REFERENCE.decode_attention(q, cache.kv, inputs, dim**-0.5, torch.full_like(q, 9.0))
        assert (expected != 9.0).all(-1).all(-1).sum() == sum(counts)
        variants = VARIANTS[: 1 + (dim == 16)]
        found = [
            attend(
                kernels, variant, q, heads, cache.kv, inputs, work_of(inputs, rule), rotation=None,
                out_THD=torch.full_like(q, 9.0), block_n=16, programs=11,
            )
            for variant in variants
            for rule in (SplitRule(16, 1, 16, 64), SplitRule(16, 2, 1024, 2))
        ]  # fmt: skip
        own = kernels.plan_decode(inputs, heads, cache.kv)
        found.append(kernels.decode_attention(q, cache.kv, own, dim**-0.5, torch.full_like(q, 9.0)))
        for out in found:
            check(out, expected, dtype, ("suffixes", heads, dim))
            assert torch.equal(out == 9.0, expected == 9.0)
    check_counters(kernels)


def trees(kernels: Nvidia) -> None:
    """The new tokens of a row are a tree, of 33 tokens and of 7, over splits and page borders."""
    for heads, kv_heads, dim, page, new in ((1, 1, 64, 16, 33), (6, 2, 24, 8, 7)):
        cache = Cache([new, 15 + new, 130], kv_heads, dim, page, torch.float32)
        rows = len(cache.lengths)
        parents = torch.stack([(torch.rand(new - 1) * torch.arange(1, new)).long() for _ in range(rows)])
        tree = lay_out_in_torch(parents, new)
        inputs = dataclasses.replace(cache.inputs(new), tree_BQ=tree.seen_BN)
        q = randn(rows * new, heads, dim, dtype=torch.float32)
        expected = REFERENCE.decode_attention(q, cache.kv, inputs, dim**-0.5)
        chain = REFERENCE.decode_attention(q, cache.kv, cache.inputs(new), dim**-0.5)
        assert not torch.allclose(chain, expected), "the mask matters"
        for row in range(rows):  # a node is the last token of a chain of what it sees
            node = new - 1
            seen = [0, *(n for n in range(1, new) if int(tree.seen_BN[row, node]) >> (n - 1) & 1)]
            places = torch.cat(
                (torch.arange(int(cache.lengths[row]) - new), int(cache.lengths[row]) - new + torch.tensor(seen))
            )
            keys, values = cache.kv.flatten(1, 2)[:, cache.slots(row, places)].repeat_interleave(heads // kv_heads, 2)
            weights = torch.einsum("hd,khd->hk", q[row * new + node], keys).mul(dim**-0.5).softmax(-1)
            check(expected[row * new + node], torch.einsum("hk,khd->hd", weights, values), torch.float32, "reference")
        variants = variants_for(heads, cache, new)
        assert (windows_by_tma in variants) == (dim == 64)
        for variant in (*variants, *BY_RULE):
            for rule in (SplitRule(16, 1, 1024, 1), SplitRule(16, 2, 16, 20)):
                work = work_of(inputs, rule)
                found = attend(
                    kernels, variant, q, heads, cache.kv, inputs, work, rotation=None, block_n=16, programs=9
                )
                check(found, expected, torch.float32, ("tree", new, rule))
        own = kernels.plan_decode(inputs, heads, cache.kv)
        check(kernels.decode_attention(q, cache.kv, own, dim**-0.5), expected, torch.float32, ("chosen", new))
    check_counters(kernels)


def blocks(kernels: Nvidia) -> None:
    """Each token of a block sees all of it, over splits and page borders, by TMA and not."""
    heads, kv_heads, block = 4, 1, 4  # 16 queries a head: all three kernels take them
    for dim, page in ((64, 16), (24, 8)):
        cache = Cache([block, 33, 70], kv_heads, dim, page, torch.float32)
        inputs = dataclasses.replace(cache.inputs(block), causal=False)
        q = randn(len(cache.lengths) * block, heads, dim, dtype=torch.float32)
        expected = REFERENCE.decode_attention(q, cache.kv, inputs, dim**-0.5)
        variants = variants_for(heads, cache, block)
        assert len(variants) == (3 if dim == 64 else 1)
        for variant in variants:
            for rule in (SplitRule(16, 1, 1024, 1), SplitRule(16, 1, 16, 40)):
                work = work_of(inputs, rule)
                found = attend(
                    kernels, variant, q, heads, cache.kv, inputs, work, rotation=None, block_n=16, programs=5
                )
                check(found, expected, torch.float32, ("block", dim, rule))
    check_counters(kernels)


def chosen(kernels: Nvidia) -> None:
    """The rule and the variant that the kernels choose; a list whose partial results do not fit is not used."""
    for heads, kv_heads, dim, page, query_len, dtype in SHAPES:
        cache = Cache(ragged(query_len), kv_heads, dim, page, dtype)
        inputs = kernels.plan_decode(cache.inputs(query_len), heads, cache.kv)
        assert isinstance(inputs.work, DecodeWork | SplitRule)
        q = randn(len(cache.lengths) * query_len, heads, dim, dtype=dtype)
        expected = REFERENCE.decode_attention(q, cache.kv, inputs, dim**-0.5)
        check(kernels.decode_attention(q, cache.kv, inputs, dim**-0.5), expected, dtype, ("chosen", heads, dim))
    large = dataclasses.replace(inputs, work=work_of(inputs, SplitRule(16, 1, 16, 60_000)))
    check(kernels.decode_attention(q, cache.kv, large, dim**-0.5), expected, dtype, "without room for the list")
    check_counters(kernels)


PARTS: tuple[Callable[[Nvidia], None], ...] = (
    lists,
    rules,
    attention,
    every_number_of_new_tokens,
    rotation,
    neighbours,
    empties,
    windows_beside_others,
    suffixes,
    trees,
    blocks,
    chosen,
)


def main() -> None:
    torch.set_num_threads(1)
    for part in PARTS:
        torch.manual_seed(0)
        began = time.perf_counter()
        part(interpreted_kernels())
        print(f"{part.__name__}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
