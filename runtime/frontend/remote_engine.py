"""RemoteEngine: the engine as an API process sees it, over its connection to rank 0. One event loop uses it.

Knows: which sequence gained which tokens, which client is served first, what is known of the engine's health and load,
what a lost rank 0 means. Does not know: text (answer.py), HTTP, how the engine works, how its turns are taken
(engine_server.py).

A step's first tokens and ends are sent at once, the others a few at a time: to write a token to its client takes some
tens of microseconds, and of many rows that is half a step, in which a request that has just come would wait unread.

    mailbox = engine.submit([sequence, ...])        # all answers of one HTTP request share a mailbox
    while not mailbox.ended: for update in await mailbox.take(): ...
    mailbox.leave()                                 # stop listening: what has not ended is cancelled
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from runtime.frontend.framing import BadFrame, FrameReader, pack_ids, unpack_ids
from runtime.frontend.outputs import TokenLogprob
from runtime.frontend.serve_messages import (
    MAX_FRAME,
    Alive,
    Beat,
    Bye,
    Columns,
    Drain,
    Drop,
    Ended,
    PrefixCacheReset,
    Ready,
    ResetPrefixCache,
    ScoredPrompt,
    Setup,
    Stats,
    Step,
    Submit,
    framed,
    from_engine,
)
from runtime.schedule.request import FinishReason, SamplingParams


class EngineLost(RuntimeError):
    """The engine ended, or is lost, before the request did."""


class ClientGone(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One answer to be generated; see serve_messages.Submit. ``answers``: how many of a prompt begin here, drawn with
    seed, seed + 1, ..., which fork from one prefill; 0 for those that follow the first."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    priority: int = 0
    answers: int = 1


class End(NamedTuple):
    """How a sequence ended. ``at``: time.monotonic() of it here."""

    reason: FinishReason
    detail: str
    queued: float
    prompt_logprobs: tuple[ScoredPrompt, ...] | None


class Update(NamedTuple):
    """What answer ``choice`` of a mailbox gained: tokens, their log-probabilities if asked for, and its end."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    end: End | None


class _Live:
    """A sequence that has not ended."""

    __slots__ = ("fresh", "index", "local", "logprobs", "mailbox", "request_id", "seen")

    def __init__(self, local: int, mailbox: Mailbox, index: int) -> None:
        self.local = local
        self.mailbox = mailbox
        self.index = index
        self.request_id: int | None = None
        self.seen = 0  # tokens that it gained so far
        self.fresh: list[int] = []  # those of them in the frame that is being read
        self.logprobs: tuple[TokenLogprob, ...] = ()


class Mailbox:
    """Where the updates of one HTTP request arrive. One task takes them."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._updates: deque[Update] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self.live: dict[int, _Live] = {}  # by index

    async def take(self) -> list[Update]:
        """The next updates, at least one and MOST_AT_ONCE at most: other tasks run before the rest is taken.

        Raises EngineLost, or what ``fail`` was given.
        """
        if self._updates:
            await asyncio.sleep(0)
        while not self._updates:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return [self._updates.popleft() for _ in range(min(len(self._updates), MOST_AT_ONCE))]

    def put(self, update: Update) -> None:
        self._updates.append(update)
        if len(self._updates) >= MOST_UNREAD:
            self.leave()
            self.fail(ClientGone())
        self._wake()

    def fail(self, failure: Exception) -> None:
        """Raised by ``take`` once the updates before it are taken; the first one counts."""
        if self._failure is None:
            self._failure = failure
            self._wake()

    def stop(self, index: int, *, await_end: bool = False) -> None:
        """Answer ``index`` found its stop string: the engine need not go on. ``await_end``: its end still matters."""
        sequence = self.live.get(index)
        if sequence is not None:
            self._engine.drop([sequence], FinishReason.STOP)
            if not await_end:
                del self.live[index]

    def leave(self) -> None:
        """The client takes no more: what has not ended is cancelled."""
        if self.live:
            self._engine.drop(list(self.live.values()), FinishReason.CANCELLED)
            self.live.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Health(NamedTuple):
    """``trouble``: why the engine is not alive, None if all is well."""

    trouble: str | None


MOST_UNREAD = 1 << 17  # updates, some 30 MB: a client that lets more wait does not read its stream
MOST_AT_ONCE = 32  # updates: to write their tokens to clients takes some ms, in which nothing else is read
_AT_ONCE = 8  # sequences whose tokens are delivered before the event loop looks for what has come meanwhile
_PATIENCE = 0.5  # of the time after which the watchdog ends the job: health is reported before that
_MOST_QUIET = 5.0  # seconds; beats come twice a second


class RemoteEngine(asyncio.Protocol):
    """The protocol of the connection to rank 0, and what is known of the engine.

    ``on_step`` receives the columns of every step. ``on_bye`` is called once, when rank 0 said goodbye or is gone: with
    the failure, if there was one.
    """

    def __init__(self, on_setup: Callable[[bytes], object], on_bye: Callable[[str | None], object]) -> None:
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.draining = False
        self.ended: str | None = None  # why nothing is taken any more
        self.failed = False  # without a request to
        self.on_step: Callable[[Columns], object] = lambda columns: None
        self._on_setup, self._on_bye = on_setup, on_bye
        self._beat: Beat | None = None
        self._heard_at = self._beat_at = time.monotonic()
        self._reader = FrameReader(MAX_FRAME)
        self._transport: asyncio.WriteTransport | None = None
        self._next = 0
        self._by_local: dict[int, _Live] = {}
        self._by_request: dict[int, _Live] = {}
        self._untold: deque[_Live] = deque()  # of the latest step: their tokens are not delivered yet
        self._resets: deque[asyncio.Future[None]] = deque()  # of the prefix cache, asked for and not answered
        self._telling = False  # the event loop will call _tell_some

    # ---- requests ----

    @property
    def live(self) -> int:
        """Sequences of this process that have not ended."""
        return len(self._by_local)

    def submit(self, sequences: Sequence[SequenceRequest], arrived_at: float) -> Mailbox:
        """All at once. Raises EngineLost."""
        if self.ended is not None or self._transport is None:
            raise EngineLost(self.ended or "the engine is not there yet")
        mailbox = Mailbox(self)
        frames = list[bytes]()
        for index, sequence in enumerate(sequences):
            local, self._next = self._next, self._next + 1
            self._by_local[local] = mailbox.live[index] = _Live(local, mailbox, index)
            if not sequence.answers:
                continue
            packed = pack_ids(sequence.prompt_token_ids)
            frames.append(
                framed(
                    Submit(
                        local,
                        packed,
                        replace(sequence.sampling, n=sequence.answers),
                        sequence.stop_token_ids,
                        sequence.priority,
                        arrived_at,
                        continues=bool(frames),
                    )
                )
            )
        self._transport.write(b"".join(frames))
        return mailbox

    def drop(self, sequences: Sequence[_Live], reason: FinishReason) -> None:
        """Have the engine end them. Here they count as live until it has let go of them."""
        if self._transport is not None and self.ended is None:
            self._transport.write(framed(Drop(tuple(s.local for s in sequences), reason)))

    def say_alive(self) -> None:
        """To rank 0, which replaces a process that is silent."""
        if self._transport is not None and self.ended is None:
            self._transport.write(framed(Alive()))

    async def reset_prefix_cache(self) -> None:
        """What is submitted from now on, by any process, hits nothing older. Raises EngineLost."""
        if self.ended is not None or self._transport is None:
            raise EngineLost(self.ended or "the engine is not there yet")
        done = asyncio.get_running_loop().create_future()
        self._resets.append(done)
        self._transport.write(framed(ResetPrefixCache()))
        await done

    # ---- health ----

    def health(self) -> Health:
        """From memory. The engine is alive when it made progress lately, on every known rank."""
        now, ready, beat = time.monotonic(), self.ready, self._beat
        if self.ended is not None:
            return Health(f"the engine ended: {self.ended}")
        if ready is None:
            return Health("loading")
        patience = min(_MOST_QUIET, ready.limit * _PATIENCE)
        quiet = now - self._heard_at
        if quiet > patience:
            return Health(f"rank 0 has said nothing for {quiet:.1f} s")
        if beat is None:
            return Health(None)
        named = f"; nothing heard of rank {', '.join(map(str, beat.silent))}" if beat.silent else ""
        still = beat.still_for + now - self._beat_at
        if still > patience:
            return Health(f"no progress for {still:.1f} s in step {beat.step} ({beat.place}){named}")
        return Health(f"a rank is silent{named}" if beat.silent else None)

    # ---- the connection ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        self._heard_at = time.monotonic()
        try:
            for body in self._reader.bodies(data):
                self._take(from_engine(body))
        except BadFrame as error:
            self._lost(f"rank 0 broke the protocol: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._lost("rank 0 is gone")

    def _lost(self, why: str | None, *, failed: bool = True) -> None:
        """Nothing more will come: waiting callers are notified."""
        if self.ended is not None:
            return
        self._tell(len(self._untold))
        self.ended, self.failed = why or "the server has shut down", failed
        for sequence in list(self._by_local.values()):
            sequence.mailbox.fail(EngineLost(self.ended))
        self._by_local.clear()
        self._by_request.clear()
        for reset in self._resets:
            if not reset.done():
                reset.set_exception(EngineLost(self.ended))
        self._on_bye(why)

    def _take(self, message: Any) -> None:
        if isinstance(message, Step):
            self._step(message)
        elif isinstance(message, Beat):
            self._beat, self._beat_at = message, self._heard_at
        elif isinstance(message, Stats):
            self.stats = message
        elif isinstance(message, Ready):
            self.ready = message
        elif isinstance(message, Drain):
            self.draining = True
        elif isinstance(message, Bye):
            self._lost(message.failure, failed=message.failure is not None)
        elif isinstance(message, PrefixCacheReset):
            if self._resets and not (reset := self._resets.popleft()).done():
                reset.set_result(None)
        elif isinstance(message, Setup):
            self._on_setup(message.settings)

    def _step(self, step: Step) -> None:
        self._tell(len(self._untold))  # of the step before, whose turn has not come
        for opened in step.opened:
            sequence = self._by_local.get(opened.local)
            if sequence is not None:
                sequence.request_id = opened.request_id
                self._by_request[opened.request_id] = sequence
        touched: list[_Live] = []
        if step.columns is not None:
            self.on_step(step.columns)
            touched = self._rows(step.columns)
        for scored in step.scored:
            sequence = self._by_local.get(scored.local)
            if sequence is not None:
                sequence.logprobs = tuple(wire.entry() for wire in scored.logprobs)
                if not sequence.fresh:
                    touched.append(sequence)
        ends: dict[int, End] = {}
        for ended in step.ended:
            sequence = self._by_local.pop(ended.local, None)
            if sequence is not None:
                self._end(sequence, ended, ends, touched)
        for sequence in touched:
            if sequence.local in ends:
                self._deliver(sequence, ends[sequence.local])
            elif sequence.seen > len(sequence.fresh):
                self._untold.append(sequence)
            else:
                self._deliver(sequence, None)
        if self._untold and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell_some)

    def _tell_some(self) -> None:
        self._tell(min(_AT_ONCE, len(self._untold)))
        self._telling = bool(self._untold)
        if self._telling:
            asyncio.get_running_loop().call_soon(self._tell_some)

    def _tell(self, count: int) -> None:
        for _ in range(count):
            self._deliver(self._untold.popleft(), None)

    def _rows(self, columns: Columns) -> list[_Live]:
        by_request, tokens, width = self._by_request, columns.tokens, columns.width
        touched = []
        for row, request_id in enumerate(columns.request_ids):
            sequence = by_request.get(request_id)
            if sequence is not None and (count := columns.counts[row]):
                sequence.fresh = tokens[row * width : row * width + count]
                sequence.seen += count
                touched.append(sequence)
        return touched

    def _end(self, sequence: _Live, ended: Ended, ends: dict[int, End], touched: list[_Live]) -> None:
        """All its tokens come with the end: those that no row brought before are fresh."""
        if sequence.request_id is not None:
            del self._by_request[sequence.request_id]
        whole = unpack_ids(ended.tokens)
        if not sequence.fresh and not sequence.logprobs:
            touched.append(sequence)
        sequence.fresh += whole[sequence.seen :]
        ends[sequence.local] = End(ended.reason, ended.detail, ended.queued, ended.prompt_logprobs)

    def _deliver(self, sequence: _Live, end: End | None) -> None:
        fresh, logprobs = tuple(sequence.fresh), sequence.logprobs
        sequence.fresh, sequence.logprobs = [], ()
        mailbox = sequence.mailbox
        if mailbox.live.get(sequence.index) is not sequence:
            return  # it was given up
        if end is not None:
            del mailbox.live[sequence.index]
        mailbox.put(Update(sequence.index, fresh, logprobs, end))
