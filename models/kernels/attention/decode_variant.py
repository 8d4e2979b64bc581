"""How decode attention is launched, as tables of choices say it: which kernel, how many keys a block, stages, warps.

Knows: which measured shape stands in for one that was not measured. Does not know: what is launched where no table has
an answer (decode_choice.py), the kernels (decode.py, decode_list.py), or which variant is the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch

_STANDS_IN = 2.0  # times as many pairs, or as few


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """``tma``: keys and values come by TMA, which takes less power (docs/decisions/0010). ``block_n``: keys a block."""

    tma: bool
    block_n: int
    stages: int
    warps: int

    @property
    def blocks(self) -> tuple[int, int, int]:
        return self.block_n, self.stages, self.warps


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """One launch: ``pairs`` of row and kv head, each with ``query_rows`` queries of ``head_dim``."""

    pairs: int
    query_rows: int
    head_dim: int
    dtype: torch.dtype

    @property
    def heads(self) -> str:
        """All but the pairs."""
        return f"{str(self.dtype).removeprefix('torch.')} {self.query_rows}x{self.head_dim}"

    @property
    def key(self) -> str:
        return f"{self.heads} x{self.pairs}"


def nearest_variant(variants: Mapping[str, DecodeVariant], shape: DecodeShape) -> DecodeVariant | None:
    """The variant measured for the most similar number of pairs, at most twice or half as many; None without one."""
    beginning = f"{shape.heads} x"
    pairs_of = {key: key.removeprefix(beginning) for key in variants if key.startswith(beginning)}
    measured = {int(pairs): variants[key] for key, pairs in pairs_of.items() if pairs.isdecimal() and int(pairs)}
    away = [(abs(math.log(pairs / shape.pairs)), -pairs, variant) for pairs, variant in measured.items()]
    near = min(away, key=lambda entry: entry[:2], default=None)
    return near[2] if near is not None and near[0] <= math.log(_STANDS_IN) else None


def candidate_variants() -> list[DecodeVariant]:
    """What is worth timing. Two stages overlap nothing and four compile to the same code as three, since a block's
    address is read from the page table; 16 to 32 keys a warp, or warps do next to nothing, or have too many registers.
    """
    by_tma = [DecodeVariant(True, *blocks) for blocks in ((32, 3, 1), (32, 4, 1), (32, 3, 2))]
    blocks = product((32, 64, 128), (3, 5), (2, 4, 8))
    return [*by_tma, *(DecodeVariant(False, *variant) for variant in blocks if 16 <= variant[0] // variant[2] <= 32)]
