"""RMSNorm (Zhang & Sennrich 2019), with the residual add before it and the product behind it.

Knows: weight and epsilon, which every rank holds in full, and who computes what: the kernels that fuse a norm with its
neighbours, or the collective that takes a sum and the norm of it at once.
Does not know: how any of them computes it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from models.layers.context import ModelContext
from parallel.comm.collectives import PendingAllReduce
from parallel.layers.shard import Shard, ShardedModule, whole
from parallel.layers.weight import Weight


class RMSNorm(ShardedModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, of ``size``.

    ``zero_centred``: the checkpoint has weight - 1. It is kept in float32 then: near 1, bfloat16 would keep two of the
    digits that the checkpoint has near 0.

    Every method takes an ``x`` that is not yet added to ``residual`` (None: there is none), and returns with its result
    residual' = x + residual. Both inputs may be overwritten.
    """

    def __init__(self, size: int, eps: float, context: ModelContext, *, zero_centred: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centred = zero_centred
        self.weight = context.parameter(size, wide=zero_centred)
        self._kernels = context.kernels

    def add(self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(residual'), residual')"""
        if isinstance(x_TN, PendingAllReduce):
            return x_TN.normed(residual_TN, self.weight, self.eps)
        if residual_TN is None:
            return self._kernels.rms_norm(x_TN, self.weight, self.eps), x_TN
        return self._kernels.add_rms_norm(x_TN, residual_TN, self.weight, self.eps)

    def add_linear(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        """(linear(norm(residual'), weight) [T, O], residual')"""
        if isinstance(x_TN, PendingAllReduce):
            hidden_TN, residual_TN = self.add(x_TN, residual_TN)
            return self._kernels.linear(hidden_TN, weight), residual_TN
        return self._kernels.add_norm_linear(x_TN, residual_TN, self.weight, self.eps, weight)

    def add_gate_up(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, gate_up: Weight
    ) -> tuple[Tensor, Tensor]:
        """(silu_mul(linear(norm(residual'), gate_up)) [T, I], residual')"""
        if isinstance(x_TN, PendingAllReduce):
            hidden_TN, residual_TN = self.add(x_TN, residual_TN)
            return self._kernels.gate_up(hidden_TN, gate_up), residual_TN
        return self._kernels.add_norm_gate_up(x_TN, residual_TN, self.weight, self.eps, gate_up)

    def shards(self) -> dict[str, Shard]:
        if self.zero_centred:
            return {"weight": replace(whole(self.weight), offset=1.0)}
        return {"weight": whole(self.weight, centre=1.0)}
