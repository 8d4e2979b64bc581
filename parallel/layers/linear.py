"""Tensor-parallel matrix products (Shoeybi et al. 2019, Megatron-LM).

Knows: for each layer, the split of its matrix over the group and the checkpoint tensors of its pieces.
Does not know: models, files, or how a product is computed (a ``LinearKernel`` does that; a model may also pass
``weight`` to a fused kernel).
Shape letters: T tokens, N hidden size, I intermediate size, O outputs of this rank, D head_dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from parallel.comm.collectives import PendingAllReduce
from parallel.comm.quantised import Activations
from parallel.layers.shard import (
    FeatureShard,
    HeadShard,
    ScatteredShard,
    Shard,
    ShardContext,
    ShardedModule,
    along_rows,
    even_share,
    rows_of,
    whole,
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, start + count) of a checkpoint matrix with ``total`` rows; ``prefix`` names the matrix. ``padding``:
    so many rows follow them in the stack."""

    prefix: str
    total: int
    start: int
    count: int
    padding: int = 0


class StackedColumns(ShardedModule):
    """y = x W^T (+ b) for one or several checkpoint matrices stacked, each split by outputs: [T, N] -> [T, O].

    No communication. ``pieces`` are this rank's rows, in the order of the outputs.
    """

    def __init__(
        self, inputs: int, pieces: Sequence[Rows], placement: ShardContext, bias: bool, *, gelu: bool = False
    ) -> None:
        super().__init__()
        self.pieces = tuple(pieces)
        self.placement = placement
        counts = [piece.count + piece.padding for piece in pieces]
        self.weight = placement.weight(sum(counts), inputs, bias=bias, parts=counts, gelu=gelu)

    def forward(self, x_TN: Activations) -> Tensor:
        return self.placement.kernels.linear(x_TN, self.weight)

    def shards(self) -> Mapping[str, Shard | ScatteredShard]:
        found: dict[str, Shard | ScatteredShard] = {}
        first = 0
        for piece in self.pieces:
            found |= rows_of(piece.prefix, self.weight.rows(first, piece.count), piece.total, piece.start)
            first += piece.count + piece.padding
        return found


class ColumnParallel(StackedColumns):
    """One matrix split by outputs, which are features: [T, inputs] -> [T, outputs / size], or as many as ``features``
    are wide.

    ``what`` names the outputs in errors. Raises ValueError where they cannot be split evenly.
    """

    def __init__(
        self, inputs: int, outputs: int, placement: ShardContext, bias: bool = False, what: str = "outputs"
    ) -> None:
        self.features = FeatureShard.of(what, outputs, placement)
        super().__init__(inputs, [_feature_rows("", outputs, self.features)], placement, bias)
        self.features.clear_padding(self.weight)


class GateUpParallel(StackedColumns):
    """The gate and up projections of a gated MLP: [T, N] -> [T, 2 * I / size], gate's share first; each as wide as
    ``features``. ``gelu``: see Weight.

    Raises ValueError where the intermediate size cannot be split evenly.
    """

    def __init__(
        self, inputs: int, intermediate: int, placement: ShardContext, bias: bool = False, *, gelu: bool = False
    ) -> None:
        self.features = FeatureShard.of("intermediate features", intermediate, placement)
        pieces = [_feature_rows(prefix, intermediate, self.features) for prefix in ("gate.", "up.")]
        super().__init__(inputs, pieces, placement, bias, gelu=gelu)
        self.features.clear_padding(self.weight)


def _feature_rows(prefix: str, total: int, features: FeatureShard) -> Rows:
    return Rows(prefix, total, features.start, features.count, features.width - features.count)


class QKVParallel(StackedColumns):
    """Query, key and value projections: [T, N] -> [T, (heads + 2 * kv_heads) of this rank * D], packed q | k | v;
    without ``values`` q | k.

    Raises ValueError where the heads cannot be split (see HeadShard). ``more``: rows after them.
    """

    def __init__(
        self, inputs: int, heads: int, kv_heads: int, head_dim: int, placement: ShardContext, bias: bool = False, *,
        values: bool = True, more: Sequence[Rows] = (),
    ) -> None:  # fmt: skip
        shard = HeadShard(heads, kv_heads, placement.rank, placement.size)
        kv_rows = (kv_heads * head_dim, shard.first_kv_head * head_dim, shard.local_kv_heads * head_dim)
        pieces = [
            Rows("q.", heads * head_dim, shard.first_head * head_dim, shard.local_heads * head_dim),
            *(Rows(part, *kv_rows) for part in ("k.", "v.")[: 1 + values]),
        ]
        super().__init__(inputs, [*pieces, *more], placement, bias)
        self.heads = shard


class GatedQKVParallel(QKVParallel):
    """QKVParallel with a gate for every query head: [T, N] -> packed q | k | v | gate, the last as wide as q.

    The checkpoint's query matrix has the rows of each head's query before those of its gate: [heads * 2 * D, N].
    """

    def __init__(
        self, inputs: int, heads: int, kv_heads: int, head_dim: int, placement: ShardContext, bias: bool = False
    ) -> None:
        self.head_dim, count = head_dim, even_share("query heads", heads, placement.size) * head_dim
        gates = Rows("gate.", heads * head_dim, placement.rank * count, count)
        super().__init__(inputs, heads, kv_heads, head_dim, placement, bias, more=[gates])

    def shards(self) -> Mapping[str, Shard | ScatteredShard]:
        found: dict[str, Shard | ScatteredShard] = {**super().shards()}
        for name in [name for name in found if name.startswith("gate.")]:
            kind, (gate,) = name.removeprefix("gate."), found.pop(name).pieces
            (packed,) = found[f"q.{kind}"].pieces
            found[f"q.{kind}"] = self._queries_and_gates(packed.target, gate.target)
        return found

    def _queries_and_gates(self, packed: Tensor, gate: Tensor) -> ScatteredShard:
        """Of both rows of this rank, head by head."""
        dim, pieces = self.head_dim, []
        full_shape = (2 * self.heads.heads * dim, *packed.shape[1:])
        rest = tuple(slice(0, size) for size in packed.shape[1:])
        for local in range(self.heads.local_heads):
            held, first = slice(local * dim, (local + 1) * dim), 2 * (self.heads.first_head + local) * dim
            pieces.append(Shard(full_shape, (slice(first, first + dim), *rest), packed[held]))
            pieces.append(Shard(full_shape, (slice(first + dim, first + 2 * dim), *rest), gate[held]))
        return ScatteredShard(tuple(pieces))


class DeltaProjection(ShardedModule):
    """The input projections of a gated delta net in one matrix: [T, N] -> [T, q | k | v | z | b | a] of this rank.

    ``heads`` splits value heads, and splits or replicates key heads. ``q``, ``k``: [local key heads * k_dim]; ``v`` and
    the output gate ``z``: [local value heads * v_dim]; ``b`` and ``a``: one number a value head. ``interleaved``: the
    checkpoint has them grouped by key head, in two matrices (qkvz and ba), as Qwen3-Next; otherwise one after another
    in four (qkv, z, b, a), as Qwen3.5. No communication.
    """

    def __init__(
        self, inputs: int, heads: HeadShard, k_dim: int, v_dim: int, placement: ShardContext, *, interleaved: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.k_dim, self.v_dim, self.interleaved = heads, k_dim, v_dim, interleaved
        k, v, h = heads.local_kv_heads * k_dim, heads.local_heads * v_dim, heads.local_heads
        self.widths = (k, k, v, v, h, h)
        self.weight = placement.weight(sum(self.widths), inputs, parts=self.widths)

    @property
    def conv_segments(self) -> list[tuple[int, int]]:
        """(first, count) of this rank's channels of q, k and v among those of the checkpoint's convolution."""
        keys, heads = self.heads.kv_heads * self.k_dim, self.heads
        k, _, v, *_ = self.widths
        first_k, first_v = heads.first_kv_head * self.k_dim, heads.first_head * self.v_dim
        return [(first_k, k), (keys + first_k, k), (2 * keys + first_v, v)]

    def shards(self) -> Mapping[str, Shard | ScatteredShard]:
        starts = itertools.accumulate(self.widths, initial=0)
        q, k, v, z, b, a = (self.weight.rows(*part).cells for part in zip(starts, self.widths, strict=False))
        heads, inputs = self.heads, self.weight.inner
        first_v = heads.first_head * self.v_dim
        if not self.interleaved:
            total = 2 * heads.kv_heads * self.k_dim + heads.heads * self.v_dim
            pieces = [
                Shard((total, inputs), (slice(first, first + count), slice(0, inputs)), part)
                for (first, count), part in zip(self.conv_segments, (q, k, v), strict=True)
            ]
            return {
                "qkv.weight": ScatteredShard(tuple(pieces)),
                "z.weight": along_rows(z, heads.heads * self.v_dim, first_v),
                "b.weight": along_rows(b, heads.heads, heads.first_head),
                "a.weight": along_rows(a, heads.heads, heads.first_head),
            }
        return {"qkvz.weight": self._grouped((q, k, v, z)), "ba.weight": self._grouped((b, a))}

    def _grouped(self, parts: Sequence[Tensor]) -> ScatteredShard:
        """Key head by key head: its rows of each part. Those of b, a, v and z are its value heads'."""
        heads = self.heads
        group = heads.heads // heads.kv_heads  # value heads of a key head
        of_keys, of_values = (2, self.v_dim) if len(parts) == 4 else (0, 1)
        sizes = [self.k_dim] * of_keys + [group * of_values] * 2
        full_shape, pieces = (heads.kv_heads * sum(sizes), self.weight.inner), list[Shard]()
        columns = slice(0, full_shape[1])
        local_group = min(group, heads.local_heads)  # a rank may have a part of one key head's value heads
        skipped = heads.first_head % group * of_values
        for local in range(heads.local_kv_heads):
            first = (heads.first_kv_head + local) * sum(sizes)
            for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
                count = size if number < of_keys else local_group * of_values
                start = first + sum(sizes[:number]) + (0 if number < of_keys else skipped)
                held = part[local * count : (local + 1) * count]
                pieces.append(Shard(full_shape, (slice(start, start + count), columns), held))
        return ScatteredShard(tuple(pieces))


class Replicated(ShardedModule):
    """One matrix [outputs, inputs] that every rank holds in full. No communication."""

    def __init__(self, inputs: int, outputs: int, placement: ShardContext) -> None:
        super().__init__()
        self.placement = placement
        self.weight = placement.weight(outputs, inputs)

    def forward(self, x_TN: Activations) -> Tensor:
        return self.placement.kernels.linear(x_TN, self.weight)

    def shards(self) -> Mapping[str, Shard | ScatteredShard]:
        return rows_of("", self.weight, self.weight.outputs, 0)


class RowParallel(ShardedModule):
    """y = sum over ranks of x_local W_local^T (+ b): [T, inputs / size] -> [T, outputs], the same on every rank.

    One all-reduce: when small, it is fused with the RMSNorm that follows (PendingAllReduce), and the matmul may push
    its partial sum to the peers while it computes. ``what`` names the inputs in errors; ``features``: this rank's, by
    default an even share. Raises ValueError where they cannot be split evenly.
    """

    def __init__(
        self, inputs: int, outputs: int, placement: ShardContext, bias: bool = False, what: str = "inputs",
        features: FeatureShard | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.inputs = inputs
        self.placement = placement
        if features is None:
            share = even_share(what, inputs, placement.size)
            features = FeatureShard(placement.rank * share, share, share)
        self.features = features
        self.weight = placement.weight(outputs, features.width, bias=bias)
        features.clear_padding(self.weight)
        # What this rank multiplies with: a bias is added once to the sum, so by exactly one rank.
        self.own = self.weight if placement.rank == 0 else self.weight.unbiased

    def forward(self, x_TI: Activations) -> Tensor | PendingAllReduce:
        kernels, collectives = self.placement.kernels, self.placement.collectives
        buffers = collectives.push_buffers(x_TI.shape[0], self.own.outputs, x_TI.dtype)
        if buffers is None:
            return self.all_reduce_of(kernels.linear(x_TI, self.own))
        part_TN, pushed = kernels.linear_push(buffers, x_TI, self.own)
        return collectives.all_reduce_before_norm(part_TN, pushed=pushed)

    def all_reduce_of(self, part_TN: Tensor) -> Tensor | PendingAllReduce:
        """y, of parts x_local W_local^T that were computed elsewhere. ``part_TN`` may be overwritten."""
        return self.placement.collectives.all_reduce_before_norm(part_TN)

    def shards(self) -> dict[str, Shard]:
        weight, features = self.weight, self.features
        ranges = (slice(0, weight.outputs), slice(features.start, features.start + features.count))
        found = {"weight": Shard((weight.outputs, self.inputs), ranges, weight.cells[:, : features.count])}
        if weight.bias is not None:
            found["bias"] = whole(weight.bias)
        return found
