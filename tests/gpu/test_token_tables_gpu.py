"""Tables of grammars in Triton against torch, bit for bit. Without a GPU, as CI does it: ``make interpreted``."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from runtime.execute.sampling import token_tables as reference
from runtime.execute.sampling.draft_tree import lay_out_in_torch
from runtime.execute.sampling.kernels import triton_kernels
from runtime.execute.sampling.token_tables import RowTables, TokenTables
from runtime.execute.slots.feature import RowView
from runtime.grammar_tables.token_table import SINK

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    importlib.import_module("tests.models.kernels.interpreted_kernels")  # mends Triton's interpreter for today's numpy
DEVICE = "cpu" if INTERPRETED else "cuda"
VOCABS = (97, 5000) if INTERPRETED else (97, 5000, 151_936)
STATES, CLASSES, SLOTS, ROWS, PLACES = 50, 7, 9, 12, 3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, with which the interpreter computes
]


def tables_of(vocab: int) -> tuple[TokenTables, torch.Generator]:
    """Slots 1 to 6 have one of three tables, the others none."""
    draw = torch.Generator().manual_seed(vocab)
    pool = torch.zeros(PLACES, vocab + STATES * CLASSES, dtype=torch.int16)
    pool[:, :vocab] = torch.randint(0, CLASSES, (PLACES, vocab), generator=draw)
    following = torch.randint(0, STATES, (PLACES, STATES, CLASSES), generator=draw)
    following[:, :, 0] = following[:, :2] = SINK
    pool[:, vocab:] = following.flatten(1)
    rows = torch.zeros(SLOTS, 4, dtype=torch.int32)
    for slot in range(1, 7):
        begin = slot % PLACES * pool.shape[1]
        state = int(torch.randint(2, STATES, (), generator=draw))
        rows[slot] = torch.tensor([begin, begin + vocab, CLASSES, state])
    return TokenTables(pool, rows), draw


def moved(tables: TokenTables) -> TokenTables:
    return TokenTables(*(table.to(DEVICE, copy=True) for table in tables))


@pytest.mark.parametrize("vocab", VOCABS)
def test_masks(vocab: int) -> None:
    """Whole rows and shards, with logits that are unusable."""
    tables, draw = tables_of(vocab)
    slots = torch.arange(ROWS) % SLOTS
    states = tables.rows_S4[:, reference.STATE].index_select(0, slots)
    kernels = triton_kernels()
    assert kernels is not None
    for start in (0, vocab // 3):
        logits = torch.randn(ROWS, vocab - start, generator=draw)
        logits[1, 5], logits[2, 3] = float("nan"), float("inf")
        wanted = reference.mask_in_torch(logits, RowTables(tables, slots, states), start)
        there = RowTables(moved(tables), slots.to(DEVICE), states.to(DEVICE))
        got = kernels.mask_by_tables(logits.to(DEVICE, copy=True), there, start).cpu()
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        assert wanted.isneginf().any(1).tolist() == [0 < slot < 7 for slot in slots.tolist()]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("width", [2, 5, 9])
@pytest.mark.parametrize("tree", [False, True])
def test_states_of_draft_tokens(vocab: int, width: int, tree: bool) -> None:
    tables, draw = tables_of(vocab)
    slots = torch.arange(SLOTS)
    tokens = torch.randint(0, vocab, (SLOTS, width), generator=draw)
    parents = torch.stack([torch.randint(0, node, (SLOTS,), generator=draw) for node in range(1, width)], 1)
    laid = lay_out_in_torch(parents, width) if tree else None
    there = None if laid is None else type(laid)(*(part.to(DEVICE) for part in laid))
    kernels = triton_kernels()
    assert kernels is not None
    wanted = reference.states_in_torch(tables, RowView(slots, tokens, laid, width))
    got = kernels.table_states(moved(tables), RowView(slots.to(DEVICE), tokens.to(DEVICE), there, width))
    assert got.cpu().tolist() == wanted.tolist()


@pytest.mark.parametrize("vocab", VOCABS)
def test_states_after_samples(vocab: int) -> None:
    tables, draw = tables_of(vocab)
    slots = torch.tensor([3, 0, 1, 8, 0, 6, 2])
    tokens = torch.randint(0, vocab, (len(slots), 2), generator=draw)[:, 1]
    gained = torch.tensor([True, False, True, True, False, True, False])
    there = moved(tables)
    kernels = triton_kernels()
    assert kernels is not None
    kernels.advance_tables(there, slots.to(DEVICE), tokens.to(DEVICE), gained.to(DEVICE))
    before = tables.rows_S4.clone()
    reference.advance_in_torch(tables, slots, tokens, gained)
    assert torch.equal(there.rows_S4.cpu(), tables.rows_S4)
    assert not torch.equal(before, tables.rows_S4)
