"""The models that tests of the engine run over."""

from __future__ import annotations

import pytest

from models.registry import ARCHITECTURES
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_nemotron import NEMOTRON
from tests.models.toy_hybrid import ARCHITECTURE, HYBRID, ToyHybrid
from tests.runtime.engine import rig

HYBRIDS: dict[str, dict[str, object]] = {**FAMILIES, "nemotron-h": NEMOTRON}


@pytest.fixture(params=["attention", "hybrid", *(pytest.param(family, marks=pytest.mark.long) for family in HYBRIDS)])
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
