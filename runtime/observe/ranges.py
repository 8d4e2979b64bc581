"""NVTX ranges: the phases of a step, named in a profiler's timeline.

Knows: torch.cuda.nvtx, and when it is there. Does not know: which phases there are (engine.py, executor.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Ranges(Protocol):
    """A stack of named ranges, of the calling thread."""

    def push(self, name: str, /) -> object: ...
    def pop(self) -> object: ...


class NvtxRanges:
    """Ranges that Nsight Systems shows; a fraction of a microsecond each without a profiler. Needs CUDA."""

    def __init__(self) -> None:
        from torch.cuda import nvtx

        self.push: Callable[[str], object] = nvtx.range_push
        self.pop: Callable[[], object] = nvtx.range_pop


class Phases:
    """Ranges that follow one another: each phase ends the one before it. None: no phase."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges, self._inside = ranges, False

    def enter(self, name: str | None) -> None:
        if self._inside:
            self._ranges.pop()
        if name is not None:
            self._ranges.push(name)
        self._inside = name is not None


class _Range:
    """One range as a context that can be entered again and again."""

    def __init__(self, ranges: Ranges, name: str) -> None:
        self._ranges = ranges
        self._name = name

    def __enter__(self) -> None:
        self._ranges.push(self._name)

    def __exit__(self, *_: object) -> None:
        self._ranges.pop()


def open_ranges(wanted: bool) -> Ranges | None:
    """None if ranges are off, or where there is no CUDA to make them with."""
    if not wanted:
        return None
    import torch

    return NvtxRanges() if torch.cuda.is_available() else None


def around(ranges: Ranges | None, name: str) -> AbstractContextManager[object]:
    """A reusable context for one phase; nothing without ranges."""
    return nullcontext() if ranges is None else _Range(ranges, name)
