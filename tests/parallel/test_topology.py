"""Topology and Sharing: leaders, groups that partition the ranks, and refusals that say what to type."""

from __future__ import annotations

import pytest

from parallel.topology import ParallelDegrees, Topology


def test_one_process_alone_leads_everything() -> None:
    alone = Topology()
    assert (alone.is_leader, alone.node_leader, alone.node_leaders, alone.node_ranks) == (True, 0, (0,), (0,))


def test_leaders_and_their_ranks_partition_the_world() -> None:
    nodes, local = 3, 4
    every = [Topology(n * local + r, nodes * local, r, local, n, nodes) for n in range(nodes) for r in range(local)]
    assert [t.rank for t in every if t.rank == t.node_leader] == [0, 4, 8] == list(every[5].node_leaders)
    assert [t.rank for t in every if t.is_leader] == [0]
    assert [r for leader in every[0].node_leaders for r in every[0].ranks_led_by(leader)] == list(range(12))
    assert all(t.rank in t.node_ranks and t.node_ranks[0] == t.node_leader for t in every)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((4, 4, 0, 4, 0, 1), "rank is 4, but must lie in 0 to 3"),
        ((0, 3, 0, 2, 0, 2), "world is 3, but 2 node.s. of 2 rank.s. make 4"),
        ((1, 4, 0, 2, 1, 2), "must be rank 2: number ranks node by node .srun --distribution=block"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Topology(*numbers)


@pytest.mark.parametrize(("world", "tensor", "expert"), [(8, 2, 8), (8, 4, 2), (8, 1, 4), (6, 3, 6), (1, 1, 1)])
def test_groups_partition_the_ranks(world: int, tensor: int, expert: int) -> None:
    sharing = ParallelDegrees(world, tensor, expert)
    for group_of, size in (
        (sharing.tensor_group, tensor),
        (sharing.expert_group, expert),
        (sharing.data_group, sharing.data),
    ):
        groups = {group_of(rank) for rank in range(world)}
        assert sorted(r for g in groups for r in g) == list(range(world))
        assert all(rank in group_of(rank) and len(group_of(rank)) == size for rank in range(world))
    assert all(len(set(sharing.tensor_group(r)) & set(sharing.data_group(r))) == 1 for r in range(world))


def test_degrees_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"tensor-parallel degree 3 does not divide 8 ranks: choose from \[1, 2, 4, 8\]"
    ):
        ParallelDegrees(8, 3, 1)
    with pytest.raises(ValueError, match="one must divide the other"):
        ParallelDegrees(6, 2, 3)
