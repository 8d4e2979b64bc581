"""Log-probabilities cost nothing where nobody asks: a step has no such stage.

Stages are counted where steps call them, on the twin, whose graphs run their work anew at each replay.

Knows: which functions compute log-probabilities, and who asks. Does not know: their values (test_windows.py,
test_prompt_logprobs.py).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.execute.proposer import MakeProposer
from runtime.schedule.plan import StepKind
from runtime.schedule.request import Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.plant import Op, plant
from tests.runtime.engine.lives import Life, live
from tests.runtime.engine.rig import request
from tests.runtime.speculate.recorded import SHAPE, VOCABULARY, Drafter

WIDTH, TREE = 4, 8
KINDS = ("ngram", "tree", "drawn guesses")


def proposer_of(kind: str, folder: Path) -> MakeProposer:
    keys: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    if kind != "ngram":
        keys = {"method": "mtp", "model": str(Drafter("mtp", folder).folder)}
        keys |= {"tree_size": TREE, "tree_top_k": 3} if kind == "tree" else {"draft_sample_method": "probabilistic"}
    return proposer_for(speculative_config({"num_speculative_tokens": WIDTH - 1, **keys}))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of the stages: for drawn tokens ("tail"), and for those of prompts ("prompt_logprobs")."""
    found: Counter[str] = Counter()

    def counted(name: str, stage: Op, *given: Any) -> Any:
        found[name] += 1
        return stage(*given)

    plant(monkeypatch, partial(counted, "tail"), part="tail.logprobs")
    plant(monkeypatch, partial(counted, "prompt_logprobs"), part="prompt.logprobs")
    return found


def lived(kind: str, folder: Path, *askers: Request) -> Life:
    """Three rows at a time, two of three at random; every row that decodes has a window, beside chunks as well."""
    quiet = [
        request(i, [(i + j) % VOCABULARY for j in range(7 + 9 * i)], max_tokens=20, temperature=0.7 * (i % 3), stops=())
        for i in range(5)
    ]
    how: dict[str, Any] = {"proposer": proposer_of(kind, folder), "speculation": Speculation(WIDTH, mixed_percent=100)}
    how |= {"tree": TREE if kind == "tree" else 0, "shape": SHAPE, "rows": 3, "max_prefill_tokens": 32, "blocks": 400}
    life = live([*askers, *quiet], depth=2, prefix_caching=False, **how)
    windows = Counter(plan.kind for plan in life.real_plans if plan.width == WIDTH)
    assert windows.keys() == {StepKind.DECODE, StepKind.MIXED}
    return life


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_have_no_such_stage_where_nobody_asks(kind: str, calls: Counter[str], tmp_path: Path) -> None:
    lived(kind, tmp_path)
    assert not calls


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_and_goes_with_the_row_that_asks(kind: str, calls: Counter[str], tmp_path: Path) -> None:
    """One call a step while the row is there, whatever the others do; prompts are scored for nobody."""
    asker = request(9, (1, 2, 3), max_tokens=12, stops=(), logprobs=2)
    life = lived(kind, tmp_path, asker)
    with_it = [spec.shape.variant.logprobs for spec in life.specs]
    steps = sum(with_it)
    assert 3 <= steps <= 1 + 12 + 2, "its prompt, a step a token at most, and those in flight when it ends"
    assert with_it == [True] * steps + [False] * (len(with_it) - steps)
    assert len(with_it) > steps + 10
    assert calls == {"tail": steps + 1}, "once more at the first, for the memory that it takes"


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_scored_in_the_steps_of_those_who_ask(kind: str, calls: Counter[str], tmp_path: Path) -> None:
    """One call for a step that scores; no round has its stage for that."""
    asker = request(9, [5] * 70, max_tokens=12, stops=(), prompt_logprobs=2)
    life = lived(kind, tmp_path, asker)
    assert calls == {"prompt_logprobs": sum(plan.scored_tokens > 0 for plan in life.real_plans)}
    assert sum(plan.scored_tokens for plan in life.real_plans) == 70 - 1
    assert calls["prompt_logprobs"] == 3, "of 32 tokens at most"
