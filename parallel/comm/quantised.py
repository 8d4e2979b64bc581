"""Activations as values: FP8 codes and their scales, which products with FP8 weights read instead of numbers.

Knows: the memory of both. Does not know: which activations are quantised (models/ops), or how.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Launches:
    """Launches that quantise activations and do nothing else, of this process; a captured one counts at each replay."""

    count: int = 0


SEPARATE = Launches()
_ROWS = 16  # of a tensor core's tile: the number of rows of codes is a multiple


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """Activations [T, K]. ``codes``: float8_e4m3fn [P, K]; ``scale``: float32 [K / group, P], one for each row and
    ``group`` of columns, by which codes are multiplied. P is at least T and a multiple of 16; rows beyond T hold
    anything. ``numbers``: [T, K] in ``dtype``, where something else reads them, too.
    """

    codes: Tensor
    scale: Tensor
    tokens: int
    dtype: torch.dtype
    numbers: Tensor | None = None

    @classmethod
    def empty(
        cls, tokens: int, inner: int, group: int, dtype: torch.dtype, device: torch.device | str, *,
        numbers: bool = False,
    ) -> Quantised:  # fmt: skip
        """Memory for a kernel to fill; ``group`` divides ``inner``."""
        rows = -(-tokens // _ROWS) * _ROWS
        codes_PK = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=device)
        scale_GP = torch.empty(inner // group, rows, dtype=torch.float32, device=device)
        kept = torch.empty(tokens, inner, dtype=dtype, device=device) if numbers else None
        return cls(codes_PK, scale_GP, tokens, dtype, kept)

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens, self.codes.shape[1]

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scale.shape[0]

    @property
    def memory(self) -> tuple[Tensor, Tensor, int]:
        """Codes, scales and P, as kernels take them (parallel/comm/quantise_triton.py)."""
        return self.codes, self.scale, self.codes.shape[0]


Activations = Tensor | Quantised


def numbers_of(x: Activations) -> Tensor:
    """Raises TypeError where they were not kept."""
    if isinstance(x, Tensor):
        return x
    if x.numbers is None:
        raise TypeError("these activations were kept as FP8 codes only, and their numbers are asked for")
    return x.numbers


def memory_of(out: Activations) -> tuple[Tensor, Tensor, int]:
    """Of a kernel's operand or result that is numbers or codes; of numbers the last two are not read."""
    return (out, out, 0) if isinstance(out, Tensor) else out.memory
