"""The gated delta net (Yang et al. 2025), as Qwen3-Next and Qwen3.5 have it: linear attention over slot state.

Knows: its projections, what a slot keeps, which heads this rank has. Does not know: how the convolution and the
recurrence are computed (models/kernels), or whose slot a row has.
Shape letters as in models/ops/contract.py.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from models.cache_layout import SlotState, StateBanks
from models.config import ModelConfig
from models.inputs import StateRows, StepInputs
from models.kernels.interface import DeltaRule
from models.layers.context import ModelContext
from models.layers.conv_state import ConvState
from models.layers.delta_config import GatedDeltaShape
from models.layers.mixer import Mixer
from models.layers.norm import RMSNorm
from parallel.comm.collectives import PendingAllReduce
from parallel.layers.linear import DeltaProjection, RowParallel
from parallel.layers.shard import HeadShard, Shard, ShardedModule, along_rows, whole


class DeltaParameters(ShardedModule):
    """The parameters of the recurrence itself, in float32: a decay a value head, and the norm of the result."""

    def __init__(self, shape: GatedDeltaShape, heads: HeadShard, eps: float, context: ModelContext) -> None:
        super().__init__()
        self.shape, self.heads, self.eps = shape, heads, eps
        self.decay_log = context.parameter(heads.local_heads, wide=True)
        self.decay_bias = context.parameter(heads.local_heads, wide=True)
        self.norm = context.parameter(shape.v_dim, wide=True)

    @cached_property
    def rule(self) -> DeltaRule:
        """For Ops.gated_delta."""
        return DeltaRule(
            k_heads=self.heads.local_kv_heads, v_heads=self.heads.local_heads, k_dim=self.shape.k_dim,
            v_dim=self.shape.v_dim, decay_log_H=self.decay_log, decay_bias_H=self.decay_bias, norm_V=self.norm,
            eps=self.eps,
        )  # fmt: skip

    def shards(self) -> dict[str, Shard]:
        total, first = self.heads.heads, self.heads.first_head
        return {
            "A_log": along_rows(self.decay_log, total, first),
            "dt_bias": along_rows(self.decay_bias, total, first),
            "norm.weight": whole(self.norm, centre=1.0),
        }


class GatedDeltaNet(Mixer[StateBanks]):
    """out(gated_delta(conv(q | k | v), z, b, a)) of the normed input, where q | k | v | z | b | a = projection(x).

    A slot keeps the latest inputs of the convolution and, in float32, a matrix [v_dim, k_dim] a value head.
    ``interleaved``: see DeltaProjection.

    Where it is decided later which tokens are kept, what the projection made of them is, too, and goes through
    convolution and recurrence once more (masked replay): a hundredth of the memory of a state for every token.
    """

    batch_invariant = True
    replays = True

    def __init__(self, config: ModelConfig, context: ModelContext, norm: RMSNorm, *, interleaved: bool) -> None:
        super().__init__()
        shape = config.delta
        if shape is None:
            raise ValueError(f"{config.architecture} has gated delta nets, but its config describes none")
        heads = HeadShard(shape.v_heads, shape.k_heads, context.rank, context.size)
        self.kernels = context.kernels
        self.norm = norm
        self.projection = DeltaProjection(
            config.hidden_size, heads, shape.k_dim, shape.v_dim, context, interleaved=interleaved
        )
        self.conv = ConvState(2 * shape.keys + shape.values, shape.taps, self.projection.conv_segments, context)
        self.recurrence = DeltaParameters(shape, heads, config.rms_norm_eps, context)
        self.out_projection = RowParallel(shape.values, config.hidden_size, context, what="linear-attention values")

    @property
    def cache(self) -> SlotState:
        rule = self.recurrence.rule
        state = (rule.v_heads, rule.v_dim, rule.k_dim), torch.promote_types(self.conv.weight.dtype, torch.float32)
        return SlotState({"conv": self.conv.window, "state": state})

    @property
    def made_size(self) -> int:
        return self.projection.weight.outputs

    def advance(self, made_TX: Tensor, rows: StateRows, positions_T: Tensor, cache: StateBanks) -> Tensor:
        """x W of the input projection, through convolution, recurrence and gated norm."""
        rule, banks = self.recurrence.rule, (cache["conv"], cache["state"])
        return self.kernels.conv_gated_delta(made_TX, self.conv.weight, banks[0], rule, banks[1], rows, positions_T)

    def forward(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, inputs: StepInputs, cache: StateBanks,
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor | PendingAllReduce, Tensor]:  # fmt: skip
        if inputs.state is None:
            raise ValueError("a layer with slot state needs StepInputs.state: whose state each row continues")
        projected_TX, residual_TN = self.norm.add_linear(x_TN, residual_TN, self.projection.weight)
        out_TX = self.advance_or_wait(projected_TX, inputs.state, inputs.positions_T, cache)
        if wanted_R is not None:
            out_TX, residual_TN = out_TX.index_select(0, wanted_R), residual_TN.index_select(0, wanted_R)
        return self.out_projection(out_TX), residual_TN
