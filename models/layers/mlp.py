"""The gated MLP (SwiGLU, Shazeer 2020) and the one of squared ReLU (So et al. 2021), each with the norm before it.

Knows: their two products. Does not know: how they are split (parallel/layers/linear.py) or computed (models/kernels).
"""

from __future__ import annotations

from torch import Tensor, nn

from models.config import ModelConfig
from models.layers.context import ModelContext
from models.layers.norm import ResidualAdd, RMSNorm
from models.row_buckets import LARGE_STEP
from parallel.comm.collectives import PendingAllReduce
from parallel.layers.linear import ColumnParallel, GateUpParallel, RowParallel


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) of the normed input, [T, N] -> [T, N]; optional biases. ``gelu``: GELU in place of
    SiLU (Hendrycks & Gimpel 2016), in its approximation by tanh.
    """

    def __init__(
        self, config: ModelConfig, context: ModelContext, norm: RMSNorm | ResidualAdd, *, bias: bool = False,
        gelu: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.kernels = context.kernels
        self.norm = norm
        self.gate_up = GateUpParallel(hidden, intermediate, context, bias=bias, gelu=gelu)
        self.down = RowParallel(intermediate, hidden, context, bias=bias, features=self.gate_up.features)

    def forward(self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor) -> tuple[Tensor | PendingAllReduce, Tensor]:
        """``x`` is not yet added to ``residual``; nor is the first result to the second."""
        gate_up, down = self.gate_up, self.down
        if gate_up.weight.bias is None and len(residual_TN) > LARGE_STEP:
            normed_TN, residual_TN = self.norm.add(x_TN, residual_TN)
            part_TN = self.kernels.gate_up_down(normed_TN, gate_up.weight, down.own)
            return down.all_reduce_of(part_TN), residual_TN
        if gate_up.weight.bias is None:
            hidden, residual_TN = self.norm.add_gate_up(x_TN, residual_TN, gate_up.weight, down.own)
        else:
            gate_up_T2I, residual_TN = self.norm.add_linear(x_TN, residual_TN, gate_up.weight)
            into = self.kernels.quantised_for(down.own, len(gate_up_T2I), gate_up_T2I.dtype)
            hidden_TI = self.kernels.silu_mul(gate_up_T2I, gelu=gate_up.weight.gelu, into=into)
            hidden = into or hidden_TI
        return down(hidden), residual_TN


class Relu2MLP(nn.Module):
    """down(relu(up(x))^2) of the normed input, [T, N] -> [T, N]."""

    def __init__(self, hidden: int, intermediate: int, context: ModelContext, norm: RMSNorm) -> None:
        super().__init__()
        self.kernels = context.kernels
        self.norm = norm
        self.up = ColumnParallel(hidden, intermediate, context, what="intermediate features")
        self.down = RowParallel(intermediate, hidden, context, features=self.up.features)

    def forward(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None
    ) -> tuple[Tensor | PendingAllReduce, Tensor]:
        """``x`` is not yet added to ``residual`` (None: there is none); nor is the first result to the second."""
        up_TI, residual_TN = self.norm.add_linear(x_TN, residual_TN, self.up.weight)
        return self.down(self.kernels.relu2(up_TI)), residual_TN
