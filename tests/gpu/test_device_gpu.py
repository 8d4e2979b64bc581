"""The device protocol on a GPU: the twin's promises, kept by CUDA, with no hidden synchronisation in a step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from runtime.execute.device.cuda import CudaDevice, CudaStream
from runtime.execute.device.protocol import DeviceError, Graph
from runtime.execute.slot_state import SlotTables
from runtime.execute.staging import Staging
from runtime.schedule.plan import Chunk
from runtime.schedule.request import SamplingParams
from tests.gpu.untyped import sleep
from tests.runtime.execute.device.chain_program import NEW_ROWS_EVERY, ChainProgram
from tests.runtime.execute.plans import decode_step, prefill_step, slot_write
from tests.runtime.execute.test_staging import seen_of

pytestmark = pytest.mark.gpu

SLOW_CYCLES = 20_000_000  # about 10 ms: long against the microseconds the host needs to run ahead


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    opened = CudaDevice(torch.device("cuda", 0))
    for dtype in (torch.int64, torch.uint8):  # a kernel's first launch loads it, which may wait for the whole device
        opened.zeros(2, dtype=dtype).fill_(1).add_(1)
    sleep(1)
    opened.synchronize()
    yield opened
    opened.close()


@contextmanager
def no_synchronisation() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that not every synchronisation is found
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def slow(device: CudaDevice) -> None:
    device.compute.submit(lambda: sleep(SLOW_CYCLES))


# ---- streams, events, graphs ----


def test_a_stream_waits_for_another_ones_event(device: CudaDevice) -> None:
    source, target = device.zeros(1 << 20, dtype=torch.int64), device.zeros(1 << 20, dtype=torch.int64)
    event = device.event()
    slow(device)
    device.compute.submit(lambda: source.fill_(7))
    device.compute.record(event)
    assert not event.query()
    device.copy.wait(event)
    device.copy.submit(lambda: target.copy_(source))
    device.copy.synchronize()
    assert event.query()
    assert bool((target == 7).all())


def test_streams_do_not_wait_for_each_other(device: CudaDevice) -> None:
    event = device.event()
    cell = device.zeros(1, dtype=torch.int64)
    device.synchronize()
    slow(device)
    device.compute.record(event)
    device.copy.submit(lambda: cell.fill_(1))
    device.copy.synchronize()
    assert not event.query()


def test_an_event_never_recorded_has_happened(device: CudaDevice) -> None:
    event = device.event()
    assert event.query()
    event.synchronize()
    device.copy.wait(event)


def test_elapsed_time_between_two_events(device: CudaDevice) -> None:
    start, end = device.event(timing=True), device.event(timing=True)
    device.compute.record(start)
    slow(device)
    device.compute.record(end)
    end.synchronize()
    assert start.elapsed_ms(end) > 1.0


def test_work_sees_its_stream_and_the_thread_stays_on_compute(device: CudaDevice) -> None:
    seen: list[torch.cuda.Stream] = []

    def look() -> None:
        seen.append(torch.cuda.current_stream())

    def fail() -> None:
        look()
        raise ArithmeticError

    device.copy.submit(look)
    with pytest.raises(ArithmeticError):
        device.copy.submit(fail)
    with torch.cuda.stream(torch.cuda.default_stream()):
        device.compute.submit(look)
        look()
    look()
    compute, copy = device.stream("compute"), device.stream("copy")
    assert isinstance(compute, CudaStream)
    assert isinstance(copy, CudaStream)
    assert seen == [copy.cuda, copy.cuda, compute.cuda, torch.cuda.default_stream(), compute.cuda]


def test_work_runs_without_autograd(device: CudaDevice) -> None:
    weight = torch.ones(2, device=device.torch_device, requires_grad=True)
    needs_grad: list[bool] = []
    device.compute.submit(lambda: needs_grad.append((weight * 2).requires_grad))
    assert needs_grad == [False]


def test_a_graph_replays_in_stream_order_and_capture_does_not_run_it(device: CudaDevice) -> None:
    total = device.zeros(1, dtype=torch.int64)
    graph = device.capture(lambda: total.mul_(2), name="double", warmup=lambda: total.add_(1), warmups=3)
    assert (device.captures, total.item()) == (1, 3)
    graph.replay()
    device.compute.submit(lambda: total.add_(1))
    graph.replay()
    device.compute.synchronize()
    assert total.item() == (3 * 2 + 1) * 2


def test_graphs_share_their_memory_and_replays_allocate_nothing(device: CudaDevice) -> None:
    sums = [device.zeros(1, dtype=torch.float32) for _ in range(8)]
    data = device.zeros(1 << 24, dtype=torch.float32)  # 64 MiB of scratch a graph

    def captured(cell: Tensor) -> Graph:
        return device.capture(lambda: cell.copy_((data + 1).sum().reshape(1)), name="sum")

    graphs = [captured(sums[0])]
    device.synchronize()
    reserved = torch.cuda.memory_reserved()
    graphs += [captured(cell) for cell in sums[1:]]
    assert torch.cuda.memory_reserved() - reserved < 2 * (64 << 20)
    assert 64 << 20 <= device.graph_bytes() < 3 * (64 << 20)
    allocations = device.allocations()
    with no_synchronisation():
        for graph in graphs * 5:
            graph.replay()
    device.synchronize()
    assert [cell.item() for cell in sums] == [float(1 << 24)] * 8
    assert device.allocations() == allocations


def test_a_failing_capture_names_the_graph_and_leaves_the_device_usable(device: CudaDevice) -> None:
    cell = device.zeros(1, dtype=torch.int64)
    with pytest.raises(DeviceError, match="capturing graph 'bucket 8' on cuda:0"):
        device.capture(lambda: cell.add_(1).item(), name="bucket 8")
    device.capture(lambda: cell.add_(1), name="bucket 4", warmups=0).replay()
    device.synchronize()
    assert cell.item() == 3  # two warm-ups of the first, one replay of the second


def test_memory_and_its_peak_are_measured(device: CudaDevice) -> None:
    before = device.memory_info()
    kept = device.zeros(64 << 20, dtype=torch.uint8)
    after = device.memory_info()
    assert after.used - before.used == kept.numel()
    assert before.free > after.free
    peak = device.peak_of(lambda: (kept + 1).add_(1))
    assert kept.numel() <= peak < kept.numel() + (1 << 20)
    assert device.allocations() > 0


# ---- staging and landing ----

HISTORY = 40


def test_staging_keeps_its_order_while_the_device_lags_behind(device: CudaDevice) -> None:
    tables = SlotTables(device, max_requests=8, max_blocks=6, vocab_size=11)
    staging = Staging(device, tables, max_prefill_tokens=64, max_rows=8, entries=2)
    row_map = staging.row_map("decode", 2)
    seen = device.zeros(HISTORY, 3, dtype=torch.int64)

    def note(step: int) -> None:
        sleep(200_000)
        seen[step, :2].copy_(row_map)
        seen[step, 2].copy_(tables.block_table_SP[1, 0])

    with no_synchronisation():
        for step in range(HISTORY):
            slots = (1 + step % 7, 1 + step % 5)
            staged = staging.stage(decode_step(step, slots, block_writes=((1, 0, step + 1),)))
            assert staged is not None
            staging.apply(staged)
            device.compute.submit(partial(note, step))
    device.synchronize()
    assert seen.tolist() == [[1 + step % 7, 1 + step % 5, step + 1] for step in range(HISTORY)]


def test_slot_writes_chunks_and_seen_tokens_arrive(device: CudaDevice) -> None:
    tables = SlotTables(device, max_requests=8, max_blocks=6, vocab_size=11)
    staging = Staging(device, tables, max_prefill_tokens=64, max_rows=8, entries=4)
    penalised = SamplingParams(seed=3, repetition_penalty=1.5, top_k=7, temperature=0.5)
    write = slot_write(2, (4, 4, 6, 7, 7, 7), prompt_length=3, stop_token_ids=(9,), sampling=penalised)
    chunks = (Chunk(2, 2, (6, 7, 7, 7), last=True), Chunk(5, 0, (1,), last=False))
    plan = prefill_step(1, chunks, bucket=4)
    with no_synchronisation():
        staged = staging.stage(decode_step(0, (2,), slot_writes=(write,)))
        assert staged is not None
        staging.apply(staged)
        staged = staging.stage(plan)
        assert staged is not None
        staging.apply(staged)
    device.synchronize()
    columns, seen, views = tables.columns, seen_of(tables), staging.chunks(plan)
    assert columns.length.tolist() == [0, 0, 6, 0, 0, 0, 0, 0, 0]
    assert (columns.seed[2].item(), columns.top_k[2].item(), columns.temperature[2].item()) == (3, 7, 0.5)
    assert columns.stop_ids_NK[2, :2].tolist() == [9, -1]
    assert seen.counts[2].tolist() == [0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0]
    assert seen.prompt[2].nonzero().flatten().tolist() == [4, 6]
    assert views.token_ids_T.tolist() == [6, 7, 7, 7, 1]
    assert views.positions_T.tolist() == [2, 3, 4, 5, 0]
    assert views.emitting_R.tolist() == [2, 0, 0, 0]
    assert views.logit_rows_R.tolist() == [3, 4, 0, 0]


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_chain_of_graph_steps_without_a_synchronisation(device: CudaDevice, depth: int) -> None:
    program = ChainProgram(device, depth)
    program.run(50)  # the allocator's caches fill
    program.landing.close()
    program = ChainProgram(device, depth)
    allocations = device.allocations()
    with no_synchronisation():
        program.run(300)
    program.landing.close()
    assert program.results == program.awaited
    assert device.allocations() == allocations
    assert program.staging.counters.copies == 300 // NEW_ROWS_EVERY
    assert [time.step for time in program.times] == list(range(300))
    assert all(time.started_ms <= time.ended_ms for time in program.times)
