"""Sums in rank order: the same bits for a row in a message of any size."""

from __future__ import annotations

import pytest
import torch

from parallel.comm.collectives import GroupCollectives, SingleRank
from parallel.comm.ordered_all_reduce import OrderedCollectives, OrderedSymmetricCollectives, rank_ordered_sum
from tests.torchrun import torchrun


def test_parts_are_added_in_their_order_and_rounded_once() -> None:
    parts = torch.tensor([[1e8], [1.0], [-1e8]])
    assert rank_ordered_sum(parts).item() == 0.0  # 1e8 + 1 is 1e8 in float32
    assert rank_ordered_sum(parts[[0, 2, 1]]).item() == 1.0
    narrow = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 257 has no bfloat16
    assert rank_ordered_sum(narrow).item() == 258.0
    assert rank_ordered_sum(narrow).dtype == torch.bfloat16
    zeros = rank_ordered_sum(torch.full((2, 1), -0.0))
    assert not zeros.signbit().any()


def test_who_declares_it() -> None:
    assert SingleRank.batch_invariant
    assert OrderedCollectives.batch_invariant
    assert OrderedSymmetricCollectives.batch_invariant
    assert not GroupCollectives.batch_invariant


@pytest.mark.multiprocess
def test_three_ranks() -> None:
    ran = torchrun(3, "tests.parallel.comm.ordered_worker")
    assert ran.returncode == 0, ran.said[-3000:]
