"""logit_bias, allowed_token_ids and bad_words: tables, history and logits, against plain Python."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.logit_edits import HISTORY, EditFeature, RowEdits, edit_logits, edits_of
from runtime.execute.sampling.sampler import local_share, merge_shares, sample
from runtime.execute.slot_state import SlotTables
from runtime.execute.slots.feature import RowView
from runtime.execute.staging import Staging
from runtime.schedule.request import MAX_BAD_WORD_TOKENS, SamplingParams
from tests.runtime.execute.plans import decode_step, slot_write
from tests.runtime.execute.sampling import sampling_reference as reference
from tests.runtime.execute.sampling.edit_cases import edits_for, random_edits
from tests.runtime.execute.sampling.sampling_cases import processed, random_params, rows_for, seen_for

VOCAB = 61
EDITS = SamplingVariant(edits=True)


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    with TwinDevice() as opened:
        yield opened


def _cases(seed: int, rows: int) -> tuple[torch.Tensor, list[SamplingParams], list[list[int]], RowEdits]:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (rows, VOCAB)).astype(np.float32))
    outputs = [rng.integers(0, 4, rng.integers(0, 25)).tolist() for _ in range(rows)]  # few ids: bad words are met
    params = [random_params(rng, **random_edits(rng, VOCAB, outputs[row])) for row in range(rows)]
    return logits, params, outputs, edits_for(params, outputs, VOCAB)


def test_edits_are_those_of_plain_python() -> None:
    logits, params, outputs, edits = _cases(5, 60)
    got = edit_logits(logits, edits)
    bans = 0
    for row, p in enumerate(params):
        plain = SamplingParams(
            logit_bias=p.logit_bias, allowed_token_ids=p.allowed_token_ids, bad_words_token_ids=p.bad_words_token_ids
        )
        wanted = reference.shape(logits[row].double().numpy(), plain, [], outputs[row])
        np.testing.assert_array_equal(got[row].isneginf().numpy(), np.isneginf(wanted))
        np.testing.assert_allclose(got[row].numpy(), wanted, rtol=1e-6, atol=1e-6)
        bans += sum(len(word) > 1 and bool(np.isneginf(wanted[word[-1]])) for word in p.bad_words_token_ids)
    assert bans > 5, "the cases hold bad words of several tokens that were about to come"


def test_rows_without_edits_keep_their_bits() -> None:
    logits = torch.tensor([[0.1, -0.0, float("-inf"), -3e38, 7.0]] * 2)
    edits = edits_for([SamplingParams(), SamplingParams(logit_bias=((1, 2.0),))], [[1], [1]], 5)
    got = edit_logits(logits, edits)
    assert torch.equal(got[0].view(torch.int32), logits[0].view(torch.int32))
    assert got[1].tolist() == pytest.approx([0.1, 2.0, float("-inf"), -3e38, 7.0])


def test_a_mask_does_not_hide_unusable_logits() -> None:
    params = [SamplingParams(allowed_token_ids=(0,)), SamplingParams(bad_words_token_ids=((1,),))]
    logits = torch.tensor([[0.0, float("nan")], [0.0, float("inf")]])
    rows = processed(rows_for(params, [0, 0]), EDITS, edits=edits_for(params, [[], []], 2))
    draw = sample(logits, rows, EDITS)
    assert draw.ok_B.tolist() == [False, False]


def test_a_row_with_nothing_left_is_not_ok() -> None:
    params = [SamplingParams(allowed_token_ids=(1,), bad_words_token_ids=((1,),)), SamplingParams()]
    edits = edits_for(params, [[], []], 3)
    draw = sample(torch.zeros(2, 3), processed(rows_for(params, [0, 0]), EDITS, edits=edits), EDITS)
    assert draw.ok_B.tolist() == [False, True]


def test_tokens_are_those_of_the_float64_reference() -> None:
    logits, params, outputs, edits = _cases(9, 64)
    features = SamplingVariant.covering(params)
    assert features.edits
    rows = processed(rows_for(params, [len(o) for o in outputs]), features, edits=edits)
    got = sample(logits, rows, features)
    for row, p in enumerate(params):
        shaped = reference.shape(logits[row].double().numpy(), p, [], outputs[row])
        if np.isneginf(shaped).all():
            assert not got.ok_B[row]
        else:
            assert got.token_B[row] == reference.draw(shaped, p, (p.seed or 0) % 2**64, len(outputs[row]))


def test_penalties_see_edited_logits() -> None:
    """As in vLLM: a bias that makes a logit positive makes it one that a repetition penalty divides."""
    p = SamplingParams(temperature=0.0, repetition_penalty=2.0, logit_bias=((0, 5.0),))
    logits = torch.tensor([[-1.0, 2.5, 1.0]])  # id 0: -1 + 5 = 4, then 4 / 2 = 2
    features = SamplingVariant.covering([p])
    rows = processed(rows_for([p], [3]), features, seen_for(3, [[0]], [[]]), edits_for([p], [[]], 3))
    draw = sample(logits, rows, features)
    assert draw.token_B.tolist() == [1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_of_the_vocabulary_draw_the_same(ranks: int) -> None:
    logits, params, outputs, edits = _cases(11, 48)
    params = [SamplingParams(temperature=p.temperature, seed=p.seed) for p in params]  # the edits are in the tables
    rows, features = rows_for(params, [len(o) for o in outputs]), SamplingVariant(random=True, edits=True)
    rows, size = processed(rows, features, edits=edits), -(-VOCAB // ranks)
    shares = [
        local_share(logits[:, begin : begin + size], begin, rows, features, VOCAB) for begin in range(0, VOCAB, size)
    ]
    draw, _ = merge_shares(torch.cat(shares, 1), rows, features)
    wanted = sample(logits, rows, features)
    assert torch.equal(draw.ok_B, wanted.ok_B)
    assert torch.equal(draw.token_B, wanted.token_B)


# ---- tables by slot ----


def _edits(tables: SlotTables) -> EditFeature:
    return next(feature for feature in tables.features if isinstance(feature, EditFeature))


def _now(tables: SlotTables, slots: torch.Tensor) -> RowEdits:
    return edits_of(_edits(tables).need(), RowView(slots, slots[:, None]))


def test_what_a_request_names_is_staged_when_it_is_seated_and_taken_back_from_its_slot(device: TwinDevice) -> None:
    tables = SlotTables(device, max_requests=6, max_blocks=4, vocab_size=VOCAB)
    staging = Staging(device, tables, max_prefill_tokens=8, max_rows=6, entries=4)
    draw, rng, plain = random.Random(3), np.random.default_rng(3), SamplingParams(seed=0)
    held: dict[int, tuple[SamplingParams, list[int]]] = {}
    for step in range(1, 80):
        slots = tuple(draw.sample(range(1, 7), draw.randrange(1, 4)))
        writes = []
        for slot in slots:
            output = rng.integers(0, 4, rng.integers(0, 25)).tolist()  # of one that was evicted, and comes again
            sampling = random_params(rng, **random_edits(rng, VOCAB, output)) if draw.random() < 0.6 else plain
            held[slot] = (sampling, output)
            writes.append(slot_write(slot, (1, 2, *output), prompt_length=2, sampling=sampling))
        staged = staging.stage(decode_step(step, slots, slot_writes=tuple(writes)))
        assert staged is not None
        staging.apply(staged)
        device.synchronize()
        assert _edits(tables).edited == {slot for slot, (sampling, _) in held.items() if sampling.edits_logits}
        known = sorted(held)
        rows = _now(tables, torch.tensor(known))
        logits = torch.from_numpy(rng.normal(0, 3, (len(known), VOCAB)).astype(np.float32))
        wanted = edits_for([held[slot][0] for slot in known], [held[slot][1] for slot in known], VOCAB)
        assert torch.equal(edit_logits(logits, rows), edit_logits(logits, wanted))


def test_requests_that_name_no_tokens_and_steady_steps_stage_nothing_for_it(device: TwinDevice) -> None:
    tables = SlotTables(device, max_requests=4, max_blocks=4, vocab_size=VOCAB)
    staging = Staging(device, tables, max_prefill_tokens=8, max_rows=4, entries=4)
    plain, biased = SamplingParams(seed=0), SamplingParams(seed=0, logit_bias=((3, 1.0),))
    slots, sizes = (1,), []
    for step, sampling in enumerate((plain, plain, biased, plain, plain)):
        before = staging.counters.host_to_device_bytes
        staged = staging.stage(decode_step(2 * step, slots, slot_writes=(slot_write(1, sampling=sampling),)))
        assert staged is not None
        staging.apply(staged)
        device.synchronize()
        sizes.append(staging.counters.host_to_device_bytes - before)
        assert staging.stage(decode_step(2 * step + 1, slots)) is None, "a steady step"
    assert sizes[1] == sizes[4] < sizes[3] < sizes[2]


def _moved_on(tables: SlotTables, slots: Sequence[int], tokens: Sequence[int], gained: Sequence[bool]) -> None:
    count = torch.tensor(gained, dtype=torch.int32)
    _edits(tables).advance(torch.tensor(slots), torch.tensor(tokens)[:, None], count)


def test_the_newest_tokens_move_on_with_rows_that_gain_one(device: TwinDevice) -> None:
    tables = SlotTables(device, max_requests=4, max_blocks=4, vocab_size=VOCAB)
    rng = np.random.default_rng(2)
    outputs: dict[int, list[int]] = {slot: [] for slot in range(5)}
    _edits(tables).need().recent_SH.fill_(-1)
    for _ in range(60):
        slots = rng.permutation(np.arange(1, 5))[:3].tolist()
        tokens, gained = rng.integers(0, VOCAB, 3).tolist(), (rng.random(3) < 0.7).tolist()
        _moved_on(tables, [*slots, 0, 0], [*tokens, 7, 7], [*gained, False, False])  # padding rows: slot 0, twice
        for slot, token, flag in zip(slots, tokens, gained, strict=True):
            outputs[slot] += [token] * flag
        for slot, output in outputs.items():
            newest = output[-HISTORY:]
            assert _edits(tables).need().recent_SH[slot].tolist() == [-1] * (HISTORY - len(newest)) + newest


def test_a_window_sees_what_single_steps_see(device: TwinDevice) -> None:
    tables = SlotTables(device, max_requests=4, max_blocks=4, vocab_size=VOCAB)
    rng = np.random.default_rng(6)
    _edits(tables).need().recent_SH.copy_(torch.from_numpy(rng.integers(0, VOCAB, (5, HISTORY))))
    slots = torch.tensor([3, 1, 0])
    proposals = torch.from_numpy(rng.integers(0, VOCAB, (3, 4)))
    tokens = torch.cat((slots[:, None], proposals), 1)
    window = edits_of(_edits(tables).need(), RowView(slots, tokens, width=5))
    assert window.slots_R.tolist() == [slot for slot in (3, 1, 0) for _ in range(5)]
    for index in range(5):
        assert window.recent_RH is not None
        assert torch.equal(window.recent_RH.view(3, 5, HISTORY)[:, index], _edits(tables).need().recent_SH[slots])
        if index < 4:
            _moved_on(tables, slots.tolist(), proposals[:, index].tolist(), [True] * 3)


def test_a_step_moves_on_by_as_many_tokens_as_a_row_appends(device: TwinDevice) -> None:
    rng = np.random.default_rng(7)
    before = torch.from_numpy(rng.integers(0, VOCAB, (5, HISTORY)))
    slots, count = torch.tensor([3, 1, 4, 0, 0]), torch.tensor([2, 20, 0, 0, 0], dtype=torch.int32)
    tokens = torch.from_numpy(rng.integers(0, VOCAB, (5, 20)))
    tables = SlotTables(device, max_requests=4, max_blocks=4, vocab_size=VOCAB)
    recent_SH = _edits(tables).need().recent_SH
    recent_SH.copy_(before)
    _edits(tables).advance(slots, tokens, count)
    wanted = {int(s): [*before[s].tolist(), *tokens[i, : count[i]].tolist()][-HISTORY:] for i, s in enumerate(slots)}
    assert {slot: recent_SH[slot].tolist() for slot in wanted} == wanted


def test_the_longest_bad_word_needs_all_its_tokens() -> None:
    word = tuple(range(1, MAX_BAD_WORD_TOKENS + 1))
    p = SamplingParams(bad_words_token_ids=(word,))
    outputs = [[9, *word[:-1]], [9, *word[1:-1]], [*word[:-1], 9]]
    got = edit_logits(torch.zeros(3, VOCAB), edits_for([p] * 3, outputs, VOCAB))
    assert got.isneginf().nonzero().tolist() == [[0, word[-1]]]
