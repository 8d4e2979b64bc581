"""Token counts by slot, the penalties and the stop-id mask, against plain Python."""

from __future__ import annotations

import numpy as np
import torch

from runtime.execute.sampling.draft_tree import lay_out
from runtime.execute.sampling.penalties import (
    SeenTokens,
    apply_penalties,
    count_tokens_,
    load_tokens_,
    mask_stop_ids,
    reset_slots_,
    seen_before,
)
from runtime.execute.slots.feature import RowView
from runtime.schedule.request import SamplingParams
from tests.runtime.execute.sampling import sampling_reference as reference
from tests.runtime.execute.sampling.sampling_cases import rows_for, seen_for

NEUTRAL = SamplingParams()


def _tables(slots: int, vocab: int) -> SeenTokens:
    return SeenTokens(torch.zeros(slots, vocab, dtype=torch.int16), torch.zeros(slots, vocab, dtype=torch.bool))


def _load(tables: SeenTokens, slot: int, prompt: list[int], output: list[int]) -> None:
    tokens = [*prompt, *output]
    in_prompt = torch.arange(len(tokens)) < len(prompt)
    load_tokens_(tables, torch.full((len(tokens),), slot), torch.tensor(tokens), in_prompt)


def test_penalties_are_those_of_plain_python() -> None:
    rng = np.random.default_rng(3)
    vocab, count = 61, 40
    logits = rng.normal(0, 4, (count, vocab)).astype(np.float32)
    prompts = [rng.integers(0, vocab, rng.integers(0, 30)).tolist() for _ in range(count)]
    outputs = [rng.integers(0, vocab, rng.integers(0, 90)).tolist() for _ in range(count)]
    params = [
        SamplingParams(
            repetition_penalty=float(rng.choice([1.0, 0.5, 1.25, 2.0])),
            presence_penalty=float(rng.choice([0.0, -1.5, 0.5])),
            frequency_penalty=float(rng.choice([0.0, -0.25, 0.75])),
        )
        for _ in range(count)
    ]
    got = apply_penalties(torch.from_numpy(logits), seen_for(vocab, prompts, outputs), rows_for(params, [0] * count))
    for row in range(count):
        wanted = reference.shape(logits[row].astype(np.float64), params[row], prompts[row], outputs[row])
        np.testing.assert_allclose(got[row].numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_neutral_rows_keep_their_bits() -> None:
    logits = torch.tensor([[0.1, -0.0, float("-inf"), -3e38, 7.0]])
    seen = seen_for(5, [[0, 1, 2]], [[2, 3, 3, 4]])
    got = apply_penalties(logits, seen, rows_for([NEUTRAL], [0]))
    assert torch.equal(got.view(torch.int32), logits.view(torch.int32))


def test_tables_follow_slots_through_reuse() -> None:
    rng = np.random.default_rng(7)
    vocab, slots = 17, 5
    tables = _tables(slots, vocab)
    prompts: dict[int, list[int]] = {s: [] for s in range(1, slots)}
    outputs: dict[int, list[int]] = {s: [] for s in range(1, slots)}
    for _ in range(60):
        if rng.random() < 0.3:  # a slot changes hands; the newcomer may already have output (it was evicted)
            slot = int(rng.integers(1, slots))
            prompts[slot] = rng.integers(0, vocab, 6).tolist()
            outputs[slot] = rng.integers(0, vocab, rng.integers(0, 5)).tolist()
            reset_slots_(tables, torch.tensor([slot, 0]))
            _load(tables, slot, prompts[slot], outputs[slot])
        chosen = rng.permutation(np.arange(1, slots))[: rng.integers(1, slots)].tolist()
        live = [bool(rng.random() < 0.8) for _ in chosen]
        tokens = rng.integers(0, vocab, len(chosen)).tolist()
        count_tokens_(  # padding rows: slot 0, twice
            tables,
            torch.tensor([*chosen, 0, 0]),
            torch.tensor([*tokens, 3, 3]),
            torch.tensor([*live, False, False]),
        )
        for slot, token, flag in zip(chosen, tokens, live, strict=True):
            outputs[slot] += [token] * flag
        expected = seen_for(vocab, list(prompts.values()), list(outputs.values()))
        assert torch.equal(tables.counts[1:], expected.counts)
        assert torch.equal(tables.prompt[1:], expected.prompt)


def test_counts_stop_at_the_largest_int16() -> None:
    tables = _tables(2, 3)
    tables.counts[1, 2] = 32766
    for _ in range(3):
        count_tokens_(tables, torch.tensor([1]), torch.tensor([2]), torch.tensor([True]))
    assert tables.counts[1].tolist() == [0, 0, 32767]


def test_counts_within_windows_and_trees_stop_there_too() -> None:
    seen = SeenTokens(torch.tensor([[0, 32766, 32767]], dtype=torch.int16), torch.zeros(1, 3, dtype=torch.bool))
    slots, tokens = torch.tensor([1]), torch.tensor([[0, 1, 2, 1]])
    chain = seen_before(seen, RowView(slots, tokens, width=4))
    assert chain.counts.tolist() == [[0, 32766, 32767], [0, 32767, 32767], [0, 32767, 32767], [0, 32767, 32767]]
    tree = seen_before(seen, RowView(slots, tokens, lay_out(torch.tensor([[0, 0, 1]]), 2), width=3))
    assert tree.counts.tolist() == [[0, 32766, 32767], [0, 32767, 32767], [0, 32766, 32767], [0, 32767, 32767]]


def test_stop_ids_are_masked_until_min_tokens() -> None:
    params = [SamplingParams(min_tokens=3)] * 3
    rows = rows_for(params, [12, 13, 12], prompt_lengths=[10] * 3, stop_ids=[[0, 5, 5], [0, 5], []])
    masked = mask_stop_ids(torch.zeros(3, 6), rows)
    assert masked.isneginf().nonzero().tolist() == [[0, 0], [0, 5]]
    share = mask_stop_ids(torch.zeros(3, 2), rows, vocab_start=4)
    assert share.isneginf().nonzero().tolist() == [[0, 1]]
    assert masked[1:].eq(0).all()


def test_the_mask_does_not_hide_unusable_logits() -> None:
    rows = rows_for([SamplingParams(min_tokens=3)] * 2, [0, 0], stop_ids=[[1], [1]])
    masked = mask_stop_ids(torch.tensor([[0.0, float("nan")], [0.0, float("inf")]]), rows)
    assert masked[:, 1].isnan().all()
