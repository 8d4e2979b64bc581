"""What the host side of a chained step costs: chained step time over bare replay of the same graph.

Knows: tables, staging, ring and landing around a graph of matrix products. Does not know: models, the scheduler.
Run on a GPU: python -m tests.bench.device
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from runtime.execute.device.open_device import open_device
from runtime.execute.device.protocol import Device
from runtime.execute.result_reader import ResultReader, StepTiming
from runtime.execute.result_ring import ResultRing
from runtime.execute.slot_state import SlotTables
from runtime.execute.staging import Staging
from tests.runtime.execute.plans import decode_step

ROWS = 256
STEPS = 1000
SLOTS = tuple(range(1, ROWS + 1))


def timed(device: Device, launches: Callable[[], None]) -> float:
    """Microseconds a step of ``launches``, which runs STEPS of them."""
    device.synchronize()
    start = time.perf_counter()
    launches()
    device.synchronize()
    return (time.perf_counter() - start) / STEPS * 1e6


def measure(device: Device, products: int, depth: int, on_timing: Callable[[StepTiming], None] | None) -> str:
    tables = SlotTables(device, max_requests=ROWS, max_blocks=64, vocab_size=151_936, seen_bytes=0)
    staging = Staging(device, tables, max_prefill_tokens=8192, max_rows=ROWS, entries=4)
    ring = ResultRing(device, entries=depth + 2, rows=ROWS, width=1)
    landing = ResultReader(device, ring, on_timing=on_timing)
    matrix = device.zeros(2048, 2048, dtype=torch.bfloat16)
    row_map = staging.row_map("decode", ROWS)
    host_s: list[float] = []

    def work(slots_B: Tensor) -> None:
        product = matrix
        for _ in range(products):
            product = matrix @ product
        columns = tables.gather(slots_B)
        tables.gather_blocks(slots_B)
        live_B = (columns.finished == 0).to(torch.int32)
        token_B = columns.last_token + live_B
        tables.store(slots_B, token_B, columns.length + live_B, columns.finished)
        ring.append(token_B[:, None], live_B, columns.finished)

    def warm_up() -> None:
        work(row_map.new_zeros(ROWS))
        ring.undo()

    graph = device.capture(lambda: work(row_map), name="decode", warmup=warm_up)

    def step(number: int) -> None:
        start = time.perf_counter()
        plan = decode_step(number, SLOTS)
        staged = staging.stage(plan)
        if staged is not None:
            staging.apply(staged)
        ticket = landing.reserve(plan)
        device.compute.record(ticket.start)
        graph.replay()
        device.compute.record(ticket.ready)
        landing.submit(ticket)
        host_s.append(time.perf_counter() - start)
        if number >= depth:
            landing.take(number - depth)

    def chain(first: int, count: int) -> None:
        for number in range(first, first + count):
            step(number)

    def replays() -> None:
        for _ in range(STEPS):
            graph.replay()

    chain(0, 50)
    chained_us = timed(device, lambda: chain(50, STEPS))
    for number in range(50 + STEPS - depth, 50 + STEPS):
        landing.take(number)
    pure_us = timed(device, replays)
    landing.close()
    return (
        f"products {products:3}  timing {'on ' if on_timing else 'off'}  D {depth}: step {chained_us:7.1f} us, replay "
        f"{pure_us:7.1f} us, ratio {chained_us / pure_us:.3f}, host p50 {statistics.median(host_s) * 1e6:.0f} us"
    )


def main() -> None:
    device = open_device("cuda")
    for products in (4, 40):
        for on_timing in (None, lambda timing: None):
            for depth in (0, 1, 2):
                print(measure(device, products, depth, on_timing), flush=True)
    device.close()


if __name__ == "__main__":
    main()
