"""The rolling digest: fixed values, sensitivity to every part of a decision, the ring, and refusals."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest

from runtime.schedule.digest import Decision, RollingDigest


def folded(*decisions: tuple[int, str, tuple[int, ...] | bytes]) -> int:
    digest = RollingDigest()
    for step, kind, decision in decisions:
        digest.fold(step, kind, decision)
    return digest.value


def test_values_are_fixed_for_all_time() -> None:
    """Written down once: a change of Python, machine or code that moves them would split a mixed job."""
    assert folded() == 0
    assert folded((0, "plan", ())) == 0xBEADE9119FC13F33
    assert folded((7, "plan", (1, -2, 1 << 62)), (8, "land", b"abc")) == 0xAA2DFFDE766BBDAB


def test_another_process_with_another_hash_seed_agrees() -> None:
    program = (
        "from runtime.schedule.digest import RollingDigest as R; d = R(); d.fold(3, 'admit', (1, 2)); print(d.value)"
    )
    values = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert values == {f"{folded((3, 'admit', (1, 2)))}\n".encode()}


def test_every_part_of_a_decision_counts() -> None:
    variants: list[list[tuple[int, str, tuple[int, ...] | bytes]]] = [
        [(1, "plan", (1, 2))],
        [(2, "plan", (1, 2))],
        [(1, "land", (1, 2))],
        [(1, "plan", (2, 1))],
        [(1, "plan", (1, 2, 0))],
        [(1, "plan", (1,)), (1, "plan", (2,))],
        [(1, "plan", (1 << 32 | 1,))],
        [(1, "plan", (1).to_bytes(8, "little") + (2).to_bytes(8, "little"))],
        [(1, "plan", b"")],
        [(1, "plan", ())],
        [(1, "plan1", b"")],
        [(1, "plan", b"1")],
    ]
    values = [folded(*v) for v in variants]
    assert len(set(values)) == len(variants)
    assert all(0 <= v < 1 << 64 for v in values)


def test_the_order_of_decisions_counts() -> None:
    a, b = (1, "plan", (5,)), (1, "land", (5,))
    assert folded(a, b) != folded(b, a)


def test_the_ring_keeps_the_last_decisions_with_their_digests() -> None:
    digest = RollingDigest(keep=3)
    values = []
    for step in range(5):
        digest.fold(step, "plan", (step, step))
        values.append(digest.value)
    assert digest.recent() == tuple(Decision(i, i, "plan", (i, i), values[i]) for i in (2, 3, 4))
    assert digest.folds == 5


@pytest.mark.parametrize("bad", [1 << 63, -(1 << 63) - 1, 1.5, "x"])
def test_what_is_no_int64_is_refused_and_changes_nothing(bad: Any) -> None:
    digest = RollingDigest()
    digest.fold(1, "plan", (1,))
    before = digest.value
    with pytest.raises(ValueError, match=r"'plan' of step 2 holds .* not an int64"):
        digest.fold(2, "plan", (1, bad))
    assert (digest.value, digest.folds) == (before, 1)


def test_what_is_kept_of_a_long_decision_is_nothing_to_collect() -> None:
    """A thousand integers in a tuple would be looked at by every young collection until the decision is forgotten."""
    digest, length = RollingDigest(), 1234
    gc.disable()
    try:
        digest.fold(7, "rows", tuple(range(length)))
        digest.fold(7, "prompt", bytes(range(200)))
        assert not [held for held in gc.get_objects() if type(held) is tuple and len(held) == length]
    finally:
        gc.enable()
    assert [one.decision for one in digest.recent()] == [tuple(range(length)), bytes(range(200))]
