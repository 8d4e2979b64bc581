"""Top-k, top-p and min-p: survivors against float64 sets, and what happens on the boundaries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.execute.sampling.filters import survival_threshold
from runtime.schedule.request import SamplingParams
from tests.runtime.execute.sampling import sampling_reference as reference
from tests.runtime.execute.sampling.sampling_cases import random_params, rows_for


def _survivors(logits: torch.Tensor, params: list[SamplingParams]) -> list[list[int]]:
    threshold, _ = survival_threshold(logits, rows_for(params, [0] * len(params)))
    return [row.nonzero().flatten().tolist() for row in logits >= threshold[:, None]]


@pytest.mark.parametrize("vocab", [1, 2, 97, 1001])
def test_survivors_are_those_of_float64(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (64, vocab)).astype(np.float32)
    params = [random_params(rng, temperature=1.0) for _ in range(64)]
    for row, got in enumerate(_survivors(torch.from_numpy(logits), params)):
        wanted = reference.probabilities(logits[row].astype(np.float64), params[row])
        assert got == np.flatnonzero(wanted).tolist(), params[row]


def test_equal_logits_are_never_separated() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]]).expand(4, 6)
    params = [
        SamplingParams(top_k=2),  # the second largest has two equals
        SamplingParams(top_p=0.5),  # 3.0 has 0.42 of the mass: one more is needed, its equals come along
        SamplingParams(min_p=0.36),  # exp(-1) = 0.368
        SamplingParams(top_k=1),
    ]
    assert _survivors(logits, params) == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1]]


def test_top_p_boundary_is_exclusive() -> None:
    """Two tokens of exactly half the mass each: p = 0.5 is reached by the first group alone."""
    logits = torch.tensor([[0.0, -50.0], [0.0, 0.0], [1.0, 1.0]])
    params = [SamplingParams(top_p=0.5), SamplingParams(top_p=0.5), SamplingParams(top_p=0.51)]
    assert _survivors(logits, params) == [[0], [0, 1], [0, 1]]
    quarter = torch.tensor([[0.0, 0.0, 0.0, 0.0]]) - torch.tensor([[0.0, 0.1, 0.2, 0.3]])
    assert _survivors(quarter, [SamplingParams(top_p=0.25)]) == [[0]]


def test_extreme_values_switch_off_or_leave_the_best() -> None:
    logits = torch.tensor([[0.5, 4.0, -1.0, 4.0, 3.0]])
    everything, best = [0, 1, 2, 3, 4], [1, 3]
    cases = [
        (SamplingParams(), everything),
        (SamplingParams(top_k=5), everything),
        (SamplingParams(top_k=2**31 - 1), everything),
        (SamplingParams(top_k=-1), everything),
        (SamplingParams(top_p=1.0), everything),
        (SamplingParams(top_p=1e-30), best),
        (SamplingParams(top_p=0.0), best),
        (SamplingParams(min_p=1e-30), everything),
        (SamplingParams(min_p=1.0), best),
        (SamplingParams(top_k=3, top_p=0.9999999, min_p=1.0), best),
    ]
    assert _survivors(logits.expand(len(cases), 5), [p for p, _ in cases]) == [wanted for _, wanted in cases]


def test_minus_infinity_never_counts_and_never_hurts() -> None:
    logits = torch.tensor([[float("-inf"), 1.0, float("-inf"), 0.0]]).expand(3, 4)
    params = [SamplingParams(top_k=3), SamplingParams(top_p=0.99), SamplingParams(min_p=0.01)]
    kept = _survivors(logits, params)
    assert kept[0] == [0, 1, 2, 3]  # fewer finite logits than k: the threshold is -inf, and -inf is never drawn
    assert kept[1:] == [[1, 3], [1, 3]]


def test_survivors_do_not_depend_on_order_or_batch() -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(0, 2, (16, 501)).astype(np.float32))
    params = [random_params(rng, temperature=1.0) for _ in range(16)]
    together, _ = survival_threshold(logits, rows_for(params, [0] * 16))
    shuffled = logits[:, torch.from_numpy(rng.permutation(501))]
    assert torch.equal(survival_threshold(shuffled, rows_for(params, [0] * 16))[0], together)
    for row in range(16):
        alone, _ = survival_threshold(logits[row : row + 1], rows_for(params[row : row + 1], [0]))
        assert alone[0] == together[row]


def test_largest_tells_unusable_rows() -> None:
    logits = torch.zeros(4, 5)
    logits[1, 3], logits[2, 4], logits[3] = float("nan"), float("inf"), float("-inf")
    params = [SamplingParams(top_k=2, top_p=0.5, min_p=0.1)] * 4
    _, largest = survival_threshold(logits, rows_for(params, [0] * 4))
    assert largest.isfinite().tolist() == [True, False, False, False]
