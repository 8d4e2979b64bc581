"""The filter of a short causal convolution, in front of every recurrent mixer, and what a slot keeps for it.

Knows: which channels of the checkpoint's filter this rank has, and the shape of the window. Does not know: how it is
computed (models/kernels), or the recurrence after it.
Shape letters as in models/ops/contract.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.layers.context import ModelContext
from parallel.layers.shard import ScatteredShard, Shard, ShardedModule


class ConvState(ShardedModule):
    """A depthwise causal convolution of ``taps`` taps; Ops.causal_conv has its arithmetic.

    ``segments``: (first channel, channels) of each run of the checkpoint's ``channels`` that this rank has, in the
    order of its channels. The checkpoint has the filter as [channels, 1, taps].
    """

    def __init__(
        self, channels: int, taps: int, segments: Sequence[tuple[int, int]], context: ModelContext, *,
        bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.channels, self.taps = channels, taps
        self.segments = tuple(segments)
        self.local_channels = sum(count for _, count in self.segments)
        self.weight = context.parameter(self.local_channels, taps)
        self.bias = context.parameter(self.local_channels) if bias else None

    @property
    def window(self) -> tuple[tuple[int, ...], torch.dtype]:
        """What a slot keeps, for SlotState: the latest inputs as they came, [taps, C]; position p is at p mod taps."""
        return (self.taps, self.local_channels), self.weight.dtype

    def shards(self) -> Mapping[str, ScatteredShard]:
        found = {"weight": self._scattered((self.channels, 1, self.taps), self.weight.unsqueeze(1))}
        if self.bias is not None:
            found["bias"] = self._scattered((self.channels,), self.bias)
        return found

    def _scattered(self, full_shape: tuple[int, ...], held: Tensor) -> ScatteredShard:
        pieces, first = [], 0
        for start, count in self.segments:
            ranges = (slice(start, start + count), *(slice(0, size) for size in full_shape[1:]))
            pieces.append(Shard(full_shape, ranges, held[first : first + count]))
            first += count
        return ScatteredShard(tuple(pieces))
