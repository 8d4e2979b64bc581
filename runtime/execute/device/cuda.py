"""The device protocol on a GPU: torch streams, blocking events, CUDA graphs from one memory pool.

Knows: torch.cuda. Does not know: what is captured or copied, or that a CPU twin exists.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from parallel.comm.quantised import SEPARATE
from runtime.execute.device.protocol import DeviceError, Event, MemoryInfo, Stream, Work

# Bytes outside torch's allocator that are taken to be ours: the context, code, communicators. No driver call says whose
# they are inside a container; an engine alone on a GPU has less, so more belongs to other processes.
_MOST_OUTSIDE = 2 << 30


class CudaEvent:
    """A CUDA event whose ``synchronize`` sleeps (cudaEventBlockingSync) instead of spinning."""

    def __init__(self, *, timing: bool) -> None:
        self.cuda = torch.cuda.Event(enable_timing=timing, blocking=True)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def query(self) -> bool:
        return bool(self.cuda.query())  # type: ignore[no-untyped-call]

    def elapsed_ms(self, end: Event) -> float:
        return float(self.cuda.elapsed_time(_own(end).cuda))


def _own(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise TypeError(f"{type(event).__name__} was not made by a CudaDevice")
    return event


class CudaStream:
    """A torch stream; ``submit`` enqueues from the calling thread. ``home``: the stream bound threads are on."""

    def __init__(self, name: str, device: torch.device, home: CudaStream | None = None) -> None:
        self.name = name
        self.cuda = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._index = self.cuda.device_index
        self._home = home if home is not None else self
        self._raw = int(self.cuda.cuda_stream)

    def submit(self, work: Work) -> None:
        with torch.no_grad():
            self.run(work)

    def run(self, work: Work) -> None:
        """``work`` with this stream current. torch.cuda.stream costs 9 us; from a bound thread this costs 2."""
        home = self._home
        if torch._C._cuda_getCurrentRawStream(self._index) != home._raw:
            with torch.cuda.stream(self.cuda):
                work()
        elif home is self:
            work()
        else:
            torch.cuda.set_stream(self.cuda)
            try:
                work()
            finally:
                torch.cuda.set_stream(home.cuda)

    def record(self, event: Event) -> None:
        _own(event).cuda.record(self.cuda)

    def wait(self, event: Event) -> None:
        self.cuda.wait_event(_own(event).cuda)

    def synchronize(self) -> None:
        self.cuda.synchronize()


class CudaGraph:
    """One captured graph and the stream it is launched on. ``quantising``: its launches that only quantise."""

    def __init__(self, graph: torch.cuda.CUDAGraph, stream: CudaStream, quantising: int) -> None:
        self._graph = graph
        self._stream = stream
        self._quantising = quantising

    def replay(self) -> None:
        SEPARATE.count += self._quantising
        self._stream.run(self._graph.replay)


class CudaDevice:
    """One GPU of this process. Makes it, and its compute stream, the thread's current ones (bind_thread)."""

    def __init__(self, torch_device: torch.device) -> None:
        index = torch_device.index if torch_device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.captures = 0
        self._before = torch.cuda.memory_allocated(self.torch_device)  # a trainer's in this process, say
        self._compute = CudaStream("compute", self.torch_device)
        self._streams = {"compute": self._compute}
        self._copy = self._stream("copy")
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.bind_thread()
        self._graph_pool = torch.cuda.graph_pool_handle()

    def _stream(self, name: str) -> CudaStream:
        if name not in self._streams:
            self._streams[name] = CudaStream(name, self.torch_device, self._compute)
        return self._streams[name]

    @property
    def compute(self) -> Stream:
        return self._compute

    @property
    def copy(self) -> Stream:
        return self._copy

    def stream(self, name: str) -> Stream:
        return self._stream(name)

    def event(self, *, timing: bool = False) -> Event:
        return CudaEvent(timing=timing)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self._compute.cuda):
            return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self._compute.cuda):
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def capture(self, work: Work, *, name: str, warmup: Work | None = None, warmups: int = 2) -> CudaGraph:
        """On the compute stream itself: after kernels of another stream, every kernel of a replay may begin 0.3 us
        later (docs/lab/measurements/launch-specs-and-roles.md)."""
        stream = self._compute.cuda
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.torch_device)
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for _ in range(warmups):
                    (warmup or work)()
            stream.synchronize()
            before = SEPARATE.count
            # thread_local: the landing worker may wait for an event in another thread meanwhile.
            with (
                torch.no_grad(),
                torch.cuda.graph(graph, pool=self._graph_pool, stream=stream, capture_error_mode="thread_local"),
            ):
                work()
        except Exception as error:
            self._give_up_capture(current)
            first = f"; before that: {error.__context__}" if error.__context__ is not None else ""
            raise DeviceError(f"capturing graph {name!r} on {self.torch_device}: {error}{first}") from error
        self._graphs.append(graph)
        self.captures += 1
        quantising, SEPARATE.count = SEPARATE.count - before, before
        return CudaGraph(graph, self._compute, quantising)

    def _give_up_capture(self, current: torch.cuda.Stream) -> None:
        """Where a capture ends in an error, torch leaves its stream current, the pool in the recording state and,
        before 2.12, the allocator too, which then frees nothing any more. The stream itself has left that state."""
        torch.cuda.set_stream(current)
        with suppress(RuntimeError):  # torch has done it, or nothing was being recorded yet
            torch._C._cuda_endAllocateToPool(self.torch_device.index, self._graph_pool)
        self._graph_pool = torch.cuda.graph_pool_handle()

    def allocations(self) -> int:
        return int(torch.cuda.memory_stats(self.torch_device).get("num_device_alloc", 0))

    def memory_info(self) -> MemoryInfo:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        allocated = torch.cuda.memory_allocated(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        outside = min(total - free - reserved, _MOST_OUTSIDE)
        return MemoryInfo(total, free + reserved - allocated, allocated - self._before + outside)

    def release_unused(self) -> None:
        self.synchronize()
        torch.cuda.empty_cache()

    def graph_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        pool = tuple(self._graph_pool)
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == pool)

    def peak_of(self, work: Work) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        self._compute.submit(work)
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def bind_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(self._compute.cuda)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        """Takes the graphs apart, too: a NCCL communicator whose calls one of them holds would never end."""
        self.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        torch.cuda.set_stream(torch.cuda.default_stream(self.torch_device))
