"""The demo model's drafters: its golden tokens, and as many guesses kept as were recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.speculate.demo_acceptance import (
    DEMO,
    RECORD,
    TREE_SIZES,
    WIDEST,
    acceptance,
    golden_rows,
    serve,
    tree_acceptance,
)


@pytest.mark.parametrize("method", WIDEST)
def test_golden_tokens_at_the_recorded_acceptance(method: str) -> None:
    """Prompts that no drafter was trained on. A float's last bits may decide between two guesses, hence the margin."""
    finished, counters = serve(method)
    for i, row in enumerate(golden_rows()):
        assert list(finished[i].token_ids) == row["token_ids"], row["id"]
        assert finished[i].reason.label == row["finish_reason"], row["id"]
    found, recorded = acceptance(method, counters), json.loads(RECORD.read_text(encoding="utf-8"))[method]
    assert found["accepted_by_position"] == pytest.approx(recorded["accepted_by_position"], abs=0.02)
    assert found["accepted_length"] == pytest.approx(recorded["accepted_length"], rel=0.02)
    assert found["accepted_length"] > 2.4


@pytest.mark.parametrize("method", TREE_SIZES)
def test_a_tree_keeps_more_than_a_chain_of_its_depth(method: str) -> None:
    finished, counters = serve(method, tree_size=TREE_SIZES[method])
    assert [list(finished[i].token_ids) for i in range(len(finished))] == [row["token_ids"] for row in golden_rows()]
    found, record = tree_acceptance(method, counters), json.loads(RECORD.read_text(encoding="utf-8"))
    assert found["accepted_length"] == pytest.approx(record[f"{method} tree"]["accepted_length"], rel=0.02)
    assert found["accepted_length"] > 1.2 * record[method]["accepted_length"]


def test_they_are_small() -> None:
    files = [DEMO / method / "model.safetensors" for method in WIDEST]
    assert sum(file.stat().st_size for file in files) <= 6_000_000
    trained = json.loads((DEMO / "drafters.json").read_text(encoding="utf-8"))["held_out"]
    assert set(trained) == set(WIDEST)
    assert all(Path(DEMO / method / "config.json").is_file() for method in WIDEST)
