"""The host stands still for three step times. With depth 4 the device does not notice, and no token changes.

Time is counted in steps, not in seconds: the twin's compute stream is paused, and "one step time" lets it work until it
has finished one step, if it has one to work on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from runtime.engine import Engine
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.plan import Finished
from runtime.schedule.request import Request
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import oracle, people
from tests.runtime.engine.rig import rig
from tests.selection import covering

STALL = 3  # step times
TURNS = 30


@dataclass
class Clockwork:
    """An engine whose device only works while somebody looks. ``idle``: step times in which it had nothing to do."""

    engine: Engine
    device: TwinDevice
    turns: int = 0
    finished: dict[int, Finished] = field(default_factory=dict)

    @property
    def steps_done(self) -> int:
        """By the device's own count of what it appended to the result ring."""
        return int(self.engine.executor._ring.appended_1.item())

    @property
    def steps_queued(self) -> int:
        return self.turns - self.steps_done

    def step_time(self) -> bool:
        """The device works for as long as one step takes; False where it stood idle instead."""
        before, compute = self.steps_done, self.device.compute
        while self.steps_done == before:
            if not compute.advance():
                if not compute._queue.operations:
                    return False
                time.sleep(0.0001)  # its next operation waits for a copy, which nobody holds up
        assert compute.advance(), "the event that tells the copy stream"
        return True

    def turn(self) -> None:
        """The host's part of a step; it waits, while the device works, for the step it must land."""
        while self.steps_done <= self.turns - self.engine.scheduler.config.limits.depth:
            assert self.step_time(), "a wait for a step that was never launched"
        for ended in self.engine.step().finished:
            self.finished[ended.request_id] = ended
        self.turns += 1


def requests() -> list[Request]:
    """One that ends by a stop id early on, others that last."""
    lasting = people(4, length=6, max_tokens=TURNS + 20)
    first = oracle(lasting).finished[0].token_ids
    return [replace(lasting[0], stop_token_ids=(first[9],)), *lasting[1:]]


@contextmanager
def clockwork(depth: int) -> Iterator[Clockwork]:
    device = TwinDevice()
    variants = (SamplingVariant.covering(one.sampling for one in requests()),)  # a capture would wait for the device
    exact: dict[str, Any] = {"kernels": exact_kernels(), "dtype": torch.float64}
    with rig(depth=depth, device=device, block_size=4, variants=variants, **exact) as engine:
        for one in requests():
            engine.add(one)
        device.compute.pause()
        try:
            yield Clockwork(engine, device)
        finally:
            device.compute.resume()


@pytest.mark.parametrize(
    ("at_depth", "stalled_at"),
    covering([(1, 2, 0), (2, 1, 0), (4, 0, 1), (6, 0, 3)], [(8,), (12,), (10, 17, 24)], at_once=1),
    ids=str,
)
def test_a_stall_of_three_step_times(at_depth: tuple[int, int, int], stalled_at: tuple[int, ...]) -> None:
    """Depth 4 leaves a step to work on when the host comes back; 1 and 2 show that a gap would be seen.

    While all rows decode, while a request's last token is in flight, and again and again.
    """
    depth, idle, left = at_depth
    stalls = deque(stalled_at)
    with clockwork(depth) as clock:
        while clock.turns < TURNS:
            clock.turn()
            if stalls and clock.turns == stalls[0]:
                stalls.popleft()
                assert clock.steps_queued == depth, "the host is as far ahead as it may be"
                worked = [clock.step_time() for _ in range(STALL)]
                assert worked.count(False) == idle
                assert clock.steps_queued == left
        clock.device.compute.resume()
        while clock.engine.has_work:
            clock.finished |= {ended.request_id: ended for ended in clock.engine.step().finished}
        counters = clock.engine.counters
    assert clock.finished == oracle(requests()).finished
    assert counters["chain_breaks{start}"] == 1, "by the host's account a stall breaks nothing"
    assert counters["ghost_rows"] == depth
