"""What is planted runs, and what it was planted over comes back."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.layers.weight import Weight
from tests.plant import PARTS, Noting, Op, kernels_with, plant, reference_kernels, width_of
from tests.test_house import ROOT, tracked

X, ONES = torch.randn(3, 8), torch.ones(8)


def doubled(op: Op, *given: Any, **named: Any) -> Any:
    return op(*given, **named) * 2


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_there_and_comes_back(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, path = PARTS[part]
    name = path.split(".")[0]
    before = inspect.getattr_static(owner, name)
    with monkeypatch.context() as patched:
        plant(patched, doubled, part=part)
        assert inspect.getattr_static(owner, name) is not before
    assert inspect.getattr_static(owner, name) is before


def test_a_part_knows_its_step_and_what_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    class Step:
        width = 4

        def drawing(self, chunks: int) -> int:
            return chunks

    monkeypatch.setitem(PARTS, "toy", (Step, "drawing"))
    plant(monkeypatch, lambda drawing, chunks: 10 * drawing(chunks) + width_of(drawing), part="toy")
    assert Step().drawing(7) == 74


def test_an_op_is_planted_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference_kernels().rms_norm(X, ONES, 1e-6)
    with monkeypatch.context() as patched:
        plant(patched, doubled, op="rms_norm")
        assert torch.equal(reference_kernels().rms_norm(X, ONES, 1e-6), 2 * expected)
    assert torch.equal(reference_kernels().rms_norm(X, ONES, 1e-6), expected)


def test_kernels_with_an_op_of_their_own_compose_others_of_it() -> None:
    """Planted twice, the later plant gets the former; kernels planted over stay as they were."""
    usual = reference_kernels()
    once = kernels_with(rms_norm=doubled, prefill_name="toy")
    twice = kernels_with(once, rms_norm=doubled)
    expected = usual.joined_norms(X, ONES, X, ONES, 1e-6)
    assert torch.equal(once.joined_norms(X, ONES, X, ONES, 1e-6), 2 * expected)
    assert torch.equal(twice.joined_norms(X, ONES, X, ONES, 1e-6), 4 * expected)
    assert torch.equal(usual.joined_norms(X, ONES, X, ONES, 1e-6), expected)
    assert (usual.prefill_name, once.prefill_name, twice.prefill_name) == ("reference", "toy", "toy")


def test_what_is_noted_is_done_all_the_same() -> None:
    noting = Noting()
    kernels = kernels_with(linear=noting)
    weight = Weight.of(torch.randn(5, 8))
    assert torch.equal(kernels.linear(X, weight), reference_kernels().linear(X, weight))
    assert [given[0] is X for given in noting.calls] == [True]


def test_nothing_is_planted_where_there_is_no_such_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    def anything(usual: Op) -> Tensor:
        raise AssertionError

    with pytest.raises(AttributeError, match="gemm"):
        kernels_with(gemm=anything)
    with pytest.raises(AttributeError, match="gemm"):
        plant(monkeypatch, anything, op="gemm")
    with pytest.raises(KeyError, match="verify"):
        plant(monkeypatch, anything, part="verify")
    with pytest.raises(ValueError, match="an op or a part"):
        plant(monkeypatch, anything)


# ---- who may name the classes that ops and parts are planted in ----

CLASSES = {
    *("TableOps", "NvidiaOps", "InvariantNvidiaOps"),
    *("RowStep", "PackedStep", "PackedPass", "DecodeTokens", "DraftTokens", "RowGraphs", "ProposerFeed", "Tail"),
}
PARTS_ARE_IN = {owner.__name__ for owner, _ in PARTS.values() if inspect.ismodule(owner)}
MAY_NAME_THEM = {
    "tests/plant.py",
    "tests/models/kernels/nvidia_kernels.py",
    "tests/models/ops/test_table.py",  # tests the table itself
    "tests/tools/diagrams/recurrent.py",  # draw what these classes are
    "tests/tools/diagrams/speculation.py",
}


def named_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of classes, by themselves and in texts that are arguments, and of modules that hold parts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in CLASSES:
                yield node.lineno, name
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            yield from ((node.lineno, name) for name in names & CLASSES)
            yield from ((node.lineno, name) for name in names if f"{node.module}.{name}" in PARTS_ARE_IN)
        elif isinstance(node, ast.Call):
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            yield from ((node.lineno, word) for text in texts for word in text.split(".") if word in CLASSES)


def test_no_other_file_names_them() -> None:
    """Who subclasses, patches or makes one of them has to be changed with it."""
    found = []
    for path in tracked():
        if path.startswith("tests/") and path.endswith(".py") and path not in MAY_NAME_THEM:
            source = (ROOT / path).read_text()
            if any(name in source for name in CLASSES | {"runtime.execute.step import"}):
                found += [f"{path}:{line}: {name}" for line, name in named_in(ast.parse(source))]
    assert found == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from runtime.execute.step.tail import Tail as End", "Tail"),
        ("class Wrong(nvidia.NvidiaOps): ...", "NvidiaOps"),
        ("from runtime.execute.step import gather", "gather"),
        ("monkeypatch.setattr('runtime.execute.step.row_step.RowStep.decode', wrong)", "RowStep"),
    ],
)
def test_who_names_one_is_found(source: str, name: str) -> None:
    assert list(named_in(ast.parse(source))) == [(1, name)]
