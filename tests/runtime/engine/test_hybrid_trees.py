"""Draft trees over models that keep recurrent state: tokens, log-probabilities and state are those of single steps.

What every tree must keep is test_trees.py's, what every state must keep test_delta.py's and test_nemotron_h.py's. Here
is what the two ask of each other: a node goes on from its parent's state, and slots take in the path that was kept.
Chains are beside trees where state behind a round is compared with that of single steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import StateRows, StateTree
from models.kernels.interface import Kernels
from models.kernels.reference import ReferenceKernels
from runtime.engine import Engine
from runtime.execute.step import window
from runtime.schedule.request import FinishReason
from tests.runtime.engine.conftest import over_model
from tests.runtime.engine.exact_kernels import ExactKernels
from tests.runtime.engine.lives import Life, live, people
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_hybrid import on_banks
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks
from tests.runtime.engine.test_trees import some, trees
from tests.runtime.engine.test_windows import windows

HYBRID = pytest.mark.parametrize("family", ["qwen3-next", "nemotron-h"])


@pytest.mark.parametrize(
    ("family", "depth", "shape"),
    [
        *(("qwen3-next", 0, (4, 12)), ("qwen3-next", 2, (2, 3)), ("qwen3.5", 1, (8, 32))),
        *(("nemotron-h", 0, (3, 3)), ("nemotron-h", 1, (5, 33)), ("nemotron-h", 2, (6, 16))),
    ],
    ids=str,
)
def test_answers_and_log_probabilities_are_those_without(
    family: str, depth: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    over_model(family, monkeypatch)
    life = trees(some(4), shape, depth=depth)
    assert life.counters["spec_num_accepted_tokens"] > 0.4 * life.counters["spec_num_drafts"]
    assert max(map(max, life.rounds.values())) >= min(shape[0], 4), "long paths are kept"
    if shape[1] > shape[0]:
        assert life.counters["spec_num_draft_tokens"] > life.counters["spec_num_accepted_tokens"]


def disturbed(engine: Engine, turn: int) -> None:
    """Request 0 is cancelled, 1 waits for a while; before every turn NaN in all state and blocks that nobody has."""
    if turn == 5:
        engine.cancel(0)
        engine.pause(1)
    if turn == 9:
        engine.resume(1)
    on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))
    fill_with_nan(engine, idle_blocks(engine))


@HYBRID
def test_rows_that_are_evicted_cancelled_and_paused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among ghosts and padded rows, with NaN in the null slot, in free slots and in idle blocks before every turn."""
    over_model(family, monkeypatch)
    requests = people(5, length=20, max_tokens=30)
    life = trees(requests, (4, 8), depth=2, blocks=22, rows=5, buckets=(3, 5), act=disturbed, but={0})
    assert life.finished[0].reason is FinishReason.CANCELLED
    assert min(life.counters[name] for name in ("evictions", "spec_num_accepted_tokens", "ghost_rows")) > 0


def test_two_ranks_hold_a_half_of_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the all-reduce of Mamba-2's norm, over all nodes of trees."""
    over_model("nemotron-h", monkeypatch)
    trees(some(3), (5, 16), depth=2, over=lambda **limits: tensor_rig(2, **limits))


# ---- state ----


class States:
    """Before every turn of a serial engine: the banks' rows of the one request, by the number of its tokens."""

    def __init__(self) -> None:
        self.by_length: dict[int, list[Tensor]] = {}

    def __call__(self, engine: Engine, turn: int) -> None:
        executor = engine.executor
        executor.device.compute.synchronize()
        length = int(executor.tables.columns.length[1])
        self.by_length[length] = [bank[:, 1].clone() for bank in executor.pool.banks]


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "nemotron-h"])
@pytest.mark.parametrize(
    "rounds", [partial(trees, shape=(5, 16)), partial(windows, widths=(5,)), partial(windows, widths=(16, 3))],
    ids=["tree", "chain", "long chains"],
)  # fmt: skip
def test_state_behind_a_round_is_that_of_single_steps(
    rounds: Callable[..., Life], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, after every round; and so are the tokens."""
    over_model(family, monkeypatch)
    requests = people(1, max_tokens=40, temperature=0.0, logprobs=None)
    plain: dict[str, Any] = {"kernels": ReferenceKernels(), "dtype": torch.float32}
    single, behind = States(), States()
    alone = live(requests, single, depth=0, **plain)
    for module in ("test_trees", "test_windows"):
        monkeypatch.setattr(f"tests.runtime.engine.{module}.oracle", lambda *_, **__: alone)
    life = rounds(requests, depth=0, act=behind, **plain)
    compared = sorted(behind.by_length.keys() & single.by_length.keys())[1:]
    assert len(compared) == len(behind.by_length) - 1 > 8
    assert len(compared) < len(life.finished[0].token_ids) / 1.5, "rounds gain several tokens"
    for length in compared:
        for mine, expected in zip(behind.by_length[length], single.by_length[length], strict=True):
            assert float((mine - expected).norm() / expected.norm()) < 1e-5


# ---- what must not stay unseen, and what must not reach anybody ----


class Changed(ExactKernels):
    """``change`` gets the rows and the projections of every tree, and says what kernels see of them."""

    def __init__(self, change: Callable[[StateRows, Tensor], tuple[StateRows, Tensor]]) -> None:
        super().__init__()
        self._change = change
        self.changed = 0

    def _of(self, rows: StateRows, projected_TX: Tensor) -> tuple[StateRows, Tensor]:
        if rows.tree is None:
            return rows, projected_TX
        self.changed += 1
        return self._change(rows, projected_TX)

    def conv_gated_delta(self, projected_TX: Tensor, *arguments: Any) -> Tensor:
        given = list(arguments)
        given[-2], projected_TX = self._of(given[-2], projected_TX)
        return super().conv_gated_delta(projected_TX, *given)

    def mamba2(self, projected_TZ: Tensor, *arguments: Any) -> Tensor:
        given = list(arguments)
        given[-2], projected_TZ = self._of(given[-2], projected_TZ)
        return super().mamba2(projected_TZ, *given)


def changed(kernels: Kernels, depth: int = 0) -> Life:
    return trees(some(4), (5, 16), depth=depth, kernels=kernels)


def nan_off_the_path(rows: StateRows, projected_TX: Tensor) -> tuple[StateRows, Tensor]:
    """What rejected nodes left behind is NaN by the time the path is taken in."""
    if rows.kept_B is None:
        return rows, projected_TX
    assert rows.tree is not None
    assert rows.path_BW is not None
    count, nodes = rows.tree.parents_BN.shape
    kept_BW = torch.arange(rows.path_BW.shape[1]) < rows.kept_B[:, None]
    on_path_BN = torch.zeros(count, nodes, dtype=torch.bool)
    for row in range(count):
        on_path_BN[row, rows.path_BW[row][kept_BW[row]]] = True
    return rows, projected_TX.masked_fill(~on_path_BN.view(-1, 1), float("nan"))


@HYBRID
def test_rejected_nodes_reach_nobody(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    over_model(family, monkeypatch)
    kernels = Changed(nan_off_the_path)
    changed(kernels, depth=2)
    assert kernels.changed > 20


def sibling_as_parent(rows: StateRows, projected_TX: Tensor) -> tuple[StateRows, Tensor]:
    """Attention sees the right ancestors, state does not."""
    assert rows.tree is not None
    parents_BN = rows.tree.parents_BN
    number_N = torch.arange(parents_BN.shape[1])
    sibling_BN = (parents_BN == parents_BN.roll(1, 1)) & (number_N > 1)
    wrong_BN = torch.where(sibling_BN, number_N - 1, parents_BN)
    return replace(rows, tree=StateTree(wrong_BN, rows.tree.seen_BN)), projected_TX


def first_nodes(rows: StateRows, projected_TX: Tensor) -> tuple[StateRows, Tensor]:
    """As many as were kept, but those of the likeliest path."""
    if rows.path_BW is None:
        return rows, projected_TX
    return replace(rows, path_BW=torch.arange(rows.path_BW.shape[1]).expand_as(rows.path_BW)), projected_TX


def one_too_many(rows: StateRows, projected_TX: Tensor) -> tuple[StateRows, Tensor]:
    """A guess that was refused is taken in as well."""
    if rows.kept_B is None or rows.path_BW is None:
        return rows, projected_TX
    path_BW, more_B = rows.path_BW.clone(), rows.kept_B + 1
    next_B = rows.kept_B.to(torch.int64).clamp(max=path_BW.shape[1] - 1)
    return replace(rows, kept_B=more_B, path_BW=path_BW.scatter(1, next_B[:, None], 1)), projected_TX


@HYBRID
@pytest.mark.parametrize("mutant", [sibling_as_parent, first_nodes, one_too_many])
def test_other_parents_and_other_tokens_show(
    mutant: Callable[..., tuple[StateRows, Tensor]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_model(family, monkeypatch)
    kernels = Changed(mutant)
    with pytest.raises(AssertionError):
        changed(kernels)
    assert kernels.changed > 20, "the life came to its end"


def test_state_that_nobody_takes_in_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant's rounds keep nothing of what mixers made."""
    over_model("qwen3.5", monkeypatch)

    def rows(slots_B: Tensor, *, undecided: object, tree: StateTree) -> StateRows:
        return StateRows(slots_B, undecided=lambda _: None, tree=tree)

    monkeypatch.setattr(window, "StateRows", rows)
    with pytest.raises(AssertionError):
        changed(ExactKernels())
