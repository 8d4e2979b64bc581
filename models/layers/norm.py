"""The weight of an RMSNorm (Zhang & Sennrich 2019), which every rank holds in full.

Knows: weight and epsilon. Does not know: how the norm is computed; kernels fuse it with what stands beside it.
"""

from __future__ import annotations

from parallel.shard import Placement, Shard, ShardedModule, whole


class RMSNorm(ShardedModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, of ``size``."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = placement.parameter(size)

    def shards(self) -> dict[str, Shard]:
        return {"weight": whole(self.weight, centre=1.0)}
