"""RMSNorm (Zhang & Sennrich 2019), with the residual add before it and the product after it.

Knows: weight and epsilon, which every rank holds in full, and who computes what: the kernels that fuse a norm with its
neighbours, or the collective that takes a sum and the norm of it at once.
Does not know: how any of them computes it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from models.layers.context import ModelContext
from parallel.comm.collectives import PendingAllReduce
from parallel.comm.quantised import Activations, Quantised
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

    def add(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, into: Quantised | None = None
    ) -> tuple[Tensor, Tensor]:
        """(norm(residual'), residual'); ``into`` gets the former as codes, too."""
        if isinstance(x_TN, PendingAllReduce):
            return x_TN.normed(residual_TN, self.weight, self.eps, into)
        if residual_TN is None:
            return self._kernels.rms_norm(x_TN, self.weight, self.eps, into), x_TN
        return self._kernels.add_rms_norm(x_TN, residual_TN, self.weight, self.eps, into)

    def add_linear(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        """(linear(norm(residual'), weight) [T, O], residual')"""
        if isinstance(x_TN, PendingAllReduce):
            into = self._kernels.quantised_for(weight, *_tokens(x_TN))
            hidden_TN, residual_TN = self.add(x_TN, residual_TN, into)
            return self._kernels.linear(into or hidden_TN, weight), residual_TN
        return self._kernels.add_norm_linear(x_TN, residual_TN, self.weight, self.eps, weight)

    def add_gate_up(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, gate_up: Weight, down: Weight
    ) -> tuple[Activations, Tensor]:
        """(silu_mul(linear(norm(residual'), gate_up)) [T, I], as ``down`` reads it, residual')"""
        into = self._kernels.quantised_for(down, *_tokens(x_TN))
        if isinstance(x_TN, PendingAllReduce):
            codes = self._kernels.quantised_for(gate_up, *_tokens(x_TN), gate_up=True)
            hidden_TN, residual_TN = self.add(x_TN, residual_TN, codes)
            hidden_TI = self._kernels.gate_up(codes or hidden_TN, gate_up, into)
        else:
            hidden_TI, residual_TN = self._kernels.add_norm_gate_up(
                x_TN, residual_TN, self.weight, self.eps, gate_up, into
            )
        return into or hidden_TI, residual_TN

    def shards(self) -> dict[str, Shard]:
        if self.zero_centred:
            return {"weight": replace(whole(self.weight), offset=1.0)}
        return {"weight": whole(self.weight, centre=1.0)}


class ResidualAdd(nn.Module):
    """In the place of a norm before a mixer or MLP that has none (OLMo 2): x + residual, twice."""

    def __init__(self, eps: float, context: ModelContext) -> None:
        super().__init__()
        self.eps = eps  # of the norms of single heads, if any
        self._kernels = context.kernels

    def add(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, into: Quantised | None = None
    ) -> tuple[Tensor, Tensor]:
        """(residual', residual'). ``x`` is a norm's result, so it is summed already. TypeError for one that is not,
        and for ``into``, which no layer without a norm asks for."""
        if isinstance(x_TN, PendingAllReduce) or into is not None:
            raise TypeError("a layer without a norm reads sums in the dtype of activations")
        stream_TN = x_TN if residual_TN is None else x_TN + residual_TN
        return stream_TN, stream_TN

    def add_linear(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        """As RMSNorm.add_linear."""
        stream_TN, _ = self.add(x_TN, residual_TN)
        return self._kernels.linear(stream_TN, weight), stream_TN

    def add_gate_up(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, gate_up: Weight, down: Weight
    ) -> tuple[Activations, Tensor]:
        """As RMSNorm.add_gate_up."""
        into = self._kernels.quantised_for(down, *_tokens(x_TN))
        stream_TN, _ = self.add(x_TN, residual_TN)
        hidden_TI = self._kernels.gate_up(stream_TN, gate_up, into)
        return into or hidden_TI, stream_TN


def _tokens(x_TN: Tensor | PendingAllReduce) -> tuple[int, torch.dtype]:
    part_TN = x_TN.part_TN if isinstance(x_TN, PendingAllReduce) else x_TN
    return part_TN.shape[0], part_TN.dtype
