"""Candidate kernels for a matrix product: which tiles to time for a shape, and the default without timing.

Knows: which tiles and splits fit a shape and fill a GPU. Does not know: which of them is fastest (autotune.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import torch

from models.kernels.matmul.choice_table import (
    Blas,
    Choice,
    Decoded,
    FourBits,
    Fragments,
    Gemv,
    LinearShape,
    Scaled,
    Skinny,
    Warpgroup,
    Wide,
)
from models.kernels.traits import H200, TALL_ROWS, DeviceTraits
from models.row_buckets import power_of_two_from

MOST_GEMV_ROWS = 4  # more do not fit a thread's registers
_DECODE_ROWS = 256  # steps of more rows are prefills
_QUICK_ALGORITHMS = 8
_QUICK_FP8 = 4
_FP8_VARIED = 6  # tiles that a full search also tries with other prefetches, and late
_L2_PREFETCHED = 0.4  # share of the L2 that one launch's prefetches may take
_TILES = (16, 32, 48, 64, 96, 128, 192, 256)  # weight rows of a program in wide.py
_TALL_TILES = (64, 128, 192, 256)  # the same where weights are the tall operand
_MOST_SUMS = {4: 128, 8: 192, 16: 128}  # of one thread, by warps a program; half as many with split K
MOST_FRAGMENT_ROWS = 8
_MOST_FRAGMENT_STEPS, _FRAGMENT_COLUMNS = 12, 128  # of a warp; its steps are all in line
_FEWEST_FRAGMENT_WARPS = 12  # of a multiprocessor
# Of four-bit weights and few rows: (split, ahead, warps).
_FRAGMENTS = ((1, 2, 4), (1, 4, 4), (2, 2, 4), (2, 4, 4), (1, 4, 8), (1, 2, 8), (3, 3, 4), (2, 2, 8), (4, 2, 4))
MOST_WARPGROUP_ROWS = 32
_MOST_FOUR_BIT_ROWS = 64  # tiles of 128 rows spill registers
# Of four-bit weights: (block_o, parts, stages) and (block_o, split, stages, warps).
_FOUR_BIT_PARTS = ((16, 4, 4), (32, 4, 4), (16, 8, 3), (32, 8, 3), (32, 2, 5))
_FOUR_BIT_TILES = ((64, 1, 4, 4), (64, 2, 4, 4), (64, 4, 4, 4), (128, 1, 4, 8), (128, 2, 4, 8), (128, 4, 4, 8))
_LARGE_WEIGHT = 64 << 20  # elements: the gate-up of an 8B model, but not its other matrices

# (block_o, block_k, stages, warps): the winners of a wider search on an H200.
_SKINNY_TILES = (
    (64, 128, 5, 4),
    (64, 256, 3, 4),
    (128, 128, 3, 4),
    (32, 128, 5, 2),
    (16, 256, 4, 1),
    (64, 128, 7, 4),
    (32, 256, 4, 2),
)
_SKINNY_TILES_OF_MANY_ROWS = ((128, 64, 4, 8), (64, 64, 5, 4), (128, 64, 3, 4), (128, 128, 3, 8))


def default_choice(shape: LinearShape, traits: DeviceTraits = H200) -> Choice:
    """A fair choice without measuring: GEMV for 1 or 2 rows, the skinny kernel up to 32, cuBLAS for more rows, for
    large weights from 8 rows, and for shapes that fit neither kernel.
    """
    rows = shape.bucket.rows
    if shape.stored is not None:
        return coded_candidates(shape.bucket, traits)[0]
    if rows > 32 or (rows >= 8 and shape.outputs * shape.inner >= _LARGE_WEIGHT):
        return Blas()
    fitting = candidates_for(shape.bucket, traits)
    return fitting[0] if fitting else Blas()


def worth_measuring(shape: LinearShape) -> bool:
    """Whether a start-up should time it: decode steps, and prefill steps of a full budget that is a power of two.

    The rest of the ladder of tokens would take a start-up half a minute; `launch tune` measures it.
    """
    return shape.rows <= _DECODE_ROWS or shape.rows == power_of_two_from(shape.rows)


def quick_candidates(shape: LinearShape, lt: Iterable[Choice], traits: DeviceTraits = H200) -> list[Choice]:
    """What a start-up can afford to time: the default kernel, cuBLAS, and what needs no compiler.

    ``lt``: cuBLASLt's algorithms, the likeliest first.
    """
    default = default_choice(shape, traits)
    if shape.four_bits:
        *tiles, decoded = four_bit_candidates(shape, traits)
        return [*tiles[:_QUICK_FP8], decoded]
    if shape.stored is not None:
        return [*itertools.islice(fp8_candidates(shape, traits), _QUICK_FP8), Scaled(), Decoded()]
    return [*([] if isinstance(default, Blas) else [default]), Blas(), *itertools.islice(lt, _QUICK_ALGORITHMS)]


def candidates_for(shape: LinearShape, traits: DeviceTraits = H200) -> list[Choice]:
    """Kernels worth timing beside cuBLAS for a bucket, the likeliest first; empty where the shape fits none."""
    if shape.stored is not None:
        return coded_candidates(shape, traits)
    gemv, skinny = gemv_candidates(shape, traits), skinny_candidates(shape, traits)
    return [*gemv, *skinny] if shape.rows <= 2 else [*skinny, *gemv, *wide_candidates(shape, traits)]


def first_wave(traits: DeviceTraits) -> int:
    """About how many programs of a GEMV run at once."""
    return 8 * traits.multiprocessors


def gemv_candidates(shape: LinearShape, traits: DeviceTraits = H200) -> list[Choice]:
    """Block sizes that fit: the chunk is a power of two that divides the inner width, or less than half of a width that
    none of them divides; at most 64 weights a thread."""
    if shape.rows > MOST_GEMV_ROWS or shape.stored is not None:
        return []
    widest, held = shape.inner & -shape.inner, power_of_two_from(shape.rows)
    if widest < 512:
        widest = shape.inner // 2
    halves = 2 if shape.gate_up else 1
    found: list[Choice] = []
    ahead: list[Choice] = []
    for chunk, warps in ((1024, 4), (512, 2), (2048, 8), (4096, 8), (2048, 4)):
        for block_o in (4, 2, 1, 8):
            weights_a_thread = block_o * halves * chunk // (warps * 32)
            fits = chunk <= widest and (shape.outputs // halves) % block_o == 0
            if fits and weights_a_thread <= 64 and weights_a_thread * held <= 128:
                rows_at_once = min(shape.outputs, block_o * halves * first_wave(traits))
                found.append(Gemv(block_o, chunk, warps))
                ahead.append(Gemv(block_o, chunk, warps, prefetch_columns(rows_at_once, shape.inner - chunk, traits)))
    return [*found, *(choice for choice in ahead if choice not in found)]


def skinny_candidates(shape: LinearShape, traits: DeviceTraits = H200) -> list[Choice]:
    """Tiles and splits of K that give most multiprocessors one to four programs."""
    if shape.rows > 256 or shape.dtype not in (torch.bfloat16, torch.float16) or shape.stored is not None:
        return []
    multiprocessors = traits.multiprocessors
    most = 3 * multiprocessors // 4 + 1  # more than three quarters of them
    block_m = min(128, max(8, power_of_two_from(shape.rows)))
    tiles_to_try = _SKINNY_TILES_OF_MANY_ROWS if shape.rows > 64 else _SKINNY_TILES
    found: list[Skinny] = []
    for block_o, block_k, stages, warps in tiles_to_try:
        if shape.outputs % block_o or shape.inner % block_k:
            continue
        warps = max(warps, block_m // 32)  # one warp lacks registers for 64 rows
        tiles, steps = shape.outputs // block_o * -(-shape.rows // block_m), shape.inner // block_k
        if tiles > 8 * multiprocessors and block_o < 64:
            continue
        for split in (1, 2, 3, 4, 8):
            if (
                steps % split == 0
                and steps // split >= 2
                and (split == 1 or most <= tiles * split <= 4 * multiprocessors)
            ):
                chosen = Skinny(block_m, block_o, block_k, split, stages, warps, min(256, block_k))
                found.append(chosen)
                if shape.normed and shape.rows <= 32:
                    found.append(dataclasses.replace(chosen, fold=True))
                found.append(dataclasses.replace(chosen, late=True))
    # First those that fill most multiprocessors, then the fewest splits.
    found.sort(key=lambda c: (shape.outputs // c.block_o * c.split < most, c.split, c.fold or c.late))
    return list(found)


def wide_candidates(shape: LinearShape, traits: DeviceTraits = H200) -> list[Choice]:
    """Tiles and splits of K that give nearly every multiprocessor one program, or two."""
    if not 8 <= shape.rows <= 256 or shape.dtype not in (torch.bfloat16, torch.float16) or shape.stored is not None:
        return []
    multiprocessors, block_m = traits.multiprocessors, power_of_two_from(shape.rows)
    # With few rows the 96 programs that 8B's qkv has of 64 weight rows each are worth timing: they won at 32.
    tiles, enough = (_TILES, 0.75) if block_m >= TALL_ROWS else (_TALL_TILES, 0.72)
    found: list[Choice] = []
    for block_o, block_k, split in itertools.product(tiles, (64, 128), (1, 2, 3, 4)):
        programs, columns = shape.outputs // block_o * split, shape.inner // split
        if shape.outputs % block_o or shape.inner % (block_k * split) or columns < 8 * block_k:
            continue
        if not any(enough * held <= programs <= held for held in (multiprocessors, 2 * multiprocessors)):
            continue
        if block_m > 4 * block_o:  # every program reads all tokens, from L2, which is not free
            continue
        together = -(-programs // multiprocessors)
        stages = min(8, (traits.shared_bytes // together - 1024) // (2 * block_k * (block_m + block_o)))
        if stages < 3:
            continue
        prefetch = min(256, prefetch_columns(shape.outputs * split, columns, traits))
        for warps in sorted({max(4, block_m // 32), block_m // 16}) if block_m >= TALL_ROWS else (4, 8):
            if block_m * block_o // (32 * warps) <= _MOST_SUMS[warps] // (1 if split == 1 else 2):
                chosen = Wide(block_m, block_o, block_k, split, stages, warps, prefetch)
                found += [chosen, dataclasses.replace(chosen, late=True)]
    return found


def coded_candidates(shape: LinearShape, traits: DeviceTraits = H200) -> list[Choice]:
    """Kernels for weights that are codes, in the order to try."""
    return four_bit_candidates(shape, traits) if shape.four_bits else fp8_candidates(shape, traits)


def four_bit_candidates(shape: LinearShape, traits: DeviceTraits = H200) -> list[Choice]:
    """Kernels for four-bit weights, in the order to try: warpgroups for 2 to 32 rows, fragments, or warps that share K,
    for up to 8, tiles of a whole program for more, and decoded weights where they are read for so many rows that
    decoding takes little of the time.
    """
    rows, found = shape.rows, list[FourBits]()
    if rows <= _MOST_FOUR_BIT_ROWS and shape.dtype in (torch.bfloat16, torch.float16):
        block_m = max(8, power_of_two_from(rows))
        for block_o, parts, stages in _FOUR_BIT_PARTS if rows <= 32 else ():
            found.append(FourBits(block_m, block_o, 128, parts, 1, stages, parts, 256))
        for block_o, split, stages, warps in _FOUR_BIT_TILES:
            found.append(FourBits(block_m, block_o, 128, 1, split, stages, warps, 256))
    if shape.format.code == "int4" and shape.block is not None and shape.block[1] == 64:  # sums are scaled, not numbers
        found = [dataclasses.replace(one, block_k=64) for one in found]
    fitting = [one for one in found if shape.outputs % one.block_o == 0]
    if rows > 8:  # on an H200 tiles of 128 outputs, in programs for about all multiprocessors, were the fastest
        fitting.sort(
            key=lambda c: (
                c.parts,
                -c.block_o,
                abs(math.log(shape.outputs // c.block_o * c.split / (1.15 * traits.multiprocessors))),
            )
        )
    else:
        fitting.sort(key=lambda c: (c.parts == 1, _off(shape.outputs // c.block_o * c.split, traits)))
    warpgroups = _warpgroups(shape, traits)  # a start-up tries the first two, then others
    return [*warpgroups[:2], *_fragments(shape, traits), *dict.fromkeys(fitting), *warpgroups[2:], Decoded()]


def _fragments(shape: LinearShape, traits: DeviceTraits) -> list[Fragments]:
    if shape.rows > MOST_FRAGMENT_ROWS or shape.dtype not in (torch.bfloat16, torch.float16):
        return []
    found = [
        Fragments(split, ahead, warps)
        for split, ahead, warps in _FRAGMENTS
        if ahead <= -(-shape.inner // (_FRAGMENT_COLUMNS * warps * split)) <= _MOST_FRAGMENT_STEPS
    ]
    few = _FEWEST_FRAGMENT_WARPS * traits.multiprocessors
    return sorted(found, key=lambda c: shape.outputs // 16 * c.split * c.warps < few)


def _warpgroups(shape: LinearShape, traits: DeviceTraits) -> list[Warpgroup]:
    """The two splits nearest to three programs a multiprocessor: 8B's products were the fastest so on an H200. Scales
    of fewer than 128 columns are multiplied in each step, and four of those in line take a compiler minutes.
    """
    if not 1 < shape.rows <= MOST_WARPGROUP_ROWS or not traits.hopper:
        return []
    columns = shape.block[1] if shape.block else 0
    aheads = (2,) if columns % 128 or shape.format.code != "int4" else (4, 2) if shape.rows <= 16 else (2, 4)
    programs = shape.outputs / 64 / (3 * traits.multiprocessors)
    splits = sorted((1, 2, 3, 4, 6, 8), key=lambda split: abs(math.log(programs * split)))
    return [Warpgroup(split, ahead) for split in splits[:2] for ahead in aheads]


def fp8_candidates(shape: LinearShape, traits: DeviceTraits = H200) -> list[Choice]:
    """Kernels for FP8 weights, in the order to try: a GEMV for one row, then tiles that quantise activations, or take
    them as they are where blocks do not allow it. The sizes are winners of a search over 8B's products on an H200.
    """
    assert shape.block is not None
    rows, halves, columns = shape.rows, 2 if shape.gate_up else 1, shape.block[1] or shape.inner
    found: list[Choice] = []
    if rows == 1 and columns % 8 == 0:
        for block_o, chunk, warps in ((4, 1024, 4), (4, 512, 2), (1, 2048, 2), (2, 512, 2), (1, 512, 2), (4, 2048, 8)):
            block_o = max(1, block_o // halves)
            if shape.inner % chunk == 0 and shape.outputs // halves % block_o == 0:
                found.append(Gemv(block_o, chunk, warps))
    if shape.dtype in (torch.bfloat16, torch.float16):
        found += _fp8_skinny(shape, columns, traits) if rows <= 64 else []
        found += _fp8_wide(shape, traits) if 32 <= rows <= 256 and columns % 128 == 0 and traits.hopper else []
    if rows < 64:
        return [*found, Scaled(), Decoded()]
    # On an H200 tiles by TMA were the fastest of 64 rows, cuBLASLt of more, with SiLU-mul in a separate launch.
    found.sort(key=lambda choice: not isinstance(choice, Wide))
    return [*found, Scaled(), Decoded()] if rows < 128 else [Scaled(), *found, Decoded()]


def fp8_variants(shape: LinearShape, traits: DeviceTraits = H200) -> list[Choice]:
    """What a full search tries besides: the first tiles with other prefetches, and late."""
    tiles = [one for one in fp8_candidates(shape, traits) if isinstance(one, Wide) or getattr(one, "narrow", False)]
    found: list[Choice] = []
    for tile in tiles[:_FP8_VARIED]:
        assert isinstance(tile, (Skinny, Wide))
        for prefetch in (256, 512):
            if prefetch <= shape.inner // tile.split:
                found.append(dataclasses.replace(tile, prefetch=prefetch))
        found.append(dataclasses.replace(tile, late=True))
    return found


def _fp8_skinny(shape: LinearShape, columns: int, traits: DeviceTraits) -> list[Skinny]:
    block_m, block_k = max(16, power_of_two_from(shape.rows)), min(128, columns & -columns)
    found = [
        Skinny(block_m, block_o, block_k, split, stages, 8 if block_o > 64 else 4, block_k // 128 * 128, narrow=narrow)
        for narrow in (True, False)
        for block_o, split, stages in itertools.product((64, 128, 32), (1, 2, 4, 8), (4, 3))
        if block_k >= (32 if narrow else 16)  # of the tensor cores' products of 8 and of 16 bits
        and (not narrow or shape.inner % columns == 0)
        and shape.outputs % block_o == 0
        and shape.inner % (block_k * split) == 0
    ]
    return sorted(found, key=lambda c: (not c.narrow, _off(shape.outputs // c.block_o * c.split, traits)))


def _off(programs: int, traits: DeviceTraits) -> float:
    """How far from so many that 8B's products were the fastest with on an H200: two or three a multiprocessor."""
    return abs(math.log(programs / (2.3 * traits.multiprocessors)))


def _fp8_wide(shape: LinearShape, traits: DeviceTraits) -> list[Wide]:
    block_m, found = power_of_two_from(shape.rows), list[Wide]()
    for block_o, split in itertools.product((64, 96, 128), (1, 2, 4)):
        spills = shape.gate_up and block_m * block_o > 128 * 96
        if shape.outputs % block_o == 0 and shape.inner % (128 * split) == 0 and not spills:
            warps = 4 if block_m * block_o <= 128 * 64 else 8
            stages = min(5, (traits.shared_bytes // 2 - 1024) // (128 * (block_m + block_o)))
            if stages >= 2:
                found.append(Wide(block_m, block_o, 128, split, stages, warps, 0))
    return sorted(found, key=lambda c: _off(shape.outputs // c.block_o * c.split, traits))


def prefetch_columns(rows: int, columns: int, traits: DeviceTraits = H200) -> int:
    """Columns of ``rows`` 16-bit weight rows to prefetch to L2: a power of two; all rows together take under half the
    L2.
    """
    most = min(columns, int(_L2_PREFETCHED * traits.l2_bytes) // 2 // rows)
    return 1 << (most.bit_length() - 1) if most >= 64 else 0
