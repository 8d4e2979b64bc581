"""Attention over a float8 cache through Triton's interpreter, on a CPU: ``TRITON_INTERPRET=1 python -m ...``.

Rotation and cache write, decode by pointers, prefill, and the deterministic mode's kernels, each against the torch
reference over the same codes. Exits with an error where one differs.

Knows: which kernels take such a cache. Does not know: GPUs (tests/gpu/test_float8_cache_gpu.py), engines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from models.inputs import DecodeAttention, PrefillAttention
from models.kernels.attention import (
    decode,
    decode_list,
    decode_window,
    decode_work,
    invariant,
    rope_decode,
    rope_prefill,
)
from models.kernels.attention.decode_work import ANY_LENGTH, SplitRule
from models.kernels.attention.prefill import TiledPrefill
from models.kernels.interface import AttentionKind, Rotation
from models.kv_group import FP8, bits_of
from tests.models.kernels.interpreted_kernels import TRAITS, Cache, check, interpreted_kernels, randn
from tests.models.kernels.nvidia_kernels import Nvidia, check_counters
from tests.plant import reference_kernels

_convert = interpreter._convert_float


def _convert_float8(data: Any, held: Any, wanted: Any, rounding: Any) -> Any:
    """As a GPU does: to the nearest code, of two the even one, and NaN stays NaN. Triton 3.6's interpreter does not."""
    if tl.float8e4nv not in (held, wanted):
        return _convert(data, held, wanted, rounding)
    values = torch.from_numpy(np.ascontiguousarray(data))
    if wanted == tl.float8e4nv:
        return values.to(FP8).view(torch.uint8).numpy()
    return values.view(FP8).to(getattr(torch, {"fp16": "float16", "fp32": "float32"}[str(wanted)])).numpy()


def _numbers_of_pairs(
    self: Any, assembly: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int
) -> Any:
    """decode_list.py's assembly, of two int16 a register: what prmt puts where, and what is converted."""
    assert ("prmt.b32 codes, $2, 0, 0x3120;" in assembly, constraints, pack) == (True, "=r,=r,r", 2)
    registers = np.ascontiguousarray(values[0].data).view(np.uint8).reshape(-1, 4)
    places = registers[:, [0x3120 >> 4 * n & 0xF for n in range(4)]]
    found = (torch.from_numpy(places[:, n : n + 2].copy()).view(FP8).half().numpy() for n in (0, 2))
    handles = [interpreter.TensorHandle(one.reshape(values[0].data.shape), tl.float16) for one in found]
    return SimpleNamespace(get_result=handles.__getitem__)


interpreter._convert_float = _convert_float8
interpreter.InterpreterBuilder.create_inline_asm = _numbers_of_pairs
REFERENCE, CPU = reference_kernels(), torch.device("cpu")
CASES = (  # heads, kv heads, dim, page, dtype of queries
    (4, 2, 16, 16, torch.float32),
    (8, 2, 64, 32, torch.float16),
)


def cache_of(lengths: list[int], kv_heads: int, dim: int, page: int) -> Cache:
    """Codes, and codes of NaN wherever no row may look."""
    cache = Cache(lengths, kv_heads, dim, page, torch.float32)
    cache.kv = cache.kv.to(FP8)
    return cache


def turn_of(cache: Cache, dim: int, dtype: torch.dtype, factors: Tensor | None = None) -> Rotation:
    """Of the last token of each row."""
    positions = cache.lengths.long() - 1
    slots = torch.cat([cache.slots(row, positions[row : row + 1]) for row in range(len(positions))])
    norms = randn(2, dim, dtype=dtype)
    return Rotation(norms[0], norms[1], 1e-6, torch.randn(128, dim), positions, slots, factors)


def rotation(kernels: Nvidia) -> None:
    """Both kernels store the codes that the reference stores, with scales and without; too large numbers become the
    largest code and NaN stays NaN. Folded into attention, too."""
    for heads, kv_heads, dim, page, dtype in CASES:
        cache = cache_of([1, 40, 33], kv_heads, dim, page)
        qkv = randn(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
        qkv[0, -1], qkv[1, -1], qkv[2, -1] = 30_000.0, -30_000.0, math.nan
        for factors in (None, torch.rand(2, kv_heads) + 0.5):
            turn, written = turn_of(cache, dim, dtype, factors), cache.kv.clone()
            REFERENCE.rope_and_cache(qkv, heads, written, turn)
            assert (written.float() == 448).any(), "saturated"
            for run in (rope_decode.rope_and_cache, rope_prefill.rope_and_cache):
                held = cache.kv.clone()
                run(qkv, heads, held, turn, False)
                same_codes(held, written, (run.__module__, heads, factors is None))
        turn, inputs, scale = turn_of(cache, dim, dtype), cache.inputs(1), dim**-0.5
        qkv = randn(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
        written, folded = cache.kv.clone(), cache.kv.clone()
        q = REFERENCE.rope_and_cache(qkv, heads, written, turn)
        expected = REFERENCE.decode_attention(q, written, inputs, scale)
        found = kernels.rope_cache_attend(qkv, heads, folded, turn, inputs, scale)
        check(found, expected, dtype, ("folded", heads, dim))
        same_codes(folded, written, ("folded", heads))


def same_codes(found: Tensor, expected: Tensor, what: object) -> None:
    """But for one step of the last bit of few: sums of a norm and a rotation are rounded in another order."""
    found, expected = bits_of(found).int(), bits_of(expected).int()
    differs = found != expected
    assert int((found - expected).abs().max()) <= 1, what
    assert float(differs.float().sum()) <= 0.02 * 3 * found.shape[-1] * found.shape[-2] * 2, what


def attention(kernels: Nvidia) -> None:
    """Single tokens and draft windows, by the op, in splits and over a list."""
    for heads, kv_heads, dim, page, dtype in CASES:
        for new in (1, 3):
            cache, scale = cache_of([new, 70, 17], kv_heads, dim, page), dim**-0.5
            q, inputs = randn(3 * new, heads, dim, dtype=dtype), cache.inputs(new)
            expected = REFERENCE.decode_attention(q, cache.kv, inputs, scale)
            assert not expected.isnan().any()
            memory = kernels.attention_sums, kernels.attention_counters
            launch: dict[str, Any] = {"stages": 2, "warps": 4, "pdl": False}
            found = [kernels.decode_attention(q, cache.kv, inputs, scale)]
            found.append(
                decode.decode_attention(
                    q, heads, cache.kv, inputs, SplitRule(16, 4, ANY_LENGTH, 4), scale, *memory, **launch
                )
            )
            work = decode_work.plan_decode(inputs, SplitRule(16, 1, 16, 64), pdl=False)
            launch |= {"tma": False, "block_n": 16, "programs": 5}
            found.append(decode_list.attend_list(q, heads, cache.kv, inputs, work, scale, *memory, **launch))
            if decode_list.supports_tma(heads, cache.kv, inputs, 16):
                launch["tma"] = True
                found.append(decode_list.attend_list(q, heads, cache.kv, inputs, work, scale, *memory, **launch))
            assert (len(found) == 4) == (dim == 64)
            for number, one in enumerate(found):
                check(one, expected, dtype, ("decode", number, heads, dim, new))
    heads, kv_heads, dim, page, dtype = CASES[1]
    cache, scale, new = cache_of([5, 70, 17], kv_heads, dim, page), dim**-0.5, 5
    for tree in (None, torch.randint(0, 2**5, (3, new), dtype=torch.int32)):
        q, inputs = randn(3 * new, heads, dim, dtype=dtype), replace(cache.inputs(new), tree_BQ=tree)
        assert decode_window.supports(heads, cache.kv, inputs, 16)
        expected = REFERENCE.decode_attention(q, cache.kv, inputs, scale)
        work = decode_work.plan_decode(inputs, SplitRule(16, 1, 16, 64), pdl=False)
        launch = {"stages": 2, "warps": 4, "programs": 5, "pdl": False}
        found = [decode_window.attend_windows(q, cache.kv, inputs, work, scale, *memory, **launch)]
        check(found[0], expected, dtype, ("windows by TMA", heads, dim, tree is None))
    check_counters(kernels)


def kinds(kernels: Nvidia) -> None:
    """Windows, sinks and a soft cap; pages before every window are NaN."""
    launch: dict[str, Any] = {"stages": 2, "warps": 4, "block_n": 16, "programs": 5, "pdl": False}
    for heads, kv_heads, dim, page, dtype in CASES:
        sinks = torch.linspace(-1.0, 2.0, heads)
        for kind in (AttentionKind(20), AttentionKind(5, None, sinks), AttentionKind(33, 2.0, sinks)):
            cache, scale = cache_of([1, 70, 40], kv_heads, dim, page), 0.3
            assert kind.window is not None
            for row, length in enumerate((1, 70, 40)):
                cache.kv[:, cache.table[row, : max(0, length - kind.window) // page].long()] = math.nan
            q, inputs, what = randn(3, heads, dim, dtype=dtype), cache.inputs(1), (heads, dim, kind.key)
            expected = REFERENCE.decode_attention(q, cache.kv, inputs, scale, kind=kind)
            assert not expected.isnan().any()
            planned = kernels.plan_decode(inputs, heads, cache.kv, kind)
            for given in (inputs, planned):
                check(kernels.decode_attention(q, cache.kv, given, scale, kind=kind), expected, dtype, ("choice", what))
            work = decode_work.plan_decode(inputs, SplitRule(16, 1, 16, 64), False, kind.window)
            by_tma = kind.softcap is None and decode_list.supports_tma(heads, cache.kv, inputs, 16)
            memory = kernels.attention_sums, kernels.attention_counters
            for tma in {False, by_tma}:
                found = decode_list.attend_list(
                    q, heads, cache.kv, inputs, work, scale, *memory, tma=tma, kind=kind, **launch
                )
                check(found, expected, dtype, ("list", tma, what))
            if dtype == torch.float16:
                cache, tiled = cache_of([70, 40], kv_heads, dim, page), TiledPrefill(CPU, TRAITS)
                prompt, q = PrefillAttention(cache.table, (5, 3), (70, 40)), randn(8, heads, dim, dtype=dtype)
                expected = REFERENCE.prefill_attention(q, cache.kv, prompt, scale, kind)
                found = tiled.run(q, cache.kv, prompt, tiled.plan(prompt, heads, cache.kv), scale, kind=kind)
                check(found, expected, dtype, ("prefill", what))
    check_counters(kernels)


def prompts(kernels: Nvidia) -> None:
    """Of 16-bit queries: with those of float32 no GPU has such a cache (runtime/model_checks.py)."""
    dtype = torch.float16
    for heads, kv_heads, dim, page, _ in CASES:
        cache, scale = cache_of([70, 90], kv_heads, dim, page), dim**-0.5
        inputs = PrefillAttention(cache.table, (70, 5), (70, 90))
        q = randn(75, heads, dim, dtype=dtype)
        expected = REFERENCE.prefill_attention(q, cache.kv, inputs, scale)
        tiled = TiledPrefill(CPU, TRAITS)
        planned = tiled.plan(inputs, heads, cache.kv)
        check(tiled.run(q, cache.kv, inputs, planned, scale), expected, dtype, ("prefill", heads, dim))
        tiles = invariant.listed_tiles(inputs, heads, cache.kv)
        found = invariant.prefill_attention(
            q, cache.kv, inputs.page_table_BP, tiles, scale, programs=5, chunk=32, pdl=False
        )
        check(found, expected, dtype, ("deterministic prefill", heads, dim))
        lengths = torch.tensor([70, 90], dtype=torch.int32)
        last = DecodeAttention(cache.table, lengths, 1, cache.table.shape[1] * page)
        one = invariant.decode_attention(
            *(q[[69, 74]], cache.kv, last, scale, kernels.attention_sums, kernels.attention_counters),
            multiprocessors=8,
            chunk=32,
            pdl=False,
        )
        check(one, found[[69, 74]], dtype, ("deterministic decode", heads, dim))


PARTS: tuple[Callable[[Nvidia], None], ...] = (rotation, attention, kinds, prompts)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels = interpreted_kernels()
    for part in PARTS:
        began = time.perf_counter()
        part(kernels)
        print(f"{part.__name__}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
