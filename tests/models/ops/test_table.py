"""The op table: which row runs a call, what is remembered, what a mode admits, and that every op has a row."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from models.kernels.traits import H200
from models.ops.contract import Ops
from models.ops.select import reference_ops
from models.ops.table import INVARIANT, Key, Row, TableOps, composed, plain

SAME_BITS = frozenset((INVARIANT,))
KEYS = {"relu2": Key(lambda size: size)}


def small(most: int, made: list[str]) -> Row:
    def bind(ops: Any, size: int) -> Any:
        made.append(f"up to {most}, for {size}")
        return lambda size: f"up to {most}"

    return Row("relu2", bind, refuses=lambda ops, size: None if size <= most else f"more than {most}")


def ops_of(*rows: Row, invariant: bool = False) -> Any:
    ops = TableOps()
    ops.bind_rows(rows, KEYS, invariant=invariant)
    return ops


def test_the_first_row_that_takes_a_call_runs_it_and_is_found_once_for_a_key() -> None:
    made: list[str] = []
    ops = ops_of(small(2, made), small(8, made), Row("relu2", lambda ops: lambda size: "any", fallback="slow"))
    assert [ops.relu2(size) for size in (1, 5, 1, 9, 5)] == ["up to 2", "up to 8", "up to 2", "any", "up to 8"]
    assert made == ["up to 2, for 1", "up to 8, for 5"]
    assert ops.stood_in == {"slow": "more than 8"}
    ops.forget()
    assert ops.relu2(1) == "up to 2"
    assert made[2:] == ["up to 2, for 1"]


def test_a_call_that_every_row_refuses_is_an_error_with_their_reasons() -> None:
    ops = ops_of(small(2, []), small(8, []))
    with pytest.raises(RuntimeError, match=r"no kernel here computes this relu2: more than 2; more than 8"):
        ops.relu2(9)


def test_a_row_alone_is_bound_at_start_and_a_composition_looks_up_the_ops_it_is_bound_to() -> None:
    rows = (plain("relu2", lambda x: x + 1), composed("silu_mul", lambda ops, x: 10 * ops.relu2(x)))
    ops = ops_of(*rows)
    assert ops.silu_mul(4) == 50
    assert ops_of(plain("relu2", lambda x: 0), *rows).silu_mul(4) == 0


def test_the_deterministic_mode_admits_invariant_rows_only() -> None:
    rows = (plain("relu2", lambda x: "fast"), plain("relu2", lambda x: "same bits", INVARIANT))
    assert ops_of(*rows).relu2(0) == "fast"
    ops = ops_of(*rows, plain("linear", lambda x: "fast"), invariant=True)
    assert ops.relu2(0) == "same bits"
    assert ops.batch_invariant == {"relu2": True}
    with pytest.raises(NotImplementedError):
        ops.linear(0, 0)


def both_modes() -> Iterator[TableOps]:
    yield reference_ops()
    yield reference_ops(deterministic=True)
    if importlib.util.find_spec("triton") is not None:
        nvidia = importlib.import_module("tests.models.kernels.nvidia_kernels")
        yield nvidia.nvidia_kernels_on_cpu()
        yield nvidia.invariant_nvidia_kernels_on_cpu(H200)


def test_every_op_of_the_contract_has_a_row_in_every_mode() -> None:
    """What is no op has a body in the contract, or is a property."""
    ops_of_contract = {
        name
        for name, method in inspect.getmembers(Ops, inspect.isfunction)
        if "raise NotImplementedError" in inspect.getsource(method)
    }
    assert set(Ops.operations) <= ops_of_contract
    for ops in both_modes():
        missing = ops_of_contract - vars(ops).keys()
        assert not missing, (ops.name, missing)
        assert set(Ops.operations) <= ops.batch_invariant.keys() or not ops.invariant
