"""The TPOT derived for more ranks: what the document shows is what the script says, and what a derivation must obey."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.derive_tp import MEASURED, MODELS, Derivation, Step, main

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "measurements.md"


@pytest.fixture
def derivation() -> Derivation:
    return Derivation(json.loads(MEASURED.read_text(encoding="utf-8")))


def test_the_document_shows_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    section = DOCUMENT.read_text(encoding="utf-8").split("## Four and eight GPUs (derived)\n")[1].split("\n## ")[0]
    printed = capsys.readouterr().out.splitlines()
    missing = [line for line in printed if line not in section.splitlines()]
    assert not missing, f"docs/measurements.md lacks {missing}: put in what `python -m tests.gpu.derive_tp` prints"
    assert sum(line.startswith("| qwen3-8b |") for line in printed) == 8 + 10
    assert sum(line.startswith("| qwen3-32b |") for line in printed) == 10


def test_errors_where_it_was_measured(derivation: Derivation) -> None:
    fitted = derivation.fit([1, 2])
    errors = {step: derivation.derive(step, fitted).tpot / tpot - 1 for step, tpot in derivation.steps.items()}
    worst = Step("qwen3-8b", 2, 32)
    assert errors.pop(worst) == pytest.approx(-0.147, abs=0.001)
    assert max(abs(error) for error in errors.values()) <= 0.051


def test_the_fit_gives_back_the_constants_that_made_the_steps(derivation: Derivation) -> None:
    planted = derivation.fit([1])._replace(kv_bytes_per_s=3e12, rest_us_a_layer=20.0)
    derivation.steps = {step: derivation.derive(step, planted).tpot for step in derivation.steps}
    assert derivation.fit([1, 2]) == pytest.approx(planted)


@pytest.mark.parametrize("model", MODELS)
def test_at_256_rows_every_doubling_of_the_ranks_is_faster(derivation: Derivation, model: str) -> None:
    fitted = derivation.fit([1, 2])
    tpots = [derivation.derive(Step(model, tp, 256), fitted).tpot for tp in (1, 2, 4, 8)]
    assert tpots == sorted(tpots, reverse=True)


def test_what_was_not_measured_is_refused(derivation: Derivation) -> None:
    fitted = derivation.fit([1, 2])
    with pytest.raises(ValueError, match="512 rows lie outside of the measured 1 to 256"):
        derivation.derive(Step("qwen3-8b", 1, 512), fitted)
    with pytest.raises(ValueError, match=r"TP \[4\]: steps of 0 batch sizes were measured"):
        derivation.fit([4])
