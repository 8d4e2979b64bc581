"""AsyncEngine: an engine for asyncio programs. It takes turns in a thread; answers arrive piece by piece.

Knows: what crosses between that thread and event loops, and in which order things end. Does not know: how requests are
checked, fed and put together (client.py), sockets, HTTP.

    async with AsyncEngine(engine) as llm:                        # on rank 0; the other ranks call engine.follow()
        async for delta in llm.stream(PromptRequest("def gcd(a, b):", SamplingParams(max_tokens=64))):
            print(delta.text, end="")

    event loops                                   the engine's thread
    stream(): tokenise, check, give a _Submit ->  takes all orders, until a turn must begin (plan_late.py), then a turn;
                                                  waits for some while nothing is live
    the consumer's mailbox                    <-  one call_soon_threadsafe a turn and loop, with all that it brought
    the consumer stops listening: a _Cancel   ->  the request ends within a few steps
    close(): a _Close                         ->  agrees on the end with the other ranks, and returns

The opener of the engine closes it, after this.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Hashable, Sequence
from dataclasses import replace
from typing import Self

from runtime.frontend.client import EngineClient, EngineStopped, PreparedPrompt, PromptRequest
from runtime.frontend.engine_protocol import EngineProtocol
from runtime.frontend.outputs import Delta, RequestOutput
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.validation import RequestError

_IDLE_SECONDS = 0.25  # longest wait for an order before the engine is asked again

log = logging.getLogger(__name__)

_Letter = Delta | RequestOutput | Exception


class _Submit:
    """A request, and where its consumer waits: pieces arrive in that consumer's own event loop."""

    def __init__(self, prepared: PreparedPrompt) -> None:
        self.prepared = prepared
        self.loop = asyncio.get_running_loop()
        self.mailbox: asyncio.Queue[_Letter] = asyncio.Queue()
        self.taken = False  # by the client, under ``key``; the engine's thread alone knows of these
        self.key: Hashable = None


class _Cancel:
    def __init__(self, submitted: _Submit) -> None:
        self.submitted = submitted


class _Close:
    pass


class _ResetPrefixCache:
    pass


class AsyncEngine:
    """See the module's docstring. Nothing else may use ``engine`` from here on until ``close`` has returned.

    ``prepare``, ``stream``, ``complete`` and ``close`` may be called in any thread and any event loop. Raises
    EngineStopped for an engine that another client's end has stopped.
    """

    def __init__(self, engine: EngineProtocol, tokenizer: Tokenizer | None = None) -> None:
        self._client = EngineClient(engine, tokenizer)
        self._consumers: dict[Hashable, _Submit] = {}  # by key; the engine's thread alone knows of them
        self._orders: deque[_Submit | _Cancel | _ResetPrefixCache | _Close] = deque()
        self._ordered = threading.Event()
        self._lock = threading.Lock()  # of the next three
        self._listening: set[_Submit] = set()  # those to notify of an end
        self._stopped = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- what callers do ----

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._client.tokenizer

    @property
    def live(self) -> int:
        """Requests that are waited for."""
        return len(self._listening)

    def prepare(self, request: PromptRequest) -> PreparedPrompt:
        """Tokenise and check, for programs that have other threads for that. Raises RequestError."""
        return self._client.prepare(request)

    async def stream(self, request: PromptRequest | PreparedPrompt) -> AsyncGenerator[Delta, None]:
        """The request's deltas as they come; the last one carries the whole ``output``.

        Blocks the event loop while it tokenises and checks, unless the request is prepared. A consumer that stops
        listening (``break``, a cancelled task, a timeout, ``aclose``) cancels the request. Raises RequestError at the
        first step, and EngineStopped when the engine ends before the request does.
        """
        submitted = self._submit(request, stream=True)
        try:
            while True:
                letter = await submitted.mailbox.get()
                if isinstance(letter, Exception):
                    raise letter
                if isinstance(letter, Delta):
                    yield letter
                    if letter.output is not None:
                        return
        finally:
            self._leave(submitted)

    async def complete(self, request: PromptRequest | PreparedPrompt) -> RequestOutput:
        """The whole answer, without the cost of deltas. Raises as ``stream`` does; a cancelled task cancels it."""
        submitted = self._submit(request, stream=False)
        try:
            while True:
                letter = await submitted.mailbox.get()
                if isinstance(letter, Exception):
                    raise letter
                if isinstance(letter, RequestOutput):
                    return letter
        finally:
            self._leave(submitted)

    async def reset_prefix_cache(self) -> None:
        """As EngineClient's, of requests that are submitted after it. Raises EngineStopped."""
        with self._lock:
            if self._stopped:
                raise self._ending()
        self._order(_ResetPrefixCache())

    async def close(self) -> None:
        """End everything: requests that have not ended raise EngineStopped, the other ranks' ``follow`` returns.

        Returns when the engine's thread has ended. Raises EngineStopped if the engine failed, so that the opener
        closes it as failed. Idempotent.
        """
        self._order(_Close())
        await asyncio.to_thread(self._thread.join)
        if self._failure is not None:
            raise self._ending()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            await self.close()
        except EngineStopped:
            if error is None:
                raise

    # ---- between the threads ----

    def _submit(self, request: PromptRequest | PreparedPrompt, *, stream: bool) -> _Submit:
        prepared = request if isinstance(request, PreparedPrompt) else self._client.prepare(request)
        if prepared.request.stream is not stream:
            prepared = replace(prepared, request=replace(prepared.request, stream=stream))
        submitted = _Submit(prepared)
        with self._lock:
            if self._stopped:
                raise self._ending()
            self._listening.add(submitted)
        self._order(submitted)
        return submitted

    def _leave(self, submitted: _Submit) -> None:
        """The consumer listens no more. If it saw the end before, there is nothing to cancel."""
        with self._lock:
            if submitted not in self._listening:
                return
            self._listening.remove(submitted)
        self._order(_Cancel(submitted))

    def _order(self, order: _Submit | _Cancel | _ResetPrefixCache | _Close) -> None:
        self._orders.append(order)
        self._ordered.set()

    def _ending(self) -> EngineStopped:
        why = "was closed" if self._failure is None else f"failed: {type(self._failure).__name__}: {self._failure}"
        ending = EngineStopped(f"the engine {why}")
        ending.__cause__ = self._failure
        return ending

    # ---- the engine's thread ----

    def _run(self) -> None:
        engine = self._client.engine
        try:
            engine.bind_thread()
            while self._take_orders() and self._put_off():
                if self._client.live:
                    self._turn()
                elif engine.has_work:
                    engine.step()  # steps that were in flight when the last request ended
                else:
                    self._client.wait(self._ordered.wait, _IDLE_SECONDS)
            self._client.close()
        except BaseException as error:  # carried to waiting callers, and to close()
            log.error("the engine's thread ends", exc_info=error)
            self._failure = error
        finally:
            with self._lock:
                self._stopped = True
                left, self._listening = self._listening, set()
            self._deliver([(submitted, self._ending()) for submitted in left])

    def _put_off(self) -> bool:
        """Takes what is ordered until the turn must begin: it is in this turn's plan then. Whether to go on."""
        while self._client.live and (left := self._client.engine.slack()) > 0:
            if self._ordered.wait(left) and not self._take_orders():
                return False
        return True

    def _take_orders(self) -> bool:
        """Whether to go on."""
        self._ordered.clear()
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, _Close):
                return False
            if isinstance(order, _Submit):
                self._take(order)
            elif isinstance(order, _ResetPrefixCache):
                self._client.reset_prefix_cache()
            elif order.submitted.taken:
                self._client.cancel(order.submitted.key)
        return True

    def _take(self, submitted: _Submit) -> None:
        try:
            submitted.key = self._client.submit(submitted.prepared)
        except RequestError as error:  # its key is in use
            self._forget(submitted)
            self._deliver([(submitted, error)])
            return
        submitted.taken = True
        self._consumers[submitted.key] = submitted

    def _turn(self) -> None:
        turn = self._client.turn()
        letters: list[tuple[_Submit, _Letter]] = [(self._consumers[delta.key], delta) for delta in turn.deltas]
        for output in turn.finished:
            submitted = self._consumers.pop(output.key)
            self._forget(submitted)
            if not submitted.prepared.request.stream:
                letters.append((submitted, output))
        if letters:
            self._deliver(letters)

    def _forget(self, submitted: _Submit) -> None:
        """It has ended, or never began: there is no end to report and nothing to cancel."""
        with self._lock:
            self._listening.discard(submitted)

    def _deliver(self, letters: Sequence[tuple[_Submit, _Letter]]) -> None:
        """Into the mailboxes, each in its own loop. Those of a loop that is closed have no reader."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Submit, _Letter]]] = {}
        for submitted, letter in letters:
            by_loop.setdefault(submitted.loop, []).append((submitted, letter))
        for loop, its_letters in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, its_letters)
            except RuntimeError:  # the loop is closed
                for submitted, _ in its_letters:
                    self._leave(submitted)


def _put(letters: Sequence[tuple[_Submit, _Letter]]) -> None:
    for submitted, letter in letters:
        submitted.mailbox.put_nowait(letter)
