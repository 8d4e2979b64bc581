"""A log of the collectives a rank called, in order: comparing logs finds the rank that called another collective.

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
    """A collective of this rank failed: a peer is gone, or called another collective. This rank cannot know which."""


class CallRun(NamedTuple):
    """A run of equal calls that starts with call number ``first``."""

    first: int
    call: str


class Calls(NamedTuple):
    """A snapshot of a log: how many calls were ``made``, and the last ``runs`` of equal calls, oldest first.

    Only logs of the same ``group``, named by its first rank, can be compared.
    """

    group: int
    made: int
    runs: tuple[CallRun, ...]


class CallLog:
    """A rank's collectives: how many were ``made``, and the last runs of equal ones. One thread writes, any may read.

    ``group`` is the first of the ranks that make the same calls. Calls are numbered from 0. The calls of a captured
    graph are logged at capture, not at replay.
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
        """Wraps a collective of ``x``: logs it, and raises CollectiveError where it fails.

        ``rows``: the padded number of rows, where ranks bring different numbers and pad them to the same.
        """
        self.note(name, x.shape if rows is None else (rows, *x.shape[1:]), x.dtype)
        try:
            yield
        except RuntimeError as error:
            text = f"collective {self.made - 1} ({name} {list(x.shape)}) failed: {error}"
            raise CollectiveError(text) from error

    def snapshot(self) -> Calls:
        """The log as it stands now; safe to call from another thread."""
        made = self.made
        runs = tuple(self._runs)
        shown = (
            CallRun(first, f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}")
            for first, name, shape, dtype in runs
            if first < made  # leave out a call that is being logged at this moment
        )
        return Calls(self.group, made, tuple(shown))
