"""A chain of fake decode steps over the real tables, staging, ring and landing: the same program for GPU and twin.

Each step adds 1 to the last token of its rows; every 20 steps rows come and go. Knows: what the host must get back.
Does not know: models, the scheduler, which device it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.execute.device.protocol import Device
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.result_reader import ResultReader, StepTiming
from runtime.execute.result_ring import ResultRing
from runtime.execute.slot_state import SlotTables
from runtime.execute.staging import Staging
from runtime.schedule.plan import SlotWrite
from tests.runtime.execute.plans import decode_step, slot_write

ROWS = 8
SLOTS = 16
NEW_ROWS_EVERY = 20


@dataclass
class ChainProgram:
    """``awaited``: the tokens of each planned step; ``results``: those that landed; ``times``: when each step ran."""

    device: Device
    depth: int
    results: list[list[int]] = field(default_factory=list)
    awaited: list[list[int]] = field(default_factory=list)
    times: list[StepTiming] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tables = SlotTables(self.device, max_requests=SLOTS, max_blocks=4, vocab_size=11)
        self.staging = Staging(self.device, self.tables, max_prefill_tokens=64, max_rows=ROWS, entries=4)
        self.ring = ResultRing(self.device, entries=self.depth + 2, rows=ROWS, width=1)
        self.landing = ResultReader(self.device, self.ring, on_timing=self.times.append)
        row_map = self.staging.row_map("decode", ROWS)

        def warm_up() -> None:
            self._work(row_map.new_zeros(ROWS))
            self.ring.undo()

        self.graph = self.device.capture(lambda: self._work(row_map), name="decode", warmup=warm_up)
        self._last_tokens: dict[int, int] = {}
        self._slots: tuple[int, ...] = ()

    def _work(self, slots_B: Tensor) -> None:
        columns = self.tables.gather(slots_B)
        live_B = (columns.finished == 0).to(torch.int32)
        token_B = columns.last_token + live_B
        self.tables.store(slots_B, token_B, columns.length + live_B, columns.finished)
        self.ring.append(token_B[:, None], live_B, columns.finished)

    def _plan(self, step: int) -> LaunchSpec:
        writes: tuple[SlotWrite, ...] = ()
        if step % NEW_ROWS_EVERY == 0:
            turn = step // NEW_ROWS_EVERY
            self._slots = tuple(1 + (turn + row) % SLOTS for row in range(5 + turn % 3))
            new = [slot for slot in self._slots if slot not in self._last_tokens]
            writes = tuple(slot_write(slot, (1, 1000 * slot)) for slot in new)
            self._last_tokens |= {slot: 1000 * slot for slot in new}
        for slot in self._slots:
            self._last_tokens[slot] += 1
        self.awaited.append([self._last_tokens[slot] for slot in self._slots])
        return decode_step(step, self._slots, bucket=ROWS, slot_writes=writes)

    def run(self, steps: int) -> None:
        """Launch ``steps`` steps, ``depth`` of them ahead of the one that is taken, and take them all."""
        for step in range(steps):
            plan = self._plan(step)
            staged = self.staging.stage(plan)
            if staged is not None:
                self.staging.apply(staged)
            ticket = self.landing.reserve(plan)
            self.device.compute.record(ticket.start)
            self.graph.replay()
            self.device.compute.record(ticket.ready)
            self.landing.submit(ticket)
            if step >= self.depth:
                self._take(step - self.depth)
        for step in range(steps - self.depth, steps):
            self._take(step)

    def _take(self, step: int) -> None:
        self.results.append(list(self.landing.take(step, deadline_s=60).tokens))
