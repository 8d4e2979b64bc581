"""The experts of a sparse layer over a group: whole experts a rank (expert parallelism), or a shard of each (TP).

Knows: which experts a rank holds, how much of each, and their checkpoint tensors, in either of two layouts.
Does not know: routing, how an expert is computed (models/kernels), how an order is chosen (models/expert_load.py).
Shape letters: E experts of the layer, G those on this rank, N hidden size, I this rank's intermediate features.

Every rank of the group has the same tokens and the same routing, and computes the terms of its own experts; one
all-reduce sums them, either way. Whole experts keep matrix products wide, but routing may load one rank more than
another; shards are always balanced, but narrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from parallel.comm.collectives import PendingAllReduce
from parallel.comm.symmetric_exchange import TokenExchange
from parallel.layers.shard import (
    FeatureShard,
    ScatteredShard,
    Shard,
    ShardContext,
    ShardedModule,
    along_rows,
    divisors,
    rows_of,
    whole,
)


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """How the experts of a model are split over a group. ``whole``: expert parallelism; otherwise a shard of each.

    ``orders``: layer number -> all expert ids of that layer, the first rank's first; 0, 1, 2, ... for layers that are
    not listed. Only whole experts have an order. ``exchange``: several groups with tokens of their own (DP attention)
    share whole experts, which are spread over the ranks of all groups, the first group's first. Raises ValueError for
    an exchange or an order without whole experts.
    """

    whole: bool = False
    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    exchange: TokenExchange | None = None

    def __post_init__(self) -> None:
        if self.exchange is not None and not self.whole:
            raise ValueError("groups that share experts have whole ones: type --expert-parallel")
        if self.orders and not self.whole:
            raise ValueError(
                "an expert map says which rank has which expert, but every rank has a share of each: "
                "type --expert-parallel, or leave out --expert-map"
            )


class Router(ShardedModule):
    """The router's matrix [E, N]; every rank holds it in full, so that all ranks route alike.

    ``bias``: with what corrects scores for the choice, float32 [E] (float64 where parameters are). ``logit_bias``: with
    a bias of the product. ``shared_gate``: with one more row, the gate of shared experts that are stored with the
    others, and zeros up to a whole tile of the kernels. ``expert_scale``: with a factor of each expert, likewise wide.
    """

    def __init__(
        self, experts: int, hidden: int, placement: ShardContext, *, bias: bool = False, logit_bias: bool = False,
        shared_gate: bool = False, expert_scale: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.experts, tile = experts, placement.kernels.expert_tile
        rows = -(-(experts + 1) // tile) * tile if shared_gate else experts
        self.weight = placement.weight(rows, hidden, bias=logit_bias, fixed=True)
        self.weight.data[experts:].zero_()
        self.bias = placement.parameter(experts, wide=True) if bias else None
        self.expert_scale = placement.parameter(experts, wide=True) if expert_scale else None

    def shards(self) -> dict[str, Shard]:
        experts = self.experts
        found = rows_of("", self.weight.rows(0, experts), experts, 0)
        if self.weight.outputs > experts:
            found["shared_gate.weight"] = along_rows(self.weight.data[experts : experts + 1], 1, 0)
        if self.bias is not None:
            found["e_score_correction_bias"] = whole(self.bias)
        if self.expert_scale is not None:
            found["per_expert_scale"] = whole(self.expert_scale, centre=1.0)
        return found


class ExpertWeights(ShardedModule):
    """This rank's experts: ``gate_up`` [G, 2I, N] with gate's rows first, ``down`` [G, N, I].

    Where they have no gate (``gated`` False), ``gate_up`` is up alone, [G, I, N]. I is this rank's ``share`` of an
    expert's features, rounded up to tiles of the kernels; weights beyond the share are zeros.
    ``local_E`` int32 is each expert's index among the G, -1 for experts of other ranks. ``layer``: the layer number.
    ``shared``: so many further experts of the same size, which serve every token, behind the others: numbers from
    ``experts`` on. They make one larger expert of the checkpoint, of which each has a part of the features. Only where
    every rank has a share of each expert, or all of them. ``biases``: both matrices have one [G, ...]; that of
    down is added on one rank. Checkpoints of such experts have them transposed, or as codes, gate and up in turn.
    ``gelu``: see Weight.
    Raises ValueError where the experts, or their features, cannot be split evenly.
    """

    local_E: Tensor

    def __init__(
        self, experts: int, hidden: int, intermediate: int, placement: ShardContext, *, layer: int, split: ExpertSplit,
        gated: bool = True, shared: int = 0, biases: bool = False, gelu: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.placement = placement
        self.gated = gated
        self.shared = shared
        self.exchange = split.exchange
        self.experts = experts
        self.intermediate = intermediate
        self.held = tuple(range(experts))
        features = FeatureShard(0, intermediate, intermediate)
        if split.whole:
            before, groups = (split.exchange.index, split.exchange.groups) if split.exchange is not None else (0, 1)
            rank, size = before * placement.size + placement.rank, groups * placement.size
            self.held = held_experts(experts, rank, size, split.orders.get(layer))
            if shared and len(self.held) < experts:
                raise ValueError(f"{shared} shared experts cannot be stored with {len(self.held)} of {experts} experts")
        else:
            features = FeatureShard.of("intermediate features of an expert", intermediate, placement)
        self.start, self.share = features.start, features.count  # of this rank's features in an expert's
        padded = -(-features.width // placement.kernels.expert_tile) * placement.kernels.expert_tile
        self.gate_up = placement.weight(
            len(self.held) + shared, (2 if gated else 1) * padded, hidden, bias=biases, gelu=gelu
        )
        self.down = placement.weight(len(self.held) + shared, hidden, padded, bias=biases)
        replace(features, width=padded).clear_padding(self.gate_up, self.down)
        self.adds_bias = split.whole or placement.rank == 0
        if self.down.bias is not None and not self.adds_bias:
            self.down.bias.zero_()
        self.up = padded if gated else 0  # first row of up in gate_up
        number = {expert: local for local, expert in enumerate(self.held)}
        numbers = [number.get(expert, -1) for expert in range(experts)]
        local = torch.tensor([*numbers, *range(experts, experts + shared)], dtype=torch.int32)
        self.register_buffer("local_E", local, persistent=False)

    def gather(self, hidden_TN: Tensor, weights_TC: Tensor, ids_TC: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Dispatch: all groups' tokens and routing, each group's padded to ``rows``. One all-gather.

        ``ids_TC`` are expert ids, -1 for none; the last result has this rank's local numbers, or -1. Raises
        RuntimeError without an exchange.
        """
        if self.exchange is None:
            raise RuntimeError("there is nobody to gather from")
        return self.exchange.dispatch(hidden_TN, weights_TC, ids_TC, rows, self.local_E)

    def group_part(self, partial_YN: Tensor, tokens: int) -> Tensor:
        """Combine: this rank's part of the sum of all terms for this group's ``tokens``. One reduce-scatter, which
        ``combine`` follows in the group."""
        if self.exchange is None:
            raise RuntimeError("there is nobody to combine with")
        return self.exchange.reduce_scatter(partial_YN)[:tokens]

    def combine(self, partial_TN: Tensor) -> Tensor | PendingAllReduce:
        """The sum of the group's terms, the same on every rank. One all-reduce, as in RowParallel."""
        return self.placement.collectives.all_reduce_before_norm(partial_TN)

    def shards(self) -> Mapping[str, Shard | ScatteredShard]:
        """Three matrices an expert, two without a gate. Other ranks' experts have empty shards."""
        if self.gate_up.bias is not None:
            return self._transposed()
        found: dict[str, Shard | ScatteredShard] = {**self._shared()}
        number = {expert: local for local, expert in enumerate(self.held)}
        for expert in range(self.experts):
            local = number.get(expert)
            gate_up, down = (self.gate_up.cells[local], self.down.cells[local]) if local is not None else (None, None)
            if self.gated:
                found[f"{expert}.gate.weight"] = self._rows(None if gate_up is None else gate_up[: self.share])
            found[f"{expert}.up.weight"] = self._rows(None if gate_up is None else gate_up[self.up :][: self.share])
            found[f"{expert}.down.weight"] = self._columns(None if down is None else down[:, : self.share])
        return found

    def layouts(self) -> tuple[Mapping[str, Shard | ScatteredShard], ...]:
        """Matrices of each expert, or the fused layout of transformers 5: [E, 2 * all I, N] and [E, N, all I], or
        [E, all I, N] without a gate."""
        return self.shards(), self._fused() if self.gate_up.bias is None else self._interleaved()

    def _interleaved(self) -> dict[str, Shard | ScatteredShard]:
        """[E, 2 * all I, N] and [E, N, all I] of codes, with biases; rows 2i and 2i + 1 are gate and up of feature i.
        Reads only the held experts."""
        hidden, start, total = self.down.outputs, self.start, self.intermediate
        found = {name: shard for name, shard in self._transposed().items() if name.endswith("_bias")}
        everything, features = slice(0, hidden), slice(start, start + self.share)
        gate_up, down = [], []
        for local, expert in enumerate(self.held):
            here, held = slice(expert, expert + 1), slice(local, local + 1)
            for half in range(2):
                rows = slice(2 * start + half, 2 * (start + self.share), 2)
                target = self.gate_up.cells[held, half * self.up : half * self.up + self.share]
                gate_up.append(Shard((self.experts, 2 * total, hidden), (here, rows, everything), target))
            target = self.down.cells[held, :, : self.share]
            down.append(Shard((self.experts, hidden, total), (here, everything, features), target))
        return {
            "gate_up_proj_blocks": ScatteredShard(tuple(gate_up)),
            "down_proj_blocks": ScatteredShard(tuple(down)),
            **found,
        }

    def _transposed(self) -> dict[str, Shard | ScatteredShard]:
        """[E, N, 2 * all I] and [E, all I, N], with biases [E, 2 * all I] and [E, N]; columns 2i and 2i + 1 are gate
        and up of feature i. Reads only the held experts."""
        hidden, share, total, count = self.down.outputs, self.share, self.intermediate, len(self.held)
        features, both = slice(self.start, self.start + share), slice(2 * self.start, 2 * (self.start + share))
        up_bias, down_bias, whole_N = self.gate_up.bias, self.down.bias, slice(0, hidden)
        assert up_bias is not None
        assert down_bias is not None
        first = self.gate_up.cells.view(count, 2, -1, hidden)[:, :, :share].permute(0, 3, 2, 1)
        targets = {
            "gate_up_proj": ((hidden, 2 * total), (whole_N, both), first),
            "gate_up_proj_bias": ((2 * total,), (both,), up_bias.view(count, 2, -1)[:, :, :share].mT),
            "down_proj": ((total, hidden), (features, whole_N), self.down.cells[:, :, :share].mT),
            "down_proj_bias": ((hidden,), (whole_N,), down_bias if self.adds_bias else down_bias[:, :0]),
        }
        found: dict[str, Shard | ScatteredShard] = {}
        for name, (shape, ranges, target) in targets.items():
            ranges = ranges if target.numel() else (slice(0, 0), *ranges[1:])
            pieces = [
                Shard((self.experts, *shape), (slice(expert, expert + 1), *ranges), target[local : local + 1])
                for local, expert in enumerate(self.held)
            ]
            found[name] = ScatteredShard(tuple(pieces))
        return found

    def _fused(self) -> dict[str, ScatteredShard]:
        """Reads only the held experts of the fused tensors, one at a time."""
        hidden, share, total = self.down.outputs, self.share, self.intermediate
        gate_up, down = [], []
        halves = 2 if self.gated else 1
        for local, expert in enumerate(self.held):
            here, held = slice(expert, expert + 1), slice(local, local + 1)
            for half in range(halves):
                rows = slice(half * total + self.start, half * total + self.start + share)
                target = self.gate_up.cells[held, half * self.up : half * self.up + share]
                gate_up.append(Shard((self.experts, halves * total, hidden), (here, rows, slice(0, hidden)), target))
            columns = slice(self.start, self.start + share)
            ranges = (here, slice(0, hidden), columns)
            down.append(Shard((self.experts, hidden, total), ranges, self.down.cells[held, :, :share]))
        first = "gate_up_proj" if self.gated else "up_proj"
        return {first: ScatteredShard(tuple(gate_up)), "down_proj": ScatteredShard(tuple(down)), **self._shared()}

    def _shared(self) -> dict[str, ScatteredShard]:
        """Of the larger expert [shared * all I, N], twice with a gate, and [N, shared * all I]; nothing without one."""
        hidden, total, share = self.down.outputs, self.shared * self.intermediate, self.share
        pieces: dict[str, list[Shard]] = {}
        for number in range(self.shared):
            held, first = self.experts + number, number * self.intermediate + self.start
            part, everything = slice(first, first + share), slice(0, hidden)
            halves = {"gate": 0, "up": self.up} if self.gated else {"up": 0}
            for half, row in halves.items():
                target = self.gate_up.cells[held, row : row + share]
                pieces.setdefault(half, []).append(Shard((total, hidden), (part, everything), target))
            down = Shard((hidden, total), (everything, part), self.down.cells[held, :, :share])
            pieces.setdefault("down", []).append(down)
        return {f"shared.{name}.weight": ScatteredShard(tuple(found)) for name, found in pieces.items()}

    def _rows(self, target: Tensor | None) -> Shard:
        """The shard of a gate or up matrix [all I, N]."""
        hidden = self.down.outputs
        if target is None:
            return Shard((self.intermediate, hidden), (slice(0, 0), slice(0, hidden)), self.gate_up.cells[0, :0])
        rows = slice(self.start, self.start + self.share)
        return Shard((self.intermediate, hidden), (rows, slice(0, hidden)), target)

    def _columns(self, target: Tensor | None) -> Shard:
        """The shard of a down matrix [N, all I]."""
        hidden = self.down.outputs
        if target is None:
            return Shard((hidden, self.intermediate), (slice(0, 0), slice(0, self.share)), self.down.cells[0, :0])
        columns = slice(self.start, self.start + self.share)
        return Shard((hidden, self.intermediate), (slice(0, hidden), columns), target)


def held_experts(experts: int, rank: int, size: int, order: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The ids of one rank's experts: its even part of ``order`` (default 0, 1, 2, ...).

    Raises ValueError where the ranks do not divide the experts, or ``order`` does not list each of them once.
    """
    if experts % size:
        raise ValueError(
            f"{experts} experts cannot be split evenly over {size} expert-parallel ranks; use a tensor-parallel size "
            f"out of {divisors(experts)}, or leave out --expert-parallel to give every rank a share of each expert"
        )
    order = order if order is not None else tuple(range(experts))
    if sorted(order) != list(range(experts)):
        raise ValueError(f"an expert order must list each of {experts} experts once, but lists {len(order)}: {order}")
    count = experts // size
    return tuple(order[rank * count : (rank + 1) * count])
