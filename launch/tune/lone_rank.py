"""One rank of several on one GPU: its share of the model runs, and nothing is summed.

Knows: where ranks would take a norm along with a sum, so that the products asked for are those of a real rank. Does not
know: how sums are computed (parallel/comm), or what they cost (all_reduce.py).
"""

from __future__ import annotations

from torch import Tensor

from models.ops.contract import Ops
from parallel.comm.all_reduce_dispatch import SizeLimits, shots_for
from parallel.comm.collectives import Collectives, PendingAllReduce
from parallel.comm.quantised import Quantised


class LoneRank(Collectives):
    """The first of ``size`` ranks. ``limits``: up to which sizes the real ones have a kernel for sums."""

    rank = 0

    def __init__(self, size: int, kernels: Ops, limits: SizeLimits | None) -> None:
        self.size = size
        self._kernels, self._limits = kernels, limits

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_before_norm(self, x_TN: Tensor, *, pushed: bool = False) -> Tensor | PendingAllReduce:
        rows, width = x_TN.shape
        if self.size == 1 or self._limits is None or shots_for(self._limits, rows, width, x_TN.dtype) is None:
            return x_TN
        return PendingAllReduce(x_TN, self)

    def all_reduce_norm(
        self,
        x_TN: Tensor,
        residual_TN: Tensor | None,
        norm_N: Tensor,
        eps: float,
        *,
        pushed: bool = False,
        into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A norm without a sum, which is most of what that kernel computes."""
        if residual_TN is None:
            return self._kernels.rms_norm(x_TN, norm_N, eps, into), x_TN
        return self._kernels.add_rms_norm(x_TN, residual_TN, norm_N, eps, into)

    def all_gather(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.size, dim=-1)
