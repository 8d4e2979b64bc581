"""KV blocks copied, and KV entries moved within their rows, in Triton: one launch for all layers of one shape.

Knows: where a block of a layer begins. Does not know: what is in it (words of 32 bits are copied as they are), whose
it is; block_copy.py holds the torch reference.

When entries move, a program has all entries of a row, and some words of each. It reads all of them before it writes
any: an entry may be moved to where another one was moved from.

Plain launches, without programmatic dependent launch: what the step before it wrote has landed. See
models/kernels/dependent_launch.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False


_MOVED_WORDS = 4096  # that a program holds


@triton.jit(do_not_specialize=["places"])
def _move_kernel(
    addresses_ptr, sources_ptr, targets_ptr, count_ptr,
    places,  # entries of a layer, keys or values
    WIDTH: tl.constexpr,
    ENTRIES: tl.constexpr,  # WIDTH, padded to a power of two
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, layer, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    entry = tl.arange(0, ENTRIES)
    count = tl.load(count_ptr + row)
    source = tl.load(sources_ptr + row * WIDTH + entry, mask=entry < WIDTH, other=0)
    target = tl.load(targets_ptr + row * WIDTH + entry, mask=entry < WIDTH, other=0)
    moved = (entry < count) & (entry < WIDTH) & (source != target)
    # Triton knows nothing of an address that was an integer: without the hint it would copy word by word.
    layer_ptr = tl.multiple_of(tl.load(addresses_ptr + layer // 2).to(tl.pointer_type(tl.int32)), 16)
    half = (layer % 2).to(tl.int64) * places
    word = part * BLOCK + tl.arange(0, BLOCK)
    mask = moved[:, None] & (word < WORDS)[None, :]
    held = tl.load(layer_ptr + (half + source)[:, None] * WORDS + word[None, :], mask=mask, other=0)
    tl.debug_barrier()
    tl.store(layer_ptr + (half + target)[:, None] * WORDS + word[None, :], held, mask=mask)


def move_entries(
    addresses_L: Tensor, sources_BW: Tensor, targets_BW: Tensor, count_B: Tensor, places: int, words: int
) -> None:
    """See EntryMover.move. addresses_L int64: of layers [2, places, words * 4 bytes], multiples of 16."""
    rows, width = sources_BW.shape
    entries = triton.next_power_of_2(width)
    block = min(triton.next_power_of_2(words), max(16, _MOVED_WORDS // entries))
    _move_kernel[(rows, 2 * len(addresses_L), triton.cdiv(words, block))](
        addresses_L, sources_BW.contiguous(), targets_BW.contiguous(), count_B.contiguous(), places,
        WIDTH=width, ENTRIES=entries, WORDS=words, BLOCK=block, num_warps=4,
    )  # fmt: skip


_WORDS = 2048  # that a program copies at a time
_PIECE = 8 * _WORDS  # and in all: a row of recurrent state has some hundred thousand


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["sources_ptr", "targets_ptr"])
def _copy_kernel(
    addresses_ptr, sources_ptr, targets_ptr, blocks,
    WORDS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair, layer, half = tl.program_id(0) // PIECES, tl.program_id(1), tl.program_id(2)
    begin = tl.program_id(0) % PIECES * PIECE
    # Triton knows nothing of an address that was an integer: without the hint it would copy word by word.
    layer_ptr = tl.multiple_of(tl.load(addresses_ptr + layer).to(tl.pointer_type(tl.int32)), 16)
    first = half.to(tl.int64) * blocks  # keys, or values; or a layer of a bank
    source_ptr = layer_ptr + (first + tl.load(sources_ptr + pair)) * WORDS
    target_ptr = layer_ptr + (first + tl.load(targets_ptr + pair)) * WORDS
    for start in range(0, PIECE, BLOCK):
        word = begin + start + tl.arange(0, BLOCK)
        inside = word < WORDS
        tl.store(target_ptr + word, tl.load(source_ptr + word, mask=inside), mask=inside)


def copy_blocks(addresses_L: Tensor, pairs_2C: Tensor, blocks: int, words: int, halves: int = 2) -> None:
    """See block_copy.BlockCopier.copy. addresses_L int64: of [halves, blocks, words * 4 bytes], multiples of 16."""
    pieces = triton.cdiv(words, _PIECE)
    grid = (pairs_2C.shape[1] * pieces, len(addresses_L), halves)
    _copy_kernel[grid](
        addresses_L, pairs_2C[0], pairs_2C[1], blocks,
        WORDS=words, PIECE=min(_PIECE, words), PIECES=pieces, BLOCK=min(_WORDS, triton.next_power_of_2(words)),
        num_warps=4,
    )  # fmt: skip
