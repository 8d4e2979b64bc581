"""What is kept of a grammar; without llguidance, what a client and a rank are told."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from runtime.frontend.structured import structured
from runtime.frontend.validation import RequestError
from runtime.grammar import GrammarError, Grammars
from runtime.schedule.request import SamplingParams
from tests.runtime.engine.table_rigs import hold


@pytest.fixture
def _no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = importlib.import_module

    def imports(name: str, package: str | None = None) -> Any:
        if name.startswith("llguidance"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return usual(name, package)

    monkeypatch.setattr(importlib, "import_module", imports)


@pytest.mark.usefixtures("_no_package")
def test_without_the_package_a_request_is_refused_with_what_to_install() -> None:
    install = r"install it on every node, pip install 'lockstride\[grammar\]'"
    with pytest.raises(RequestError, match=install) as found:
        structured(regex="a")
    assert found.value.field == "structured_outputs"
    grammars = Grammars(lambda: "", 64, (0,))
    with pytest.raises(GrammarError, match=install):
        hold(grammars, structured(json={}))
    grammars.close()


@pytest.mark.usefixtures("_no_package")
def test_a_rank_without_the_package_allows_nothing() -> None:
    """So its request ends, and the job goes on."""
    grammars = Grammars(lambda: "", 64, (0,))
    grammars.warm()
    allowed_W = np.full(2, -1, np.int32)
    grammars.matcher(SamplingParams(grammar='start: "a"'), (0,), (5, 6)).allow(allowed_W)
    assert not allowed_W.any()
    grammars.close()
