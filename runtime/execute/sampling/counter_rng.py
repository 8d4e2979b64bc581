"""Counter-based randomness (law 7): a draw is a function of (seed, absolute position, purpose, token id), nothing else.

Knows: how a 64-bit seed, a position and a purpose become a row key, how a key and a token id become 32 random bits, and
how those become uniform or Gumbel noise. There is no generator object and no state to save.
Does not know: logits, requests, batches.

Construction. Row key: the 64-bit finalizer of splitmix64 (Steele, Lea & Flood 2014) over the seed, then over the result
mixed with position and purpose. Token bits: two rounds of a 32-bit multiply-xorshift permutation (constants of Wellons'
lowbias32), each entered with one half of the row key; within a row distinct tokens therefore get distinct 32-bit words.
All arithmetic is wrap-around two's complement, so the CPU, CUDA and Triton forms give the same bits.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from runtime.execute.sampling import exact_math

UNIFORM_BITS = 31
UNIFORM_UNIT = 2.0**-UNIFORM_BITS
UNIFORM_MAX = 1.0 - 2.0**-24  # the largest float32 below 1
_CACHE_WORDS = 1 << 17  # on a CPU the forty passes over temporaries of this size stay in its cache

_SPLITMIX_STEP = 0x9E3779B97F4A7C15
_SPLITMIX_A = 0xBF58476D1CE4E5B9
_SPLITMIX_B = 0x94D049BB133111EB
_POSITION_STEP = 0xD1342543DE82EF95
_PURPOSE_STEP = 0xDA942042E4DD58B5
_LOWBIAS_A = 0x7FEB352D
_LOWBIAS_B = 0x846CA68B


class Purpose(IntEnum):
    """What a draw is for. Draws of different purposes at one position are independent. Never renumber."""

    TOKEN = 0  # Gumbel noise of the token at this position
    ACCEPT = 1  # coin of an acceptance test at this position
    DRAFT = 2  # Gumbel noise of a drafted token at this position


def row_keys(seed_B: Tensor, position_B: Tensor, purpose: Purpose = Purpose.TOKEN) -> Tensor:
    """Seed int64, position int32 or int64 -> int32 [B, 2]: the low and high halves of the row key."""
    seeded = _splitmix(seed_B + _signed64(_SPLITMIX_STEP))
    counter = position_B.to(torch.int64) * _signed64(_POSITION_STEP) + _signed64(_PURPOSE_STEP * (int(purpose) + 1))
    return _splitmix(seeded ^ counter).view(torch.int32).view(*seed_B.shape, 2)


def token_bits(keys_B2: Tensor, ids_V: Tensor) -> Tensor:
    """int32 [B, 2] row keys and int32 [V] token ids -> int32 [B, V], 32 random bits each."""
    words = _lowbias(ids_V ^ keys_B2[:, :1])
    return _lowbias(words.add_(keys_B2[:, 1:]))


def uniform_from_bits(bits: Tensor) -> Tensor:
    """int32 words -> float32 in (0, 1), never 0 or 1: (low 31 bits + 1/2) * 2**-31, with 24 significant bits."""
    u = (bits & 0x7FFFFFFF).to(torch.float32)
    return u.add_(0.5).mul_(UNIFORM_UNIT).clamp_(max=UNIFORM_MAX)


def gumbel_noise(keys_B2: Tensor, ids_V: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [B, V] = -log(-log(1 - u)).

    The upper tail decides an argmax over a large vocabulary, so it must not be coarse: it comes from small u, where a
    float32 is finest (u = 2**-32 gives 22.2), instead of from u near 1, where steps of 2**-24 would cap it at 16.6
    and make ties. The lower tail ends at -log(24 log 2) = -2.8. A token rarer than 2**-31 is practically never drawn.
    """
    at_once = _CACHE_WORDS // ids_V.numel() if keys_B2.is_cpu else keys_B2.shape[0]
    parts = [_gumbel(keys_R2, ids_V) for keys_R2 in torch.split(keys_B2, max(1, at_once))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gumbel(keys_B2: Tensor, ids_V: Tensor) -> Tensor:
    exponential = exact_math.log_one_minus(uniform_from_bits(token_bits(keys_B2, ids_V))).neg_()
    return exact_math.log(exponential).neg_()


def uniform_draws(seed_B: Tensor, position_B: Tensor, purpose: Purpose) -> Tensor:
    """One uniform float32 in (0, 1) a row."""
    keys = row_keys(seed_B, position_B, purpose)
    return uniform_from_bits(token_bits(keys, torch.zeros(1, dtype=torch.int32, device=seed_B.device)))[:, 0]


def _splitmix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30, 64)) * _signed64(_SPLITMIX_A)
    z = (z ^ _shift_right(z, 27, 64)) * _signed64(_SPLITMIX_B)
    return z ^ _shift_right(z, 31, 64)


def _lowbias(x: Tensor) -> Tensor:
    """The permutation, in place: ``x`` must be a temporary of the caller."""
    x ^= _shift_right(x, 16, 32)
    x *= _LOWBIAS_A
    x ^= _shift_right(x, 15, 32)
    x *= _LOWBIAS_B - (1 << 32)
    x ^= _shift_right(x, 16, 32)
    return x


def _shift_right(x: Tensor, bits: int, width: int) -> Tensor:
    """Logical right shift of a signed integer tensor."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _signed64(value: int) -> int:
    """The int64 with the same low 64 bits; torch takes no larger scalars."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
