"""Shard arithmetic: which piece of a checkpoint tensor a tensor-parallel rank holds, and how it is loaded.

Knows: even splits, head replication, vocabulary padding, and the copy of one piece into one parameter.
Does not know: files (models/weights.py), checkpoint names (the table beside each model) or matrix products (linear.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from parallel.comm.collectives import Collectives
from parallel.comm.peer_buffers import PeerBuffers
from parallel.comm.quantised import Activations
from parallel.layers.weight import PlannedWeight, Weight, WeightFormat, WeightPlan, plain


class Sliceable(Protocol):
    """A checkpoint tensor that can be read in pieces: a torch tensor, or a safetensors slice."""

    def __getitem__(self, ranges: tuple[slice, ...], /) -> Tensor: ...


class LinearKernel(Protocol):
    """The operations that parallel layers need from a set of kernels. ``expert_tile``: an expert's features on a rank
    come in multiples of it."""

    expert_tile: int

    def linear(self, x_TN: Activations, weight: Weight) -> Tensor:
        """x @ weight^T (+ bias), [T, O]."""
        ...

    def linear_push(self, buffers: PeerBuffers, x_TN: Activations, weight: Weight) -> tuple[Tensor, bool]:
        """(``linear``, whether its kernel has also pushed the result into the peers' ``buffers``)."""
        ...

    def vocab_rows(self, weight: Weight, ids_T: Tensor, first: int, held: int) -> Tensor:
        """The rows of ``ids_T`` of a rank that holds ids [first, first + held), zeros for other ids, [T, N]."""
        ...


@dataclass(frozen=True, slots=True)
class ShardContext:
    """What every parallel layer is built with: its collectives, its kernels and the dtype of its parameters.

    The device is torch's default device at construction (``with torch.device(device): ...``).
    """

    collectives: Collectives
    kernels: LinearKernel
    dtype: torch.dtype
    plan: WeightPlan = field(default_factory=WeightPlan, kw_only=True)

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def size(self) -> int:
        return self.collectives.size

    def parameter(self, *shape: int, wide: bool = False) -> nn.Parameter:
        """An uninitialised parameter without gradient on the default device. ``wide``: in float32 at least."""
        dtype = torch.promote_types(self.dtype, torch.float32) if wide else self.dtype
        return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

    def weight(
        self, *shape: int, bias: bool = False, parts: Sequence[int] = (), fixed: bool = False, gelu: bool = False,
    ) -> Weight:  # fmt: skip
        """An uninitialised matrix [..., outputs, inner] on the default device, of parameters without gradient.

        Its format is the next of the ``plan``. ``parts``: how many outputs come from each checkpoint matrix that may
        have a format of its own. ``fixed``: always in the model's dtype. ``gelu``: see Weight.
        """
        *experts, outputs, inner = shape
        counts = tuple(parts) or (outputs,)
        runs: list[tuple[WeightFormat | None, int]] = []
        for form, count in zip(self.plan.next_formats(len(counts)), counts, strict=True):
            if runs and runs[-1][0] == form and not (form is not None and form.ordered):
                count += runs.pop()[1]
            runs.append((form, count))
        made = Weight.joined([self._weight((*experts, count, inner), form, bias) for form, count in runs])
        made = replace(made, gelu=gelu)
        self.plan.made.append(PlannedWeight(made, counts, fixed))
        return made

    def _weight(self, shape: tuple[int, ...], form: WeightFormat | None, bias: bool) -> Weight:
        bias_O = self.parameter(*shape[:-1]) if bias else None
        if form is None:
            return Weight(self.parameter(*shape), plain(self.dtype), bias_O)
        *rows, inner = shape
        grid = (*shape[:-2], *form.grid(*shape[-2:]))

        def parameter(tensor: Tensor) -> nn.Parameter:
            return nn.Parameter(tensor, requires_grad=False)

        if form.code is None:
            return Weight(parameter(torch.empty(shape, dtype=form.dtype)), form, bias_O, parameter(torch.ones(grid)))
        return Weight(  # padding means 0
            parameter(torch.zeros(*rows, inner // 2, dtype=form.dtype)),
            form,
            bias_O,
            parameter(torch.zeros(grid, dtype=form.scale_dtype)),
            zero=parameter(torch.zeros(grid, dtype=torch.uint8)) if form.zeros else None,
            factor=parameter(torch.zeros(rows)) if form.factors else None,
            order=parameter(torch.arange(inner, dtype=torch.int32)) if form.ordered else None,
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """``target`` (a view of a parameter) holds ``full[ranges]``, where ``full`` is one tensor of the checkpoint. It may
    cut the last dim in two: columns that belong to two matrices in turn.

    ``centre`` is the mean of dummy weights: 1 for norms, 0 elsewhere. ``offset`` is added to what is loaded: a
    zero-centred norm's weight is kept as 1 + what the checkpoint has; ``factor`` multiplies it.
    """

    full_shape: tuple[int, ...]
    ranges: tuple[slice, ...]
    target: Tensor
    centre: float = 0.0
    offset: float = 0.0
    factor: float = 1.0

    def load(self, full: Sliceable) -> None:
        """Reads only this rank's piece and copies it, converting the dtype if needed."""
        if self.target.numel():
            self.target.copy_(full[self.ranges].reshape(self.target.shape))
            self.finish()

    def finish(self) -> None:
        """What follows the copy of the checkpoint's values, made by whatever means."""
        if self.offset:
            self.target.add_(self.offset)
        if self.factor != 1.0:
            self.target.mul_(self.factor)

    @property
    def pieces(self) -> tuple[Shard, ...]:
        return (self,)


@dataclass(frozen=True, slots=True)
class ScatteredShard:
    """A rank's shard of one checkpoint tensor in several pieces (at least one), each with its own target."""

    pieces: tuple[Shard, ...]

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.pieces[0].full_shape

    def load(self, full: Sliceable) -> None:
        """Loads piece after piece."""
        for piece in self.pieces:
            piece.load(full)


def stacked(first: Shard | ScatteredShard, second: Shard | ScatteredShard) -> ScatteredShard:
    """The shards of two checkpoint tensors as shards of one that has the rows (dim 0) of both, one after another."""
    above, below = first.full_shape[0], second.full_shape[0]
    full_shape = (above + below, *first.full_shape[1:])
    pieces = [replace(piece, full_shape=full_shape) for piece in first.pieces]
    for piece in second.pieces:
        rows, *rest = piece.ranges
        moved = slice(rows.start + above, rows.stop + above)
        pieces.append(replace(piece, full_shape=full_shape, ranges=(moved, *rest)))
    return ScatteredShard(tuple(pieces))


class ShardedModule(nn.Module):
    """A module that owns parameters and says which checkpoint tensors fill them.

    The tensors of a Weight that is set as an attribute are parameters of the module, by that name and ``<name>_bias``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, Weight):
            super().__setattr__(name, value)
            return
        self.__dict__[name] = value
        known = {id(parameter) for parameter in self._parameters.values()}
        for kind, tensor in (("weight", value.data), ("bias", value.bias)):
            if isinstance(tensor, nn.Parameter) and id(tensor) not in known:
                self._parameters[name if kind == "weight" else f"{name}_{kind}"] = tensor

    def shards(self) -> Mapping[str, Shard | ScatteredShard]:
        """Part name (``weight``, ``q.bias``, ...) -> shard. Together they cover every parameter exactly once."""
        raise NotImplementedError

    def layouts(self) -> tuple[Mapping[str, Shard | ScatteredShard], ...]:
        """The alternative checkpoint layouts that can fill the module; the first is ``shards``."""
        return (self.shards(),)


def whole(parameter: Tensor, centre: float = 0.0) -> Shard:
    """The shard of a tensor that every rank holds in full."""
    return Shard(tuple(parameter.shape), tuple(slice(0, n) for n in parameter.shape), parameter, centre)


def along_rows(parameter_view: Tensor, total: int, start: int) -> Shard:
    """The shard [start, start + rows) of a tensor with ``total`` rows (dim 0); other dims are whole."""
    rows, *rest = parameter_view.shape
    return Shard((total, *rest), (slice(start, start + rows), *(slice(0, n) for n in rest)), parameter_view)


def rows_of(prefix: str, weight: Weight, total: int, start: int) -> dict[str, Shard]:
    """The shards [start, start + outputs) of the tensors of a checkpoint matrix with ``total`` outputs."""
    return {f"{prefix}{kind}": along_rows(tensor, total, start) for kind, tensor in weight.tensors}


def divisors(number: int) -> list[int]:
    """Every size that splits ``number`` evenly, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def even_share(what: str, total: int, size: int) -> int:
    """``total / size``, or ValueError naming the sizes that divide ``total``."""
    if total % size:
        raise ValueError(
            f"{total} {what} cannot be split evenly over {size} tensor-parallel ranks; "
            f"use a tensor-parallel size out of {divisors(total)}"
        )
    return total // size


@dataclass(frozen=True, slots=True)
class FeatureShard:
    """The features [start, start + count) of one rank, out of those between two matrices, in matrices of ``width``."""

    start: int
    count: int
    width: int

    @classmethod
    def of(cls, what: str, total: int, placement: ShardContext) -> FeatureShard:
        """An even part of ``total``, or a number of whole edges (``WeightPlan.edge``) where it has none, padded to
        those of the largest part. ValueError naming the sizes that divide ``total``."""
        share, edge = even_share(what, total, placement.size), placement.plan.edge
        if share % edge == 0 or placement.size == 1:
            return cls(placement.rank * share, share, share)
        edges = -(-total // edge)
        start, stop = (
            min(total, rank * edges // placement.size * edge) for rank in (placement.rank, placement.rank + 1)
        )
        return cls(start, stop - start, -(-edges // placement.size) * edge)

    def clear_padding(self, *weights: Weight) -> None:
        """Zeros, where what is loaded leaves some of a matrix as it is."""
        if self.width > self.count:
            for weight in weights:
                for tensor in (weight.data, weight.bias, *(part.data for part in weight.parts)):
                    if tensor is not None:
                        tensor.zero_()


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The query and key/value heads of one rank (grouped-query attention, Ainslie et al. 2023).

    With more ranks than key/value heads each of these is replicated on ``size / kv_heads`` neighbouring ranks, which
    hold the query heads of its group between them.
    """

    heads: int
    kv_heads: int
    rank: int
    size: int

    def __post_init__(self) -> None:
        legal = self.legal_sizes(self.heads, self.kv_heads)
        if self.size not in legal:
            raise ValueError(
                f"{self.heads} query heads and {self.kv_heads} key/value heads cannot be split evenly over {self.size} "
                f"tensor-parallel ranks; use a tensor-parallel size out of {legal}"
            )

    @staticmethod
    def legal_sizes(heads: int, kv_heads: int) -> list[int]:
        """Group sizes that split the query heads evenly and either split or replicate the key/value heads."""
        return [size for size in divisors(heads) if kv_heads % size == 0 or size % kv_heads == 0]

    @property
    def local_heads(self) -> int:
        return self.heads // self.size

    @property
    def local_kv_heads(self) -> int:
        return max(1, self.kv_heads // self.size)

    @property
    def first_head(self) -> int:
        return self.rank * self.local_heads

    @property
    def first_kv_head(self) -> int:
        return self.rank * self.kv_heads // self.size


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The token ids [start, end) of one rank.

    Every rank's shard has ``width`` rows, of which those past the vocabulary are padding; shards concatenated in rank
    order give the padded vocabulary, in which token id = row.
    """

    vocab_size: int
    rank: int
    size: int

    @property
    def width(self) -> int:
        return -(-self.vocab_size // self.size)

    @property
    def start(self) -> int:
        return min(self.rank * self.width, self.vocab_size)

    @property
    def end(self) -> int:
        return min(self.start + self.width, self.vocab_size)

    @property
    def rows(self) -> int:
        """Rows of this shard that are real tokens."""
        return self.end - self.start
