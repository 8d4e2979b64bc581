"""Staging, slot tables, graph, ring and landing together on the twin: any depth and any delay give the same tokens."""

from __future__ import annotations

import pytest

from runtime.execute.device.cpu_twin import TwinDevice
from tests.runtime.execute.device.chain_program import NEW_ROWS_EVERY, ChainProgram


def check(program: ChainProgram, steps: int) -> None:
    assert program.results == program.awaited
    assert program.staging.counters.copies == steps // NEW_ROWS_EVERY
    assert [time.step for time in program.times] == list(range(steps))


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_chain_of_any_depth(depth: int) -> None:
    with TwinDevice() as device:
        program = ChainProgram(device, depth)
        allocations = device.allocations()
        program.run(200)
        program.landing.close()
        check(program, 200)
        assert device.allocations() == allocations
        assert device.captures == 1


@pytest.mark.parametrize("slow", ["compute", "copy", "stage"])
def test_a_chain_with_one_slow_stream(slow: str) -> None:
    with TwinDevice() as device:
        program = ChainProgram(device, 2)
        device.stream(slow).slow(0.0005)
        program.run(60)
        program.landing.close()
        check(program, 60)


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_under_jitter(seed: int) -> None:
    with TwinDevice(jitter_s=0.0003, seed=seed) as device:
        program = ChainProgram(device, 1 + seed % 3)
        program.run(60)
        program.landing.close()
        check(program, 60)
