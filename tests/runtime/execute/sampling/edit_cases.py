"""Requests that name tokens, and the device tables of them, made without the code that packs and stages them.

Knows: how SamplingParams and generated tokens become RowEdits. Does not know: slots, expected results.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runtime.execute.sampling.logit_edits import HISTORY, LogitEdits, RowEdits
from runtime.execute.sampling.token_tables import MOST_FORCED, TokenTables
from runtime.schedule.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, SamplingParams
from tests.runtime.execute.sampling.sampling_fields import SamplingFields


def random_edits(rng: np.random.Generator, vocab: int, output: Sequence[int]) -> SamplingFields:
    """Some of each kind; half of the bad words begin as ``output`` ends."""
    fields: SamplingFields = {}
    if rng.random() < 0.6:
        ids = rng.permutation(vocab)[: rng.integers(1, min(vocab, 300) + 1)]
        fields["logit_bias"] = tuple((int(i), float(rng.integers(-800, 801)) / 8) for i in sorted(ids))
    if rng.random() < 0.4:
        fields["allowed_token_ids"] = tuple(sorted(map(int, rng.permutation(vocab)[: rng.integers(1, vocab + 1)])))
    if rng.random() < 0.7:
        words = []
        for _ in range(rng.integers(1, 41)):
            before = [int(i) for i in rng.integers(0, vocab, rng.integers(0, 3))]
            if rng.random() < 0.5:
                before = list(output[len(output) - int(rng.integers(0, min(len(output), 15) + 1)) :])
            words.append((*before, int(rng.integers(0, vocab))))
        fields["bad_words_token_ids"] = tuple(words)
    return fields


def edits_for(
    params: Sequence[SamplingParams], outputs: Sequence[Sequence[int]], vocab: int, device: str = "cpu"
) -> RowEdits:
    """Row i has slot i + 1; what is past the sizes is filled with what would show if it were read."""
    slots = len(params) + 1
    sizes = torch.zeros(slots, 3, dtype=torch.int32)
    bias_ids = torch.zeros(slots, MAX_LOGIT_BIAS, dtype=torch.int32)
    biases = torch.full((slots, MAX_LOGIT_BIAS), 777.0)
    bad = torch.zeros(slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, dtype=torch.int32)
    bad[:, :, :-1] = -1
    words = -(-vocab // 32)
    allowed = torch.zeros(slots, words, dtype=torch.int32)
    recent = torch.full((slots, HISTORY), -1, dtype=torch.int32)
    for slot, (p, output) in enumerate(zip(params, outputs, strict=True), 1):
        sizes[slot] = torch.tensor(
            [len(p.logit_bias), len(p.bad_words_token_ids), int(bool(p.allowed_token_ids))], dtype=torch.int32
        )
        for i, (token, bias) in enumerate(p.logit_bias):
            bias_ids[slot, i], biases[slot, i] = token, bias
        for i, word in enumerate(p.bad_words_token_ids):
            bad[slot, i, MAX_BAD_WORD_TOKENS - len(word) :] = torch.tensor(word, dtype=torch.int32)
        for token in p.allowed_token_ids:
            at, bit = divmod(token, 32)
            allowed[slot, at] |= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
        newest = list(output)[-HISTORY:]
        if newest:
            recent[slot, -len(newest) :] = torch.tensor(newest, dtype=torch.int32)
    rows, forced = torch.zeros(slots, 4, dtype=torch.int32), torch.zeros(slots, MOST_FORCED, dtype=torch.int32)
    none = TokenTables(torch.zeros(1, vocab, dtype=torch.int16), rows, forced)
    own = (part.to(device) for part in (sizes, bias_ids, biases, bad, allowed, recent))
    tables = LogitEdits._make((*own, TokenTables(*(part.to(device) for part in none))))
    return RowEdits(tables, torch.arange(1, slots, device=device))
