"""Results come home complete, in order and late if need be; a reused ring entry is an error, never a wrong token."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.device.protocol import DeviceError
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.result_reader import ResultError, ResultReader, StepLogprobs, StepTiming
from runtime.execute.result_ring import ResultRing
from runtime.execute.sampling.logprobs import TokenLogprobs
from tests.runtime.execute.plans import decode_step

ENTRIES = 4


class Steps:
    """Fake steps over a real ring: step n's row i holds the tokens n * 100 + i * 10 + column."""

    def __init__(
        self,
        device: TwinDevice,
        *,
        rows: int = 4,
        width: int = 1,
        reported: int = 0,
        direct: bool = False,
        on_timing: Callable[[StepTiming], None] | None = None,
    ) -> None:
        self.device = device
        self.ring = ResultRing(device, entries=ENTRIES, rows=rows, width=width, reported=reported, direct=direct)
        self.landing = ResultReader(device, self.ring, on_timing=on_timing)

    def launch(self, spec: LaunchSpec, *, fail: bool = False) -> None:
        ticket = self.landing.reserve(spec)
        self.device.compute.record(ticket.start)
        self.device.compute.submit(lambda: self._work(spec, fail))
        self.device.compute.record(ticket.ready)
        self.landing.submit(ticket)

    def _work(self, spec: LaunchSpec, fail: bool = False) -> None:
        if fail:
            raise FloatingPointError("the model failed")
        rows, width = torch.arange(spec.shape.rows), torch.arange(spec.shape.width)
        tokens = spec.plan.step * 100 + rows[:, None] * 10 + width
        parts: tuple[torch.Tensor, ...] = ()
        if spec.shape.variant.logprobs:
            chosen = -tokens.to(torch.float32) / 8
            top = chosen[..., None].expand(-1, -1, spec.shape.variant.top_logprobs) - 1
            parts = TokenLogprobs(chosen, (tokens + 1).to(torch.int32), top.to(torch.int32), top.contiguous())
        before = self.ring.buffer_EX.clone()
        self.ring.append(tokens, torch.ones(spec.shape.rows, dtype=torch.int32), rows % 3, parts)
        if self.ring.direct and not parts:  # as a kernel does, which leaves the device's buffer alone
            entry = (int(self.ring.appended_1) - 1) % ENTRIES
            self.ring.stored_EX[entry] = self.ring.buffer_EX[entry]
            self.ring.buffer_EX.copy_(before)


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    with TwinDevice() as opened:
        yield opened


@pytest.fixture
def steps(device: TwinDevice) -> Iterator[Steps]:
    made = Steps(device)
    yield made
    made.landing.close()


# ---- contents ----


def test_a_result_holds_the_plans_rows_only(steps: Steps) -> None:
    steps.launch(decode_step(7, (5, 2, 9), bucket=4))
    result = steps.landing.take(7)
    assert (result.step, result.tokens, result.counts, result.finish) == (7, [700, 710, 720], [1, 1, 1], [0, 1, 2])
    assert result.logprobs is None
    assert all(type(token) is int for token in result.tokens)


def test_wide_rows_are_row_major(device: TwinDevice) -> None:
    steps = Steps(device, width=3)
    steps.launch(decode_step(1, (4, 5), bucket=4, width=3))
    assert steps.landing.take(1).tokens == [100, 101, 102, 110, 111, 112]
    steps.landing.close()


def test_logprobs_come_along_when_asked_for(device: TwinDevice) -> None:
    steps = Steps(device, reported=6)
    steps.launch(decode_step(1, (4, 5), bucket=4, logprobs=2))
    steps.launch(decode_step(2, (4, 5), bucket=4))
    steps.launch(decode_step(3, (4, 5), bucket=4, logprobs=0))
    logprobs = steps.landing.take(1).logprobs
    assert isinstance(logprobs, StepLogprobs)
    assert logprobs.chosen_BW.tolist() == [[-12.5], [-13.75]]
    assert logprobs.rank_BW.tolist() == [[101], [111]]
    assert logprobs.top_ids_BWN.tolist() == [[[-13, -13]], [[-14, -14]]]
    assert logprobs.top_BWN.tolist() == [[[-13.5, -13.5]], [[-14.75, -14.75]]]
    assert steps.landing.take(2).logprobs is None
    third = steps.landing.take(3).logprobs
    assert isinstance(third, StepLogprobs)
    assert (third.chosen_BW.shape, third.top_BWN.shape) == ((2, 1), (2, 1, 0))
    words = (1 + 4 * 3) * 3 + 4 * (2 + 2 * 2) + 4 * 2
    assert steps.landing.counters.device_to_host_bytes == 4 * words
    steps.landing.close()


def test_results_taken_early_or_late_are_the_same(steps: Steps) -> None:
    for step in range(100):
        steps.launch(decode_step(step, (1, 2)))
        if step >= 2:
            assert steps.landing.take(step - 2).tokens == [(step - 2) * 100, (step - 2) * 100 + 10]
    assert steps.landing.take(98).step == 98
    assert steps.landing.take(99).step == 99
    assert steps.landing.counters.landed == 100


@pytest.mark.parametrize("seed", range(4))
def test_results_are_right_under_jitter(seed: int) -> None:
    with TwinDevice(jitter_s=0.0003, seed=seed) as device:
        steps = Steps(device)
        for step in range(60):
            steps.launch(decode_step(step, (1, 2)))
            if step >= 2:
                assert steps.landing.take(step - 2).tokens == [(step - 2) * 100, (step - 2) * 100 + 10]
        steps.landing.close()


def test_undo_takes_a_rehearsal_back(steps: Steps) -> None:
    steps.launch(decode_step(0, (1,)))
    for _ in range(3):
        steps.device.compute.submit(lambda: steps._work(decode_step(99, (1,))))
        steps.device.compute.submit(steps.ring.undo)
    for step in range(1, 10):
        assert steps.landing.take(step - 1).tokens == [(step - 1) * 100]
        steps.launch(decode_step(step, (1,)))
    assert steps.landing.take(9).tokens == [900]


def test_the_append_number_wraps_with_the_ring(device: TwinDevice) -> None:
    ring = ResultRing(device, entries=3, rows=1, width=1)
    assert ring.stamps % 3 == 0
    ring.appended_1.fill_(ring.stamps - 1)
    one = torch.ones(1, dtype=torch.int32)
    ring.append(one[:, None], one, one)
    assert (ring.appended_1.item(), ring.buffer_EX[2, 0].item()) == (0, ring.stamps - 1)
    ring.undo()
    assert ring.appended_1.item() == ring.stamps - 1


def test_what_kernels_store_at_home_needs_no_copy(device: TwinDevice) -> None:
    """Beside results with log-probabilities, which do: the same entries in turn."""
    steps = Steps(device, reported=4, direct=True)
    device.copy.pause()
    for step in range(7):
        steps.launch(decode_step(step, (1, 2)))
        assert steps.landing.take(step, deadline_s=30).tokens == [step * 100, step * 100 + 10]
    steps.launch(decode_step(7, (1, 2), logprobs=1))
    steps.device.compute.synchronize()
    with pytest.raises(TimeoutError, match="step 7: no result"):
        steps.landing.take(7, deadline_s=0.01)
    device.copy.resume()
    found = steps.landing.take(7)
    assert found.tokens == [700, 710]
    assert isinstance(found.logprobs, StepLogprobs)
    assert found.logprobs.chosen_BW.tolist() == [[-87.5], [-88.75]]
    steps.launch(decode_step(8, (1, 2)))
    assert steps.landing.take(8).tokens == [800, 810]
    assert steps.landing.counters.device_to_host_bytes == 4 * (9 * 7 + 2 * (2 + 2))
    steps.landing.close()


def test_an_entry_that_no_kernel_stored_is_refused(device: TwinDevice) -> None:
    steps = Steps(device, direct=True)
    steps.launch(decode_step(0, (1, 2)))
    assert steps.landing.take(0).tokens == [0, 10]
    ticket = steps.landing.reserve(decode_step(1, (1, 2)))
    one = torch.ones(2, dtype=torch.int32)
    steps.device.compute.submit(lambda: steps.ring.append(one[:, None], one, one))  # as torch does, on the device
    steps.device.compute.record(ticket.ready)
    steps.landing.submit(ticket)
    with pytest.raises(ResultError, match="ring entry 1 holds append -1, step 1 is append 1"):
        steps.landing.take(1)


# ---- when ----


def test_take_blocks_until_the_step_has_landed(steps: Steps) -> None:
    steps.device.copy.pause()
    steps.launch(decode_step(1, (1,)))
    steps.device.compute.synchronize()  # computed, not landed
    with pytest.raises(TimeoutError, match=r"step 1: no result after 0\.01 s"):
        steps.landing.take(1, deadline_s=0.01)
    taken: list[list[int]] = []
    taker = threading.Thread(target=lambda: taken.append(list(steps.landing.take(1).tokens)))
    taker.start()
    steps.device.copy.resume()
    taker.join()
    assert taken == [[100]]


def test_a_signal_reaches_a_loop_that_waits_for_a_hanging_device(steps: Steps) -> None:
    def interrupt(*_: object) -> None:
        raise InterruptedError("asked to end")

    steps.device.compute.pause()
    steps.launch(decode_step(1, (1,)))
    before = signal.signal(signal.SIGUSR2, interrupt)
    to_the_loop = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2))
    to_the_loop.start()
    try:
        with pytest.raises(InterruptedError, match="asked to end"):
            steps.landing.take(1, deadline_s=60)
    finally:
        to_the_loop.join()
        signal.signal(signal.SIGUSR2, before)
    steps.device.compute.resume()
    assert steps.landing.take(1).tokens == [100], "nothing is lost"


def test_steps_are_taken_in_order(steps: Steps) -> None:
    with pytest.raises(RuntimeError, match="cannot take step 1: no step is in flight"):
        steps.landing.take(1)
    steps.launch(decode_step(1, (1,)))
    steps.launch(decode_step(2, (1,)))
    with pytest.raises(RuntimeError, match="cannot take step 2: step 1 is next"):
        steps.landing.take(2)


def test_times_are_told_in_order_before_the_step_is_taken(device: TwinDevice) -> None:
    times: list[StepTiming] = []
    steps = Steps(device, on_timing=times.append)
    device.compute.slow(0.001)
    for step in range(10):
        steps.launch(decode_step(step, (1,)))
        steps.landing.take(step)
        assert times[-1].step == step
    assert all(time.ended_ms - time.started_ms >= 1.0 for time in times)
    assert all(first.ended_ms <= second.started_ms for first, second in pairwise(times))
    steps.landing.close()


# ---- the ring is bounded ----


def test_a_step_too_many_is_refused_by_name(steps: Steps) -> None:
    for step in range(ENTRIES - 1):
        steps.launch(decode_step(step, (1,)))
    with pytest.raises(RuntimeError, match="step 3: 3 steps are launched and not taken, a result ring of 4 entries"):
        steps.launch(decode_step(3, (1,)))
    assert steps.landing.take(0).tokens == [0]
    steps.launch(decode_step(3, (1,)))
    assert [steps.landing.take(step).tokens for step in (1, 2, 3)] == [[100], [200], [300]]


def overrun(steps: Steps) -> list[list[int]]:
    """Launch one step more than the ring has entries while no result can leave the device; then take them all."""
    steps.device.copy.pause()
    for step in range(ENTRIES + 1):
        steps.launch(decode_step(step, (1,)))
    steps.device.compute.synchronize()
    steps.device.copy.resume()
    return [list(steps.landing.take(step).tokens) for step in range(ENTRIES + 1)]


def test_without_the_bound_the_stamp_catches_the_overwritten_entry(
    device: TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultReader, "_check_free", lambda self, step: None)
    steps = Steps(device)
    with pytest.raises(ResultError, match=r"step 0: result ring entry 0 holds append 4, step 0 is append 0"):
        overrun(steps)
    steps.landing.close()


def test_without_bound_and_stamp_the_wrong_token_comes_home(
    device: TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultReader, "_check_free", lambda self, step: None)
    monkeypatch.setattr(ResultReader, "_check_stamp", lambda self, ticket, stamp: None)
    steps = Steps(device)
    assert overrun(steps)[0] == [400]  # step 0 was given step 4's token
    steps.landing.close()


def test_a_step_that_appends_nothing_is_caught(steps: Steps) -> None:
    for step in range(5):
        steps.launch(decode_step(step, (1,)))
        steps.landing.take(step)
    ticket = steps.landing.reserve(decode_step(5, (1,)))
    steps.device.compute.record(ticket.ready)
    steps.landing.submit(ticket)
    with pytest.raises(ResultError, match="step 5: result ring entry 1 holds append 1, step 5 is append 5"):
        steps.landing.take(5)


@pytest.mark.parametrize("direct", [False, True])
def test_a_step_that_appends_nothing_behind_a_rehearsal_is_caught(device: TwinDevice, direct: bool) -> None:
    """The rehearsal's append, which was taken back, had the same number."""
    steps = Steps(device, direct=direct)
    device.compute.submit(lambda: steps._work(decode_step(9, (1,))))
    device.compute.submit(steps.ring.undo)
    device.compute.synchronize()
    ticket = steps.landing.reserve(decode_step(0, (1,)))
    device.compute.record(ticket.ready)
    steps.landing.submit(ticket)
    with pytest.raises(ResultError, match="step 0: result ring entry 0 holds append -1, step 0 is append 0"):
        steps.landing.take(0)
    steps.landing.close()


# ---- failures and the end ----


def test_a_failing_step_is_named_and_later_ones_fail_with_it() -> None:
    device = TwinDevice()
    steps = Steps(device)
    steps.launch(decode_step(1, (1,)))
    assert steps.landing.take(1).tokens == [100]
    device.compute.pause()
    steps.launch(decode_step(2, (1,)), fail=True)
    steps.launch(decode_step(3, (1,)))
    device.compute.resume()
    for _ in range(2):
        with pytest.raises(ResultError, match=r"step 2: stream 'compute'.*FloatingPointError: the model failed") as got:
            steps.landing.take(2)
        assert isinstance(got.value.__cause__, DeviceError)
    steps.landing.close()
    device.close()


def test_close_raises_a_failure_nobody_took() -> None:
    device = TwinDevice()
    steps = Steps(device)
    device.compute.pause()
    steps.launch(decode_step(1, (1,)), fail=True)
    device.compute.resume()
    with pytest.raises(ResultError, match="step 1:"):
        steps.landing.close()
    with pytest.raises(DeviceError, match="FloatingPointError"):
        device.compute.synchronize()
    device.close()


def test_close_lands_what_was_submitted_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    device = TwinDevice()
    steps = Steps(device)
    for step in range(3):
        steps.launch(decode_step(step, (1,)))
    steps.landing.close()
    steps.landing.close()
    assert steps.landing.counters.landed == 3
    assert [steps.landing.take(step).tokens for step in range(3)] == [[0], [100], [200]]
    device.close()
    assert set(threading.enumerate()) == before


def test_close_says_which_steps_are_stuck() -> None:
    device = TwinDevice()
    steps = Steps(device)
    device.compute.pause()
    steps.launch(decode_step(4, (1,)))
    with pytest.raises(ResultError, match=r"steps \[4\] did not land within 0.01 s of close"):
        steps.landing.close(deadline_s=0.01)
    device.compute.resume()
    steps.landing.close()
    device.close()
