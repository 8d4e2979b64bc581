"""Weight matrices as values: numbers, how they are stored, and the bias that is added to their products.

Knows: what checkpoints and tuned tables call a format, its bytes, what its codes mean, and how rows of a matrix are
taken by themselves.
Does not know: which piece of a checkpoint tensor a rank holds (shard.py), or how products are computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

INT4_ZERO = 8  # the code of 0 where a format has no zeros
# E2M1 codes 0 to 15 (OCP Microscaling Formats v1.0); those from 8 on are negative.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the numbers of a matrix are stored. ``name``: in keys of tuned tables. ``dtype``: of what is stored.

    ``block``: rows and columns that share a scale of ``scale_dtype``, by which what is stored is multiplied; 0 columns:
    a whole row. None: the numbers themselves are stored. ``activation_cap``: activations that are quantised for
    products with the matrix are cut to +-cap; None: not cut.

    ``code``: of four-bit weights, two a byte, the even column in the low half. A number is (code - zero) * scale of
    "int4", with a zero for each block where ``zeros``, else 8; e2m1(code) * scale of "e2m1", times a ``factor`` of its
    row where ``factors``. A ``scale_dtype`` of uint8 is E8M0: 2^(scale - 127). ``ordered``: columns of codes are in
    another order than those of the matrix.
    """

    name: str
    dtype: torch.dtype
    block: tuple[int, int] | None = None
    activation_cap: float | None = None
    code: Literal["int4", "e2m1"] | None = None
    scale_dtype: torch.dtype = torch.float32
    zeros: bool = False
    factors: bool = False
    ordered: bool = False

    def grid(self, outputs: int, inner: int) -> tuple[int, int]:
        """Scales of a matrix [outputs, inner]; blocks at its edges may be ragged."""
        if self.block is None:
            return 0, 0
        rows, columns = self.block
        return -(-outputs // rows), -(-inner // (columns or inner))

    def in_blocks(self, rows: int, columns: int) -> WeightFormat:
        """The format with another block; 0 columns: whole rows."""
        kind = self.name.partition("_")[0]
        return replace(self, name=f"{kind}_{rows}x{columns or 'all'}", block=(rows, columns))

    def nbytes(self, *shape: int) -> int:
        """Bytes of a matrix [..., outputs, inner], with its scales."""
        blocks = math.prod((*shape[:-2], *self.grid(*shape[-2:])))
        factors = math.prod(shape[:-1]) * torch.float32.itemsize if self.factors else 0
        codes = math.prod(shape) * self.dtype.itemsize // (2 if self.code else 1)
        return codes + blocks * (self.scale_dtype.itemsize + self.zeros) + factors


@functools.cache
def plain(dtype: torch.dtype) -> WeightFormat:
    """Numbers as they are, in a float dtype."""
    return WeightFormat(str(dtype).removeprefix("torch."), dtype)


@functools.cache
def fp8(rows: int, columns: int, activation_cap: float | None = None) -> WeightFormat:
    """float8_e4m3fn codes with a scale for each block; 0 columns: for each ``rows`` rows."""
    return WeightFormat("fp8", torch.float8_e4m3fn, activation_cap=activation_cap).in_blocks(rows, columns)


@functools.cache
def int4(group: int, scale_dtype: torch.dtype, *, zeros: bool = False, ordered: bool = False) -> WeightFormat:
    """Integers, with a float16, bfloat16 or float32 scale for each ``group`` columns of a row."""
    form = WeightFormat("int4z" if zeros else "int4", torch.uint8, code="int4", zeros=zeros, ordered=ordered)
    return replace(form, scale_dtype=scale_dtype).in_blocks(1, group)


@functools.cache
def mxfp4(group: int = 32) -> WeightFormat:
    """E2M1 codes with an E8M0 scale for each ``group`` columns of a row."""
    return WeightFormat("mxfp4", torch.uint8, code="e2m1", scale_dtype=torch.uint8).in_blocks(1, group)


@functools.cache
def nvfp4(group: int = 16) -> WeightFormat:
    """E2M1 codes with a float8_e4m3fn scale for each ``group`` columns of a row, and a factor a row."""
    form = WeightFormat("nvfp4", torch.uint8, code="e2m1", scale_dtype=torch.float8_e4m3fn, factors=True)
    return form.in_blocks(1, group)


def format_of(name: str) -> WeightFormat:
    """A format of that name, with a block; its scales, where the name leaves them open, are bfloat16. Raises
    ValueError."""
    kind, _, block = name.partition("_")
    kinds: dict[str, WeightFormat] = {
        "fp8": fp8(1, 0),
        "int4": int4(0, torch.bfloat16),
        "int4z": int4(0, torch.bfloat16, zeros=True),
        "mxfp4": mxfp4(),
        "nvfp4": nvfp4(),
    }
    rows, _, columns = block.partition("x")
    if kind not in kinds:
        raise ValueError(f"{name!r} is no format of weights; there are {', '.join(kinds)}")
    return kinds[kind].in_blocks(int(rows), 0 if columns == "all" else int(columns))


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix W of products x W^T (+ bias). ``data``: [outputs, inner], or [G, outputs, inner] of G experts, with
    inner / 2 bytes a row where the format has a ``code``; ``bias``: [outputs]; ``scale``: the grid of the format, in
    its ``scale_dtype``; ``zero``: uint8, likewise; ``factor``: float32 [outputs]; all with G in front likewise.
    ``order``: int32 [inner], which column of the matrix each column of codes is.

    ``parts``: rows in different formats, one part after another; ``data`` is empty then. ``cells``: as ``data``, with
    one element a number: ``data`` itself, or without memory. ``gelu``: of gate and up rows, whose product is followed
    by GELU-mul in the place of SiLU-mul.
    """

    data: Tensor
    format: WeightFormat
    bias: Tensor | None = None
    scale: Tensor | None = None
    parts: tuple[Weight, ...] = ()
    zero: Tensor | None = None
    factor: Tensor | None = None
    order: Tensor | None = None
    shared_cells: Tensor | None = None
    gelu: bool = False
    cells: Tensor = field(init=False)
    outputs: int = field(init=False)
    inner: int = field(init=False)

    def __post_init__(self) -> None:
        cells = self.data
        if self.shared_cells is not None:
            cells = self.shared_cells
        elif self.format.code is not None:
            *rows, half = self.data.shape
            cells = torch.empty(*rows, 2 * half, dtype=torch.uint8, device="meta")
        object.__setattr__(self, "cells", cells)
        *_, outputs, inner = cells.shape
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
        first = parts[0]
        return cls(first.data[:0], first.format, parts=tuple(parts), shared_cells=first.cells[:0])

    @classmethod
    def stacked(cls, weights: Sequence[Weight]) -> Weight:
        """A copy of the rows of several, with a bias if each has one; without a copy ``joined`` where formats differ or
        blocks of scales do not meet."""
        rows = (weights[0].format.block or (1, 0))[0]
        alike = len({weight.format for weight in weights}) == 1 and not any(weight.parts for weight in weights)
        if not alike or weights[0].format.ordered or any(weight.outputs % rows for weight in weights[:-1]):
            return cls.joined([part for weight in weights for part in weight.parts or (weight,)])

        def of_all(name: str) -> Tensor | None:
            found = [tensor for weight in weights if (tensor := getattr(weight, name)) is not None]
            return torch.cat(found) if len(found) == len(weights) else None

        data = torch.cat([weight.data for weight in weights])
        given = of_all("bias"), of_all("scale"), (), of_all("zero"), of_all("factor")
        return cls(data, weights[0].format, *given)

    @property
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(what checkpoints call it after the last dot, tensor), each with a row an output and a number an element."""
        yield "weight", self.cells
        if self.bias is not None:
            yield "bias", self.bias

    def matrix(self, expert: int) -> Weight:
        """One of the experts', sharing memory."""
        given = self.bias, self.scale, self.zero, self.factor
        bias, scale, zero, factor = (None if x is None else x[expert] for x in given)
        return Weight(self.data[expert], self.format, bias, scale, zero=zero, factor=factor, gelu=self.gelu)

    def rows(self, first: int, count: int) -> Weight:
        """Outputs [first, first + count), sharing memory. Raises ValueError where that cuts a block of scales."""
        if self.parts:
            return Weight.joined(list(self._rows_of_parts(first, count)))
        here, blocks = slice(first, first + count), slice(0, 0)
        if self.format.block is not None:
            rows = self.format.block[0]
            if first % rows or (count % rows and first + count != self.outputs):
                raise ValueError(f"outputs {first} to {first + count} cut a block of {rows} that share a scale")
            blocks = slice(first // rows, -(-(first + count) // rows))
        bias, factor = (None if x is None else x[here] for x in (self.bias, self.factor))
        scale, zero = (None if x is None else x[blocks] for x in (self.scale, self.zero))
        data = self.data[here]
        cells = None if self.format.code is None else self.cells[here]
        return Weight(data, self.format, bias, scale, (), zero, factor, self.order, cells)

    def _rows_of_parts(self, first: int, count: int) -> Iterator[Weight]:
        begin = 0
        for part in self.parts:
            start, stop = max(first, begin) - begin, min(first + count, begin + part.outputs) - begin
            if start < stop:
                yield part.rows(start, stop - start)
            begin += part.outputs

    def moved_by(self, order_O: Tensor) -> Iterator[Tensor]:
        """The tensors with rows to move where output n becomes what output order_O[n] was. Raises ValueError where an
        output would leave the block of rows whose scale it shares."""
        rows = self.format.block[0] if self.format.block else 1
        if bool((order_O // rows != torch.arange(len(order_O), device="cpu") // rows).any()) and rows > 1:
            raise ValueError(f"blocks of {rows} rows share a scale; use a checkpoint with a scale for each row")
        shared = (self.scale, self.zero) if rows == 1 else ()
        yield from (tensor for tensor in (self.data, self.bias, self.factor, *shared) if tensor is not None)

    @property
    def unbiased(self) -> Weight:
        cells = None if self.format.code is None else self.cells
        return replace(self, bias=None, parts=tuple(part.unbiased for part in self.parts), shared_cells=cells)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The numbers that are meant: ``data`` itself where it has no scales, else codes times scales, computed in
        float32, in ``dtype``."""
        if self.parts:
            return torch.cat([part.plain(dtype) for part in self.parts])
        if self.scale is None or self.format.block is None:
            return self.data
        if self.format.code is None:
            return (self.data.float() * self._wide(self.scale)).to(dtype)
        codes = torch.stack((self.data & 15, self.data >> 4), -1).flatten(-2)
        if self.format.code == "int4":
            numbers = codes.float() - (INT4_ZERO if self.zero is None else self._wide(self.zero))
        else:
            numbers = torch.tensor(E2M1, device=codes.device)[codes.int()]
        numbers *= self._wide(self.scale.view(torch.float8_e8m0fnu) if self.scale.dtype == torch.uint8 else self.scale)
        if self.factor is not None:
            numbers *= self.factor[..., None]
        if self.order is not None:
            numbers = torch.empty_like(numbers).index_copy_(-1, self.order.long(), numbers)
        return numbers.to(dtype)

    def _wide(self, blocks: Tensor) -> Tensor:
        """float32: that of its block for each number."""
        rows, columns = self.format.block or (1, 0)
        wide = blocks.float().repeat_interleave(rows, -2)[..., : self.outputs, :]
        return wide.repeat_interleave(columns or self.inner, -1)[..., : self.inner]


class WeightPlan:
    """The formats of a model's matrices, in the order in which its layers make them.

    A model is built twice: first without memory (on the meta device), which notes its matrices in ``made``, then with
    the ``formats`` that its checkpoint asks for. ``edge``: columns of which shards of features are multiples, where an
    even split would cut smaller groups of scales.
    """

    def __init__(self, formats: Sequence[tuple[WeightFormat | None, ...]] = (), edge: int = 1) -> None:
        self.made: list[PlannedWeight] = []
        self.edge = edge
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
