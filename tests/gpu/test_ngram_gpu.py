"""Prompt lookup in Triton against torch, token for token.

Without a GPU, as CI does it: ``make interpreted``.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from runtime.speculate.ngram import look_up_in_torch

look_up = pytest.importorskip("runtime.speculate.ngram_triton").look_up

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    importlib.import_module("tests.models.kernels.interpreted_kernels")  # mends Triton's interpreter for today's numpy
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, with which the interpreter computes
]


@pytest.mark.parametrize("positions", [40, 5000])
@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 3), (2, 5)])
@pytest.mark.parametrize("count", [1, 4, 15])
def test_the_same_as_torch(count: int, low: int, high: int, positions: int) -> None:
    torch.manual_seed(count + high)
    slots, rows = 9, 7
    kinds = torch.tensor([2, 3, 5, 50, 50, 3, 7, 2, 9])[:, None]
    history_SL = (torch.randint(0, 1 << 20, (slots, positions)) % kinds).to(torch.int32).to(DEVICE)
    rows_B = torch.randperm(slots)[:rows].to(DEVICE)
    records = torch.randint(1, positions, (rows, 4), dtype=torch.int32, device=DEVICE)
    length_B = records[:, 2]  # a column, as of slot records
    length_B[0], length_B[1], length_B[2] = 0, 1, positions
    found = look_up(history_SL, rows_B, length_B, count, low, high)
    assert torch.equal(found, look_up_in_torch(history_SL, rows_B, length_B, count, low, high))
