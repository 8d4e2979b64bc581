"""What drafters have besides decoder layers.

Knows: products of what every rank holds whole, computed in full by each or in shares. Does not know: what is
multiplied.
"""

from __future__ import annotations

from torch import Tensor

from models.layers.context import ModelContext
from parallel.comm.collectives import PendingAllReduce
from parallel.comm.quantised import Activations, numbers_of
from parallel.layers.linear import RowParallel
from parallel.layers.shard import Shard, ShardedModule, whole


class Projection(ShardedModule):
    """y = x W^T, [T, inputs] -> [T, outputs]; every rank holds all of W."""

    def __init__(self, inputs: int, outputs: int, context: ModelContext) -> None:
        super().__init__()
        self._kernels = context.kernels
        self.weight = context.weight(outputs, inputs)

    def forward(self, x_TN: Tensor) -> Tensor:
        return self._kernels.linear(x_TN, self.weight)

    def shards(self) -> dict[str, Shard]:
        return {"weight": whole(self.weight.cells)}


class SplitProjection(RowParallel):
    """Projection of which each rank holds and multiplies its share of the inputs' columns, and one all-reduce adds the
    parts up. ``what`` as in RowParallel; the inputs [T, inputs] are whole on every rank.
    """

    def __init__(self, inputs: int, outputs: int, context: ModelContext, what: str) -> None:
        super().__init__(inputs, outputs, context, what=what)

    def forward(self, x_TI: Activations) -> Tensor | PendingAllReduce:
        return super().forward(numbers_of(x_TI).narrow(1, self.features.start, self.features.count))
