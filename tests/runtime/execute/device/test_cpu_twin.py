"""The twin keeps the protocol's rules: order in a stream, events across streams, failures that are never lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from runtime.execute.device.cpu_twin import TwinDevice, open_device
from runtime.execute.device.protocol import DeviceError


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    with TwinDevice() as opened:
        yield opened


# ---- order ----


def test_a_stream_runs_in_order(device: TwinDevice) -> None:
    seen: list[int] = []
    for number in range(200):
        device.compute.submit(partial(seen.append, number))
    device.compute.synchronize()
    assert seen == list(range(200))


def test_submit_returns_before_the_work_runs(device: TwinDevice) -> None:
    seen: list[str] = []
    device.compute.pause()
    device.compute.submit(lambda: seen.append("work"))
    assert seen == []
    device.compute.resume()
    device.compute.synchronize()
    assert seen == ["work"]


def test_streams_do_not_wait_for_each_other(device: TwinDevice) -> None:
    seen: list[str] = []
    device.compute.pause()
    device.compute.submit(lambda: seen.append("compute"))
    device.copy.submit(lambda: seen.append("copy"))
    device.copy.synchronize()
    assert seen == ["copy"]
    device.compute.resume()
    device.compute.synchronize()
    assert seen == ["copy", "compute"]


def test_the_same_name_is_the_same_stream(device: TwinDevice) -> None:
    assert device.stream("stage") is device.stream("stage")
    assert device.stream("compute") is device.compute


def test_work_runs_without_autograd(device: TwinDevice) -> None:
    weight = torch.ones(2, requires_grad=True)
    needs_grad: list[bool] = []
    device.compute.submit(lambda: needs_grad.append((weight * 2).requires_grad))
    device.compute.synchronize()
    assert needs_grad == [False]


# ---- events ----


def test_a_stream_waits_for_another_ones_event(device: TwinDevice) -> None:
    seen: list[str] = []
    event = device.event()
    device.compute.pause()
    device.compute.submit(lambda: seen.append("compute"))
    device.compute.record(event)
    device.copy.wait(event)
    device.copy.submit(lambda: seen.append("copy"))
    assert not event.query()
    device.compute.resume()
    device.copy.synchronize()
    assert seen == ["compute", "copy"]
    assert event.query()


def test_an_event_never_recorded_has_happened(device: TwinDevice) -> None:
    event = device.event()
    assert event.query()
    event.synchronize()
    device.copy.wait(event)
    device.copy.synchronize()


def test_wait_means_the_latest_record_so_far(device: TwinDevice) -> None:
    event = device.event()
    device.compute.record(event)
    device.compute.synchronize()
    device.copy.wait(event)
    device.compute.pause()
    device.compute.record(event)  # recorded again, later: not what the copy stream waits for
    device.copy.synchronize()
    assert not event.query()
    device.compute.resume()
    event.synchronize()
    assert event.query()


def test_synchronize_blocks_until_the_event(device: TwinDevice) -> None:
    seen: list[str] = []
    event = device.event()
    device.compute.pause()
    device.compute.submit(lambda: seen.append("work"))
    device.compute.record(event)

    def wait() -> None:
        event.synchronize()
        seen.append("woken")

    waiter = threading.Thread(target=wait)
    waiter.start()
    device.compute.resume()
    waiter.join()
    assert seen == ["work", "woken"]


def test_elapsed_time_between_two_events(device: TwinDevice) -> None:
    start, end = device.event(timing=True), device.event(timing=True)
    device.compute.slow(0.002)
    device.compute.record(start)
    device.compute.submit(lambda: None)
    device.compute.record(end)
    with pytest.raises(RuntimeError, match="have happened"):
        start.elapsed_ms(device.event(timing=True))
    end.synchronize()
    assert start.elapsed_ms(end) >= 2.0  # two operations were slowed by 2 ms each: a lower bound, not a deadline
    with pytest.raises(RuntimeError, match="timing=True"):
        start.elapsed_ms(device.event())


# ---- single steps ----


def test_advance_runs_one_operation_of_a_paused_stream(device: TwinDevice) -> None:
    seen: list[int] = []
    event = device.event()
    device.compute.pause()
    device.copy.pause()
    device.compute.submit(lambda: seen.append(1))
    device.compute.record(event)
    device.copy.wait(event)
    device.copy.submit(lambda: seen.append(2))
    assert not device.copy.advance()  # waits for the event
    assert device.compute.advance()
    assert seen == [1]
    assert not device.copy.advance()  # the record is an operation too
    assert device.compute.advance()
    assert not device.compute.advance()  # empty
    assert device.copy.advance()
    assert device.copy.advance()
    assert seen == [1, 2]


def test_advance_needs_a_paused_stream(device: TwinDevice) -> None:
    with pytest.raises(RuntimeError, match="pause"):
        device.compute.advance()


# ---- graphs and memory ----


def test_a_graph_replays_in_stream_order_and_capture_does_not_run_it(device: TwinDevice) -> None:
    total = device.zeros(1, dtype=torch.int64)
    graph = device.capture(lambda: total.mul_(2), name="double", warmup=lambda: total.add_(1), warmups=3)
    assert device.captures == 1
    assert total.item() == 3
    graph.replay()
    device.compute.submit(lambda: total.add_(1))
    graph.replay()
    device.compute.synchronize()
    assert total.item() == (3 * 2 + 1) * 2


def test_a_failing_capture_names_the_graph() -> None:
    with TwinDevice() as device, pytest.raises(DeviceError, match=r"bucket 8.*ZeroDivisionError"):
        device.capture(lambda: 1 // 0, name="bucket 8")


def test_empty_memory_is_poisoned(device: TwinDevice) -> None:
    assert device.empty(3, dtype=torch.float32).isnan().all()
    assert device.empty(3, dtype=torch.bfloat16).isnan().all()
    assert (device.empty(3, dtype=torch.int32) == -1).all()


def test_memory_is_counted(device: TwinDevice) -> None:
    before = device.memory_info()
    device.zeros(256, 4, dtype=torch.float32)
    after = device.memory_info()
    assert device.allocations() == 1
    assert before.free - after.free == after.used - before.used == 4096


# ---- failures ----


def _fail(device: TwinDevice) -> None:
    device.compute.submit(lambda: [][1])
    with device.compute._queue.changed:  # wait without a call that would raise
        device.compute._queue.changed.wait_for(lambda: device._failure.happened)


def test_every_later_call_raises_the_failure(device: TwinDevice) -> None:
    event = device.event()
    _fail(device)
    calls = [
        lambda: device.compute.submit(lambda: None),
        lambda: device.copy.submit(lambda: None),
        lambda: device.compute.record(event),
        lambda: device.compute.wait(event),
        device.compute.synchronize,
        device.copy.synchronize,
        event.synchronize,
        event.query,
    ]
    for call in calls:
        with pytest.raises(DeviceError, match=r"stream 'compute', operation 0: IndexError") as caught:
            call()
        assert isinstance(caught.value.__cause__, IndexError)


def test_work_after_a_failure_does_not_run_and_nobody_hangs() -> None:
    seen: list[str] = []
    with TwinDevice() as device:
        event = device.event()
        device.compute.pause()
        device.compute.submit(lambda: 1 // 0)
        device.compute.submit(lambda: seen.append("compute"))
        device.compute.record(event)
        device.copy.wait(event)
        device.copy.submit(lambda: seen.append("copy"))
        device.compute.resume()
        with pytest.raises(DeviceError, match="ZeroDivisionError"):
            event.synchronize()
        with pytest.raises(DeviceError, match="ZeroDivisionError"):
            device.copy.synchronize()
    assert seen == []


def test_close_raises_a_failure_nobody_heard_of_and_only_then() -> None:
    unheard = TwinDevice()
    unheard.compute.submit(lambda: 1 // 0)
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        unheard.close()
    heard = TwinDevice()
    heard.compute.submit(lambda: 1 // 0)
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        heard.compute.synchronize()
    heard.close()


def test_even_a_system_exit_in_work_is_carried() -> None:
    def leave() -> None:
        raise SystemExit(3)

    device = TwinDevice()
    device.compute.submit(leave)
    with pytest.raises(DeviceError, match="SystemExit"):
        device.close()


def test_submitted_work_must_not_submit(device: TwinDevice) -> None:
    device.compute.submit(lambda: device.copy.submit(lambda: None))
    with pytest.raises(DeviceError, match="work on stream 'compute' submits to 'copy'"):
        device.compute.synchronize()


def test_events_of_another_device_are_refused(device: TwinDevice) -> None:
    class Foreign:
        def synchronize(self) -> None: ...

        def query(self) -> bool:
            return True

        def elapsed_ms(self, end: object) -> float:
            return 0.0

    with pytest.raises(TypeError, match="Foreign was not made by a TwinDevice"):
        device.compute.record(Foreign())


# ---- the end ----


def test_close_runs_what_was_submitted_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    seen: list[str] = []
    device = TwinDevice()
    event = device.event()
    for stream in (device.compute, device.copy):
        stream.pause()
    device.copy.submit(lambda: seen.append("copy"))
    device.copy.record(event)
    device.compute.wait(event)  # of a stream that is closed later
    device.compute.submit(lambda: seen.append("compute"))
    device.close()
    device.close()
    assert seen == ["copy", "compute"]
    assert set(threading.enumerate()) == before
    with pytest.raises(DeviceError, match="closed"):
        device.compute.submit(lambda: None)


def test_open_device_takes_what_there_is() -> None:
    device = open_device("cpu")
    assert device.torch_device.type == "cpu"
    device.close()
    with pytest.raises(ValueError, match="meta"):
        open_device("meta")
