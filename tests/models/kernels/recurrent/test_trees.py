"""Draft trees over slot state: a node gives what the chain of its ancestors gives, and state takes in one path.

The reference in torch against the oracle of tree_cases.py; kernels are compared with the reference by
interpreted_recurrent.py, interpreted_mamba.py and tests/gpu.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from models.inputs import StateRows
from tests.models.kernels.recurrent.delta_cases import DeltaCase
from tests.models.kernels.recurrent.mamba_cases import banks, random_weights, width
from tests.models.kernels.recurrent.tree_cases import (
    CHAIN,
    FORKED,
    STAR,
    Run,
    along_ancestors,
    grown,
    padded,
    path,
    positions,
    state_tree,
)
from tests.plant import Kernels, invariant_kernels, reference_kernels

PARENTS = [[CHAIN, STAR, FORKED], [grown(33, seed) for seed in range(3)], [[0, 0], [0, 0], [0, 0]]]
STARTS = [5, 0, 2]  # of sequences, so that taps reach state, zeros and nodes
Made = tuple[Tensor, Run, list[Tensor]]  # projections of three rows of at most 33 tokens, the operation, its banks


def delta_net(kernels: Kernels) -> Made:
    made = DeltaCase(k_heads=2, v_heads=4, k_dim=8, v_dim=12, lengths=(99, 33, 33)).made()

    def run(tokens_TX: Tensor, rows: StateRows, positions_T: Tensor) -> Tensor:
        state = made.window_SJC, made.rule, made.state_SHVK
        return kernels.conv_gated_delta(tokens_TX, made.weight_CJ, *state, rows, positions_T)

    return made.projected[0], run, [made.window_SJC, made.state_SHVK]


def mamba(kernels: Kernels) -> Made:
    torch.manual_seed(3)
    weights = random_weights(4, 6, 2, 10, 4, torch.float32)
    window, state = banks(weights, torch.float32, slots=6)

    def run(tokens_TX: Tensor, rows: StateRows, positions_T: Tensor) -> Tensor:
        return kernels.mamba2(tokens_TX, weights, window, state, rows, positions_T)

    return torch.randn(99, width(weights)), run, [window, state]


OPERATIONS = pytest.mark.parametrize(
    "make",
    [
        partial(delta_net, reference_kernels()),
        partial(delta_net, invariant_kernels()),
        partial(mamba, reference_kernels()),
    ],
    ids=["gated delta net", "gated delta net, deterministic", "Mamba-2"],
)


def begun(make: partial[Made]) -> Made:
    """Each slot's state behind a few tokens of its sequence."""
    tokens_TX, run, state = make()
    for bank in state:
        bank[1:4] = 0
    for slot, start in enumerate(STARTS, 1):
        if start:
            before = torch.arange(start)
            run(tokens_TX.flip(0)[:start], StateRows(torch.tensor([slot]), torch.tensor([start])), before)
    return tokens_TX, run, state


@OPERATIONS
@pytest.mark.parametrize("parents", PARENTS, ids=["shapes", "33", "2"])
def test_a_node_gives_what_the_chain_of_its_ancestors_gives(make: partial[Made], parents: list[list[int]]) -> None:
    tokens_TX, run, state = begun(make)
    tokens_TX = tokens_TX[: 3 * len(parents[0])]
    before = [bank.clone() for bank in state]
    slots, positions_T = torch.tensor([1, 2, 3]), positions(parents, STARTS)
    rows = StateRows(slots, frozen=True, tree=state_tree(parents))
    expected = along_ancestors(run, tokens_TX, [1, 2, 3], parents)(tokens_TX, rows, positions_T)
    torch.testing.assert_close(run(tokens_TX, rows, positions_T), expected, atol=2e-6, rtol=2e-6)
    assert all(torch.equal(bank[1:4], old[1:4]) for bank, old in zip(state, before, strict=True))


@OPERATIONS
@pytest.mark.parametrize("poisoned", [False, True], ids=["", "NaN elsewhere"])
def test_state_takes_in_the_path_alone(make: partial[Made], poisoned: bool) -> None:
    """Paths of every length, also none; NaN in every node off the path and in a row of nobody change nothing."""
    parents = [FORKED, CHAIN, STAR]
    paths, counts = [path(FORKED, 6), path(CHAIN, 4), [0, 3]], [3, 2, 0]
    tokens_TX, run, state = begun(make)
    tokens_TX = torch.cat((tokens_TX[:21], tokens_TX[:7] * float("nan")))
    _, run_alone, alone = begun(make)
    positions_T = positions(parents, STARTS)
    for row, (slot, start, count) in enumerate(zip((1, 2, 3), STARTS, counts, strict=True)):
        chain = tokens_TX[[7 * row + node for node in paths[row][:count]]]
        if count:
            numbers = torch.arange(start, start + count)
            run_alone(chain, StateRows(torch.tensor([slot]), torch.tensor([count])), numbers)
    if poisoned:
        kept = [7 * row + node for row, count in enumerate(counts) for node in paths[row][:count]]
        tokens_TX = torch.where(torch.isin(torch.arange(28), torch.tensor(kept))[:, None], tokens_TX, float("nan"))
    tree = state_tree([*parents, CHAIN])
    kept_B, path_BW = torch.tensor([*counts, 0], dtype=torch.int32), padded([*paths, [0]], 5)
    rows = StateRows(torch.tensor([1, 2, 3, 0]), kept_B=kept_B, tree=tree, path_BW=path_BW)
    run(tokens_TX, rows, torch.cat((positions_T, torch.zeros(7, dtype=torch.int64))))
    for bank, expected in zip(state, alone, strict=True):
        torch.testing.assert_close(bank[1:4], expected[1:4], atol=1e-6, rtol=1e-6)
        assert bool(bank[-1].isnan().all())


@OPERATIONS
def test_nan_reaches_descendants_alone(make: partial[Made]) -> None:
    tokens_TX, run, _ = begun(make)
    parents = [FORKED, grown(7, 1), CHAIN]
    rows, positions_T = (
        StateRows(torch.tensor([1, 2, 3]), frozen=True, tree=state_tree(parents)),
        positions(parents, STARTS),
    )
    clean = run(tokens_TX[:21].clone(), rows, positions_T)
    tokens_TX[1] = float("nan")  # node 1 of the first row, over nodes 2, 3 and 4
    found = run(tokens_TX[:21].clone(), rows, positions_T)
    bad = torch.isin(torch.arange(21), torch.tensor([1, 2, 3, 4]))
    assert torch.equal(found[~bad], clean[~bad])
    assert bool(found[bad].isnan().any(1).all())
