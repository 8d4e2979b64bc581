"""Random programs over three streams give the serial result under every interleaving, as long as events guard them.

A program writes and reads shared cells from several streams. Where two operations touch one cell from two streams, the
later one waits for an event after the earlier one: then order is fixed, whatever runs when. Without those waits the
same explorer finds interleavings with other results, so it can see what it is meant to see.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from runtime.execute.device.cpu_twin import TwinDevice

CELLS = 4
STREAMS = ("compute", "copy", "stage")


@dataclass(frozen=True)
class Operation:
    """cell[target] = 3 * cell[target] + cell[source] + number, on ``stream``: any change of order shows."""

    stream: str
    source: int
    target: int
    number: int


def random_program(draw: random.Random, length: int) -> list[Operation]:
    return [
        Operation(draw.choice(STREAMS), draw.randrange(CELLS), draw.randrange(CELLS), number)
        for number in range(1, length + 1)
    ]


def apply(cells: Tensor, operation: Operation) -> None:
    cells[operation.target] = 3 * cells[operation.target] + cells[operation.source] + operation.number


def serial_result(program: list[Operation]) -> list[int]:
    cells = torch.zeros(CELLS, dtype=torch.int64)
    for operation in program:
        apply(cells, operation)
    return cells.tolist()


def submit(device: TwinDevice, cells: Tensor, program: list[Operation], *, guarded: bool) -> None:
    last_touch = [device.event() for _ in range(CELLS)]  # after the latest operation on each cell
    for operation in program:
        stream = device.stream(operation.stream)
        touched = {operation.source, operation.target}
        if guarded:
            for cell in touched:
                stream.wait(last_touch[cell])
        stream.submit(partial(apply, cells, operation))
        for cell in touched:
            stream.record(last_touch[cell])


def explored_result(program: list[Operation], draw: random.Random, *, guarded: bool) -> list[int]:
    """The result of one random interleaving, chosen operation by operation."""
    with TwinDevice() as device:
        streams = [device.stream(name) for name in STREAMS]
        for stream in streams:
            stream.pause()
        cells = torch.zeros(CELLS, dtype=torch.int64)
        submit(device, cells, program, guarded=guarded)
        moving = True
        while moving:
            draw.shuffle(streams)
            moving = any(stream.advance() for stream in streams)  # the first that can takes one step
        device.synchronize()
        return cells.tolist()


@pytest.mark.parametrize("seed", range(25))
def test_guarded_programs_do_not_depend_on_the_interleaving(seed: int) -> None:
    draw = random.Random(seed)
    program = random_program(draw, 24)
    assert explored_result(program, draw, guarded=True) == serial_result(program)


def test_without_events_the_explorer_finds_other_results() -> None:
    wrong = 0
    for seed in range(25):
        draw = random.Random(seed)
        program = random_program(draw, 24)
        wrong += explored_result(program, draw, guarded=False) != serial_result(program)
    assert wrong >= 20


@pytest.mark.parametrize("seed", range(5))
def test_guarded_programs_do_not_depend_on_jitter(seed: int) -> None:
    program = random_program(random.Random(seed), 40)
    with TwinDevice(jitter_s=0.0005, seed=seed) as device:
        cells = torch.zeros(CELLS, dtype=torch.int64)
        submit(device, cells, program, guarded=True)
        device.synchronize()
        assert cells.tolist() == serial_result(program)
