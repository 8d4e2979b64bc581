"""What a drafter does beside its layers, in Triton against torch: rows laid out, tokens chosen, states kept, scripts.

Without a GPU, as CI does it: ``make interpreted``.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.execute.proposer import Advanced
from runtime.execute.sampling.kernels import triton_kernels as triton_sampling
from runtime.execute.sampling.packed_argmax import pack
from runtime.speculate import draft_rows, guesses, mtp, synthetic
from runtime.speculate.draft_kernels import triton_kernels
from runtime.speculate.draft_rows import (
    DraftRows,
    block_rows,
    block_rows_in_torch,
    chain_rows,
    chain_rows_in_torch,
)
from runtime.speculate.guesses import best_keys, chosen, chosen_in_torch, ranked_in_torch, shortlist_in_torch
from runtime.speculate.mtp import keep_newest, keep_newest_in_torch
from runtime.speculate.synthetic import kept_by_script, kept_in_torch
from tests.gpu.slot_cases import BLOCK_SIZE, Case, random_case, same
from tests.plant import reference_kernels

pytest.importorskip("triton")
norm_kernels = pytest.importorskip("models.kernels.matmul.norm")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    importlib.import_module("tests.models.kernels.interpreted_kernels")  # mends Triton's interpreter for today's numpy
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, with which the interpreter computes
]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels take CPU tensors, which would otherwise be given to torch."""
    if INTERPRETED:
        for module in (draft_rows, guesses, mtp, synthetic):
            monkeypatch.setattr(module, "kernels_for", lambda tensor: triton_kernels())
        monkeypatch.setattr(guesses, "sampling_kernels", lambda tensor: triton_sampling())


def _case(seed: int, rows: int, blocks: int = 12) -> Case:
    """Lengths from 1 to where a block of 33 ends with its row's table; ghosts and padding among the rows."""
    case = random_case(seed, rows, blocks, padding=min(seed, rows))
    lengths = torch.randint(1, blocks * BLOCK_SIZE - 32, (case.tables.slots - 1,), dtype=torch.int32)
    lengths[0], lengths[-1] = 1, blocks * BLOCK_SIZE - 32
    case.tables.columns.length[1:] = lengths.clamp(min=2)
    return case


def _same_rows(found: DraftRows, wanted: DraftRows) -> None:
    for field in fields(DraftRows):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(other, Tensor):
            same(one, other, field.name)
        else:
            assert one == other, field.name


@pytest.mark.parametrize("positions", [60, 10_000])  # of a rotation: some drafts reach past its end
@pytest.mark.parametrize("count", [1, 3, 32])
@pytest.mark.parametrize("rows", [1, 5])
def test_rows_of_chains_and_of_blocks_are_those_of_torch(rows: int, count: int, positions: int) -> None:
    how: dict[str, Any] = {"block_size": BLOCK_SIZE, "positions": positions}
    for seed in range(3):
        case = _case(seed, rows)
        device = case.on(DEVICE)
        there = device.tables, device.rows_B, device.tables.gather(device.rows_B), count
        here = case.tables, case.rows_B, case.tables.gather(case.rows_B), count
        _same_rows(chain_rows(*there, **how), chain_rows_in_torch(*here, **how))
        how_blocks = {**how, "mask_token": 151_669}
        _same_rows(block_rows(*there, **how_blocks), block_rows_in_torch(*here, **how_blocks))


def test_a_table_longer_than_what_a_program_copies() -> None:
    case = _case(1, 3, blocks=1025)
    device = case.on(DEVICE)
    found = chain_rows(
        device.tables, device.rows_B, device.tables.gather(device.rows_B), 3, block_size=BLOCK_SIZE, positions=99
    )
    same(found.page_table_BP, case.tables.gather_blocks(case.rows_B), "pages")


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 40), (5, 5000), (3, 2049)])
def test_the_likeliest_are_those_of_torch(rows: int, vocab: int, dtype: torch.dtype, mapped: bool) -> None:
    """Ties go to the lowest id. A row of -inf, with padding behind the vocabulary, one with NaN, one of zeros."""
    torch.manual_seed(rows)
    logits = torch.randn(rows, vocab).to(dtype)
    logits[:, -8:] = float("-inf")
    logits[0, 5], logits[0, 20] = 9.0, 9.0
    if rows > 2:
        logits[1], logits[2, 7] = float("-inf"), float("nan")
    if rows > 3:
        logits[3, :-8], logits[3, 3] = -0.0, 0.0
    size, start = vocab - 8, 100  # ids of an earlier rank
    ids_V = torch.randperm(start + size) + 7 if mapped else None
    keys = best_keys(logits.to(DEVICE), start)
    found = chosen(keys, None if ids_V is None else ids_V.to(DEVICE), start + size)
    expected = torch.tensor([100 + int(row.float().nan_to_num(nan=99.0).argmax()) for row in logits])
    expected = expected.clamp(max=start + size - 1)
    same(found, expected if ids_V is None else ids_V[expected], "ids")
    same(found, chosen_in_torch(keys.cpu(), ids_V, start + size), "ids of the same keys")


@pytest.mark.parametrize("mapped", [False, True])
def test_an_id_of_padding_becomes_the_last_one(mapped: bool) -> None:
    """As of a rank all of whose ids are padding, where no other has a usable logit."""
    keys = pack(torch.tensor([[float("nan"), 1.0], [float("-inf"), float("-inf")]]), torch.tensor([[72, 3], [71, 70]]))
    ids_V = torch.arange(66) * 2 if mapped else None
    found = chosen(keys.to(DEVICE), None if ids_V is None else ids_V.to(DEVICE), 66)
    assert found.tolist() == [65 * (1 + mapped)] * 2
    same(found, chosen_in_torch(keys, ids_V, 66), "ids")


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "vocab"), [(1, 40), (1, 4100), (2, 2050), (3, 20)])
@pytest.mark.parametrize("count", [1, 8, 33])
def test_candidates_and_their_logprobs_are_those_of_torch(
    count: int, ranks: int, vocab: int, dtype: torch.dtype, mapped: bool
) -> None:
    """Few different scores, so that ids decide what is left out, too; rows with infinities and NaN; fewer ids on a rank
    than are wanted; ids of padding. With several ranks each has a record of its own."""
    torch.manual_seed(count)
    kernels = triton_kernels()
    assert kernels is not None
    logits_RV = torch.randint(-2, 3, (6, ranks * vocab)).to(dtype) * 0.5
    logits_RV[0, 5], logits_RV[1, 3], logits_RV[2, 7] = float("-inf"), float("nan"), float("inf")
    logits_RV[3], logits_RV[4, :] = float("-inf"), -0.0
    logits_RV[4, 11], logits_RV[5, -1] = 0.0, 3.0
    size = ranks * vocab - 3
    ids_V = torch.randperm(size) + 5 if mapped else None
    shares = torch.split(logits_RV, vocab, 1)
    found = [
        kernels.shortlist(share.to(DEVICE), rank * vocab, count, merged=ranks > 1) for rank, share in enumerate(shares)
    ]
    expected = [shortlist_in_torch(share, rank * vocab, count) for rank, share in enumerate(shares)]
    if ranks > 1:
        for one, other in zip(found, expected, strict=True):
            same(one[:, :-1], other[:, :-1], "keys of a rank")
    ids, logprobs = kernels.ranked(torch.cat(found, 1), count, None if ids_V is None else ids_V.to(DEVICE), size)
    wanted_ids, wanted_logprobs = ranked_in_torch(torch.cat(expected, 1), count, ids_V, size)
    same(ids, wanted_ids, "ids")
    torch.testing.assert_close(logprobs.cpu(), wanted_logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)
    whole = logits_RV[4:].float().log_softmax(1).topk(count).values
    torch.testing.assert_close(wanted_logprobs[4:], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 48), (5, 1500)])
def test_states_that_are_kept_are_those_of_torch(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    bank = torch.randn(9, width).to(dtype)
    states = torch.randn(rows * 4, width).to(dtype)
    rows_B = torch.cat((1 + torch.randperm(8)[:rows], torch.zeros(2, dtype=torch.int64)))  # two rows of padding
    last_B = torch.cat((torch.arange(rows) * 4 + torch.arange(rows) % 4, torch.zeros(2, dtype=torch.int64)))
    for gained in (torch.arange(rows) % 2 == 0, torch.zeros(rows, dtype=torch.bool)):
        gained_B = torch.cat((gained, torch.zeros(2, dtype=torch.bool)))
        found = bank.to(DEVICE, copy=True)
        advanced = Advanced(rows_B.to(DEVICE), last_B.to(DEVICE), gained_B.to(DEVICE), 4)
        keep_newest(found, states.to(DEVICE), advanced)
        expected = bank.clone()
        keep_newest_in_torch(expected, states, Advanced(rows_B, last_B, gained_B, 4))
        same(found, expected, "bank")
        assert torch.equal(expected, bank) == (not gained.any())


@pytest.mark.parametrize("rates", [[0.7], [0.9, 0.5, 0.2], [1.0] * 5 + [0.0] * 10])
def test_a_script_keeps_what_it_does_in_torch(rates: list[float]) -> None:
    torch.manual_seed(len(rates))
    records = torch.randint(-(2**62), 2**62, (80, 3))
    seed_B, length_B = records[:, 1], torch.randint(1, 9000, (80, 5), dtype=torch.int32)[:, 2]
    rates_Q = torch.tensor(rates)
    found = kept_by_script(seed_B.to(DEVICE), length_B.to(DEVICE), rates_Q.to(DEVICE))
    expected = kept_in_torch(seed_B, length_B, rates_Q)
    same(found, expected, "kept")
    assert len(set(expected.tolist())) == len({0, *rates} - {1.0}), "every outcome that the rates allow"


@pytest.mark.parametrize("wide", [False, True], ids=["own dtype", "float32 weights"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 48), (5, 1024)])
def test_joined_norms_are_the_norms_side_by_side(rows: int, width: int, dtype: torch.dtype, wide: bool) -> None:
    torch.manual_seed(width)
    x, y = (torch.randn(rows, width, device=DEVICE).to(dtype) for _ in range(2))
    norms = [torch.rand(width, device=DEVICE).add(0.5).to(torch.float32 if wide else dtype) for _ in range(2)]
    found = norm_kernels.joined_norms(x, norms[0], y, norms[1], 1e-6, False)
    halves = [
        norm_kernels.rms_norm(part, None, weight, 1e-6, False) for part, weight in zip((x, y), norms, strict=True)
    ]
    assert torch.equal(found, torch.cat(halves, 1)), "the same bits as one norm after the other"
    expected = reference_kernels().joined_norms(x, norms[0], y, norms[1], 1e-6)
    # In bfloat16 the reference rounds twice, by half a step of 2**-7 each, and the kernel once.
    rtol = 1e-5 if dtype == torch.float32 else 3 * 2**-8
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)
