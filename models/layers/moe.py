"""The sparse MLP (Shazeer et al. 2017; Qwen3-MoE, Mixtral, Nemotron-H): a few experts out of many for each token, norm
before it.

Knows: the order norm -> router -> choice -> experts -> sum. Does not know: which experts this rank holds
(parallel/layers/experts.py), or how choices and products are computed (models/kernels).
Shape letters as in models/ops/contract.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.kernels.sigmoid_routing import SigmoidRouting
from models.layers.context import ModelContext
from models.layers.norm import RMSNorm
from models.layers.routed_experts import RoutedExperts
from parallel.comm.collectives import PendingAllReduce
from parallel.layers.experts import ExpertWeights, Router
from parallel.layers.linear import ColumnParallel, GateUpParallel, Replicated, RowParallel
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


class SparseMLP(nn.Module):
    """sum over the chosen experts e of p_e * down_e(silu(gate_e(x)) * up_e(x)) of the normed input, [T, N] -> [T, N].

    Without a gate it is down_e(relu(up_e(x))^2). ``shared``: an expert that serves every token, or None; where it is as
    wide as some of the others together, it lies next to them as so many further choices of every token instead, which
    saves its launches.
    Routing needs no communication: every rank has the same x (an all-reduce gives every rank the same bits), the same
    router and the same kernel. ``load_E`` int64, where set, counts the tokens of each expert (models/expert_load.py).
    Where groups with other tokens share the experts, each routes its own and sends the choice along.
    """

    all_E: Tensor

    def __init__(self, config: ModelConfig, context: ModelContext, norm: RMSNorm, *, layer: int) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.experts
        if experts is None:
            raise ValueError(f"layer {layer} of {config.architecture} has experts, but its config describes none")
        self.kernels = context.kernels
        self.choices = experts.per_token
        self.renormalise = experts.renormalise
        beside = _shared_beside(config, experts, context)
        self.routing = _sigmoid_routing(experts, beside)
        self.norm = norm
        biases = experts.limit is not None
        self.router = Router(
            experts.count, hidden, context,
            bias=self.routing is not None, logit_bias=biases, shared_gate=beside > 0 and experts.shared_gate,
            expert_scale=experts.beside_mlp,
        )  # fmt: skip
        latent = experts.latent_size
        self.to_latent = Replicated(hidden, latent, context) if latent else None
        self.from_latent = Replicated(latent, hidden, context) if latent else None
        self.experts = ExpertWeights(
            experts.count, latent or hidden, experts.intermediate_size, context,
            layer=layer, split=context.experts, gated=experts.activation != "relu2", shared=beside, biases=biases,
            gelu=experts.activation == "geglu",
        )  # fmt: skip
        self.activation = {"limit": experts.limit} if biases else {}
        self.router_norm: RMSNorm | None = None  # of the residual stream, for a router that does not read ``norm``
        self.shared = None if beside else _shared_expert(experts, hidden, context)
        ids = torch.tensor(range(experts.count), dtype=torch.int32)  # arange on meta imports SymPy: 0.4 s
        self.register_buffer("all_E", ids, persistent=False)  # every expert's number among all ranks'
        self.load_E: Tensor | None = None

    def forward(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, real_T: Tensor,
        exchange_rows: int | None = None,
    ) -> tuple[Tensor | PendingAllReduce, Tensor]:  # fmt: skip
        """``x`` is not yet added to ``residual``; nor is the first result to the second. The rest: see StepInputs."""
        experts = self.experts
        hidden_TN, logits_TE, residual_TN = self._logits(x_TN, residual_TN)
        grouped = experts.exchange is not None
        weights_TC, chosen_TC = self._route(logits_TE, self.all_E if grouped else experts.local_E, real_T)
        read_TN = hidden_TN if self.to_latent is None else self.to_latent(hidden_TN)
        if grouped:
            part_TN = self._with_other_groups(read_TN, weights_TC, chosen_TC, exchange_rows)
        else:
            part_TN = self._terms(read_TN, weights_TC, chosen_TC)
        if self.from_latent is not None:  # of a rank's part: the sum of these is that of the sum
            part_TN = self.from_latent(part_TN)
        return experts.combine(self._with_shared(part_TN, hidden_TN)), residual_TN

    def _logits(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(the normed input, the router's product, x + residual)"""
        kernels, weight, wide = self.kernels, self.router.weight, self.routing is not None
        if self.router_norm is None and isinstance(x_TN, Tensor):
            return kernels.add_norm_logits(x_TN, residual_TN, self.norm.weight, self.norm.eps, weight, wide=wide)
        hidden_TN, residual_TN = self.norm.add(x_TN, residual_TN)
        routed_TN = hidden_TN if self.router_norm is None else self.router_norm.add(residual_TN, None)[0]
        return hidden_TN, (kernels.router_logits if wide else kernels.linear)(routed_TN, weight), residual_TN

    def _route(self, logits_TE: Tensor, local_E: Tensor, real_T: Tensor) -> tuple[Tensor, Tensor]:
        kernels, router = self.kernels, self.router
        if self.routing is None:
            given = local_E, real_T, self.load_E, self.experts.shared, router.expert_scale
            return kernels.route_top_k(logits_TE, self.choices, self.renormalise, *given)
        assert router.bias is not None
        return kernels.route_sigmoid(logits_TE, router.bias, self.routing, local_E, real_T, self.load_E)

    def _with_shared(self, part_TN: Tensor, hidden_TN: Tensor) -> Tensor:
        """This rank's part of the sum, the shared expert's included."""
        return part_TN if self.shared is None else self.shared.add_to(part_TN, hidden_TN)

    def _with_other_groups(
        self, hidden_TN: Tensor, weights_TC: Tensor, ids_TC: Tensor, exchange_rows: int | None
    ) -> Tensor:
        """This rank's part of the experts' sum where several groups share them; ``ids_TC`` are numbers among all
        experts, -1 for none."""
        experts, tokens = self.experts, hidden_TN.shape[0]
        hidden_YN, weights_YC, local_YC = experts.gather(hidden_TN, weights_TC, ids_TC, exchange_rows or tokens)
        return experts.group_part(self._terms(hidden_YN, weights_YC, local_YC), tokens)

    def _terms(self, hidden_TN: Tensor, weights_TC: Tensor, local_TC: Tensor) -> Tensor:
        """What this rank's experts add to the sum."""
        experts = self.experts
        count = experts.experts + experts.shared
        return self.kernels.expert_mlp(
            hidden_TN, experts.gate_up, experts.down, weights_TC, local_TC, all_experts=count, **self.activation
        )


def _shared_beside(config: ModelConfig, experts: RoutedExperts, context: ModelContext) -> int:
    """As how many of the others a shared expert lies next to them: it is the sum of parts of its features, for each of
    them is activated by itself. 0 where it does not: ranks with whole experts have a share of it, and checkpoints of
    codes may store it in another format.
    """
    parts, rest = divmod(experts.shared_size, experts.intermediate_size)
    alone = context.size == 1 and context.experts.exchange is None
    one_format = experts.activation == "relu2" or config.quantization is None or config.quantization.at_load
    weighed = experts.shared_gate == (experts.scoring == "softmax")  # as route_top_k and route_sigmoid weigh it
    fits = weighed and one_format and not rest and not experts.latent_size
    return parts if fits and (alone or not context.experts.whole) else 0


def _sigmoid_routing(experts: RoutedExperts, shared: int) -> SigmoidRouting | None:
    if experts.scoring == "softmax":
        return None
    return SigmoidRouting(
        experts.per_token, experts.renormalise, experts.groups, experts.top_groups, float(experts.scale), shared,
        softmax=experts.scoring == "corrected",
    )  # fmt: skip


def _shared_expert(
    experts: RoutedExperts, hidden: int, context: ModelContext
) -> SharedExpert | Relu2SharedExpert | None:
    if not experts.shared_size:
        return None
    if experts.activation == "relu2":
        return Relu2SharedExpert(hidden, experts.shared_size, context)
    return SharedExpert(hidden, experts.shared_size, context, gated=experts.shared_gate)
