"""The CPU twin of a GPU: a stream is a FIFO worker thread, an event a fence on it, a graph the recorded closure.

Knows: the size of the card it plays, and how its streams are made. Does not know: CUDA, or what the work is.
"""

from __future__ import annotations

import atexit
import random

import torch
from torch import Tensor

from runtime.execute.device.cpu_twin_stream import TwinEvent, TwinFailure, TwinStream
from runtime.execute.device.protocol import Device, DeviceError, MemoryInfo, Work


def open_device(name: str) -> Device:
    """``"cpu"`` gives the twin, ``"cuda"`` or ``"cuda:1"`` that GPU. ValueError for any other kind."""
    wanted = torch.device(name)
    if wanted.type == "cuda":
        from runtime.execute.device.cuda import CudaDevice

        return CudaDevice(wanted)
    if wanted.type == "cpu":
        from runtime.execute.device.cpu_twin import TwinDevice

        return TwinDevice()
    raise ValueError(f"no device layer for {name!r}: use 'cpu' or 'cuda:N'")


class TwinGraph:
    """The closure that was recorded, replayed in the compute stream's order."""

    def __init__(self, work: Work, stream: TwinStream) -> None:
        self._work = work
        self._stream = stream

    def replay(self) -> None:
        self._stream.submit(self._work)


class TwinDevice:
    """The twin. ``memory_bytes`` is the size of the card it plays, so that sizing is the same on every machine.

    ``jitter_s`` > 0 sleeps a random time up to that before every operation, drawn from ``seed`` and the stream's name.
    """

    def __init__(self, *, memory_bytes: int = 1 << 30, jitter_s: float = 0.0, seed: int = 0) -> None:
        self.torch_device = torch.device("cpu")
        self.captures = 0
        self._memory_bytes = memory_bytes
        self._allocated = 0
        self._allocations = 0
        self._jitter_s = jitter_s
        self._seed = seed
        self._failure = TwinFailure()
        self._streams: dict[str, TwinStream] = {}
        self.compute = self.stream("compute")
        self.copy = self.stream("copy")
        atexit.register(self._abandon)

    def __enter__(self) -> TwinDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the protocol ----

    def stream(self, name: str) -> TwinStream:
        if name not in self._streams:
            draw = random.Random(f"{self._seed}/{name}")
            self._streams[name] = TwinStream(self._failure, name, lambda: draw.random() * self._jitter_s)
        return self._streams[name]

    def event(self, *, timing: bool = False) -> TwinEvent:
        return TwinEvent(self._failure, timing=timing)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).fill_(0xFF)  # NaN or -1: reading it before writing it shows
        return self._count(tensor)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self._count(torch.zeros(shape, dtype=dtype))

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def capture(self, work: Work, *, name: str, warmup: Work | None = None, warmups: int = 2) -> TwinGraph:
        try:
            for _ in range(warmups):
                self.compute.submit(warmup or work)
            self.compute.synchronize()
        except DeviceError as error:
            raise DeviceError(f"capturing graph {name!r} on the CPU twin: {error}") from error
        self.captures += 1
        return TwinGraph(work, self.compute)

    def allocations(self) -> int:
        return self._allocations

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._memory_bytes, self._memory_bytes - self._allocated, self._allocated)

    def release_unused(self) -> None:
        """Nothing is kept."""

    def graph_bytes(self) -> int:
        return 0

    def peak_of(self, work: Work) -> int:
        self.compute.submit(work)
        self.compute.synchronize()
        return 0

    def bind_thread(self) -> None:
        """Threads need no binding here."""

    def synchronize(self) -> None:
        for stream in list(self._streams.values()):
            stream.synchronize()

    def close(self, deadline_s: float = 30.0) -> None:
        atexit.unregister(self._abandon)
        self._stop(deadline_s)
        if not self._failure.raised:
            self._failure.check()

    def _stop(self, deadline_s: float) -> None:
        streams = list(self._streams.values())
        for stream in streams:  # all of them first: one may wait for an event of another
            stream.resume()
        stuck = [stream.name for stream in streams if not stream.stop(deadline_s)]
        if stuck:
            raise DeviceError(f"streams still busy {deadline_s:g} s after close: {', '.join(stuck)}")

    def _abandon(self) -> None:
        """The process ends without a close: a thread torn down inside a tensor operation would abort it."""
        self._failure.keep("any", 0, RuntimeError("the process is ending"))
        self._stop(deadline_s=5.0)

    def _count(self, tensor: Tensor) -> Tensor:
        self._allocations += 1
        self._allocated += tensor.numel() * tensor.element_size()
        return tensor
