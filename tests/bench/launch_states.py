"""How soon the kernels of a graph follow each other, before and after something is launched beside it: a table.

Run on one GPU:  python3 -m tests.bench.launch_states            (20 s on an H200; needs sm_90)
A graph of 300 small additions, one behind the other, is replayed on a stream of its own and timed. The GPU has two
states: there the graph takes 280 us or 335, and it stays in one until something else is launched. What is launched, and
on which stream, decides which state follows. Each line is one thing, five times from each state: F fast, S slow; "?"
marks where the state it should begin in could not be had. A second table: after eight plain launches on another stream,
so many dependent ones there, then so many plain ones on the graph's own: the state before and behind these, thrice.

Knows: how to bring about both states. Does not know: what they are. docs/lab/measurements/launch-specs-and-roles.md has
what was found.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from runtime.execute.device.cuda import CudaEvent

KERNELS, REPLAYS, RUNS, TRIES, TIMES = 300, 20, 3, 6, 5
FLOATS = 4096
Act = Callable[[], object]


@triton.jit
def _add_kernel(x_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < size) + 1, mask=at < size)


class States:
    """The graph, its stream ``home``, two streams beside it, and what may be launched there."""

    def __init__(self) -> None:
        device = torch.device("cuda", 0)
        stream: Any = torch.cuda.Stream
        self.home, self.side, self.other = stream(device), stream(device), stream(device)
        torch.cuda.set_stream(self.home)
        self.x, self.scratch = torch.zeros(FLOATS, device=device), torch.zeros(FLOATS, device=device)
        self.large = torch.zeros(1 << 21, device=device)
        self.matrix = torch.zeros(FLOATS, FLOATS, device=device, dtype=torch.bfloat16)
        self.few, self.many = (torch.zeros(n, FLOATS, device=device, dtype=torch.bfloat16) for n in (32, 512))
        self.pinned = torch.zeros(FLOATS, pin_memory=True)
        self.graph = torch.cuda.CUDAGraph()
        self._load()
        with torch.cuda.graph(self.graph, stream=self.home):
            for _ in range(KERNELS):
                self.x.add_(1)
        found = []
        for way in (self.fast, self.slow) * TRIES:
            way()
            found.append(self.us())
        if max(found) < 1.07 * min(found):
            raise SystemExit(f"one state only: a replay takes {min(found):.1f} to {max(found):.1f} us")
        self.limit = (min(found) + max(found)) / 2

    def _load(self) -> None:
        """Every kernel once, on every stream: first launches load code, and allocate."""
        for stream in (self.home, self.side, self.other):
            with torch.cuda.stream(stream):
                for act in self.acts().values():
                    act()
        torch.cuda.synchronize()

    def us(self) -> float:
        """Of a replay, the least of three runs."""
        found = []
        for _ in range(RUNS):
            begin, end = CudaEvent(timing=True), CudaEvent(timing=True)
            self.graph.replay()
            begin.cuda.record()
            for _ in range(REPLAYS):
                self.graph.replay()
            end.cuda.record()
            end.synchronize()
            found.append(begin.elapsed_ms(end) * 1e3 / REPLAYS)
        return min(found)

    def host_us(self) -> float:
        """The host's time for a replay while the GPU is busy with others."""
        torch.cuda.synchronize()
        for _ in range(REPLAYS):
            self.graph.replay()
        began = time.perf_counter()
        for _ in range(REPLAYS):
            self.graph.replay()
        took = time.perf_counter() - began
        torch.cuda.synchronize()
        return took * 1e6 / REPLAYS

    def state(self) -> str:
        return "F" if self.us() < self.limit else "S"

    def dependent(self) -> None:
        """One program with programmatic dependent launch."""
        _add_kernel[(1,)](self.scratch, FLOATS, BLOCK=1024, launch_pdl=True)

    def on(self, stream: Any, act: Act) -> None:
        stream.wait_stream(self.home)
        with torch.cuda.stream(stream):
            act()
        stream.synchronize()

    def fast(self) -> None:
        self.on(self.other, self.dependent)

    def slow(self) -> None:
        self.on(self.other, lambda: self.scratch.add_(1))

    def make(self, way: Act, wanted: str) -> bool:
        for _ in range(TRIES):
            way()
            if self.state() == wanted:
                return True
        return False

    def acts(self) -> dict[str, Act]:
        return {
            "an addition": lambda: self.scratch.add_(1),
            "an addition over all multiprocessors": lambda: self.large.add_(1),
            "a Triton kernel": lambda: _add_kernel[(1,)](self.scratch, FLOATS, BLOCK=1024),
            "the same, a dependent launch": self.dependent,
            "a product of 32 rows": lambda: self.few @ self.matrix,
            "a product of 512 rows": lambda: self.many @ self.matrix,
            "a copy to the device": lambda: self.scratch.copy_(self.pinned, non_blocking=True),
            "a copy to the host": lambda: self.pinned.copy_(self.scratch, non_blocking=True),
        }


def table_of_acts(states: States) -> None:
    streams = {"its own": None, "another": states.side}
    print("| launched | stream | from fast | from slow |\n| --- | --- | --- | --- |")
    for what, act in states.acts().items():
        for where, stream in streams.items():
            seen = []
            for way, wanted in ((states.fast, "F"), (states.slow, "S")):
                marks = ""
                for _ in range(TIMES):
                    began = states.make(way, wanted)
                    act() if stream is None else states.on(stream, act)
                    torch.cuda.synchronize()
                    marks += states.state() if began else f"?{states.state()}"
                seen.append(marks)
            print(f"| {what} | {where} | {seen[0]} | {seen[1]} |", flush=True)


def table_of_sequences(states: States) -> None:
    print("\n| dependent, on another | plain, on its own | before these, behind |\n| ---: | ---: | --- |")
    for dependent, plain in product((1, 2, 3, 8), (1, 5, 50)):
        seen = []
        for _ in range(3):
            for _ in range(8):
                states.slow()
                states.graph.replay()
            for _ in range(dependent):
                states.fast()
                states.graph.replay()
            before = states.state()
            for _ in range(plain):
                states.scratch.add_(1)
                states.graph.replay()
            seen.append(before + states.state())
        print(f"| {dependent} | {plain} | {' '.join(seen)} |", flush=True)


def main() -> None:
    with torch.no_grad():
        states = States()
        print(f"fast: less than {states.limit:.0f} us")
        for way, wanted in ((states.fast, "F"), (states.slow, "S")):
            if states.make(way, wanted):
                print(f"{wanted}: {states.us():.1f} us on the GPU, {states.host_us():.1f} on the host")
        print(flush=True)
        table_of_acts(states)
        table_of_sequences(states)


if __name__ == "__main__":
    main()
