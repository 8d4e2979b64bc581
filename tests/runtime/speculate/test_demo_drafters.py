"""The demo models' drafters: their golden tokens, and as many guesses kept as were recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.execute.proposer import Observed
from runtime.schedule.plan import Finished
from runtime.speculate.mtp import MTPProposer
from tests.runtime.speculate.demo_acceptance import (
    DEMO,
    HYBRID,
    RECORD,
    TREE_SIZES,
    WIDEST,
    acceptance,
    golden_rows,
    serve,
    tree_acceptance,
)


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("mtp", marks=pytest.mark.long), "dflash"])
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


@pytest.mark.long
@pytest.mark.parametrize("method", WIDEST)
def test_a_tree_keeps_more_than_a_chain_of_its_depth(method: str) -> None:
    finished, counters = serve(method, tree_size=TREE_SIZES[method])
    assert [list(finished[i].token_ids) for i in range(len(finished))] == [row["token_ids"] for row in golden_rows()]
    found, record = tree_acceptance(method, counters), json.loads(RECORD.read_text(encoding="utf-8"))
    assert found["accepted_length"] == pytest.approx(record[f"{method} tree"]["accepted_length"], rel=0.02)
    # Both count rounds beside chunks of prompts, too; without these it is 1.22 for mtp.
    assert found["accepted_length"] > 1.15 * record[method]["accepted_length"]


SURE = 2e-3  # margin of a golden row beyond which an error of 1e-3 in a logit decides nothing


def check_hybrid_tokens(finished: dict[int, Finished]) -> None:
    """Those of transformers, but for rows in which two tokens were as good as equal to it."""
    sure = [(i, row) for i, row in enumerate(golden_rows(HYBRID)) if row["margin"] > SURE]
    assert len(sure) >= 25
    for i, row in sure:
        assert list(finished[i].token_ids) == row["token_ids"], row["id"]
        assert finished[i].reason.label == row["finish_reason"], row["id"]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.long), 2])
def test_the_hybrid_and_the_layer_in_its_checkpoint(depth: int) -> None:
    """Three gated delta nets to a layer of attention, whose state takes in what is kept of a window and no more."""
    finished, counters = serve("mtp", depth, folder=HYBRID)
    check_hybrid_tokens(finished)
    found = acceptance("mtp", counters)
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["hybrid mtp"]
    assert found["accepted_by_position"] == pytest.approx(recorded["accepted_by_position"], abs=0.02)
    assert found["accepted_length"] == pytest.approx(recorded["accepted_length"], rel=0.02)


@pytest.mark.long
def test_a_tree_over_the_hybrid_keeps_more_than_a_chain() -> None:
    """Whose nodes go on from their parents' states, and whose path is taken in."""
    finished, counters = serve("mtp", tree_size=TREE_SIZES["mtp"], folder=HYBRID)
    check_hybrid_tokens(finished)
    found, record = tree_acceptance("mtp", counters), json.loads(RECORD.read_text(encoding="utf-8"))
    assert found["accepted_length"] == pytest.approx(record["hybrid mtp tree"]["accepted_length"], rel=0.02)
    assert found["accepted_length"] > 1.04 * record["hybrid mtp"]["accepted_length"]


@pytest.mark.slow
def test_the_hybrids_layer_needs_the_newest_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that lags by a step costs guesses, and no token: acceptance alone tells."""
    observe = MTPProposer.observe

    def lagging(self: MTPProposer, observed: Observed) -> None:
        before = self._hidden_SN.clone()
        observe(self, observed)
        if observed.advanced is not None:
            self._hidden_SN.copy_(before)

    monkeypatch.setattr(MTPProposer, "observe", lagging)
    finished, counters = serve("mtp", folder=HYBRID)
    check_hybrid_tokens(finished)
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["hybrid mtp"]
    assert acceptance("mtp", counters)["accepted_length"] < 0.9 * recorded["accepted_length"]


def test_the_hybrid_is_small() -> None:
    assert sum(file.stat().st_size for file in HYBRID.iterdir()) <= 4 << 20
    trained = json.loads((HYBRID / "training.json").read_text(encoding="utf-8"))
    assert trained["held_out"]["mtp"]["accepted_length"] > 3


def test_they_are_small() -> None:
    files = [DEMO / method / "model.safetensors" for method in WIDEST]
    assert sum(file.stat().st_size for file in files) <= 6_000_000
    trained = json.loads((DEMO / "drafters.json").read_text(encoding="utf-8"))["held_out"]
    assert set(trained) == set(WIDEST)
    assert all(Path(DEMO / method / "config.json").is_file() for method in WIDEST)
