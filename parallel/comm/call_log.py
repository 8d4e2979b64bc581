"""Which collectives a rank called, in order: what tells apart the rank that called another one than the others.

Knows: calls by number, name, shape and dtype. Does not know: how a collective is done (collectives.py), what the ranks'
logs are compared for (runtime/watchdog/blame.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class CollectiveError(RuntimeError):
    """A collective of this rank failed: another rank is gone, or called another one. It is not known here which."""


class CallRun(NamedTuple):
    """Calls that were alike, from number ``first`` on."""

    first: int
    call: str


class Calls(NamedTuple):
    """A log at one moment. Only logs of one ``group``, named by its first rank, can be compared."""

    group: int
    made: int
    runs: tuple[CallRun, ...]


class CallLog:
    """A rank's collectives: how many were ``made``, and the last runs of like ones. Written by one thread, read by any.

    ``group`` is the first rank of those that make the same calls. Calls are numbered from 0. A captured graph's are
    logged when it is captured, not when it is replayed.
    """

    RUNS = 24

    def __init__(self, group: int = 0) -> None:
        self.group = group
        self.made = 0
        self._runs: deque[tuple[int, str, tuple[int, ...], torch.dtype]] = deque(maxlen=self.RUNS)

    def note(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        runs = self._runs
        if not runs or runs[-1][2] != shape or runs[-1][1] != name or runs[-1][3] is not dtype:
            runs.append((self.made, name, shape, dtype))
        self.made += 1

    @contextmanager
    def call(self, name: str, x: Tensor, rows: int | None = None) -> Iterator[None]:
        """Around a collective of ``x``: logs it, and raises CollectiveError where it fails.

        ``rows``: to how many it is filled up, where that is what all ranks have alike.
        """
        self.note(name, x.shape if rows is None else (rows, *x.shape[1:]), x.dtype)
        try:
            yield
        except RuntimeError as error:
            text = f"collective {self.made - 1} ({name} {list(x.shape)}) failed: {error}"
            raise CollectiveError(text) from error

    def snapshot(self) -> Calls:
        """How many calls were made, and the runs that the last of them make up, oldest first."""
        made = self.made
        runs = tuple(self._runs)
        told = (
            CallRun(first, f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}")
            for first, name, shape, dtype in runs
            if first < made  # a call that is being noted is not told yet
        )
        return Calls(self.group, made, tuple(told))
