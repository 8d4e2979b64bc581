"""The device side of results: a ring that each step appends to, inside its captured graph or outside.

Knows: how a step's results are packed into int32 words, and that the place of the next append is a counter on the
device. Does not know: how results are computed, or how they get to the host (result_reader.py).

There are two buffers of the same shape. What torch packs lies on the device and is copied home. Kernels that write a
step's end store its few words into pinned memory themselves, where the host reads them: no copy, and no stream for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.execute.device.protocol import Device

NO_APPEND = -1  # the stamp of an entry whose step has not appended yet


class ResultShape(NamedTuple):
    """Of one step's results: B ``rows`` of W tokens (``width``), and int32 words ``reported`` with each token."""

    rows: int
    width: int
    reported: int = 0

    def __str__(self) -> str:
        return f"{self.rows} rows x {self.width} tokens, {self.reported} words reported with each"

    @property
    def words(self) -> int:
        """int32: stamp, tokens [B, W], counts [B], finish [B], then what features report, one after the other [B, W,
        ...]: chosen [B, W], rank [B, W], top ids [B, W, n], top values [B, W, n] with log-probabilities."""
        return 1 + self.rows * (self.width + 2) + self.rows * self.width * self.reported


class ResultRing:
    """``append`` runs inside the step, captured or not: where to write is a counter on the device.

    buffer_EX int32 [entries, words] on the device; host_EX: as large, pinned; appended_1 int64 [1]: the next append's
    number, modulo ``stamps``. On CUDA step/commit.py does what ``append`` does if nothing is ``reported``, and stores
    into ``stored_EX``: with ``direct`` host_EX, else buffer_EX. ``latest``: the shape of what was checked
    last, None where it was undone; replays of a captured step check nothing.
    """

    def __init__(
        self, device: Device, *, entries: int, rows: int, width: int, reported: int = 0, direct: bool = False
    ) -> None:
        self.room = ResultShape(rows, width, reported)  # of an entry
        self.latest: ResultShape | None = None
        self.buffer_EX = device.zeros(entries, self.room.words, dtype=torch.int32)
        self.host_EX = device.pinned(entries, self.room.words, dtype=torch.int32)
        self.direct = direct
        self.stored_EX = self.host_EX if direct else self.buffer_EX
        self.entries = entries
        self.width = width
        self.stamps = 2**31 - 2**31 % entries  # appends are numbered modulo this
        self.appended_1 = device.zeros(1, dtype=torch.int64)

    def append(self, tokens_BW: Tensor, counts_B: Tensor, finish_B: Tensor, reported: Sequence[Tensor] = ()) -> None:
        """Write one step's results into the next entry; exactly once a step. Graph-safe.

        Integers of any width. ``reported`` of the B * W tokens, in that order, whatever the leading shape; dtypes of 4
        bytes. ValueError where a shape does not fit the others, or an entry.
        """
        if tokens_BW.dim() != 2:
            raise ValueError(f"results of tokens {list(tokens_BW.shape)}; they are to be [B, W]")
        rows, width = tokens_BW.shape
        check_shapes(f"{rows} rows x {width} tokens", {"counts": (counts_B, (rows,)), "finish": (finish_B, (rows,))})
        self.check(rows, width, reported)
        integers = [self.appended_1, tokens_BW, counts_B, finish_B]
        words = [part.reshape(-1).to(torch.int32) for part in integers]
        words += [part.reshape(-1).view(torch.int32) for part in reported]
        packed = torch.cat(words).unsqueeze(0)
        self.buffer_EX[:, : packed.shape[1]].index_copy_(0, self.appended_1 % self.entries, packed)
        self.appended_1.add_(1).remainder_(self.stamps)

    def check(self, rows: int, width: int, reported: Sequence[Tensor] = ()) -> None:
        """To be called before each append. ValueError where an entry has no room for such results, or ``reported`` is
        of another number of tokens."""
        tokens, sizes = rows * width, [part.numel() for part in reported]
        if any(size % tokens for size in sizes):
            raise ValueError(f"{sizes} words reported with {tokens} tokens: each size must be a multiple")
        shape = ResultShape(rows, width, sum(sizes) // tokens)
        self.check_room(shape)
        self.latest = shape

    def is_home(self, shape: ResultShape) -> bool:
        """Whether results of that shape are in ``host_EX`` when their step has run, without a copy."""
        return self.direct and not shape.reported

    def check_room(self, shape: ResultShape) -> None:
        """ValueError where an entry is smaller, in any dimension."""
        room = self.room
        if any(wanted > there for wanted, there in zip(shape, room, strict=True)):
            raise ValueError(f"results of {shape}; an entry of the ring has room for {room}")

    def check_latest(self, expected: ResultShape) -> None:
        """ValueError where the latest results have another shape than the one they will be read with."""
        if self.latest != expected:
            raise ValueError(f"results of {self.latest or 'no shape'}; they are to be read as {expected}")

    def undo(self) -> None:
        """Take back the latest append, as after each warm-up of a step. Graph-safe.

        Never hurts a step in flight: the entry after the newest is always free (ResultReader.reserve). Its stamp is
        the one that the next step's will be, so it goes, too: on the device here, at home when a step reserves it. A
        capture after that, while the step is being launched, leaves it at home.
        """
        self.appended_1.add_(self.stamps - 1).remainder_(self.stamps)
        self.buffer_EX[:, 0].index_fill_(0, self.appended_1 % self.entries, NO_APPEND)
        self.latest = None

    def start_over(self) -> None:
        """Count appends from 0 again, whatever was counted, and forget all stamps. While no step is in flight."""
        self.appended_1.zero_()
        self.buffer_EX[:, 0].fill_(NO_APPEND)
        self.latest = None


def check_shapes(of: str, parts: Mapping[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """ValueError that names those of ``parts`` whose shape is not the given one; None fits any."""
    wrong = [
        f"{name} {list(part.shape)} instead of {list(shape)}"
        for name, (part, shape) in parts.items()
        if part is not None and part.shape != shape
    ]
    if wrong:
        raise ValueError(f"results of {of} with {', '.join(wrong)}")
