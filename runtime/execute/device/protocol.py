"""The device protocol: streams, events, graphs and memory, the same words for a GPU and for its CPU twin.

Knows: the promises everything above relies on: order within a stream, events across streams, graphs replayed in order.
Does not know: CUDA (cuda.py), threads (cpu_twin.py), or what the work is.

The rules, which both implementations keep:

1. Work submitted to one stream runs in the order of submission. Streams run side by side unless an event orders them.
2. ``submit`` may run its work later and on another thread. So work closes over nothing the caller changes afterwards,
   hands results over in buffers that were allocated before, and submits nothing itself.
3. ``wait`` and ``synchronize`` mean the *latest* ``record`` of the event at the time of the call. An event that was
   never recorded has already happened.
4. Work runs without autograd.
5. A failure is raised by the submit that ran the work, or, where it ran later, as a DeviceError by the next call on
   the device, at the latest by ``close``; from then on the device runs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[], object]


class DeviceError(RuntimeError):
    """Work on a stream failed. The message names the stream; the cause is chained."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes. ``free`` counts what the allocator holds unused; ``used`` is what this engine holds: tensors made since
    its device was opened, and what libraries took. Memory of other engines and processes is in neither."""

    total: int
    free: int
    used: int


class Event(Protocol):
    """A point in a stream's order, set by ``Stream.record``."""

    def synchronize(self) -> None:
        """Block this thread (asleep, not spinning) until the event has happened."""
        ...

    def query(self) -> bool:
        """Whether it has happened. Never blocks."""
        ...

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds from this event to ``end``; both made with ``timing=True`` and both have happened."""
        ...


class Stream(Protocol):
    """A queue of device work that runs in order."""

    @property
    def name(self) -> str: ...

    def submit(self, work: Work) -> None:
        """Append ``work``: tensor operations without a host synchronisation. Returns at once; see rule 2."""
        ...

    def record(self, event: Event) -> None:
        """Append "``event`` has happened"."""
        ...

    def wait(self, event: Event) -> None:
        """Append "go on once ``event`` has happened". The caller does not block."""
        ...

    def synchronize(self) -> None:
        """Block until everything appended so far has run. For start-up, shutdown and tests, never in a step."""
        ...


class Graph(Protocol):
    """Work captured once, replayed as one launch."""

    def replay(self) -> None:
        """Append the captured work to the compute stream."""
        ...


class Device(Protocol):
    """One GPU, or its CPU twin. ``compute`` runs the steps, ``copy`` brings to the host what kernels do
    not store there themselves, nothing else does."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def compute(self) -> Stream: ...

    @property
    def copy(self) -> Stream: ...

    @property
    def captures(self) -> int:
        """Graphs captured since the start; must not grow after warm-up."""
        ...

    def stream(self, name: str) -> Stream:
        """The stream of that name, made at the first call."""
        ...

    def event(self, *, timing: bool = False) -> Event: ...

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A device tensor, contents undefined. Ordered with the compute stream."""
        ...

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor: ...

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A host tensor that copies read and write asynchronously (page-locked on a GPU host), zeroed."""
        ...

    def capture(self, work: Work, *, name: str, warmup: Work | None = None, warmups: int = 2) -> Graph:
        """Run ``warmup`` (or ``work`` itself) ``warmups`` times, then capture ``work``, which does not run it.

        Blocks; for start-up and for counted, lazy variants. Warm-ups are real: what they write is written. Buffers
        ``work`` allocates belong to a memory pool that all graphs share, so nothing of them may be read after the
        replay: hand results over in buffers allocated outside. DeviceError naming ``name`` if anything fails.
        """
        ...

    def allocations(self) -> int:
        """Device memory requests that reached the driver (twin: calls of empty and zeros); flat after warm-up."""
        ...

    def memory_info(self) -> MemoryInfo: ...

    def release_unused(self) -> None:
        """Give memory that nothing holds any more back to the driver, where others may ask for it. For start-up."""
        ...

    def graph_bytes(self) -> int:
        """Device memory that graphs keep for themselves: of the one pool they share (twin: 0). For start-up."""
        ...

    def peak_of(self, work: Work) -> int:
        """Run ``work`` on the compute stream and block. The most bytes it held beyond those held before (twin: 0)."""
        ...

    def bind_thread(self) -> None:
        """To be called once by every further thread that uses this device; the one that opened it is bound already.

        A bound thread's tensor operations outside ``submit``, as while weights are loaded, go to the compute stream.
        """
        ...

    def synchronize(self) -> None:
        """Block until every stream is empty. For start-up, shutdown and tests, never in a step."""
        ...

    def close(self) -> None:
        """Finish what was submitted and stop. Raises a failure that no call has raised so far. Idempotent."""
        ...
