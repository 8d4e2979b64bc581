"""Tables of grammars in Triton against torch, bit for bit. Without a GPU, as CI does it: ``make interpreted``."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from runtime.execute.sampling import logit_edits
from runtime.execute.sampling import token_tables as reference
from runtime.execute.sampling.draft_tree import lay_out_in_torch
from runtime.execute.sampling.kernels import triton_kernels
from runtime.execute.sampling.logit_edits import LogitEdits, RowEdits
from runtime.execute.sampling.token_tables import TokenTables
from runtime.execute.slots.feature import RowView
from runtime.grammar_tables.token_table import SINK
from runtime.schedule.request import SamplingParams
from tests.runtime.execute.sampling.edit_cases import edits_for

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
    forced = torch.randint(0, vocab + 1, (SLOTS, reference.MOST_FORCED), generator=draw, dtype=torch.int32)
    return TokenTables(pool, rows, forced * (torch.arange(reference.MOST_FORCED) < torch.arange(SLOTS)[:, None])), draw


def moved(tables: TokenTables) -> TokenTables:
    return TokenTables(*(table.to(DEVICE, copy=True) for table in tables))


def edits_of(tables: TokenTables, slots: torch.Tensor, states: torch.Tensor | None, device: str) -> RowEdits:
    """Rows of ``slots``, of which 3 and 7 have other edits too, on a device; ``states`` None: those of the slots."""
    plain, vocab = SamplingParams(), tables.pool_PE.shape[1] - STATES * CLASSES
    named = SamplingParams(
        allowed_token_ids=tuple(range(0, vocab, 3)),
        bad_words_token_ids=((7,), (5, 1)),
        logit_bias=((4, 2.5), (9, -1.0)),
    )
    rows = [named if slot in (3, 7) else plain for slot in range(1, SLOTS)]
    made = edits_for(rows, [[2, 5]] * len(rows), vocab)
    every = made.tables._replace(grammars=tables)
    recent = None if states is None else every.recent_SH[slots]
    own, grammars = (part.to(device, copy=True) for part in every[:-1]), (part.to(device, copy=True) for part in tables)
    recent, states = (None if part is None else part.to(device) for part in (recent, states))
    return RowEdits(LogitEdits._make((*own, TokenTables(*grammars))), slots.to(device), recent, states)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_slots", [True, False])
def test_masks(vocab: int, dtype: torch.dtype, of_slots: bool) -> None:
    """Whole rows and shards, with logits that are unusable; copies, and in place where no row has a bias."""
    tables, draw = tables_of(vocab)
    slots = torch.arange(ROWS) % SLOTS
    states = None if of_slots else torch.randint(2, STATES, (ROWS,), generator=draw, dtype=torch.int32)
    kernels = triton_kernels()
    assert kernels is not None
    for start in (0, vocab // 3):
        logits = torch.randn(ROWS, vocab - start, generator=draw).to(dtype)
        logits[1, 5], logits[2, 3] = float("nan"), float("inf")
        for in_place in (False, True):
            here, there = (edits_of(tables, slots, states, device) for device in ("cpu", DEVICE))
            if in_place:
                for edits in (here, there):
                    edits.tables.sizes_S3[:, logit_edits.BIASES] = 0
            wanted = logit_edits.edit_logits_in_torch(logits, here, start)
            given = logits.to(DEVICE, copy=True)
            got = kernels.edit_logits(given, there, start, in_place=in_place)
            assert (got is given) == in_place
            torch.testing.assert_close(got.float().cpu(), wanted, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(given.cpu().nan_to_num(), logits.nan_to_num()) != in_place
        assert wanted.isneginf().any(1).tolist() == [0 < slot < 8 for slot in slots.tolist()]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("width", [2, 5, 17])
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
@pytest.mark.parametrize("width", [1, 4, 20])
def test_states_and_newest_tokens_after_samples(vocab: int, width: int) -> None:
    tables, draw = tables_of(vocab)
    slots = torch.tensor([3, 0, 1, 8, 0, 6, 2])
    tokens = torch.randint(0, vocab, (len(slots), width + 1), generator=draw)[:, 1:]
    count = torch.tensor([width, 0, 1, 1, 0, width // 2, 0], dtype=torch.int32)
    here, there = (edits_of(tables, slots, None, device).tables for device in ("cpu", DEVICE))
    kernels = triton_kernels()
    assert kernels is not None
    kernels.advance_edits(there, slots.to(DEVICE), tokens.to(DEVICE), count.to(DEVICE))
    logit_edits.advance_in_torch(here, slots, tokens, count)
    assert torch.equal(there.grammars.rows_S4.cpu(), here.grammars.rows_S4)
    assert torch.equal(there.recent_SH.cpu(), here.recent_SH)
    assert not torch.equal(tables.rows_S4, here.grammars.rows_S4)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_of_a_drafters_logits(vocab: int, reduced: bool, dtype: torch.dtype) -> None:
    """Of whole rows and of shards with padding, by draft ids and by those of the target, at the first place and after
    a draft token."""
    tables, draw = tables_of(vocab)
    slots = torch.arange(ROWS) % SLOTS
    states = torch.randint(2, STATES, (ROWS,), generator=draw, dtype=torch.int32)
    tokens = torch.randint(0, vocab, (ROWS, 2), generator=draw)[:, 1]
    has_table = tables.rows_S4[slots, reference.CLASSES] > 0
    ids = torch.randperm(vocab, generator=draw)[: vocab // 2] if reduced else None
    size, there = vocab if ids is None else len(ids), moved(tables)
    kernels = triton_kernels()
    assert kernels is not None
    for start in (0, size // 3):
        logits = torch.randn(ROWS, size - start + 5, generator=draw).to(dtype)  # five columns of padding
        there_ids = None if ids is None else ids.to(DEVICE)
        for before in (None, (states, tokens)):
            wanted, got = logits.clone(), logits.to(DEVICE, copy=True)
            after = reference.bar_in_torch(wanted, tables, slots, before, start, size, ids)
            moved_before = None if before is None else (before[0].to(DEVICE), before[1].to(DEVICE))
            found = kernels.bar(got, there, slots.to(DEVICE), moved_before, start, size, there_ids)
            assert torch.equal(got.cpu(), wanted)
            assert torch.equal(found.cpu()[has_table], after[has_table])
            assert wanted.isneginf().any(1).tolist() == [0 < slot < 7 for slot in slots.tolist()]
