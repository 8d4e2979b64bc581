"""Topology: this process's rank, the layout of ranks on nodes, and the parallel groups of a model.

Knows: the numbers of ranks and nodes, the node leaders, the members of tensor-, expert- and data-parallel groups.
Does not know: how the numbers were found (launch/ranks/rendezvous.py), process groups, sockets, devices.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """Where this rank is. Ranks are numbered node by node: rank = node_rank * local_world + local_rank.

    Raises ValueError when a number is out of range, or when the numbers do not match.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node_rank: int = 0
    nodes: int = 1

    def __post_init__(self) -> None:
        for name, index, size in (
            ("rank", self.rank, self.world),
            ("local_rank", self.local_rank, self.local_world),
            ("node_rank", self.node_rank, self.nodes),
        ):
            if not 0 <= index < size:
                raise ValueError(f"{name} is {index}, but must lie in 0 to {size - 1}")
        if self.world != self.nodes * self.local_world:
            raise ValueError(
                f"world is {self.world}, but {self.nodes} node(s) of {self.local_world} rank(s) make "
                f"{self.nodes * self.local_world}: start the same number of ranks on every node"
            )
        expected = self.node_rank * self.local_world + self.local_rank
        if self.rank != expected:
            raise ValueError(
                f"rank is {self.rank}, but local rank {self.local_rank} of node {self.node_rank} must be rank "
                f"{expected}: number ranks node by node (srun --distribution=block)"
            )

    @property
    def is_leader(self) -> bool:
        """Rank 0 talks to clients and orders events for all ranks."""
        return self.rank == 0

    @property
    def node_leader(self) -> int:
        """The first rank of this rank's node. It relays control records to the others."""
        return self.node_rank * self.local_world

    @property
    def node_leaders(self) -> tuple[int, ...]:
        """The first rank of every node, rank 0 first."""
        return tuple(range(0, self.world, self.local_world))

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """All ranks of this rank's node, this one included."""
        return self.ranks_led_by(self.node_leader)

    def ranks_led_by(self, node_leader: int) -> tuple[int, ...]:
        """All ranks of the node whose first rank is ``node_leader``, itself included."""
        return tuple(range(node_leader, node_leader + self.local_world))


@dataclass(frozen=True, slots=True)
class ParallelDegrees:
    """How ``world`` ranks share one model: ``tensor`` ranks split each layer, ``expert`` ranks split the experts.

    Tensor-parallel groups are consecutive ranks, so that they stay inside a node where they fit. Each is a
    data-parallel replica of everything but the experts; an expert-parallel group spans whole replicas, or lies inside
    one. Raises ValueError when a degree does not divide the ranks, or when groups would overlap in part.
    """

    world: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name, degree in (("tensor", self.tensor), ("expert", self.expert)):
            if degree < 1 or self.world % degree:
                legal = [d for d in range(1, self.world + 1) if self.world % d == 0]
                raise ValueError(
                    f"{name}-parallel degree {degree} does not divide {self.world} ranks: choose from {legal}"
                )
        if self.expert % self.tensor and self.tensor % self.expert:
            raise ValueError(
                f"expert-parallel degree {self.expert} and tensor-parallel degree {self.tensor}: "
                "one must divide the other"
            )

    @property
    def data(self) -> int:
        """The number of replicas, each with a batch of its own."""
        return self.world // self.tensor

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that split layers with ``rank``, in shard order."""
        return _run(rank, self.tensor)

    def expert_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that split the experts with ``rank``, in shard order."""
        return _run(rank, self.expert)

    def data_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same shard as ``rank`` in the other replicas, in replica order."""
        return tuple(range(rank % self.tensor, self.world, self.tensor))


def _run(rank: int, size: int) -> tuple[int, ...]:
    first = rank - rank % size
    return tuple(range(first, first + size))
