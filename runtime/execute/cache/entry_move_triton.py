"""KV entries moved within their rows in Triton: one launch for all layers of one shape.

Knows: where an entry of a layer begins. Does not know: what is in it (words of 32 bits are copied as they are), which
entries are moved; entry_move.py holds the torch reference.

A program has all entries of a row, and some words of each. It reads all of them before it writes any: an entry may be
moved to where another one was moved from. A plain launch, as block_copy_triton.py's.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WORDS = 4096  # that a program holds


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
    """See entry_move.EntryMover.move. addresses_L int64: of layers [2, places, words * 4 bytes], multiples of 16."""
    rows, width = sources_BW.shape
    entries = triton.next_power_of_2(width)
    block = min(triton.next_power_of_2(words), max(16, _WORDS // entries))
    _move_kernel[(rows, 2 * len(addresses_L), triton.cdiv(words, block))](
        addresses_L, sources_BW.contiguous(), targets_BW.contiguous(), count_B.contiguous(), places,
        WIDTH=width, ENTRIES=entries, WORDS=words, BLOCK=block, num_warps=4,
    )  # fmt: skip
