"""The device side of results: a ring that each step appends to, inside its captured graph or outside.

Knows: how a step's results are packed into int32 words, and that the place of the next append is a counter on the
device. Does not know: how results are computed, or how they get to the host (result_reader.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.execute.device.protocol import Device
from runtime.execute.sampling.logprobs import TokenLogprobs


def result_words(rows: int, width: int, logprobs: int | None) -> int:
    """int32 words of one step: stamp, tokens [B, W], counts [B], finish [B] and, unless None, chosen [B, W],
    rank [B, W], top ids [B, W, n], top values [B, W, n]."""
    words = 1 + rows * (width + 2)
    return words if logprobs is None else words + rows * width * (2 + 2 * logprobs)


class ResultRing:
    """``append`` runs inside the step, captured or not: where to write is a counter on the device.

    buffer_EX int32 [entries, words]; appended_1 int64 [1]: the next append's number, modulo ``stamps``. On CUDA
    step_io.write_back and window_io.settle_window do what ``append`` does.
    """

    def __init__(self, device: Device, *, entries: int, rows: int, width: int, max_logprobs: int = 0) -> None:
        words = result_words(rows, width, max_logprobs)
        self.buffer_EX = device.zeros(entries, words, dtype=torch.int32)
        self.entries = entries
        self.width = width
        self.max_logprobs = max_logprobs
        self.stamps = 2**31 - 2**31 % entries  # appends are numbered modulo this
        self.appended_1 = device.zeros(1, dtype=torch.int64)

    def append(
        self, tokens_BW: Tensor, counts_B: Tensor, finish_B: Tensor, logprobs: TokenLogprobs | None = None
    ) -> None:
        """Write one step's results into the next entry; exactly once a step. Graph-safe.

        Integers of any width; W is at most the ring's width. ``logprobs`` of the B * W tokens, in that order, whatever
        its leading shape. ValueError where a shape does not fit the others.
        """
        self._check_shapes(tokens_BW, counts_B, finish_B, logprobs)
        integers = [self.appended_1, tokens_BW, counts_B, finish_B]
        words = [part.reshape(-1).to(torch.int32) for part in integers]
        if logprobs is not None:
            words += [part.reshape(-1).view(torch.int32) for part in logprobs]
        packed = torch.cat(words).unsqueeze(0)
        self.buffer_EX[:, : packed.shape[1]].index_copy_(0, self.appended_1 % self.entries, packed)
        self.appended_1.add_(1).remainder_(self.stamps)

    def check(self, rows: int, width: int) -> None:
        """ValueError where an entry has no room for so many tokens."""
        if width > self.width:
            raise ValueError(f"results of {rows} rows x {width} tokens; the ring's width is {self.width}")

    def _check_shapes(
        self, tokens_BW: Tensor, counts_B: Tensor, finish_B: Tensor, logprobs: TokenLogprobs | None
    ) -> None:
        (rows, width), shapes = tokens_BW.shape, [tuple(counts_B.shape), tuple(finish_B.shape)]
        self.check(rows, width)
        if shapes != [(rows,)] * 2:
            raise ValueError(f"results of {rows} rows x {width} tokens, {shapes}; the ring's width is {self.width}")
        if logprobs is not None and logprobs.chosen.numel() != rows * width:
            raise ValueError(f"{logprobs.chosen.numel()} log-probabilities for {rows} rows x {width} tokens")

    def undo(self) -> None:
        """Take back the latest append, as after each warm-up of a step. Graph-safe.

        Never hurts a step in flight: the entry after the newest is always free (ResultReader.reserve).
        """
        self.appended_1.add_(self.stamps - 1).remainder_(self.stamps)
