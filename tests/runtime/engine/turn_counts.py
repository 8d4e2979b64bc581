"""What each turn of an engine puts on the CPU twin: graph launches, other work, bytes and copies; what it waits for.

Knows: the twin's streams and graphs, and what staging sends. Does not know: how much of it a step may do
(test_steady_steps.py).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.execute.device.cpu_twin import TwinGraph
from runtime.execute.device.cpu_twin_stream import TwinEvent, TwinStream
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.staging import Staged, Staging
from runtime.schedule.plan import StepOutput
from tests.dispatch_mode import DispatchMode


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. ``launches``: graphs that it replayed. ``beside``: other work on the compute stream. ``sent``: bytes of
    each change that was staged, by its name; ``sent_bytes`` and ``sends``: of all that went to the device. ``home``:
    copies back. ``waits``: for the device, by the thread that launches.
    """

    spec: LaunchSpec | None
    output: StepOutput
    launches: int
    beside: int
    sent: dict[str, int]
    sent_bytes: int
    sends: int
    home: int
    waits: int
    captures: int
    allocations: int


class _Reads(DispatchMode):
    """Counts reads of a tensor's value, for which a GPU's host would wait."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counts["waits"] += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


class Counted:
    """``turn()`` takes one of ``engine``'s and says what it did; only inside ``counted``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.counts: Counter[str] = Counter()
        self.sent: dict[str, int] = {}
        self.spec: LaunchSpec | None = None

    def turn(self) -> Turn:
        self.counts.clear()
        self.sent, self.spec = {}, None
        before = self.engine.counters
        with _Reads(self.counts):
            output = self.engine.step()
        after, counts = self.engine.counters, self.counts
        return Turn(
            self.spec,
            output,
            launches=counts["replays"],
            beside=counts["compute"] - counts["replays"],
            sent=self.sent,
            sent_bytes=int(after["host_to_device_bytes"] - before["host_to_device_bytes"]),
            sends=counts["stage"],
            home=counts["copy"],
            waits=counts["waits"],
            captures=int(after["graph_captures_after_warmup"] - before["graph_captures_after_warmup"]),
            allocations=int(after["device_allocs_after_warmup"] - before["device_allocs_after_warmup"]),
        )


@contextmanager
def counted(engine: Engine) -> Iterator[Counted]:
    """Inside, nothing but ``engine`` may use the twin."""
    found, host = Counted(engine), threading.get_ident()

    def counting(owner: type, name: str, count: Callable[..., str | None]) -> None:
        inner = getattr(owner, name)

        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            what = count(self, *arguments)
            if what is not None and threading.get_ident() == host:  # the thread that lands results waits for them
                found.counts[what] += 1
            return inner(self, *arguments, **named)

        patched.setattr(owner, name, method)

    def launch(self: Executor, spec: LaunchSpec) -> None:
        found.spec = spec
        launches(self, spec)

    def stage(self: Staging, spec: LaunchSpec) -> Staged | None:
        staged = stages(self, spec)
        if staged is not None:
            found.sent = {name: tensor.nbytes for name, tensor in staged.changes.items()}
        return staged

    launches, stages = Executor.launch, Staging.stage
    with pytest.MonkeyPatch.context() as patched:
        counting(TwinGraph, "replay", lambda graph: "replays")
        counting(TwinStream, "submit", lambda stream, work: stream.name)
        counting(TwinStream, "synchronize", lambda stream: "waits")
        counting(TwinEvent, "synchronize", lambda event: "waits")
        patched.setattr(Executor, "launch", launch)
        patched.setattr(Staging, "stage", stage)
        yield found
