"""The models that tests of the engine run over."""

from __future__ import annotations

import pytest

from models.registry import ARCHITECTURES
from tests.models.tiny_nemotron import NEMOTRON
from tests.models.toy_hybrid import ARCHITECTURE, HYBRID, ToyHybrid
from tests.runtime.engine import rig


@pytest.fixture(params=["attention", "hybrid", pytest.param("nemotron-h", marks=pytest.mark.long)])
def every_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return over_model(str(request.param), monkeypatch)


def over_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every rig's model keeps all of a sequence in pages, or a part of it in the slot's row; returns which."""
    if kind == "hybrid":
        monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)
        monkeypatch.setattr(rig, "TINY", rig.TINY | HYBRID)
    if kind == "nemotron-h":
        monkeypatch.setattr(rig, "TINY", rig.TINY | NEMOTRON)
    return kind
