"""Log-probabilities, ranks and top tokens against float64, and their independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.execute.sampling.logprobs import token_logprobs


@pytest.mark.parametrize(("rows", "vocab", "spread"), [(1, 1, 1.0), (5, 33, 3.0), (16, 5001, 6.0), (3, 60_000, 0.01)])
def test_values_are_those_of_float64(rows: int, vocab: int, spread: float) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, spread, (rows, vocab)).astype(np.float32)
    tokens = rng.integers(0, vocab, rows)
    exact = logits.astype(np.float64)
    exact -= exact.max(1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    got = token_logprobs(torch.from_numpy(logits), torch.from_numpy(tokens), min(20, vocab))
    np.testing.assert_allclose(got.chosen.numpy(), exact[np.arange(rows), tokens], atol=6e-6)
    order = np.argsort(-logits, axis=1, kind="stable")[:, : min(20, vocab)]
    assert got.top_ids.tolist() == order.tolist()
    np.testing.assert_allclose(got.top_values.numpy(), np.take_along_axis(exact, order, 1), atol=6e-6)
    assert got.rank.tolist() == [(logits[i] > logits[i, t]).sum() + 1 for i, t in enumerate(tokens)]
    assert got.top_ids.dtype == got.rank.dtype == torch.int32


def test_ties_take_the_lowest_ids_and_the_better_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.0]])
    got = token_logprobs(logits, torch.tensor([4]), 5)
    assert got.top_ids.tolist() == [[1, 3, 5, 2, 4]]
    assert got.rank.tolist() == [4]
    assert got.chosen[0] == got.top_values[0, 3] == got.top_values[0, 4]


def test_bits_do_not_depend_on_the_batch() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 4, (12, 3001)).astype(np.float32))
    tokens = torch.arange(12) * 7
    together = token_logprobs(logits, tokens, 6)
    for row in range(12):
        alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], 6)
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[row], part[0])


def test_masked_and_missing_tokens() -> None:
    got = token_logprobs(torch.tensor([[float("-inf"), 0.0, 0.0]]), torch.tensor([0]), 4)
    assert got.chosen.tolist() == [float("-inf")]
    assert got.top_ids.tolist() == [[1, 2, 0, -1]]
    np.testing.assert_allclose(got.top_values[0, :2].numpy(), -np.log(2), rtol=1e-6)
    assert got.top_values[0, 2:].isneginf().all()


def test_certain_token_has_probability_one() -> None:
    got = token_logprobs(torch.tensor([[200.0, -200.0, 0.0]]), torch.tensor([0]), 0)
    assert got.chosen.tolist() == [0.0]
    assert got.top_ids.shape == got.top_values.shape == (1, 0)


def test_unusable_rows_do_not_spoil_others() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    got = token_logprobs(logits, torch.zeros(3, dtype=torch.int64), 2)
    np.testing.assert_allclose(got.chosen[[0, 2]].numpy(), -np.log(4), rtol=1e-6)
    assert got.chosen[1].isnan()


def test_too_many_top_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="top_n is 21"):
        token_logprobs(torch.zeros(1, 30), torch.tensor([0]), 21)
