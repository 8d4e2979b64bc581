"""Dummy weights: deterministic random values that need no files and do not depend on the tensor-parallel size.

Knows: a hash of (seed, tensor name, full shape, index) that any rank can evaluate for its own piece, on any device.
Does not know: which parameters a model has.

Every value is a function of its index in the full tensor, so that the shards of a dummy model are shards of one model.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_CHUNK = 1 << 24  # values hashed at once: 128 MiB of int64


class DummyTensor:
    """A full tensor that exists only as a rule; index it with slices to make a piece (Sliceable of layers/shard.py).

    Values are uniform with mean ``centre`` and standard deviation 1 / sqrt(last dim), which keeps activations of any
    model size near 1.
    """

    def __init__(
        self, seed: int, name: str, full_shape: tuple[int, ...], centre: float, device: torch.device | str
    ) -> None:
        text = f"{seed}:{name}:{','.join(map(str, full_shape))}"
        self._key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        self._centre = centre
        self._reach = reach(full_shape)
        self._rows = full_shape[:-1]
        self._device = device

    def __getitem__(self, ranges: tuple[slice, ...]) -> Tensor:
        piece = torch.empty([r.stop - r.start for r in ranges], dtype=torch.float32, device=self._device)
        self.fill(piece, ranges)
        return piece

    def fill(self, target: Tensor, ranges: tuple[slice, ...], scale: float = 1.0) -> None:
        """Write the piece at ``ranges``, divided by ``scale``, into ``target``, which has its shape but for dims that
        it cuts in several, in steps that need little memory."""
        if len(ranges) == 1:
            target.copy_(self._values(ranges) / scale)
            return
        first, *rest = ranges
        step = max(1, _CHUNK // max(1, math.prod(r.stop - r.start for r in rest)))
        for start in range(first.start, first.stop, step):
            stop = min(start + step, first.stop)
            part = target[start - first.start : stop - first.start]
            part.copy_((self._values((slice(start, stop), *rest)) / scale).view(part.shape))

    def _values(self, ranges: tuple[slice, ...]) -> Tensor:
        """In the shape of ``ranges``. A row is what the last dim runs over; rows are numbered as if they lay in one
        dim."""
        *leading, columns = ranges
        row: Tensor | None = None
        for size, taken in zip(self._rows, leading, strict=True):
            part = torch.arange(taken.start, taken.stop, dtype=torch.int64, device=self._device)
            row = part if row is None else row.unsqueeze(-1) * size + part
        if row is None:
            row = torch.zeros((), dtype=torch.int64, device=self._device)
        column = torch.arange(columns.start, columns.stop, dtype=torch.int64, device=self._device)
        hashed = _mix(row.unsqueeze_(-1).add_(self._key & _MASK))
        hashed = _mix(hashed + column.add_(self._key >> 32))
        return (hashed >> 8).float().mul_(2 * self._reach * 2.0**-24).add_(self._centre - self._reach)


def reach(full_shape: tuple[int, ...]) -> float:
    """The largest magnitude of a tensor whose mean is 0: the variance of U(-reach, reach) is reach^2 / 3."""
    return math.sqrt(3.0 / full_shape[-1])


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (Wellons' lowbias32) on int64 lanes, in place: a sparse model has 20,000 small tensors, and
    what counts is the number of operators."""
    x &= _MASK
    x ^= x >> 16
    x *= 0x21F0AAAD
    x &= _MASK
    x ^= x >> 15
    x *= 0x735A2D97
    x &= _MASK
    x ^= x >> 15
    return x
