"""Sampling of one row in plain Python and float64: the oracle of the sampler's tests.

Knows: the definitions of runtime/execute/{counter_rng,filters,penalties,sampler}.py, written a second time with big
integers and sorting. Does not know: torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.schedule.request import SamplingParams

Floats = npt.NDArray[np.float64]

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1


def row_key(seed: int, position: int, purpose: int) -> tuple[int, int]:
    """(low, high) 32 bits of a row's key."""
    seeded = _splitmix((seed + 0x9E3779B97F4A7C15) & _MASK64)
    counter = (position * 0xD1342543DE82EF95 + 0xDA942042E4DD58B5 * (purpose + 1)) & _MASK64
    key = _splitmix(seeded ^ counter)
    return key & _MASK32, key >> 32


def token_word(key: tuple[int, int], token: int) -> int:
    """32 random bits of a token."""
    return _lowbias((_lowbias(token ^ key[0]) + key[1]) & _MASK32)


def gumbel(seed: int, position: int, vocab: int, purpose: int = 0) -> Floats:
    key = row_key(seed, position, purpose)
    words = np.array([token_word(key, token) & 0x7FFFFFFF for token in range(vocab)], dtype=np.float64)
    uniform = np.minimum((words + 0.5) * 2.0**-31, 1 - 2.0**-24)
    return np.asarray(-np.log(-np.log1p(-uniform)))


def shape(
    logits: Floats, p: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int] = ()
) -> Floats:
    """Edits, penalties and the min_tokens mask, one token at a time."""
    shaped = logits.astype(np.float64).copy()
    for token in range(len(shaped)):
        if p.allowed_token_ids and token not in p.allowed_token_ids:
            shaped[token] = -math.inf
        shaped[token] += dict(p.logit_bias).get(token, 0.0)
    for *before, last in p.bad_words_token_ids:
        if list(output[len(output) - len(before) :]) == before:
            shaped[last] = -math.inf
    counts = Counter(output)
    for token in range(len(shaped)):
        if token in counts or token in prompt:
            if shaped[token] > 0:
                shaped[token] /= p.repetition_penalty
            else:
                shaped[token] *= p.repetition_penalty
        shaped[token] -= p.frequency_penalty * counts[token]
        shaped[token] -= p.presence_penalty * (counts[token] > 0)
    if len(output) < p.min_tokens:
        for token in stop_ids:
            shaped[token] = -math.inf
    return shaped


def probabilities(shaped: Floats, p: SamplingParams) -> Floats:
    """What a row's draws are distributed as: temperature, top-k, top-p, min-p, renormalised."""
    vocab = len(shaped)
    if p.greedy:
        best = np.zeros(vocab)
        best[int(np.argmax(shaped))] = 1.0
        return best
    weights = np.exp((shaped - shaped.max()) / p.temperature)
    if 0 < p.top_k < vocab:
        weights[weights < np.sort(weights)[-p.top_k]] = 0.0
    if p.top_p < 1.0:
        total = weights.sum()
        more_likely = np.array([weights[weights > w].sum() for w in weights])
        weights = np.where((more_likely < p.top_p * total) | (more_likely == 0), weights, 0.0)
    if p.min_p > 0.0:
        weights[weights < p.min_p * weights.max()] = 0.0
    return np.asarray(weights / weights.sum())


def draw(shaped: Floats, p: SamplingParams, seed: int, position: int) -> int:
    """The token of a row."""
    if p.greedy:
        return int(np.argmax(shaped))
    survives = probabilities(shaped, p) > 0
    noisy = np.where(survives, shaped / p.temperature + gumbel(seed, position, len(shaped)), -math.inf)
    return int(np.argmax(noisy))


def chi_square_bound(degrees: int, deviations: float = 4.5) -> float:
    """A chi-square value exceeded with probability about 3e-6 (Wilson & Hilferty 1931)."""
    part = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - part + deviations * math.sqrt(part)) ** 3


def chi_square(observed: npt.NDArray[np.int64], expected: Floats) -> tuple[float, int]:
    """(statistic, degrees of freedom); cells that expect under 5 draws are put together."""
    rare = expected < 5
    seen = np.append(observed[~rare], observed[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    return float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1


def _splitmix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _lowbias(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK32
    x ^= x >> 15
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)
