"""The order of CudaDevice's calls, without a GPU: torch.cuda's objects are recorders that know the rules relied on.

Knows: what torch promises of streams, captures and their failures (2.11 to 2.13). Does not know: what a GPU does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from models.cache_layout import CacheLayout
from models.kv_group import keys_and_values
from runtime.execute.cache.sizing import CacheMemoryError, CacheShape, size_cache
from runtime.execute.device.cuda import CudaDevice, CudaStream
from runtime.execute.device.protocol import DeviceError


class FakeStream:
    """One of torch's streams: what was done on it goes to the log."""

    numbers = itertools.count(1)

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.cuda_stream = next(self.numbers)
        self.device_index = 0

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.log.append(("wait", self, other))

    def synchronize(self) -> None:
        self._cuda.log.append(("synchronize", self))


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.captured = False

    def replay(self) -> None:
        assert self.captured
        self._cuda.log.append(("replay", self, self._cuda.current))

    def reset(self) -> None:
        self.captured = False
        self._cuda.log.append(("reset", self))


class FakeCuda:
    """torch.cuda as far as CudaDevice uses it. ``recording``: the pools that the allocator records into."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.default = FakeStream(self)
        self.current = self.default
        self.recording: list[tuple[int, int]] = []
        self.breaks = ""  # what the end of the next capture fails with
        self.modes: list[str] = []
        self._pools = itertools.count(1)

    def pool(self) -> tuple[int, int]:
        return 0, next(self._pools)

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, graph: FakeGraph, *, pool: tuple[int, int], stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        """As torch 2.11: where the capture cannot be ended, neither the stream nor the allocator is put back."""
        assert not self.recording, "the allocator still records an earlier capture"
        before, self.current = self.current, stream
        self.recording.append(pool)
        self.modes.append(capture_error_mode)
        try:
            yield
        finally:
            if self.breaks:
                text, self.breaks = self.breaks, ""
                raise RuntimeError(text)
            self.recording.remove(pool)
            self.current = before
            graph.captured = True

    def end_recording(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name, value in {
        "Stream": lambda device: FakeStream(fake),
        "CUDAGraph": lambda: FakeGraph(fake),
        "graph": fake.graph,
        "graph_pool_handle": fake.pool,
        "stream": fake.stream,
        "set_stream": fake.set_stream,
        "current_stream": lambda device=None: fake.current,
        "default_stream": lambda device=None: fake.default,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: fake.log.append(("synchronize", None)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {
        "_cuda_getCurrentRawStream": lambda index: fake.current.cuda_stream,
        "_cuda_endAllocateToPool": fake.end_recording,
    }.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    return fake


@pytest.fixture
def device(cuda: FakeCuda) -> CudaDevice:
    return CudaDevice(torch.device("cuda", 0))


def compute_of(device: CudaDevice) -> Any:
    """The recorder."""
    stream = device.stream("compute")
    assert isinstance(stream, CudaStream)
    return stream.cuda


def test_a_capture_warms_up_and_replays_on_the_compute_stream_alone(cuda: FakeCuda, device: CudaDevice) -> None:
    """Kernels on another stream would make those of graphs begin later:
    docs/lab/measurements/launch-specs-and-roles.md."""
    ran: list[tuple[str, FakeStream]] = []
    compute = compute_of(device)
    with torch.cuda.stream(torch.cuda.default_stream()):
        graph = device.capture(
            lambda: ran.append(("work", cuda.current)), name="step", warmup=lambda: ran.append(("warm", cuda.current))
        )
        assert cuda.current is cuda.default, "the thread's stream is put back"
    assert ran == [("warm", compute), ("warm", compute), ("work", compute)]
    assert cuda.log == [("synchronize", compute)], "nothing of the warm-up runs any more when the capture begins"
    assert cuda.modes == ["thread_local"], "what other threads do must not break a capture"
    graph.replay()
    assert cuda.log[-1][0] == "replay"
    assert cuda.log[-1][2] is compute
    assert cuda.current is compute


def test_close_takes_every_graph_apart_when_the_device_is_at_rest(cuda: FakeCuda, device: CudaDevice) -> None:
    """NCCL's end of a communicator waits until no graph holds one of its calls."""
    graphs: list[Any] = [device.capture(lambda: None, name=name) for name in ("one", "two")]
    held = [graph._graph for graph in graphs]
    del cuda.log[:]
    device.close()
    assert cuda.log == [("synchronize", None), *(("reset", graph) for graph in held)]
    assert cuda.current is cuda.default
    device.close()
    assert len(cuda.log) == 4, "a graph is taken apart once"


def test_work_that_fails_in_a_capture_is_told_with_what_torch_makes_of_it(cuda: FakeCuda, device: CudaDevice) -> None:
    def work() -> None:
        cuda.breaks = "operation failed due to a previous error during capture"
        raise torch.OutOfMemoryError("out of memory: 64 MiB")

    with pytest.raises(DeviceError) as caught:
        device.capture(work, name="step", warmups=0)
    assert "capturing graph 'step' on cuda:0" in str(caught.value)
    assert "operation failed due to a previous error" in str(caught.value)
    assert "out of memory: 64 MiB" in str(caught.value)


@pytest.mark.parametrize("broken", [True, False], ids=["the capture cannot be ended", "it can"])
def test_after_a_failed_capture_the_next_one_has_a_pool_of_its_own(
    cuda: FakeCuda, device: CudaDevice, broken: bool
) -> None:
    """And the same stream: a capture that broke has left it, as tests/gpu/test_device_gpu.py shows."""
    pools: list[tuple[int, int]] = []
    home = cuda.current

    def work() -> None:
        pools.extend(cuda.recording)
        if broken:
            cuda.breaks = "capture failed"
        raise ArithmeticError("in the work")

    with pytest.raises(DeviceError, match="in the work"):
        device.capture(work, name="bad", warmups=0)
    assert cuda.current is home
    assert not cuda.recording
    device.capture(lambda: pools.extend(cuda.recording), name="good", warmups=0)
    assert len(set(pools)) == len(pools) == 2
    assert device.captures == 1
    assert cuda.current is home


def test_a_warm_up_that_fails_is_named(cuda: FakeCuda, device: CudaDevice) -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(DeviceError, match=r"capturing graph 'step' on cuda:0: out of memory$"):
        device.capture(work, name="step")
    assert not cuda.modes


GIB = 1 << 30


@pytest.mark.parametrize(
    ("outside", "others", "fraction", "left"),
    [
        (1.0, 0.0, 0.9, 0.0),  # one rank
        (2.0, 0.0, 0.9, 0.0),
        (3.5, 0.0, 0.9, 1.5),  # eight ranks, with all their communicators: what is not counted lies above the share
        (1.0, 30.0, 0.5, 1.0),  # others' memory counts for no more than the rest of the 2 GiB
        (6.0, 0.0, 0.98, None),  # more than is free: refused with the numbers
    ],
)
def test_memory_outside_the_allocator_counts_up_to_2_gib(
    monkeypatch: pytest.MonkeyPatch, device: CudaDevice, outside: float, others: float, fraction: float,
    left: float | None,
) -> None:  # fmt: skip
    """``left``: GiB by which the caches and all else of this engine differ from its share of an H200 with 139.8 GiB."""
    total, weights, peak = int(139.8 * GIB), 16 * GIB, 2 * GIB
    free = total - weights - int((outside + others) * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, total))
    for name in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: weights)
    shape = CacheShape(CacheLayout((keys_and_values(1, 128, torch.bfloat16),) * 36), 16, 8)
    limits = {"max_model_len": 4096, "reserve_tokens": 8}
    if left is None:
        with pytest.raises(CacheMemoryError, match="are free: type --num-blocks"):
            size_cache(device.memory_info(), peak, shape, memory_fraction=fraction, **limits)
        return
    sizing = size_cache(device.memory_info(), peak, shape, memory_fraction=fraction, **limits)
    caches = (sizing.num_blocks + 1) * shape.block_bytes
    assert caches + peak <= free
    used = (weights + peak + caches) / GIB + outside
    assert abs(used - fraction * total / GIB) == pytest.approx(left, abs=0.01)
