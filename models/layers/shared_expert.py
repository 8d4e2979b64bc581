"""The expert that serves every token, besides those that a router chooses (Dai et al. 2024; Qwen2-MoE, Qwen3-Next).

Knows: its products and its gate. Does not know: the routed experts (moe.py), or how products are split and computed.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.layers.context import ModelContext
from parallel.layers.linear import ColumnParallel, GateUpParallel, RowParallel
from parallel.layers.shard import Shard, ShardedModule, whole


def shared_expert_names(mlp: str, matrices: str, gate: str | None = None) -> dict[str, str]:
    """Module part -> checkpoint name of a shared expert's matrices, whether it is stored with the experts of ``mlp`` or
    apart; ``gate``: of its gate."""
    own = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    found = {f"{mlp}.experts.shared.{part}": f"{matrices}.{name}" for part, name in own.items()}
    apart = {"gate_up.gate": "gate_proj", "gate_up.up": "up_proj", "down": "down_proj"}
    found |= {f"{mlp}.shared.{part}": f"{matrices}.{name}" for part, name in apart.items()}
    return found | ({} if gate is None else {f"{mlp}.router.shared_gate": gate, f"{mlp}.shared.gate": gate})


class SharedExpertGate(ShardedModule):
    """The row w [1, N] of sigmoid(x w); every rank holds it in full."""

    def __init__(self, hidden: int, context: ModelContext) -> None:
        super().__init__()
        self.weight = context.parameter(1, hidden)

    def shards(self) -> dict[str, Shard]:
        return {"weight": whole(self.weight)}


class SharedExpert(nn.Module):
    """down(silu(gate(x)) * up(x)), times sigmoid(x w) where ``gated``. Split by features, as a dense MLP is, however
    the routed experts lie on the ranks: every rank of a group has the group's tokens.
    """

    def __init__(self, hidden: int, intermediate: int, context: ModelContext, *, gated: bool) -> None:
        super().__init__()
        self.kernels = context.kernels
        self.gate_up = GateUpParallel(hidden, intermediate, context)
        self.down = RowParallel(intermediate, hidden, context, features=self.gate_up.features)
        self.gate = SharedExpertGate(hidden, context) if gated else None

    def add_to(self, part_TN: Tensor, hidden_TN: Tensor) -> Tensor:
        """``part`` + this rank's part of the result for a normed input; ``part`` may be overwritten."""
        into = self.kernels.quantised_for(self.down.weight, len(hidden_TN), hidden_TN.dtype)
        inner_TI = self.kernels.gate_up(hidden_TN, self.gate_up.weight, into)
        own_TN = self.kernels.linear(into or inner_TI, self.down.weight)
        if self.gate is None:
            return part_TN + own_TN
        return self.kernels.gated_add(part_TN, own_TN, hidden_TN, self.gate.weight[0])


class Relu2SharedExpert(nn.Module):
    """down(relu(up(x))^2) (Nemotron-H), split likewise."""

    def __init__(self, hidden: int, intermediate: int, context: ModelContext) -> None:
        super().__init__()
        self.kernels = context.kernels
        self.up = ColumnParallel(hidden, intermediate, context, what="intermediate features of the shared expert")
        self.down = RowParallel(intermediate, hidden, context, features=self.up.features)

    def add_to(self, part_TN: Tensor, hidden_TN: Tensor) -> Tensor:
        """As SharedExpert.add_to."""
        inner_TI = self.kernels.relu2(self.up(hidden_TN))
        return part_TN + self.kernels.linear(inner_TI, self.down.weight)
