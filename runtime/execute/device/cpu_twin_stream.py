"""The CPU twin's streams and events: FIFO worker threads and fences.

Knows: order, how to slow, pause and single-step a stream so that tests reach every interleaving, and how a failure in
a worker travels to the threads that call. Does not know: tensors' meaning, memory, graphs (cpu_twin.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from runtime.execute.device.protocol import DeviceError, Event, Work


class _Worker(threading.local):
    """Which stream's worker the current thread is, None for all others."""

    stream: str | None = None


_worker = _Worker()


class TwinFailure:
    """The first failure of any worker, kept until every caller has seen it: each ``check`` raises it."""

    def __init__(self) -> None:
        self.raised = False
        self._first: DeviceError | None = None
        self._lock = threading.Lock()

    @property
    def happened(self) -> bool:
        return self._first is not None

    def keep(self, stream: str, operation: int, error: BaseException) -> None:
        with self._lock:
            if self._first is None:
                self._first = DeviceError(f"stream {stream!r}, operation {operation}: {type(error).__name__}: {error}")
                self._first.__cause__ = error

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self._first is not None:
            self.raised = True
            raise DeviceError(str(self._first)) from self._first.__cause__


class _Fence:
    """One ``record`` of an event: a new object each time, so that re-recording does not disturb earlier waiters."""

    __slots__ = ("done", "time_s")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.time_s = 0.0

    def pass_(self) -> None:
        self.time_s = time.perf_counter()
        self.done.set()


class TwinEvent:
    """Points at the fence of its latest ``record``."""

    def __init__(self, failure: TwinFailure, *, timing: bool) -> None:
        self._failure = failure
        self._timing = timing
        self.fence: _Fence | None = None

    def synchronize(self) -> None:
        fence = self.fence
        if fence is not None:
            fence.done.wait()
        self._failure.check()

    def query(self) -> bool:
        self._failure.check()
        return self.fence is None or self.fence.done.is_set()

    def elapsed_ms(self, end: Event) -> float:
        last = _own(end)
        if not (self._timing and last._timing):
            raise RuntimeError("elapsed_ms needs two events made with timing=True")
        if self.fence is None or last.fence is None or not (self.fence.done.is_set() and last.fence.done.is_set()):
            raise RuntimeError("elapsed_ms needs two events that have happened")
        return (last.fence.time_s - self.fence.time_s) * 1e3


def _own(event: Event) -> TwinEvent:
    if not isinstance(event, TwinEvent):
        raise TypeError(f"{type(event).__name__} was not made by a TwinDevice")
    return event


@dataclass(slots=True)
class _Operation:
    """``work`` to run once ``after`` has passed, then ``fence`` passes. A failed device skips work, never fences."""

    work: Work | None = None
    after: _Fence | None = None
    fence: _Fence | None = None


@dataclass(slots=True)
class _Queue:
    """What the worker and its callers share, all of it guarded by ``changed``."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    operations: deque[_Operation] = field(default_factory=deque)
    submitted: int = 0
    finished: int = 0
    running: bool = False
    paused: bool = False
    permits: int = 0
    closing: bool = False


class TwinStream:
    """A FIFO worker thread. Beyond the protocol: ``slow``, ``pause``, ``resume`` and ``advance`` for tests."""

    def __init__(self, failure: TwinFailure, name: str, jitter: Callable[[], float]) -> None:
        self.name = name
        self._failure = failure
        self._jitter = jitter
        self._delay_s = 0.0
        self._queue = _Queue()
        self._thread = threading.Thread(target=self._work_off, name=f"twin-{name}", daemon=True)
        self._thread.start()

    # ---- the protocol ----

    def submit(self, work: Work) -> None:
        self._append(_Operation(work=work))

    def record(self, event: Event) -> None:
        fence = _Fence()
        self._append(_Operation(fence=fence))
        _own(event).fence = fence

    def wait(self, event: Event) -> None:
        self._append(_Operation(after=_own(event).fence))

    def synchronize(self) -> None:
        queue = self._queue
        with queue.changed:
            target = queue.submitted
            queue.changed.wait_for(lambda: queue.finished >= target)
        self._failure.check()

    # ---- for tests ----

    def slow(self, seconds: float) -> None:
        """Sleep ``seconds`` before every operation from now on."""
        self._delay_s = seconds

    def pause(self) -> None:
        """Start nothing more. Returns once the operation that is running, if any, has ended."""
        queue = self._queue
        with queue.changed:
            queue.paused = True
            queue.changed.wait_for(lambda: not queue.running)

    def resume(self) -> None:
        queue = self._queue
        with queue.changed:
            queue.paused = False
            queue.permits = 0
            queue.changed.notify_all()

    def advance(self) -> bool:
        """On a paused stream: run the next operation to its end.

        False when there is none, or when it waits for an event that has not happened.
        """
        queue = self._queue
        with queue.changed:
            if not queue.paused:
                raise RuntimeError(f"stream {self.name!r} is not paused: call pause() before advance()")
            if not queue.operations:
                return False
            after = queue.operations[0].after
            if after is not None and not after.done.is_set():
                return False
            target = queue.finished + 1
            queue.permits += 1
            queue.changed.notify_all()
            queue.changed.wait_for(lambda: queue.finished >= target)
        return True

    # ---- the worker ----

    def _append(self, operation: _Operation) -> None:
        self._failure.check()
        if _worker.stream is not None:
            raise RuntimeError(
                f"work on stream {_worker.stream!r} submits to {self.name!r}: only hosts submit (protocol.py, rule 2)"
            )
        queue = self._queue
        with queue.changed:
            if queue.closing:
                raise DeviceError(f"stream {self.name!r} is closed")
            queue.operations.append(operation)
            queue.submitted += 1
            queue.changed.notify_all()

    def _next(self) -> _Operation | None:
        """The next operation once it may run, marked as running; None when the stream is closed and empty."""
        queue = self._queue
        while True:
            with queue.changed:
                queue.changed.wait_for(
                    lambda: (queue.operations and (not queue.paused or queue.permits > 0)) or queue.closing
                )
                if not queue.operations:
                    return None
                operation = queue.operations[0]
                if operation.after is None or operation.after.done.is_set():
                    queue.permits -= queue.paused
                    queue.running = True
                    return operation
            operation.after.done.wait()

    def _work_off(self) -> None:
        queue = self._queue
        _worker.stream = self.name
        with torch.inference_mode():  # cheaper than no_grad: no version counters
            while (operation := self._next()) is not None:
                self._run(operation)
                with queue.changed:
                    queue.operations.popleft()
                    queue.finished += 1
                    queue.running = False
                    queue.changed.notify_all()

    def _run(self, operation: _Operation) -> None:
        if not self._failure.happened:
            pause_s = self._delay_s + self._jitter()
            if pause_s > 0:
                time.sleep(pause_s)
            if operation.work is not None:
                try:
                    operation.work()
                except BaseException as error:
                    self._failure.keep(self.name, self._queue.finished, error)
        if operation.fence is not None:
            operation.fence.pass_()

    def stop(self, deadline_s: float) -> bool:
        """Run what was submitted, end the thread; whether it ended within ``deadline_s``."""
        self.resume()
        with self._queue.changed:
            self._queue.closing = True
            self._queue.changed.notify_all()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()
