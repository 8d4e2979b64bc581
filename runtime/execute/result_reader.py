"""Results on their way to the host: in pinned memory, by kernels or by a copy, and one worker thread that waits.

Knows: which ring entry holds which step, when an entry may be used again, and how a step is read from its words.
Does not know: how results are computed or packed (result_ring.py), or what they mean to a request (the scheduler).

A step's path:  reserve (host) -> record start -> work, which ends with its append -> record ready -> submit
                -> worker: StepResult -> take (host)

Kernels store into the pinned entry itself. What torch appended (log-probabilities, or all results without Triton), and
scores of prompts, the copy stream brings home between ``submit`` and the worker.

An entry is written by the device from ``reserve`` on and read until ``take``. At most ``entries - 1`` steps are between
the two; one more is refused by name. Each appended result carries the number of its append, and the worker compares it
with the number it expects, so an entry that was overwritten is an error, never a wrong token.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from runtime.execute.device.protocol import Device, Event, Work
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.result_ring import NO_APPEND, ResultRing, ResultShape
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.logprobs import PromptLogprobRing, StepPromptLogprobs
from runtime.schedule.plan import StepResult


class ResultError(RuntimeError):
    """A step's result could not be landed; the message names the step, the cause is chained."""


class StepLogprobs(NamedTuple):
    """Host arrays, one row a plan row: chosen_BW float32, rank_BW int32, top_ids_BWN int32, top_BWN float32.

    Meanings are those of logprobs.TokenLogprobs; entries past a row's count mean nothing.
    """

    chosen_BW: npt.NDArray[np.float32]
    rank_BW: npt.NDArray[np.int32]
    top_ids_BWN: npt.NDArray[np.int32]
    top_BWN: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepTiming:
    """When the device ran a step: milliseconds after ``ResultReader.origin_s``, by the device's clock.

    ``seen_at``: when its results were on the host, on time.perf_counter's clock. ``gained``: tokens of all its rows.
    """

    step: int
    started_ms: float
    ended_ms: float
    seen_at: float
    gained: int


class Ticket(NamedTuple):
    """A step's claim on a ring entry. ``send`` copies its ``words`` to the host; None: kernels store them there.

    Record ``ready`` on the compute stream after the step's work and, where steps are timed, ``start`` before it.
    """

    spec: LaunchSpec
    sequence: int
    entry: int
    start: Event
    ready: Event
    copied: Event
    send: Work | None
    words: int
    scores: StepPromptLogprobs | None = None

    @property
    def copies(self) -> bool:
        """Whether the copy stream has anything to bring."""
        return self.send is not None or self.scores is not None


@dataclass(slots=True)
class ResultCounters:
    """landed: steps; device_to_host_bytes: of their results, stored there or copied."""

    landed: int = 0
    device_to_host_bytes: int = 0


class ResultReader:
    """The host side. One thread calls reserve, submit and take; a worker thread waits for steps to be home.

    ``on_timing`` is called by the worker, with each step's device times, before the step can be taken; without it no
    times are kept. ``origin_s`` is the zero of those times on time.perf_counter's clock. Without ``prompt_scores`` no
    plan may score prompt tokens. ``land_range(name)``: a context around each step that the worker waits for and reads.
    """

    def __init__(
        self,
        device: Device,
        ring: ResultRing,
        *,
        on_timing: Callable[[StepTiming], None] | None = None,
        prompt_scores: PromptLogprobRing | None = None,
        land_range: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.counters = ResultCounters()
        self._device = device
        self._ring = ring
        self._on_timing = on_timing
        self._prompt_scores = prompt_scores
        self._land_range = land_range
        self._copies: dict[tuple[int, int, int, SamplingVariant], tuple[Work | None, int]] = {}  # and words
        self._array_EX: npt.NDArray[np.int32] = ring.host_EX.numpy()
        timed = on_timing is not None
        self._events = [
            (device.event(timing=timed), device.event(timing=timed), device.event()) for _ in range(ring.entries)
        ]
        self._previous_end = device.event(timing=timed)
        self._previous_end_ms = 0.0
        device.compute.record(self._previous_end)
        device.compute.synchronize()
        self.origin_s = self.landed_at = time.perf_counter()  # landed_at: when the step taken last had landed
        self._taken = 0
        self._reserved = 0  # sequence number of the next step; equals the device's append counter
        self._in_flight: deque[int] = deque()  # submitted and not taken
        self._submitted: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        # In order of their submission; None: the step failed, and no later one will come. A queue in C: what the worker
        # does in Python, the loop cannot do meanwhile.
        self._landed: queue.SimpleQueue[tuple[StepResult, float] | None] = queue.SimpleQueue()
        self._failure: ResultError | None = None
        self._ended_in_failure = self._failure_raised = False
        self._worker = threading.Thread(target=self._work, name="landing", daemon=True)
        self._worker.start()

    @property
    def timed(self) -> bool:
        """Whether steps' times are reported."""
        return self._on_timing is not None

    def reserve(self, spec: LaunchSpec) -> Ticket:
        """Claim the ring entry the step will append to; before its work is launched.

        RuntimeError when no entry is free: a step was launched before the oldest one in flight was taken. ValueError
        for results that an entry has no room for.
        """
        self._check_free(spec.plan.step)
        sequence = self._reserved
        index = sequence % self._ring.entries
        shape = spec.shape
        key = index, shape.rows, shape.width, shape.variant
        copy = self._copies.get(key) or self._copy_of(*key)
        self._reserved += 1
        self._array_EX[index, 0] = NO_APPEND
        scores = None
        if spec.plan.chunks and self._prompt_scores is not None:
            scores = self._prompt_scores.claim(spec.plan, index)
        return Ticket(spec, sequence, index, *self._events[index], *copy, scores)

    def _check_free(self, step: int) -> None:
        outstanding = self._reserved - self._taken
        if outstanding >= self._ring.entries - 1:
            raise RuntimeError(
                f"step {step}: {outstanding} steps are launched and not taken, a result ring of "
                f"{self._ring.entries} entries allows {self._ring.entries - 1}; take a step first"
            )

    def submit(self, ticket: Ticket) -> None:
        """Land the step's results once ``ticket.ready`` has happened. Returns at once."""
        if ticket.copies:
            self._copy_home(ticket)
        self.counters.device_to_host_bytes += 4 * ticket.words
        self._in_flight.append(ticket.spec.plan.step)
        self._submitted.put(ticket)

    def _copy_home(self, ticket: Ticket) -> None:
        stream = self._device.copy
        stream.wait(ticket.ready)
        if ticket.send is not None:
            stream.submit(ticket.send)
        if ticket.scores is not None:
            stream.submit(ticket.scores.send)
            self.counters.device_to_host_bytes += 4 * ticket.scores.words
        stream.record(ticket.copied)

    def _copy_of(self, index: int, rows: int, width: int, variant: SamplingVariant) -> tuple[Work | None, int]:
        """The copy of an entry's results of that shape, if they need one, and its words; kept, since slicing costs more
        than the copy's launch."""
        ring, shape = self._ring, ResultShape(rows, width, variant.reported)
        ring.check_room(shape)
        send: Work | None = None
        if not ring.is_home(shape):
            source, target = ring.buffer_EX[index, : shape.words], ring.host_EX[index, : shape.words]
            send = partial(target.copy_, source, non_blocking=True)
        self._copies[index, rows, width, variant] = send, shape.words
        return send, shape.words

    def take(self, step: int, deadline_s: float | None = None) -> StepResult:
        """The result of ``step``; blocks until it has landed. Steps are taken in submission order.

        ResultError when it failed, naming the step that did; TimeoutError after ``deadline_s``.
        """
        if not self._in_flight or self._in_flight[0] != step:
            expected = f"step {self._in_flight[0]} is next" if self._in_flight else "no step is in flight"
            raise RuntimeError(f"cannot take step {step}: {expected}")
        if self._ended_in_failure:
            self._raise_failure()
        try:
            landed = self._landed.get(timeout=deadline_s)
        except queue.Empty:
            where = self._device.torch_device
            raise TimeoutError(f"step {step}: no result after {deadline_s:g} s on {where}") from None
        if landed is None:
            self._ended_in_failure = True
            self._raise_failure()
        result, self.landed_at = landed
        self._in_flight.popleft()
        self._taken += 1
        return result

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Steps that are launched and taken inside are not reported to ``on_timing``. Nothing may be in flight."""
        on_timing, self._on_timing = self._on_timing, None
        try:
            yield
        finally:
            self._on_timing = on_timing

    def close(self, deadline_s: float = 30.0) -> None:
        """Land what was submitted and end the worker. Raises an unreported failure. Idempotent."""
        self._submitted.put(None)
        self._worker.join(deadline_s)
        if self._worker.is_alive():
            raise ResultError(f"steps {list(self._in_flight)} did not land within {deadline_s:g} s of close")
        if self._failure is not None and not self._failure_raised:
            self._raise_failure()

    def _raise_failure(self) -> NoReturn:
        assert self._failure is not None
        self._failure_raised = True
        raise ResultError(str(self._failure)) from self._failure.__cause__

    # ---- the worker ----

    def _work(self) -> None:
        self._device.bind_thread()
        while (ticket := self._submitted.get()) is not None:
            try:
                if self._failure is None:
                    with self._land_range(f"results of {ticket.spec.shape.label}"):
                        self._land(ticket)
            except BaseException as error:
                failure = ResultError(f"step {ticket.spec.plan.step}: {error}")
                failure.__cause__ = error
                self._failure = failure
                self._landed.put(None)

    def _land(self, ticket: Ticket) -> None:
        (ticket.copied if ticket.copies else ticket.ready).synchronize()
        at = time.perf_counter()
        result = self._read(ticket)
        self._time(ticket, at, result)
        self.counters.landed += 1
        self._landed.put((result, at))

    def _read(self, ticket: Ticket) -> StepResult:
        """Copies out of the pinned entry: it may be overwritten once the step is taken."""
        spec, words = ticket.spec, self._array_EX[ticket.entry]
        self._check_stamp(ticket, int(words[0]))
        bucket, width, rows = spec.shape.rows, spec.shape.width, len(spec.plan.slots)
        if rows > bucket:
            raise ResultError(f"the plan has {rows} rows, its results have {bucket}")
        counts_at = 1 + bucket * width
        finish_at = counts_at + bucket
        return StepResult(
            step=spec.plan.step,
            tokens=words[1 : 1 + rows * width].tolist(),
            counts=words[counts_at : counts_at + rows].tolist(),
            finish=words[finish_at : finish_at + rows].tolist(),
            logprobs=self._read_logprobs(ticket, words[finish_at + bucket :]),
            prompt_logprobs=None if ticket.scores is None else ticket.scores.read(),
        )

    def _check_stamp(self, ticket: Ticket, stamp: int) -> None:
        expected = ticket.sequence % self._ring.stamps
        if stamp != expected:
            raise ResultError(
                f"result ring entry {ticket.entry} holds append {stamp}, step {ticket.spec.plan.step} is append "
                f"{expected}: the entry was overwritten before it was read, or a launched step appended nothing"
            )

    def _read_logprobs(self, ticket: Ticket, words: npt.NDArray[np.int32]) -> StepLogprobs | None:
        spec, variant = ticket.spec, ticket.spec.shape.variant
        if not variant.logprobs:
            return None
        top = variant.top_logprobs
        bucket, width, rows = spec.shape.rows, spec.shape.width, len(spec.plan.slots)
        tokens = bucket * width
        chosen, rank, top_ids, values, _ = np.split(words, np.cumsum([tokens, tokens, tokens * top, tokens * top]))
        row, float32 = (bucket, width), np.float32
        columns: tuple[Any, ...] = (
            chosen.view(float32).reshape(row),
            rank.reshape(row),
            top_ids.reshape(*row, top),
            values.view(float32).reshape(*row, top),
        )
        return StepLogprobs(*(column[:rows].copy() for column in columns))

    def _time(self, ticket: Ticket, seen_at: float, result: StepResult) -> None:
        """Add this step's gap and duration to the previous end: float32 event times lose microseconds over hours.

        The previous step's ``ready`` is still its own: its entry is not reserved again while this step is in flight.
        """
        if self._on_timing is None:
            return
        started_ms = self._previous_end_ms + self._previous_end.elapsed_ms(ticket.start)
        ended_ms = started_ms + ticket.start.elapsed_ms(ticket.ready)
        self._previous_end, self._previous_end_ms = ticket.ready, ended_ms
        self._on_timing(StepTiming(ticket.spec.plan.step, started_ms, ended_ms, seen_at, sum(result.counts)))
