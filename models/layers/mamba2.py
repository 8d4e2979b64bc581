"""Mamba-2 (Dao & Gu 2024) as a mixer, with the norm before it: a state of a fixed size in the slot's row.

Knows: its weights, how heads and groups lie on ranks, and what it keeps of a sequence. Does not know: how state
advances (models/kernels/recurrent).
Shape letters as in models/kernels/recurrent/mamba2.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from models.block_pattern import Mamba2Shape
from models.cache_layout import SlotState, StateBanks
from models.config import ModelConfig
from models.inputs import StateRows, StepInputs
from models.kernels.recurrent.mamba2 import Mamba2Weights
from models.layers.context import ModelContext
from models.layers.conv_state import ConvState
from models.layers.mixer import Mixer
from models.layers.norm import RMSNorm
from parallel.comm.collectives import PendingAllReduce
from parallel.layers.linear import RowParallel
from parallel.layers.shard import ScatteredShard, Shard, ShardContext, ShardedModule, along_rows, even_share


class Mamba2(Mixer[StateBanks]):
    """out(gated_norm(ssm(conv(in(norm(x)))))).

    Each rank has whole heads. Groups are split as key/value heads are: with more ranks than groups each group's B and C
    are on several ranks, which hold its heads between them, and sum the squares that the group's norm needs.

    Where it is decided later which tokens are kept, what the projection made of them is, too, and goes through
    convolution and recurrence once more (masked replay).
    """

    replays = True

    def __init__(self, config: ModelConfig, context: ModelContext, norm: RMSNorm) -> None:
        super().__init__()
        shape = config.mamba
        if shape is None:
            raise ValueError(f"{config.architecture} has Mamba-2 layers, but its config describes none")
        self.kernels, self.collectives = context.kernels, context.collectives
        self.norm = norm
        split = GroupSplit(shape, context.rank, context.size)
        self.split = split
        self.batch_invariant = split.ranks_a_group == 1  # the squares of several are summed by whatever serves the step
        self.in_proj = InProjection(config.hidden_size, split, context)
        self.conv = ConvState(shape.conv_channels, shape.taps, split.conv_parts(), context, bias=shape.conv_bias)
        self.ssm = SsmParameters(split, context)
        self.gated_norm = ShardedWeight(shape.inner, split.first_head * shape.head_dim, split.inner, context)
        self.out = RowParallel(shape.inner, config.hidden_size, context, what="channels of Mamba-2 (heads * head_dim)")
        self.eps = config.rms_norm_eps

    @property
    def cache(self) -> SlotState:
        shape, wide = self.split.shape, self.ssm.D.dtype
        recurrent = ((self.split.heads, shape.head_dim, shape.state_size), wide)
        return SlotState({"window": self.conv.window, "state": recurrent})

    @property
    def weights(self) -> Mamba2Weights:
        split, ssm = self.split, self.ssm
        return Mamba2Weights(
            split.heads, split.shape.head_dim, split.groups, split.shape.state_size, self.conv.weight, self.conv.bias,
            ssm.A_log, ssm.D, ssm.dt_bias, self.gated_norm.weight, self.eps,
            0 if split.ranks_a_group > 1 else split.groups,
        )  # fmt: skip

    @property
    def made_size(self) -> int:
        """Z."""
        return self.in_proj.weight.outputs

    def advance(self, made_TX: Tensor, rows: StateRows, positions_T: Tensor, cache: StateBanks) -> Tensor:
        """Columns z | xBC | dt of the input projection, through convolution, recurrence, gate and norm."""
        return self.kernels.mamba2(made_TX, self.weights, cache["window"], cache["state"], rows, positions_T)

    def forward(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, inputs: StepInputs, cache: StateBanks,
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor | PendingAllReduce, Tensor]:  # fmt: skip
        if inputs.state is None:
            raise ValueError("a step of a model with Mamba-2 layers needs StepInputs.state")
        projected_TZ, residual_TN = self.norm.add_linear(x_TN, residual_TN, self.in_proj.weight)
        out_TX = self.advance_or_wait(projected_TZ, inputs.state, inputs.positions_T, cache)
        if wanted_R is not None:
            out_TX, residual_TN = out_TX.index_select(0, wanted_R), residual_TN.index_select(0, wanted_R)
        if self.split.ranks_a_group > 1:
            out_TX = self._normed_over_ranks(out_TX)
        return self.out(out_TX), residual_TN

    def _normed_over_ranks(self, gated_TX: Tensor) -> Tensor:
        """rms_norm over a group's channels, of which this rank has a part. One small all-reduce."""
        split, wide = self.split, self.ssm.D.dtype
        part_TX = gated_TX.to(wide)
        squares_TG = part_TX.new_zeros(len(part_TX), split.shape.groups)
        squares_TG[:, split.first_group] = part_TX.square().sum(-1)
        squares_TG = self.collectives.all_reduce(squares_TG)
        mean_T1 = squares_TG[:, split.first_group, None] / (split.shape.inner // split.shape.groups)
        return (part_TX * torch.rsqrt(mean_T1 + self.eps)).to(gated_TX.dtype) * self.gated_norm.weight


class GroupSplit:
    """The heads and groups of one rank. Raises ValueError where they cannot be split (see ``legal_sizes``)."""

    def __init__(self, shape: Mamba2Shape, rank: int, size: int) -> None:
        self.shape = shape
        self.heads = even_share("Mamba-2 heads", shape.heads, size)
        if shape.groups % size and size % shape.groups:
            raise ValueError(
                f"{shape.groups} groups of Mamba-2 heads cannot be split evenly over {size} tensor-parallel ranks; use "
                "a tensor-parallel size that divides them or is a multiple of them"
            )
        self.groups = max(1, shape.groups // size)
        self.ranks_a_group = max(1, size // shape.groups)
        self.first_head = rank * self.heads
        self.first_group = rank * shape.groups // size

    @property
    def inner(self) -> int:
        """Channels of this rank's heads."""
        return self.heads * self.shape.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.shape.state_size

    def conv_parts(self) -> list[tuple[int, int]]:
        """(first, count) of this rank's channels of x, B and C, in the whole model's order of channels."""
        shape = self.shape
        states, first = self.groups * shape.state_size, self.first_group * shape.state_size
        x = (self.first_head * shape.head_dim, self.inner)
        return [x, (shape.inner + first, states), (shape.inner + shape.groups * shape.state_size + first, states)]


class InProjection(ShardedModule):
    """[Z, hidden]: rows of the gate, of x, B and C, and of dt, of a checkpoint's one matrix in that order."""

    def __init__(self, hidden: int, split: GroupSplit, placement: ShardContext) -> None:
        super().__init__()
        self.split = split
        self.weight = placement.weight(split.inner + split.conv_channels + split.heads, hidden)

    def shards(self) -> Mapping[str, ScatteredShard]:
        split, inner = self.split, self.split.shape.inner
        channels = split.shape.conv_channels
        parts = [(split.first_head * split.shape.head_dim, split.inner)]
        parts += [(inner + first, count) for first, count in split.conv_parts()]
        parts.append((inner + channels + split.first_head, split.heads))
        pieces, place, total = [], 0, inner + channels + split.shape.heads
        for first, count in parts:
            pieces.append(along_rows(self.weight.cells[place : place + count], total, first))
            place += count
        return {"weight": ScatteredShard(tuple(pieces))}


class SsmParameters(ShardedModule):
    """A_log, D and dt_bias of this rank's heads, in float32 (float64 where parameters are), whatever the dtype."""

    def __init__(self, split: GroupSplit, placement: ShardContext) -> None:
        super().__init__()
        self.split = split
        wide = torch.promote_types(placement.dtype, torch.float32)
        self.A_log, self.D, self.dt_bias = (
            nn.Parameter(torch.empty(split.heads, dtype=wide), requires_grad=False) for _ in range(3)
        )

    def shards(self) -> dict[str, Shard]:
        total, first = self.split.shape.heads, self.split.first_head
        return {name: along_rows(getattr(self, name), total, first) for name in ("A_log", "D", "dt_bias")}


class ShardedWeight(ShardedModule):
    """The weight of a norm of ``total`` channels, of which this rank has ``count`` from ``first`` on."""

    def __init__(self, total: int, first: int, count: int, placement: ShardContext) -> None:
        super().__init__()
        self.total, self.first = total, first
        self.weight = placement.parameter(count)

    def shards(self) -> dict[str, Shard]:
        ranges = (slice(self.first, self.first + len(self.weight)),)
        return {"weight": Shard((self.total,), ranges, self.weight, centre=1.0)}
