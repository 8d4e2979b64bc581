"""The counter-based noise and the elementary functions under it: exact bits, accuracy, uniformity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from runtime.execute.sampling import exact_math
from runtime.execute.sampling.counter_rng import (
    Purpose,
    gumbel_noise,
    row_keys,
    token_bits,
    uniform_draws,
    uniform_from_bits,
)
from tests.runtime.execute.sampling import sampling_reference as reference

SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF)
POSITIONS = (0, 1, 7, 2**31, 2**40 + 3)


def _ids(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


def _key(seed: int, position: int) -> torch.Tensor:
    return row_keys(torch.tensor([seed]), torch.tensor([position]))


@pytest.mark.parametrize("purpose", list(Purpose))
def test_bits_are_those_of_the_definition(purpose: Purpose) -> None:
    ids = [0, 1, 2, 31999, 151935, 2**31 - 1]
    pairs = [(seed, position) for seed in SEEDS for position in POSITIONS]
    keys = row_keys(torch.tensor([s for s, _ in pairs]), torch.tensor([p for _, p in pairs]), purpose)
    words = token_bits(keys, torch.tensor(ids, dtype=torch.int32)).to(torch.int64) & 0xFFFFFFFF
    for row, (seed, position) in enumerate(pairs):
        key = reference.row_key(seed % 2**64, position, int(purpose))
        assert words[row].tolist() == [reference.token_word(key, token) for token in ids]


def test_columns_of_a_record_table_give_the_same_keys() -> None:
    """The slot tables hand over strided views."""
    table = torch.arange(40, dtype=torch.int64).view(8, 5)
    assert torch.equal(row_keys(table[:, 1], table[:, 3]), row_keys(table[:, 1].contiguous(), table[:, 3].contiguous()))


@pytest.mark.parametrize("field", ["seed", "position", "token"])
def test_one_changed_input_bit_changes_half_of_the_output_bits(field: str) -> None:
    count, width = 400, 16 if field == "token" else 63
    rng = np.random.default_rng(1)
    seed, position = (torch.from_numpy(rng.integers(-(2**63), 2**63, count)) for _ in range(2))
    token = torch.from_numpy(rng.integers(0, 2**16, count))

    def bits(seed: torch.Tensor, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        keys = row_keys(seed, position)
        return torch.stack([token_bits(keys[i : i + 1], token[i : i + 1].int())[0, 0] for i in range(count)])

    inputs = {"seed": seed, "position": position, "token": token}
    base = bits(**inputs)
    for bit in (0, 1, width // 2, width - 1):
        flipped = base ^ bits(**(inputs | {field: inputs[field] ^ (1 << bit)}))
        ones = torch.stack([(flipped >> b) & 1 for b in range(32)]).sum(1)  # by output bit
        assert ((ones - count / 2).abs() < 5 * math.sqrt(count / 4)).all(), (field, bit)


def test_distinct_tokens_of_a_row_get_distinct_words() -> None:
    assert len(set(token_bits(_key(5, 9), _ids(200_000)).flatten().tolist())) == 200_000


def test_uniform_is_uniform_and_open() -> None:
    u = uniform_from_bits(token_bits(_key(3, 4), _ids(1 << 18))).double()
    observed = torch.histc(u, bins=256, min=0.0, max=1.0).long().numpy()
    statistic, degrees = reference.chi_square(observed, np.full(256, u.numel() / 256))
    assert statistic < reference.chi_square_bound(degrees)
    # Neighbouring tokens, positions and seeds are uncorrelated.
    keys = row_keys(torch.arange(300), torch.arange(300) % 7)
    v = uniform_from_bits(token_bits(keys, _ids(300))).double() - 0.5
    for left, right in ((v[1:], v[:-1]), (v[:, 1:], v[:, :-1])):
        assert abs(float((left * right).mean())) < 5 / 12 / math.sqrt(left.numel())


def test_uniform_never_reaches_zero_or_one() -> None:
    u = uniform_from_bits(torch.tensor([0, -(2**31), 2**31 - 1, -1], dtype=torch.int32))
    assert u.tolist() == [2.0**-32, 2.0**-32, 1 - 2.0**-24, 1 - 2.0**-24]


def test_gumbel_matches_float64_and_has_a_fine_upper_tail() -> None:
    noise = gumbel_noise(_key(11, 2), _ids(30_000))[0]
    exact = reference.gumbel(11, 2, 30_000)
    np.testing.assert_allclose(noise.numpy(), exact, atol=1e-4)  # the lower tail, u near 1, is coarser: it never wins
    np.testing.assert_allclose(noise.numpy()[exact > -1], exact[exact > -1], rtol=0, atol=2e-6)
    # The largest of 2**20 values would tie with each other if noise came from u near 1, in steps of 2**-24.
    many = gumbel_noise(_key(0, 0), _ids(1 << 20))[0]
    assert many.isfinite().all()
    assert len(set(many.topk(100).values.tolist())) == 100


def test_gumbel_bits_depend_on_nothing_else() -> None:
    """Not on the length of the vocabulary, the lane a token falls into, or the number of rows."""
    ids, keys = _ids(1003), row_keys(torch.arange(9), torch.arange(9))
    whole = gumbel_noise(keys, ids)
    for start in (0, 1, 3, 500, 1002):
        assert torch.equal(gumbel_noise(keys, ids[start:]), whole[:, start:])
    for row in range(9):
        assert torch.equal(gumbel_noise(keys[row : row + 1], ids)[0], whole[row])
    many = row_keys(torch.arange(9).repeat(40), torch.arange(9).repeat(40))  # enough to be made in several pieces
    assert torch.equal(gumbel_noise(many, ids), whole.repeat(40, 1))


def test_uniform_draws_differ_by_purpose() -> None:
    seed, position = torch.zeros(1000, dtype=torch.int64), torch.arange(1000)
    accept = uniform_draws(seed, position, Purpose.ACCEPT)
    draft = uniform_draws(seed, position, Purpose.DRAFT)
    assert accept.shape == (1000,)
    assert abs(float(accept.mean()) - 0.5) < 0.05
    assert abs(float(((accept - 0.5) * (draft - 0.5)).mean())) < 0.02


def test_logarithms_are_accurate() -> None:
    x = torch.logspace(-9, 8, 200_000, dtype=torch.float64).float()
    assert float((exact_math.log(x).double() - x.double().log()).abs().max()) < 2e-6
    u = torch.cat((torch.logspace(-9, -0.001, 100_000), 1 - torch.logspace(-7, -0.4, 100_000))).clamp(max=1 - 2.0**-24)
    exact = torch.log1p(-u.double())
    assert float(((exact_math.log_one_minus(u).double() - exact) / exact).abs().max()) < 3e-7


def test_weights_are_exact_at_zero_and_accurate_and_monotone() -> None:
    x = -torch.linspace(0, 41, 300_001)
    weights = exact_math.exp_weights(x)
    assert weights[0] == 1 << 44
    assert (weights[1:] <= weights[:-1]).all()
    assert weights[-1] == 0
    near = x > -12
    ratio = weights[near].double() / 2.0**44 / x[near].double().exp()
    assert float((ratio - 1).abs().max()) < 2e-7
    assert exact_math.exp_weights(torch.tensor([float("-inf"), float("nan"), -1e30])).tolist() == [0, 0, 0]
