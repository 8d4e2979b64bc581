"""EngineServer: rank 0's side of the API processes. It takes the engine's turns and sends them the results.

Knows: which API process submitted what, what follows when one is lost, how a drain ends.
Does not know: HTTP, text, tokenizers (all in the API processes), their connections and the beat thread (api_links.py),
how processes are started (launch/serve/processes.py).

    the engine's thread   orders from all sockets, until a turn must begin (plan_late.py) -> a turn -> one message to
                          each API process; never blocks on them

If an API process is lost, its requests are cancelled on all ranks, and the starter of API processes is asked for
another one.
"""

from __future__ import annotations

import logging
import select
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from runtime.frontend.api_links import ApiLink, Beats, News, ServedEngine, columns_of
from runtime.frontend.client import Batch, EngineClient, PreparedPrompt, PromptRequest, Turn
from runtime.frontend.framing import BadFrame, pack_ids, unpack_ids
from runtime.frontend.outputs import Delta, RequestOutput
from runtime.frontend.serve_messages import (
    ITERATION_BUCKETS,
    Bye,
    Columns,
    Drain,
    Ended,
    Opened,
    PrefixCacheReset,
    Ready,
    ResetPrefixCache,
    Scored,
    ScoredPrompt,
    Stats,
    Step,
    Submit,
    ToApi,
    WireLogprob,
    framed,
)
from runtime.frontend.validation import RequestError, fitted
from runtime.schedule.request import FinishReason

_IDLE_SECONDS = 0.25  # longest wait for an order before the engine is asked again
_STATS_SECONDS = 0.5
_POLL_SECONDS = 1e-3  # poll() waits for whole milliseconds
_FLUSH_SECONDS = 2.0
_FOR_OTHERS = 8  # one of so many rows and KV blocks is never an HTTP request's that has more

log = logging.getLogger("lockstride")


class _Owner(NamedTuple):
    """The API process that a sequence is of, and its id there."""

    link: ApiLink
    local: int


class EngineServer:
    """``run`` takes the engine's turns until ``close`` or a drain is over; see the module's docstring.

    ``max_queued``: sequences that may wait for their first step; more are refused. ``replace``: asked, with why, for
    a new connection in place of a lost one; it comes through ``connect``, from any thread, or never.
    """

    def __init__(
        self,
        engine: ServedEngine,
        links: Sequence[ApiLink],
        beats: Beats,
        *,
        max_queued: int,
        replace: Callable[[ApiLink, str], object],
    ) -> None:
        self._engine = engine
        self._client = EngineClient(engine, text=False, clock=time.monotonic)
        self._beats = beats
        self._links = list(links)
        self._fresh: deque[ApiLink] = deque()
        self._replace = replace
        self._max_queued = max_queued
        self._owners: dict[Hashable, _Owner] = {}  # by the client's key, which is the engine's request id
        self._keys: dict[ApiLink, dict[int, Hashable]] = {link: {} for link in links}
        self._news: dict[ApiLink, News] = {}
        self._batches: dict[ApiLink, Batch] = {}  # of the latest HTTP request
        self._most_together = _most(engine.config.max_num_seqs)
        self._stats_at = 0.0
        self._looked_at = time.monotonic()
        self._draining: float | None = None  # when what runs then is cancelled
        self._hurried: float | None = None  # when it is left alone even if it has not come back
        self.restarts = 0
        self.disconnected = 0  # sequences that were cancelled because their client was gone
        self._iterations = [0] * (len(ITERATION_BUCKETS) + 1)
        self._iteration_tokens = 0
        beats.attend(engine)

    # ---- what others call ----

    def connect(self, link: ApiLink) -> None:
        """From any thread: one more API process."""
        self._fresh.append(link)

    def drain(self, seconds: float) -> None:
        """Take nothing new; after ``seconds`` what still runs is cancelled, and ``run`` returns."""
        if self._draining is None:
            self._draining = time.monotonic() + seconds
            self._broadcast(Drain(seconds))

    def hurry(self) -> None:
        """Cancel what runs now."""
        self._draining = min(time.monotonic(), self._draining or 0.0)

    def run(self, tend: Callable[[], object] = lambda: None) -> None:
        """Turns until a drain is over. ``tend`` is called once a turn and may call ``drain`` and ``hurry``.

        Raises what the engine raises, after the API processes have received the reason.
        """
        try:
            self._greet(self._links)
            while True:
                tend()
                self._take_orders()
                self._put_off()
                if self._draining is not None and self._drained(self._draining):
                    break
                self._turn()
                self._send_stats()
            self._client.close()
        except BaseException as error:
            self.end(f"{type(error).__name__}: {error}")
            raise
        self.end(None)

    def end(self, failure: str | None) -> None:
        """The last message, and a moment for it to leave. Does not raise."""
        self._broadcast(Bye(failure))
        until = time.monotonic() + _FLUSH_SECONDS
        while any(link.behind and link.lost is None for link in self._links) and time.monotonic() < until:
            for link in self._links:
                link.flush()
            time.sleep(0.005)

    @property
    def live(self) -> int:
        """Sequences that have not ended."""
        return self._client.live

    # ---- orders ----

    def _greet(self, links: Sequence[ApiLink]) -> None:
        engine, model = self._engine, self._engine.model_config
        cache = {"block_size": str(engine.config.block_size), "num_gpu_blocks": str(engine.occupancy.blocks)}
        cache |= {
            "cache_dtype": engine.config.kv_cache_dtype,
            "quantization": str(model.quantization),
            "enable_prefix_caching": str(engine.config.prefix_caching),
            "gpu_memory_utilization": str(engine.config.memory_fraction),
        }
        ready = Ready(
            model.vocab_size,
            model.max_model_len,
            model.eos_token_ids,
            engine.config.control_timeout_s,
            cache,
            self._most_together,
        )
        stats = self._stats()
        for link in links:
            link.send(stats)  # first: a process that is ready has some
            link.send(ready)
            if self._draining is not None:
                link.send(Drain(max(0.0, self._draining - time.monotonic())))
        self._beats.speak_to(self._links)

    def _take_orders(self) -> None:
        while self._fresh:
            link = self._fresh.popleft()
            self._links.append(link)
            self._keys[link] = {}
            self._greet([link])
        now = time.monotonic()
        passed = min(now - self._looked_at, 1.0)  # a process that was stopped with this one need not have hung
        self._looked_at = now
        for link in list(self._links):
            if link.behind:
                link.flush()
            for order in link.receive(passed):
                if isinstance(order, Submit):
                    self._submit(link, order)
                elif isinstance(order, ResetPrefixCache):
                    self._client.reset_prefix_cache()
                    link.send(PrefixCacheReset())
                else:
                    self._drop(link, order.locals, order.reason)
            if link.lost is not None:
                self._lose(link)

    def _submit(self, link: ApiLink, order: Submit) -> None:
        """To the client, or back with the reason. Its fields were checked where it came from."""
        if not order.continues or link not in self._batches:
            self._batches[link] = self._batch()
        if self._draining is not None:
            self._refuse(link, order, "draining: the server is shutting down")
            return
        waiting = self._client.not_begun
        if waiting + order.sampling.n > self._max_queued:
            self._refuse(link, order, f"queue full: {waiting} of {self._max_queued} requests wait already")
            return
        try:
            prompt = unpack_ids(order.prompt)
            sampling = fitted(order.sampling, len(prompt), self._engine.model_config)
            scored = sampling.logprobs is not None
            request = PromptRequest(
                prompt,
                sampling,
                priority=order.priority,
                stream=scored,
                arrived_at=order.arrived_at,
                apart=True,
                batch=self._batches[link],
            )
            key = self._client.submit(PreparedPrompt(request, prompt, sampling, order.stop_token_ids, order.priority))
        except (RequestError, BadFrame) as error:
            self._refuse(link, order, f"invalid: {error}")
            return
        assert isinstance(key, int), "the client numbers what has no key: the engine's request id"
        for local, answer in enumerate(range(key, key + sampling.n), order.local):
            self._owners[answer] = _Owner(link, local)
            self._keys[link][local] = answer
            self._of(link).opened.append(Opened(local, answer))

    def _batch(self) -> Batch:
        """What one HTTP request may hold: some rows and KV blocks are left for others whatever it asks for."""
        config, blocks = self._engine.config, self._engine.occupancy.blocks
        groups = config.data_parallel
        return Batch(groups * self._most_together, groups * _most(blocks) * config.block_size)

    def _refuse(self, link: ApiLink, order: Submit, why: str) -> None:
        for local in range(order.local, order.local + order.sampling.n):
            self._of(link).ended.append(Ended(local, FinishReason.REJECTED, b"", why, 0.0, None))

    def _drop(self, link: ApiLink, locals_: Sequence[int], reason: FinishReason) -> None:
        keys = [key for local in locals_ if (key := self._keys[link].get(local)) is not None]
        if reason is not FinishReason.STOP:
            self.disconnected += len(keys)
        self._client.cancel(*keys, reason=reason)

    def _lose(self, link: ApiLink) -> None:
        """Cancel its requests and ask for another API process."""
        self._links.remove(link)
        self._beats.speak_to(self._links)
        why = link.lost or "closed"
        orphans = self._keys.pop(link)
        self._news.pop(link, None)
        self._batches.pop(link, None)
        for key in orphans.values():
            del self._owners[key]
        self.disconnected += len(orphans)
        self._client.cancel(*orphans.values())
        link.close()
        if self._draining is None:
            self.restarts += 1
            log.warning("an API process is lost: %s; %d of its requests are cancelled", why, len(orphans))
            self._replace(link, why)

    # ---- turns ----

    def _turn(self) -> None:
        client, engine = self._client, self._engine
        if client.live:
            turn = client.turn()
            self._beats.progress("turn", turn.step.step)
            self._report(turn)
            return
        if self._news:
            self._send(None)
        if engine.has_work:
            self._beats.progress("turn", engine.step().step)
        else:
            client.wait(self._ordered, _IDLE_SECONDS)
            self._beats.progress("idle", 0)

    def _put_off(self) -> None:
        """Reads orders until the turn must begin, so that they are in this turn's plan, not in the next one's."""
        while self._client.live and (left := self._engine.slack()) > 0:
            if left < _POLL_SECONDS:
                time.sleep(left)
                self._take_orders()
                return
            if self._ordered(left - left % _POLL_SECONDS):
                self._take_orders()

    def _ordered(self, timeout: float) -> bool:
        """Waits for the sockets; whether one of them can be read or written."""
        poll = select.poll()  # select() refuses descriptors from 1024 on
        for link in self._links:
            poll.register(link, select.POLLIN | (select.POLLOUT if link.behind else 0))
        if not self._links:
            timeout = min(timeout, 0.05)  # another one comes through ``connect``
        return bool(poll.poll(1000 * timeout) or self._fresh or self._draining is not None)

    def _report(self, turn: Turn) -> None:
        for delta in turn.deltas:
            self._score(delta)
        for output in turn.finished:
            self._finish(output)
        columns = columns_of(turn.step)
        if columns is not None:
            gained = sum(n for id_, n in zip(columns.request_ids, columns.counts, strict=True) if id_ >= 0)
            self._iterations[bisect_left(ITERATION_BUCKETS, gained)] += 1
            self._iteration_tokens += gained
        self._send(columns)

    def _score(self, delta: Delta) -> None:
        owner = self._owners.get(delta.key)
        if owner is not None and delta.logprobs:
            logprobs = tuple(map(WireLogprob.of, delta.logprobs))
            self._of(owner.link).scored.append(Scored(owner.local, logprobs))

    def _finish(self, output: RequestOutput) -> None:
        owner = self._owners.pop(output.key, None)
        if owner is None:
            return  # its API process is lost
        del self._keys[owner.link][owner.local]
        (answer,) = output.completions
        scores = None if output.prompt_parts is None else tuple(map(ScoredPrompt.of, output.prompt_parts))
        reason, packed, queued = answer.finish_reason, pack_ids(answer.token_ids), output.timing.queued
        self._of(owner.link).ended.append(Ended(owner.local, reason, packed, answer.detail, queued, scores))

    def _of(self, link: ApiLink) -> News:
        return self._news.setdefault(link, News())

    def _send(self, columns: Columns | None) -> None:
        """One message to each API process that has anything in this turn."""
        news, self._news = self._news, {}
        silent = framed(Step(columns, (), (), ())) if columns is not None and len(news) < len(self._links) else b""
        for link in self._links:
            if link in news:
                message = news[link].step(columns)
                if message is not None:
                    link.send(message)
            elif columns is not None and self._keys[link]:
                link.send_frame(silent)

    def _send_stats(self) -> None:
        now = time.monotonic()
        if now - self._stats_at < _STATS_SECONDS:
            return
        self._stats_at = now
        self._broadcast(self._stats())

    def _stats(self) -> Stats:
        occupancy, queued = self._engine.occupancy, self._client.not_begun
        return Stats(
            {name: float(value) for name, value in self._engine.counters.items()},
            max(0, self._client.sequences - queued),
            queued,
            occupancy.used_blocks,
            occupancy.blocks,
            queued >= self._max_queued,
            self.restarts,
            self.disconnected,
            tuple(self._iterations),
            self._iteration_tokens,
            *self._engine.agreements,
        )

    def _broadcast(self, message: ToApi) -> None:
        frame = framed(message)
        for link in list(self._links):
            link.send_frame(frame)

    # ---- the end ----

    def _drained(self, until: float) -> bool:
        """Whether nothing runs any more, or it is not waited for any longer."""
        now = time.monotonic()
        if not self._client.live:
            if self._news:
                self._send(None)
            return True
        if now >= until and self._hurried is None:
            log.warning("%d requests do not finish in time: cancelled", self._client.live)
            self._client.cancel_all()
            self._hurried = now + _FLUSH_SECONDS
        return self._hurried is not None and now >= self._hurried


def _most(total: int) -> int:
    """Of so many rows or blocks, those that one HTTP request may hold."""
    return max(1, total - max(1, total // _FOR_OTHERS))
