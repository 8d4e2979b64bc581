"""Tensor-parallel matrix products (Shoeybi et al. 2019, Megatron-LM).

Knows: for each layer, the split of its matrix over the group and the checkpoint tensors of its pieces.
Does not know: models, files, or how a product is computed (a ``LinearKernel`` does that; a model may also pass
``weight`` and ``bias`` to a fused kernel).
Shape letters: T tokens, N hidden size, I intermediate size, O outputs of this rank, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from parallel.comm.collectives import PendingAllReduce
from parallel.layers.shard import HeadShard, Shard, ShardContext, ShardedModule, along_rows, even_share, whole


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, start + count) of a checkpoint matrix with ``total`` rows; ``prefix`` names the matrix."""

    prefix: str
    total: int
    start: int
    count: int


class StackedColumns(ShardedModule):
    """y = x W^T (+ b) for one or several checkpoint matrices stacked, each split by outputs: [T, N] -> [T, O].

    No communication. ``pieces`` are this rank's rows, in the order of the outputs.
    """

    def __init__(self, inputs: int, pieces: Sequence[Rows], placement: ShardContext, bias: bool) -> None:
        super().__init__()
        self.pieces = tuple(pieces)
        self.placement = placement
        outputs = sum(piece.count for piece in pieces)
        self.weight = placement.parameter(outputs, inputs)
        self.bias = placement.parameter(outputs) if bias else None

    def forward(self, x_TN: Tensor) -> Tensor:
        return self.placement.kernels.linear(x_TN, self.weight, self.bias)

    def shards(self) -> dict[str, Shard]:
        found, first = {}, 0
        for piece in self.pieces:
            rows = slice(first, first + piece.count)
            found[f"{piece.prefix}weight"] = along_rows(self.weight[rows], piece.total, piece.start)
            if self.bias is not None:
                found[f"{piece.prefix}bias"] = along_rows(self.bias[rows], piece.total, piece.start)
            first += piece.count
        return found


class ColumnParallel(StackedColumns):
    """One matrix split by outputs: [T, inputs] -> [T, outputs / size].

    ``what`` names the outputs in errors. Raises ValueError where they cannot be split evenly.
    """

    def __init__(
        self, inputs: int, outputs: int, placement: ShardContext, bias: bool = False, what: str = "outputs"
    ) -> None:
        share = even_share(what, outputs, placement.size)
        super().__init__(inputs, [Rows("", outputs, placement.rank * share, share)], placement, bias)


class GateUpParallel(StackedColumns):
    """The gate and up projections of a gated MLP: [T, N] -> [T, 2 * I / size], gate's share first.

    Raises ValueError where the intermediate size cannot be split evenly.
    """

    def __init__(self, inputs: int, intermediate: int, placement: ShardContext, bias: bool = False) -> None:
        share = even_share("intermediate features", intermediate, placement.size)
        start = placement.rank * share
        pieces = [Rows(prefix, intermediate, start, share) for prefix in ("gate.", "up.")]
        super().__init__(inputs, pieces, placement, bias)


class QKVParallel(StackedColumns):
    """Query, key and value projections: [T, N] -> [T, (heads + 2 * kv_heads) of this rank * D], packed q | k | v.

    Raises ValueError where the heads cannot be split (see HeadShard).
    """

    def __init__(
        self, inputs: int, heads: int, kv_heads: int, head_dim: int, placement: ShardContext, bias: bool = False
    ) -> None:
        shard = HeadShard(heads, kv_heads, placement.rank, placement.size)
        kv_rows = (kv_heads * head_dim, shard.first_kv_head * head_dim, shard.local_kv_heads * head_dim)
        pieces = [
            Rows("q.", heads * head_dim, shard.first_head * head_dim, shard.local_heads * head_dim),
            Rows("k.", *kv_rows),
            Rows("v.", *kv_rows),
        ]
        super().__init__(inputs, pieces, placement, bias)
        self.heads = shard


class RowParallel(ShardedModule):
    """y = sum over ranks of x_local W_local^T (+ b): [T, inputs / size] -> [T, outputs], the same on every rank.

    One all-reduce: when small, it is fused with the RMSNorm that follows (PendingAllReduce), and the matmul may push
    its partial sum to the peers while it computes. ``what`` names the inputs in errors. Raises ValueError where they
    cannot be split evenly.
    """

    def __init__(
        self, inputs: int, outputs: int, placement: ShardContext, bias: bool = False, what: str = "inputs"
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.placement = placement
        self.local_inputs = even_share(what, inputs, placement.size)
        self.weight = placement.parameter(outputs, self.local_inputs)
        self.bias = placement.parameter(outputs) if bias else None

    def forward(self, x_TI: Tensor) -> Tensor | PendingAllReduce:
        bias = self.own_bias
        kernels, collectives = self.placement.kernels, self.placement.collectives
        buffers = collectives.push_buffers(x_TI.shape[0], self.weight.shape[0], x_TI.dtype)
        if buffers is None:
            return self.sum_of(kernels.linear(x_TI, self.weight, bias))
        part_TN, pushed = kernels.linear_push(buffers, x_TI, self.weight, bias)
        return collectives.all_reduce_before_norm(part_TN, pushed=pushed)

    @property
    def own_bias(self) -> Tensor | None:
        """The bias that this rank adds to its part: it is added once to the sum, so by exactly one rank."""
        return self.bias if self.placement.rank == 0 else None

    def sum_of(self, part_TN: Tensor) -> Tensor | PendingAllReduce:
        """y, of parts x_local W_local^T that were computed elsewhere. ``part_TN`` may be overwritten."""
        return self.placement.collectives.all_reduce_before_norm(part_TN)

    def shards(self) -> dict[str, Shard]:
        outputs = self.weight.shape[0]
        start = self.placement.rank * self.local_inputs
        ranges = (slice(0, outputs), slice(start, start + self.local_inputs))
        found = {"weight": Shard((outputs, self.inputs), ranges, self.weight)}
        if self.bias is not None:
            found["bias"] = whole(self.bias)
        return found
