"""The models that tests of the engine run over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from models.registry import ARCHITECTURES
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_nemotron import NEMOTRON
from tests.models.toy_hybrid import ARCHITECTURE, HYBRID, ToyHybrid
from tests.runtime.engine import rig
from tests.selection import covering

HYBRIDS: dict[str, dict[str, object]] = {**FAMILIES, "nemotron-h": NEMOTRON}


def long(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def over_models(*axes: Sequence[Any], at_once: int = 1, turned: int = 0) -> list[Any]:
    """For ``every_model`` and other parameters: a selection of their grid (tests/selection.py); that of families is
    long."""
    cases = covering(("attention", "hybrid"), *axes, at_once=at_once, turned=turned)
    return cases + [long(*values) for values in product(HYBRIDS, *axes)]


@pytest.fixture(params=["attention", "hybrid", *map(long, HYBRIDS)])
def every_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return over_model(str(request.param), monkeypatch)


def over_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every rig's model keeps all of a sequence in pages ("attention"), or a part of it in the slot's row ("hybrid", of
    which "hybrid" is the smallest kind and families with gated delta nets are others); returns which of the two.
    """
    if kind == "hybrid":
        monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)
        monkeypatch.setattr(rig, "TINY", rig.TINY | HYBRID)
    elif kind != "attention":
        monkeypatch.setattr(rig, "TINY", rig.TINY | HYBRIDS[kind])
        kind = "hybrid"
    return kind
