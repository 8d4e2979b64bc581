"""What drafters have beside decoder layers.

Knows: a product that every rank computes in full. Does not know: what is multiplied.
"""

from __future__ import annotations

from torch import Tensor

from models.layers.context import ModelContext
from parallel.layers.shard import Shard, ShardedModule, whole


class Projection(ShardedModule):
    """y = x W^T, [T, inputs] -> [T, outputs]; every rank holds all of W."""

    def __init__(self, inputs: int, outputs: int, context: ModelContext) -> None:
        super().__init__()
        self._kernels = context.kernels
        self.weight = context.parameter(outputs, inputs)

    def forward(self, x_TN: Tensor) -> Tensor:
        return self._kernels.linear(x_TN, self.weight)

    def shards(self) -> dict[str, Shard]:
        return {"weight": whole(self.weight)}
