"""Several groups in one process: an engine a thread, one rank each; control plane and exchange are made of barriers.

A collective or an agreement that one group skips breaks a barrier, and with it the test. The model is computed exactly
(exact_kernels.py), so that groups can be compared bit for bit with one engine alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor

from parallel.comm.symmetric_exchange import TokenExchange
from parallel.control.interface import SingleRankControl
from parallel.layers.experts import ExpertSplit
from runtime.engine import Engine
from runtime.grammar import Grammars
from runtime.groups.load_balancer import LoadBalancer
from runtime.replicate.event_codec import encode_events
from runtime.schedule.plan import Event
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import check_all_is_back
from tests.runtime.engine.rig import RigLimits, RigPlace, rig

PATIENCE_S = 120.0  # a machine may be busy with other things


class Meeting:
    """Where all groups put something down, and each picks up everybody's."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self._barrier = threading.Barrier(groups, timeout=PATIENCE_S)
        self._left: list[Any] = [None] * groups

    def everyones(self, index: int, mine: Any) -> list[Any]:
        self._left[index] = mine
        self._barrier.wait()
        found = list(self._left)
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class MetExchange(TokenExchange):
    """A TokenExchange between threads; ``rows`` are those of every gather so far."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.index, self.groups = index, meeting.groups
        self.rows: list[int] = []
        self._meeting = meeting

    def all_gather(self, x_XN: Tensor) -> Tensor:
        self.rows.append(x_XN.shape[0])
        return torch.cat(self._meeting.everyones(self.index, x_XN))

    def reduce_scatter(self, x_YN: Tensor) -> Tensor:
        parts = [x.chunk(self.groups)[self.index].clone() for x in self._meeting.everyones(self.index, x_YN)]
        return torch.stack(parts).sum(0)


class MetAgreement:
    """A StepAgreement between threads."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting, self._index = meeting, index

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        everyones = self._meeting.everyones(self._index, (step, *numbers))
        assert {steps for steps, *_ in everyones} == {step}
        return tuple(map(max, zip(*everyones, strict=True)))[1:]


class MetControl(SingleRankControl):
    """The control plane of rank ``index``: events, numbers and what is told, between threads. Rank 0 leads."""

    def __init__(self, meeting: Meeting, index: int, horizon: int, mailbox: deque[tuple[int, bytes]]) -> None:
        super().__init__(horizon)
        self.rank, self.world = index, meeting.groups
        self._meeting = meeting
        self._mailbox = mailbox

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        leader = self._meeting.everyones(self.rank, (step, payload, self._stop))[0]
        assert leader[0] == step
        self._stop = leader[2]
        return super().exchange(step, digest, leader[1])

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        return MetAgreement(self._meeting, self.rank).agree_max(step, super().agree_max(step, numbers))

    def send_message(self, payload: bytes) -> None:
        assert self.rank
        self._mailbox.append((self.rank, payload))

    def take_messages(self) -> list[tuple[int, bytes]]:
        assert not self.rank
        return [self._mailbox.popleft() for _ in range(len(self._mailbox))]

    @property
    def pending(self) -> bool:
        return not self.rank and (self._stop or any(payload or stop for payload, stop in self._coming))


class OwnEvents(MetControl):
    """Takes its turns with the others, but its events are its own: ``arrivals`` by turn."""

    arrivals: Mapping[int, Sequence[Event]] = {}

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        super().exchange(step, digest, payload)
        return encode_events(self.arrivals.get(step, ()))


@contextmanager
def dealt_rig(
    *,
    groups: int = 2,
    horizon: int = 0,
    all_back: bool = True,
    grammars_of: Callable[[int], Grammars] | None = None,
    **limits: Unpack[RigLimits],
) -> Iterator[Engine]:
    """Rank 0's engine of several groups that deal requests out among them; the others follow, each in a thread.

    ``limits`` are the rig's, the same for all; ``grammars_of``: of each. ``all_back``: in the end no group holds
    anything any more.
    """
    rows: list[list[int]] = []

    def one(index: int, meetings: tuple[Meeting, Meeting], mailbox: deque[tuple[int, bytes]]) -> RigPlace:
        control = MetControl(meetings[1], index, horizon, mailbox)
        exchange = MetExchange(meetings[0], index)
        rows.append(exchange.rows)
        experts = ExpertSplit(whole=True, exchange=exchange)
        assignment = LoadBalancer(index, groups)
        return {"control": control, "groups": control, "experts": experts, "assignment": assignment}

    with _together(groups, one, limits, all_back, grammars_of) as engine:
        yield engine
    assert all(each == rows[0] for each in rows), "the same exchanges on every group"


@contextmanager
def accompanied_rig(
    *, arrivals: Mapping[int, Sequence[Event]], horizon: int = 0, **limits: Unpack[RigLimits]
) -> Iterator[Engine]:
    """An engine that shares its experts with a second group, which has requests of its own, by turn."""

    def one(index: int, meetings: tuple[Meeting, Meeting], mailbox: deque[tuple[int, bytes]]) -> RigPlace:
        kind = OwnEvents if index else MetControl
        control = kind(meetings[1], index, horizon, mailbox)
        if isinstance(control, OwnEvents):
            control.arrivals = arrivals
        experts = ExpertSplit(whole=True, exchange=MetExchange(meetings[0], index))
        return {"control": control, "groups": control, "experts": experts}

    with _together(2, one, limits, all_back=False) as engine:
        yield engine


@contextmanager
def _together(
    groups: int,
    place_of: Callable[[int, tuple[Meeting, Meeting], deque[tuple[int, bytes]]], RigPlace],
    limits: RigLimits,
    all_back: bool = True,
    grammars_of: Callable[[int], Grammars] | None = None,
) -> Iterator[Engine]:
    meetings = (Meeting(groups), Meeting(groups))  # of devices, and of hosts
    mailbox: deque[tuple[int, bytes]] = deque()

    def exact(index: int) -> RigLimits:
        own: RigLimits = {} if grammars_of is None else {"grammars": grammars_of(index)}
        return {"kernels": exact_kernels(tables=True), "dtype": torch.float64, **limits, **own}

    def follow(index: int) -> None:
        unobserved: RigLimits = {**exact(index), "observe": None}
        place = place_of(index, meetings, mailbox)
        try:
            with rig(**unobserved, **place) as engine:
                engine.follow()
                if all_back:
                    check_all_is_back(engine)
        except BaseException:
            abort()  # the others shall not wait for this group
            raise

    def abort() -> None:
        for meeting in meetings:
            meeting.abort()

    with ThreadPoolExecutor(groups) as threads:
        others: list[Future[None]] = [threads.submit(follow, index) for index in range(1, groups)]
        try:
            with rig(**exact(0), **place_of(0, meetings, mailbox)) as engine:
                yield engine
        except BaseException:
            abort()
            raise
        for other in others:
            other.result()
