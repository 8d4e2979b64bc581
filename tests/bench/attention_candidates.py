"""Which launch parameters of the decode attention are worth a measurement beside those that the kernels choose.

Knows: the choice of models/kernels/attention/decode_choice.py, and why most of the grid around it cannot win.
Does not know: how a candidate is timed (bench/attention.py).
"""

from __future__ import annotations

from itertools import product
from math import log2
from typing import NamedTuple

from models.kernels.attention import decode_tma
from models.kernels.attention.decode_choice import (
    _MANY_PAIRS,
    _SHARED_RESERVE,
    _attention_blocks,
    _attention_shared,
    _tma_blocks,
)
from models.kernels.attention.decode_work import choose_splits, workspace_floats
from models.kernels.attention.query import padded_dim, power_of_two_above
from models.kernels.matmul.dispatch import PARTIAL_BYTES
from models.kernels.traits import H200

_SHARED_BYTES = H200.shared_bytes - _SHARED_RESERVE
_MULTIPROCESSOR_SHARED = 228 << 10
_SPLITS = (1, 2, 4)
_MANY = ((32, 3, 1), (32, 4, 1), (32, 3, 2))  # (keys a block, stages, warps) of the form for many rows
_FEWEST_WARPS = 8  # of a multiprocessor: two for each of its four schedulers


class Candidate(NamedTuple):
    """What decode_attention is launched with, or attend_many where ``many``; ``block_n`` is keys a block."""

    block_n: int
    splits: int
    stages: int
    warps: int
    many: bool = False

    @property
    def blocks(self) -> tuple[int, int, int]:
        return self.block_n, self.stages, self.warps


class Attention(NamedTuple):
    """One launch for bfloat16 ``rows`` of one query each, ``shortest`` to ``most`` tokens long."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    shortest: int
    most: int

    @property
    def query_rows(self) -> int:
        return power_of_two_above(self.heads // self.kv_heads)

    @property
    def row_bytes(self) -> int:
        return 2 * padded_dim(self.head_dim)

    @property
    def many_fits(self) -> bool:
        """Whether the form for many rows takes it."""
        return self.query_rows <= decode_tma.MOST_QUERY_ROWS and self.head_dim in decode_tma.HEAD_DIMS

    def shared(self, blocks: tuple[int, int, int]) -> int:
        """Bytes a program."""
        block_n, stages, _ = blocks
        return _attention_shared(block_n, stages, self.query_rows, self.row_bytes)


def current_choice(asked: Attention) -> Candidate:
    """What NvidiaKernels launches."""
    if asked.rows * asked.kv_heads >= _MANY_PAIRS and asked.many_fits:
        block_n, stages, warps = _tma_blocks(asked.query_rows)
        return Candidate(block_n, 1, stages, warps, many=True)
    return choice_of_few(asked)


def choice_of_few(asked: Attention) -> Candidate:
    """What it launches, or would without the form for many rows."""
    block_n, stages, warps = _attention_blocks(
        asked.rows * asked.kv_heads, asked.query_rows, asked.row_bytes, _SHARED_BYTES
    )
    splits = choose_splits(asked.rows, asked.kv_heads, asked.most, block_n, H200.multiprocessors)
    return Candidate(block_n, splits, stages, warps)


def candidates(asked: Attention) -> list[Candidate]:
    """The current choice, then the others: the form for many rows, the other one's blocks with every number of splits,
    other blocks with the likeliest two.

    The likeliest numbers are the current one and its double; where that is too many for the row, fewer.
    """
    few = choice_of_few(asked)
    found = [current_choice(asked)]
    if asked.many_fits and 2 * asked.rows * asked.kv_heads >= _MANY_PAIRS:
        found += [Candidate(block_n, 1, stages, warps, many=True) for block_n, stages, warps in _MANY]
    found.append(few)
    for blocks in [few.blocks, *block_choices(asked)]:
        splits = [n for n in sorted({*_SPLITS, few.splits, 2 * few.splits}) if _splits_fit(asked, blocks[0], n)]
        if blocks == few.blocks:
            splits = [n for n in splits if n in _SPLITS]
        else:
            splits = sorted(splits, key=lambda n: (abs(log2(n / few.splits)), -n))[:2]
        block_n, stages, warps = blocks
        found += [Candidate(block_n, n, stages, warps) for n in splits]
    return list(dict.fromkeys(found))


def block_choices(asked: Attention) -> list[tuple[int, int, int]]:
    """(keys a block, stages, warps) that may win.

    Left out of blocks of 32 to 128 keys, 2 to 5 stages and 2 to 8 warps:

    * 2 and 4 stages. A block's address is read from the page table, and Triton halves its stages between the two loads:
      2 stages overlap nothing, 4 compile to the same code as 3.
    * Fewer than 16 or more than 32 keys a warp: warps that do next to nothing, or too many registers each.
    * More warps than _attention_blocks takes for so many query rows.
    * What shared memory does not hold, and what it does not hold often enough for eight warps a multiprocessor.
    """
    found = []
    for block_n, stages, warps in product((32, 64, 128), (2, 3, 4, 5), (2, 4, 8)):
        shared = asked.shared((block_n, stages, warps))
        fits = shared <= _SHARED_BYTES and _MULTIPROCESSOR_SHARED // shared * warps >= _FEWEST_WARPS
        sensible = 16 <= block_n // warps <= 32 and warps <= max(4, asked.query_rows // 16)
        if stages % 2 and sensible and fits:
            found.append((block_n, stages, warps))
    return found


def _splits_fit(asked: Attention, block_n: int, splits: int) -> bool:
    """Two blocks a split at least, and partial results that the kernels' workspace holds."""
    floats = workspace_floats(asked.rows, asked.kv_heads, asked.query_rows, asked.head_dim, splits)
    blocks = -(-asked.shortest // block_n)
    return floats <= PARTIAL_BYTES // 4 and (splits == 1 or 2 * splits <= blocks)
