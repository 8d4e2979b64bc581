"""Real proposers in the deterministic mode, on the twin: tokens are those without speculation, in every bit.

Against the serial engine of the same mode, which has neither windows nor a proposer. Products of float32 and bfloat16
are rounded here, as they are where the mode is for; the lives of test_drafted_lives.py are computed exactly.

Knows: which proposers there are, as chains and as trees. Does not know: what is guessed (test_drafted.py), guesses that
a test scripts (tests/runtime/engine/test_deterministic.py).
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from models.ops.select import select_kernels
from runtime.execute.proposer import MakeProposer
from runtime.model_checks import require_invariance
from runtime.schedule.plan import StepKind
from runtime.schedule.request import Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.ngram import NgramProposer
from tests.runtime.engine.lives import Launches, Life
from tests.runtime.engine.rig import rig
from tests.runtime.engine.same_bits import Answers, answers, difference, plainly
from tests.runtime.speculate.recorded import SHAPE
from tests.runtime.speculate.test_drafted import people
from tests.runtime.speculate.test_drafted_lives import drafter_of

WIDTH = 4
TREE = 7
KINDS = (("ngram", 0), ("mtp", 0), ("mtp", TREE), ("dflash", 0), ("dflash", TREE), ("eagle3", 0), ("eagle3", TREE))
OFTEN = ((("mtp", TREE), torch.bfloat16), (("dflash", 0), torch.float32), (("eagle3", 0), torch.bfloat16))
CASES = [
    pytest.param(*case, marks=() if case in OFTEN else pytest.mark.long)
    for case in product(KINDS, (torch.float32, torch.bfloat16))
]


def asked() -> list[Request]:
    """Greedy and sampled in turn; their prompts take up to three chunks."""
    return people(4, (5, 17, 1, 30), max_tokens=16, logprobs=3)


def mode(dtype: torch.dtype) -> dict[str, Any]:
    kernels = select_kernels("cpu", dtype, 16, deterministic=True)
    return {"shape": SHAPE, "dtype": dtype, "kernels": kernels}


@cache
def expected(dtype: torch.dtype) -> Answers:
    return plainly(rig, asked(), **mode(dtype))


def proposer_of(kind: str, tree: int, folder: Path) -> MakeProposer:
    if kind == "ngram":
        return partial(NgramProposer, low=1, high=3)
    return drafter_of(kind, WIDTH, folder, top_k=3 if tree else 0)


@pytest.mark.parametrize(("of_kind", "dtype"), CASES, ids=str)
def test_real_guesses_change_no_bit(of_kind: tuple[str, int], dtype: torch.dtype, tmp_path: Path) -> None:
    """Two rows of four requests, so that later prompts come in chunks beside windows."""
    kind, tree = of_kind
    seen = Life()
    how: dict[str, Any] = {"proposer": proposer_of(kind, tree, tmp_path), "tree": tree, "observe": Launches(seen)}
    how |= {
        "speculation": Speculation(WIDTH, mixed_percent=100),
        "rows": 2,
        "max_prefill_tokens": 8 + 2 * max(WIDTH, tree),
    }
    with rig(depth=2, **how, **mode(dtype)) as engine:
        require_invariance(engine.executor._model)
        found = answers(engine, asked())
        counters = dict(engine.counters)
    told = difference(found, expected(dtype))
    assert (told.flips, told.bits) == (0, 0), told
    assert told.compared == 4 * 16
    assert counters["spec_num_accepted_tokens"] > 3, "windows of which more than a token was kept"
    beside = [plan.width for plan in seen.real_plans if plan.kind is StepKind.MIXED]
    assert beside.count(WIDTH) > 1, "windows beside chunks"
