"""Recurrent state in verification steps of chains and trees: it is that of single steps, and wrong state is seen.

Lives over such models, with NaN in all state and blocks that no request has: test_lives.py. Ops against chains of
ancestors: tests/models/kernels/recurrent/test_trees.py.

Knows: mutants of what recurrent layers read and write, and of when slots are free. Does not know: steps that have
chunks of prompts, too (test_mixed_windows.py), or which slots a pass gets (test_round_slots.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import StateRows, StateTree
from models.ops.contract import Ops
from runtime.engine import Engine
from runtime.execute.cache.pool import CachePool
from runtime.schedule.slots import SlotPool
from tests.plant import Op, kernels_with, plant, reference_kernels
from tests.runtime.engine.conftest import over_model
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import Life, live, people
from tests.runtime.engine.settings import Setting, of_model, with_tokens
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_lives import finish
from tests.runtime.engine.test_trees import some, trees
from tests.runtime.engine.test_windows import windows
from tests.selection import covering

FAMILIES = ("qwen3-next", "nemotron-h")  # one of each recurrence
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def recurrences(fn: object) -> Ops:
    """``fn`` over both recurrences. It is called with what it replaces, then (projections, ..., rows, positions)."""
    return kernels_with(exact_kernels(), conv_gated_delta=fn, mamba2=fn)


def each_mutant(*mutants: object) -> pytest.MarkDecorator:
    """Each over one family, in turn; over the other one it is long."""
    cases = [
        pytest.param(family, mutant, marks=() if (number + i) % len(FAMILIES) == 0 else pytest.mark.long)
        for number, mutant in enumerate(mutants)
        for i, family in enumerate(FAMILIES)
    ]
    return pytest.mark.parametrize(("family", "mutant"), cases)


# ---- the same state ----


class States:
    """Before every turn of a serial engine: the banks' rows of the one request, by the number of its tokens."""

    def __init__(self) -> None:
        self.by_length: dict[int, list[Tensor]] = {}

    def __call__(self, engine: Engine, turn: int) -> None:
        executor = engine.executor
        executor.device.compute.synchronize()
        length = int(executor.tables.columns.length[1])
        self.by_length[length] = [bank[:, 1].clone() for bank in executor.pool.banks]


ROUNDS: dict[str, Callable[..., Life]] = {
    "tree": partial(trees, shape=(5, 16)),
    "chain": partial(windows, widths=(5,)),
    "long chains": partial(windows, widths=(16, 3)),
}


@pytest.mark.parametrize(("family", "rounds"), covering((*FAMILIES, "qwen3.5"), [*ROUNDS], at_once=1))
def test_state_after_a_verification_step_is_that_of_single_steps(
    family: str, rounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, after every step; and so are the tokens."""
    over_model(family, monkeypatch)
    requests = people(1, max_tokens=40, temperature=0.0, logprobs=None)
    plain: dict[str, Any] = {"kernels": reference_kernels(), "dtype": torch.float32}
    single, stepped = States(), States()
    alone = live(requests, single, depth=0, **plain)
    for module in ("test_trees", "test_windows"):
        monkeypatch.setattr(f"tests.runtime.engine.{module}.oracle", lambda *_, **__: alone)
    life = ROUNDS[rounds](requests, depth=0, act=stepped, **plain)
    compared = sorted(stepped.by_length.keys() & single.by_length.keys())[1:]
    assert len(compared) == len(stepped.by_length) - 1 > 8
    assert len(compared) < len(life.finished[0].token_ids) / 1.5, "a step gains several tokens"
    for length in compared:
        for mine, expected in zip(stepped.by_length[length], single.by_length[length], strict=True):
            assert float((mine - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    ("family", "depth", "shape"),
    [
        ("qwen3.5", 1, (8, 32)),
        *(pytest.param("nemotron-h", *case, marks=pytest.mark.long) for case in ((1, (5, 33)), (2, (6, 16)))),
    ],
    ids=str,
)
def test_answers_of_wide_trees_are_those_of_single_steps(
    family: str, depth: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    over_model(family, monkeypatch)
    life = trees(some(4), shape, depth=depth)
    assert life.counters["spec_num_accepted_tokens"] > 0.4 * life.counters["spec_num_drafts"]
    assert max(map(max, life.rounds.values())) >= 4, "long paths are accepted"
    assert life.counters["spec_num_draft_tokens"] > life.counters["spec_num_accepted_tokens"]


def test_two_ranks_hold_a_half_of_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the all-reduce of Mamba-2's norm, over all nodes of trees."""
    over_model("nemotron-h", monkeypatch)
    trees(some(3), (5, 16), depth=2, over=lambda **limits: tensor_rig(2, **limits))


# ---- chains: mutants of the state ----


def unchanged(recurrence: Op, *given: Any) -> Any:
    return recurrence(*given)


def commits_all(recurrence: Op, *given: Any) -> Any:
    """Rejected draft tokens as well."""
    *before, rows, positions = given
    if rows.kept_B is not None:
        rows = replace(rows, kept_B=torch.full_like(rows.kept_B, len(positions) // len(rows.slots_B)))
    return recurrence(*before, rows, positions)


def commits_at_once(recurrence: Op, *given: Any) -> Any:
    """While the window is verified, and once more when it is decided."""
    *before, rows, positions = given
    return recurrence(*before, replace(rows, frozen=False), positions)


class CommitsLate:
    """A step's tokens when the next step is decided."""

    def __init__(self) -> None:
        self._due: dict[int, Callable[[], Any]] = {}

    def __call__(self, recurrence: Op, *given: Any) -> Any:
        *before, rows, positions = given
        if rows.kept_B is None:
            return recurrence(*given)
        own = replace(rows, slots_B=rows.slots_B.clone(), kept_B=rows.kept_B.clone())
        layer = before[2].data_ptr()
        due = self._due.get(layer)
        self._due[layer] = partial(recurrence, *before, own, positions.clone())
        return None if due is None else due()


def setting(family: str, drafts: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    of_model(family, monkeypatch)
    chunks = "in turns" if drafts == "windows" else "mixed"
    return Setting(drafts, family, 2, chunks, "filtered", "alone", "float", "float", folder)


def finished(at: Setting, **limits: Any) -> None:
    at.live([with_tokens(one, 1 + 4 * i) for i, one in enumerate(at.requests(4))], right=7, **limits)


@each_mutant(unchanged, commits_all, commits_at_once, CommitsLate)
def test_state_of_other_tokens_shows(family: str, mutant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is none: what it wraps stays right."""
    at = setting(family, "windows", tmp_path, monkeypatch)
    fn = mutant() if isinstance(mutant, type) else mutant
    with nullcontext() if mutant is unchanged else pytest.raises(AssertionError):
        finished(at, kernels=recurrences(fn))


# ---- chains: NaN in what rejected draft tokens left ----


def multiplies_by_zero(recurrence: Op, *given: Any) -> Any:
    """Of each window all tokens count, those that were rejected as zero times themselves."""
    *before, rows, _ = given
    found = recurrence(*given)
    if rows.kept_B is not None:
        made_BWX, state_SHXX = before[0].unflatten(0, (len(rows.slots_B), -1)), before[-1]
        nothing_B = (made_BWX * 0.0).sum((1, 2))
        state_SHXX.index_add_(0, rows.slots_B, nothing_B.view(-1, 1, 1, 1).expand(-1, *state_SHXX.shape[1:]))
    return found


@dataclass
class RejectedAreNan:
    """What layers made of rejected draft tokens, of ghosts and of padding is NaN by the time the rest is committed.
    ``poisoned``: steps in which that was so of a live row."""

    then: Callable[..., Any] = unchanged
    poisoned: list[int] = field(default_factory=list)

    def __call__(self, recurrence: Op, *given: Any) -> Any:
        *before, rows, positions = given
        if rows.kept_B is not None:
            rejected_BW = torch.arange(len(positions) // len(rows.slots_B)) >= rows.kept_B[:, None]
            self.poisoned.append(int(rejected_BW[rows.kept_B > 0].any()))
            before = [before[0].masked_fill(rejected_BW.view(-1, 1), float("nan")), *before[1:]]
        return self.then(recurrence, *before, rows, positions)


@pytest.mark.parametrize(("family", "drafts"), covering(FAMILIES, ("windows", "mtp"), at_once=1))
@pytest.mark.parametrize(
    "over",
    [
        RejectedAreNan,
        pytest.param(lambda: multiplies_by_zero, marks=pytest.mark.long),  # shows what no assertion sees
        lambda: RejectedAreNan(multiplies_by_zero),
    ],
    ids=["poison", "a mask that multiplies", "both"],
)
def test_rejected_draft_tokens_reach_no_state(
    over: Callable[[], Any], family: str, drafts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``mtp`` also in steps with chunks. A mask that multiplies is seen by the poison, and not without."""
    at, fn = setting(family, drafts, tmp_path, monkeypatch), over()
    wrong = isinstance(fn, RejectedAreNan) and fn.then is multiplies_by_zero
    with pytest.raises(AssertionError) if wrong else nullcontext():
        life = at.live(at.requests(6, max_tokens=14), right=7, kernels=recurrences(fn))
        assert life.counters["mixed_steps"] > 0 or drafts == "windows"
    if isinstance(fn, RejectedAreNan) and not wrong:
        assert sum(fn.poisoned) > 8


# ---- mutants of slots ----


@pytest.mark.parametrize(("family", "late"), covering(FAMILIES, (False, True), at_once=1))
def test_slots_that_are_released_in_another_step_show(
    family: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a request, whatever is in flight of it; or a step after all of that has landed."""
    fenced = SlotPool.retire_after

    def retire(pool: SlotPool, step: int, slot: int) -> None:
        if late:
            fenced(pool, step + 1, slot)
        else:
            pool.give_back(slot)

    monkeypatch.setattr(SlotPool, "retire_after", retire)
    at = setting(family, "ngram", tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match="a slot is kept" if late else "a slot is free"):
        finish(at)


@EACH_FAMILY
def test_a_slot_that_is_not_cleared_for_the_next_request_shows(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = setting(family, "ngram", tmp_path, monkeypatch)
    monkeypatch.setattr(CachePool, "reset", lambda pool, slots_N: None)
    with pytest.raises(AssertionError, match="request"):
        finished(at)


# ---- trees ----


class Changed:
    """``change`` gets the rows and the projections of every tree, and returns what kernels see of them."""

    def __init__(self, change: Callable[[StateRows, Tensor], tuple[StateRows, Tensor]]) -> None:
        self._change = change
        self.changed = 0

    def __call__(self, recurrence: Op, projected_TX: Tensor, *given: Any) -> Any:
        *between, rows, positions = given
        if rows.tree is not None:
            self.changed += 1
            rows, projected_TX = self._change(rows, projected_TX)
        return recurrence(projected_TX, *between, rows, positions)


def changed(fn: Changed, depth: int = 0) -> None:
    trees(some(4), (5, 16), depth=depth, kernels=recurrences(fn))


def nan_off_the_path(rows: StateRows, projected_TX: Tensor) -> tuple[StateRows, Tensor]:
    """What rejected nodes left is NaN by the time the path is committed."""
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


@EACH_FAMILY
def test_rejected_nodes_reach_no_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    over_model(family, monkeypatch)
    fn = Changed(nan_off_the_path)
    changed(fn, depth=2)
    assert fn.changed > 20


def sibling_as_parent(rows: StateRows, projected_TX: Tensor) -> tuple[StateRows, Tensor]:
    """Attention sees the right ancestors, state does not."""
    assert rows.tree is not None
    parents_BN = rows.tree.parents_BN
    number_N = torch.arange(parents_BN.shape[1])
    sibling_BN = (parents_BN == parents_BN.roll(1, 1)) & (number_N > 1)
    wrong_BN = torch.where(sibling_BN, number_N - 1, parents_BN)
    return replace(rows, tree=StateTree(wrong_BN, rows.tree.seen_BN)), projected_TX


def first_nodes(rows: StateRows, projected_TX: Tensor) -> tuple[StateRows, Tensor]:
    """As many as were accepted, but those of the likeliest path."""
    if rows.path_BW is None:
        return rows, projected_TX
    return replace(rows, path_BW=torch.arange(rows.path_BW.shape[1]).expand_as(rows.path_BW)), projected_TX


def one_too_many(rows: StateRows, projected_TX: Tensor) -> tuple[StateRows, Tensor]:
    """A draft token that was rejected is committed as well."""
    if rows.kept_B is None or rows.path_BW is None:
        return rows, projected_TX
    path_BW, more_B = rows.path_BW.clone(), rows.kept_B + 1
    next_B = rows.kept_B.to(torch.int64).clamp(max=path_BW.shape[1] - 1)
    return replace(rows, kept_B=more_B, path_BW=path_BW.scatter(1, next_B[:, None], 1)), projected_TX


@each_mutant(sibling_as_parent, first_nodes, one_too_many)
def test_other_parents_and_other_tokens_show(
    mutant: Callable[..., tuple[StateRows, Tensor]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_model(family, monkeypatch)
    fn = Changed(mutant)
    with pytest.raises(AssertionError, match="request"):
        changed(fn)
    assert fn.changed > 20, "the life came to its end"


def test_state_without_accepted_tokens_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant keeps nothing of what mixers made of draft tokens."""
    over_model("qwen3.5", monkeypatch)

    def rows(usual: Op, slots_B: Tensor, *, undecided: object, tree: StateTree) -> StateRows:
        made: StateRows = usual(slots_B, undecided=lambda _: None, tree=tree)
        return made

    plant(monkeypatch, rows, part="window.state_rows")
    with pytest.raises(AssertionError, match="request"):
        changed(Changed(lambda rows, projected_TX: (rows, projected_TX)))
