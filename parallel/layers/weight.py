"""Weight matrices as values: numbers, how they are stored, and the bias that is added to their products.

Knows: what checkpoints and tuned tables call a format, its bytes, and how rows of a matrix are taken by themselves.
Does not know: which piece of a checkpoint tensor a rank holds (shard.py), or how products are computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the numbers of a matrix are stored. ``name``: in keys of tuned tables. ``dtype``: of what is stored."""

    name: str
    dtype: torch.dtype

    def nbytes(self, *shape: int) -> int:
        """Bytes of a matrix [..., outputs, inner]."""
        return math.prod(shape) * self.dtype.itemsize


@functools.cache
def plain(dtype: torch.dtype) -> WeightFormat:
    """Numbers as they are, in a float dtype."""
    return WeightFormat(str(dtype).removeprefix("torch."), dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix W of products x W^T (+ bias). ``data``: [outputs, inner], or [G, outputs, inner] of G experts; ``bias``:
    [outputs]."""

    data: Tensor
    format: WeightFormat
    bias: Tensor | None = None
    outputs: int = field(init=False)
    inner: int = field(init=False)

    def __post_init__(self) -> None:
        *_, outputs, inner = self.data.shape
        object.__setattr__(self, "outputs", outputs)
        object.__setattr__(self, "inner", inner)

    @classmethod
    def of(cls, data: Tensor, bias: Tensor | None = None) -> Weight:
        """A matrix whose numbers are those of ``data``."""
        return cls(data, plain(data.dtype), bias)

    @classmethod
    def stacked(cls, weights: Sequence[Weight]) -> Weight:
        """A copy of the rows of several of one format, with a bias if each has one."""
        biases = [weight.bias for weight in weights if weight.bias is not None]
        bias = torch.cat(biases) if len(biases) == len(weights) else None
        return cls(torch.cat([weight.data for weight in weights]), weights[0].format, bias)

    @property
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(what checkpoints call it after the last dot, tensor), each with a row an output."""
        yield "weight", self.data
        if self.bias is not None:
            yield "bias", self.bias

    def rows(self, first: int, count: int) -> Weight:
        """Outputs [first, first + count), sharing memory."""
        here = slice(first, first + count)
        return Weight(self.data[here], self.format, None if self.bias is None else self.bias[here])

    @property
    def unbiased(self) -> Weight:
        return Weight(self.data, self.format) if self.bias is not None else self
