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
    """How the numbers of a matrix are stored. ``name``: in keys of tuned tables. ``dtype``: of what is stored.

    ``block``: rows and columns that share a float32 scale, by which what is stored is multiplied; 0 columns: a whole
    row. None: the numbers themselves are stored. ``activation_cap``: activations that are quantised for products with
    the matrix are cut to +-cap; None: not cut.
    """

    name: str
    dtype: torch.dtype
    block: tuple[int, int] | None = None
    activation_cap: float | None = None

    def grid(self, outputs: int, inner: int) -> tuple[int, int]:
        """Scales of a matrix [outputs, inner]; blocks at its edges may be ragged."""
        if self.block is None:
            return 0, 0
        rows, columns = self.block
        return -(-outputs // rows), -(-inner // (columns or inner))

    def nbytes(self, *shape: int) -> int:
        """Bytes of a matrix [..., outputs, inner], with its scales."""
        scales = math.prod((*shape[:-2], *self.grid(*shape[-2:]))) * torch.float32.itemsize
        return math.prod(shape) * self.dtype.itemsize + scales


@functools.cache
def plain(dtype: torch.dtype) -> WeightFormat:
    """Numbers as they are, in a float dtype."""
    return WeightFormat(str(dtype).removeprefix("torch."), dtype)


@functools.cache
def fp8(rows: int, columns: int, activation_cap: float | None = None) -> WeightFormat:
    """float8_e4m3fn codes with a scale for each block; 0 columns: for each ``rows`` rows."""
    return WeightFormat(f"fp8_{rows}x{columns or 'all'}", torch.float8_e4m3fn, (rows, columns), activation_cap)


def block_of(name: str) -> tuple[int, int]:
    """The block of a format that ``fp8`` named. Raises ValueError."""
    rows, columns = name.removeprefix("fp8_").split("x")
    return int(rows), 0 if columns == "all" else int(columns)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix W of products x W^T (+ bias). ``data``: [outputs, inner], or [G, outputs, inner] of G experts; ``bias``:
    [outputs]; ``scale``: float32, the grid of the format; both with G in front likewise.

    ``parts``: rows in different formats, one part after another; ``data`` is empty then.
    """

    data: Tensor
    format: WeightFormat
    bias: Tensor | None = None
    scale: Tensor | None = None
    parts: tuple[Weight, ...] = ()
    outputs: int = field(init=False)
    inner: int = field(init=False)

    def __post_init__(self) -> None:
        *_, outputs, inner = self.data.shape
        if self.parts:
            outputs, inner = sum(part.outputs for part in self.parts), self.parts[0].inner
        object.__setattr__(self, "outputs", outputs)
        object.__setattr__(self, "inner", inner)

    @classmethod
    def of(cls, data: Tensor, bias: Tensor | None = None) -> Weight:
        """A matrix whose numbers are those of ``data``."""
        return cls(data, plain(data.dtype), bias)

    @classmethod
    def joined(cls, parts: Sequence[Weight]) -> Weight:
        """Parts one after another, sharing memory; one part is itself."""
        if len(parts) == 1:
            return parts[0]
        return cls(parts[0].data[:0], parts[0].format, parts=tuple(parts))

    @classmethod
    def stacked(cls, weights: Sequence[Weight]) -> Weight:
        """A copy of the rows of several, with a bias if each has one; without a copy ``joined`` where formats differ or
        blocks of scales do not meet."""
        rows = (weights[0].format.block or (1, 0))[0]
        alike = len({weight.format for weight in weights}) == 1 and not any(weight.parts for weight in weights)
        if not alike or any(weight.outputs % rows for weight in weights[:-1]):
            return cls.joined([part for weight in weights for part in weight.parts or (weight,)])
        biases = [weight.bias for weight in weights if weight.bias is not None]
        bias = torch.cat(biases) if len(biases) == len(weights) else None
        scales = [weight.scale for weight in weights if weight.scale is not None]
        data = torch.cat([weight.data for weight in weights])
        return cls(data, weights[0].format, bias, torch.cat(scales) if scales else None)

    @property
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(what checkpoints call it after the last dot, tensor), each with a row an output."""
        yield "weight", self.data
        if self.bias is not None:
            yield "bias", self.bias

    def matrix(self, expert: int) -> Weight:
        """One of the experts', sharing memory."""
        bias, scale = (None if x is None else x[expert] for x in (self.bias, self.scale))
        return Weight(self.data[expert], self.format, bias, scale)

    def rows(self, first: int, count: int) -> Weight:
        """Outputs [first, first + count), sharing memory. Raises ValueError where that cuts a block of scales."""
        if self.parts:
            return Weight.joined(list(self._rows_of_parts(first, count)))
        here, scale = slice(first, first + count), self.scale
        if self.format.block is not None and scale is not None:
            rows = self.format.block[0]
            if first % rows or (count % rows and first + count != self.outputs):
                raise ValueError(f"outputs {first} to {first + count} cut a block of {rows} that share a scale")
            scale = scale[first // rows : -(-(first + count) // rows)]
        return Weight(self.data[here], self.format, None if self.bias is None else self.bias[here], scale)

    def _rows_of_parts(self, first: int, count: int) -> Iterator[Weight]:
        begin = 0
        for part in self.parts:
            start, stop = max(first, begin) - begin, min(first + count, begin + part.outputs) - begin
            if start < stop:
                yield part.rows(start, stop - start)
            begin += part.outputs

    @property
    def unbiased(self) -> Weight:
        parts = tuple(part.unbiased for part in self.parts)
        return Weight(self.data, self.format, None, self.scale, parts)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The numbers that are meant: ``data`` itself where it has no scales, else codes times scales in ``dtype``."""
        if self.parts:
            return torch.cat([part.plain(dtype) for part in self.parts])
        if self.scale is None or self.format.block is None:
            return self.data
        rows, columns = self.format.block
        wide = self.scale.repeat_interleave(rows, -2)[..., : self.outputs, :]
        wide = wide.repeat_interleave(columns or self.inner, -1)[..., : self.inner]
        return (self.data.float() * wide).to(dtype)


class WeightPlan:
    """The formats of a model's matrices, in the order in which its layers make them.

    A model is built twice: first without memory (on the meta device), which notes its matrices in ``made``, then with
    the ``formats`` that its checkpoint asks for.
    """

    def __init__(self, formats: Sequence[tuple[WeightFormat | None, ...]] = ()) -> None:
        self.made: list[PlannedWeight] = []
        self._formats = formats

    def next_formats(self, parts: int) -> tuple[WeightFormat | None, ...]:
        """For each part of the next matrix; None for that of the model's other parameters."""
        number = len(self.made)
        return self._formats[number] if number < len(self._formats) else (None,) * parts


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """``parts``: outputs of each part that a checkpoint may store in another format. ``fixed``: never quantised."""

    weight: Weight
    parts: tuple[int, ...]
    fixed: bool
