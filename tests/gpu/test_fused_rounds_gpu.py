"""Engines whose rounds are fused kernels against engines whose rounds are torch: the same tokens, as many guesses kept.

On a GPU in bfloat16, captured. Without one, as CI does it (``make interpreted``), in float32 on the twin, with layers,
attention and draws in torch on both sides.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from runtime.engine import Engine
from runtime.execute.sampling import draft_tree
from runtime.execute.sampling import kernels as sampling_kernels
from runtime.execute.step.step_io_kernels import triton_kernels
from runtime.speculate import draft_kernels, draft_rows, guesses, mtp, synthetic, tree
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.gpu.test_drafters_gpu import rig_of
from tests.plant import plant
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.test_depths import outcome
from tests.runtime.speculate.demo_acceptance import DEMO, WIDEST, golden_rows

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    importlib.import_module("tests.models.kernels.interpreted_kernels")  # mends Triton's interpreter for today's numpy
SCRIPT: dict[str, Any] = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
# Where a round asks for its kernels: the part of a step; or the module, the name that it asks by; and what answers.
STEP_CHOICES = {
    "step.kernels": triton_kernels,
}
CHOICES = (
    (guesses, "sampling_kernels", sampling_kernels.triton_kernels),
    *((module, "kernels_for", draft_kernels.triton_kernels) for module in (draft_rows, guesses)),
    *((module, "kernels_for", draft_kernels.triton_kernels) for module in (mtp, synthetic)),
    (draft_tree, "_kernels_for", draft_tree._triton_kernels),
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, with which the interpreter computes
]


@contextmanager
def engine_of(method: str, rules: dict[str, Any]) -> Iterator[Engine]:
    """Without steps in flight, so that the same rows share each step."""
    keys = {"method": method, "model": str(DEMO / method), "num_speculative_tokens": WIDEST[method]}
    how: dict[str, Any] = {"depth": 0, "proposer": proposer_for(speculative_config(keys | rules))}
    how |= {"tree": rules["tree_size"]} if "tree_size" in rules else {}
    if not INTERPRETED:
        with rig_of(method, torch.bfloat16, **how) as engine:
            yield engine
        return
    how |= {"rows": 3, "blocks": 200, "max_model_len": 640, "max_prefill_tokens": 512, "folder": DEMO}
    with rig(dtype=torch.float32, widths=(WIDEST[method] + 1,), **how) as engine:
        yield engine


@pytest.mark.parametrize("rules", [{}, {"tree_size": 16}, SCRIPT], ids=["chain", "tree", "script"])
@pytest.mark.parametrize("method", WIDEST)
def test_fused_rounds_are_those_of_torch(method: str, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows beside sampled ones, stop ids and ends within windows: tokens and every counter of speculation."""
    rows = golden_rows()[: 3 if INTERPRETED else 16]
    requests = [
        request(i, row["prompt_token_ids"], max_tokens=5 + 4 * i, stops=(0, 3), temperature=0.8 * (i % 2))
        for i, row in enumerate(rows)
    ]
    found, asked = [], Counter[str]()
    for fused in (True, False):
        with monkeypatch.context() as patch:

            def answer(place: str, kernels: Callable[[], Any], *_: Any) -> Any:
                asked[place] += 1
                return kernels() if fused else None  # noqa: B023  # asked in this turn only

            for part, step_kernels in STEP_CHOICES.items():
                plant(patch, partial(answer, part, step_kernels), part=part)
            for module, name, kernels in CHOICES:
                patch.setattr(module, name, partial(answer, module.__name__, kernels))
            if not fused:
                patch.setattr(tree, "_triton_kernel", lambda: None)
            with engine_of(method, rules) as engine:
                answers = outcome(run(engine, requests))
                engine.stop()
                counted = {name: number for name, number in engine.counters.items() if name.startswith("spec_")}
        found.append((answers, counted))
    assert found[0] == found[1]
    assert found[0][1]["spec_num_accepted_tokens"] > 0
    reached = {draft_rows, guesses}
    reached |= ({mtp} if method == "mtp" else set()) | ({synthetic} if rules is SCRIPT else set())
    reached |= {draft_tree} if "tree_size" in rules else set()
    assert set(asked) == {*STEP_CHOICES, *(module.__name__ for module in reached)}
