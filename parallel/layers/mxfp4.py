"""MXFP4 tensors of a checkpoint, which become numbers of a model's dtype while they are loaded.

Knows: the codes (E2M1, two a byte, the low half first), their scales (E8M0, one for 32 columns), and pieces of both
that cut a block of columns. Does not know: which tensors are stored like this (experts.py), files.
Source: OCP Microscaling Formats v1.0; transformers 5.23, integrations/mxfp4.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.layers.shard import Shard, Sliceable

BLOCK = 32  # columns
_NOT_A_NUMBER = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Target:
    """``target`` [1, ..., columns] of one expert's matrix, whose codes and scales are two tensors, loaded in either
    order. ``first``: the first column that it has of those of its blocks."""

    def __init__(self, target: Tensor, first: int = 0) -> None:
        self.target, self.first = target, first
        self._scales: Tensor | None = None
        self._has_codes = False

    def take_codes(self, codes: Tensor) -> None:
        """uint8 [1, rows, blocks, 16]."""
        codes = codes.to(self.target.device)
        table = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], dtype=torch.float32, device=codes.device)
        numbers = table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]
        if self._scales is not None:
            numbers = numbers * self._scales[..., None]
        self.target.copy_(self._own(numbers.flatten(-2)))
        self._has_codes, self._scales = self._scales is None, None

    def take_scales(self, exponents: Tensor) -> None:
        """uint8 [1, rows, blocks]; ValueError where one is no number."""
        exponents = exponents.to(self.target.device)
        if bool((exponents == _NOT_A_NUMBER).any()):
            raise ValueError("a scale of MXFP4 codes is 255, which stands for no number")
        scales = torch.exp2(exponents.float() - 127)
        if self._has_codes:
            self.target.mul_(self._own(scales.repeat_interleave(BLOCK, -1)).to(self.target.dtype))
            self._has_codes = False
        else:
            self._scales = scales

    def _own(self, wide: Tensor) -> Tensor:
        """Of whole blocks [1, rows, columns], in the shape of the target."""
        return wide[..., self.first : self.first + self.target.shape[-1]].reshape(self.target.shape)


@dataclass(frozen=True, slots=True)
class Mxfp4Shard(Shard):
    """A piece of the codes of ``into``, or of its scales."""

    into: Mxfp4Target | None = None
    scales: bool = False

    def load(self, full: Sliceable) -> None:
        assert self.into is not None
        take = self.into.take_scales if self.scales else self.into.take_codes
        take(full[self.ranges])
