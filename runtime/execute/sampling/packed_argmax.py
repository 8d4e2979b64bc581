"""A (score, token id) pair as one int64 whose order is: higher score first, then lower id.

Knows: the packing. So an argmax with the right tie rule is a plain integer maximum, over lanes, programs or ranks, in
any order, and one number a row is all that a vocabulary-parallel step exchanges.
Does not know: what the score means. NaN is the highest score, so that it is never lost in a reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN_BITS = 0x7FC00000
_ID_MASK = 0xFFFFFFFF
_LAST_ID = 0x7FFFFFFF
NO_CANDIDATE = -(2**63)  # loses against every pair: a rank whose share of the vocabulary is empty


def pack(score: Tensor, ids: Tensor) -> Tensor:
    """float32 scores and int64 ids in [0, 2**31), broadcast together -> int64 keys."""
    bits = torch.where(score.isnan(), _NAN_BITS, (score + 0.0).view(torch.int32))  # + 0.0: -0.0 ties with 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ascending.to(torch.int64) << 32) | (_LAST_ID - ids)


def unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """int64 keys -> (float32 scores, int64 ids)."""
    ascending = (keys >> 32).to(torch.int32)
    bits = ascending ^ ((ascending >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), _LAST_ID - (keys & _ID_MASK)
