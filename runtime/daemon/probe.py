"""SCHED_PROBE: the same tokens of some sessions drawn in one batch and one by one, on forks, and compared.

A token of both passes is compared as long as those before it are equal: what is drawn, and where that is equal, too,
how likely the model finds it. Knows: the forks, and when each pass is over. Does not know: the sessions themselves,
which it never touches: a fork has its blocks, state and counts, so nothing is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Protocol

from runtime.config import EngineConfig
from runtime.daemon.frames import Kind, pack_json
from runtime.daemon.session import Connection
from runtime.frontend.engine_protocol import ModelFacts
from runtime.schedule.plan import Evicted, Finished, Parked, Refused
from runtime.schedule.request import FinishReason, Request


class SessionEngine(Protocol):
    """What the desk needs of an engine: the verbs of runtime/engine.py."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model_config(self) -> ModelFacts: ...
    @property
    def counters(self) -> Mapping[str, int | float]: ...
    def reset_prefix_cache(self) -> None: ...
    def start(self, request: Request, quantum: int, *, keep: bool = False) -> None: ...
    def proceed(self, request_id: int, epoch: int, tokens: int) -> None: ...
    def extend(
        self, request_id: int, epoch: int, token_ids: tuple[int, ...], max_tokens: int, quantum: int
    ) -> None: ...
    def fork(self, request_id: int, parent: int, *, scored: bool = False) -> None: ...
    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None: ...


class Probe:
    """``request``: the id before its line, or 0, which its answer has, too. ``parents``: engine ids of parked sessions,
    and how many tokens of each are compared. Each is forked twice at once; the first forks go on together, the others
    one after the other."""

    def __init__(
        self,
        connection: Connection,
        request: int,
        engine: SessionEngine,
        parents: Sequence[tuple[int, int]],
        take_id: Callable[[], int],
    ) -> None:
        self.connection = connection
        self._request = request
        self._engine = engine
        self._wanted: dict[int, int] = {}
        self._pairs: list[tuple[int, int]] = []
        for parent, tokens in parents:
            pair = take_id(), take_id()
            for fork in pair:
                engine.fork(fork, parent, scored=True)
                self._wanted[fork] = tokens
            self._pairs.append(pair)
        self._gained: dict[int, list[int]] = {fork: [] for fork in self._wanted}
        self._scores: dict[int, list[float]] = {fork: [] for fork in self._wanted}
        self._begun: set[int] = set()
        self._running: set[int] = set()
        self._alone = [alone for _, alone in self._pairs]
        self._failed: str | None = None
        for batched, _ in self._pairs:
            self._go_on(batched)

    @property
    def forks(self) -> int:
        return len(self._wanted)

    @property
    def over(self) -> bool:
        return not self._running and (not self._alone or self._failed is not None)

    def _go_on(self, fork: int) -> None:
        self._running.add(fork)
        self._engine.proceed(fork, 1, self._wanted[fork])

    def has(self, fork: int) -> bool:
        return fork in self._wanted

    def gained(self, fork: int, tokens: tuple[int, ...], scores: Sequence[float]) -> None:
        """``scores``: log-probabilities of the tokens; empty if the engine reports none."""
        self._gained[fork] += tokens
        self._scores[fork] += scores

    def noticed(self, notice: Parked | Refused | Evicted) -> None:
        fork = notice.request_id
        if fork not in self._wanted or isinstance(notice, Evicted):
            return
        if isinstance(notice, Refused):
            self._failed = self._failed or notice.detail
            self._running.discard(fork)
        elif fork not in self._begun:
            self._begun.add(fork)  # it is there: its parent's state is its own
            return
        else:
            self._engine.cancel(fork)
            self._running.discard(fork)
        self._next()

    def ended(self, finished: Finished) -> None:
        if finished.request_id in self._running:
            self._running.discard(finished.request_id)
            if finished.reason in (finished.reason.CANCELLED, finished.reason.REJECTED, finished.reason.ERROR):
                self._failed = self._failed or finished.detail or finished.reason.label
            self._next()

    def _next(self) -> None:
        if self._alone and not self._running and self._failed is None:
            self._go_on(self._alone.pop(0))

    def close(self) -> None:
        """Give up what is left of it."""
        for fork in self._wanted:
            self._engine.cancel(fork)

    def answer(self) -> None:
        """Send the result."""
        connection = self.connection
        if self._failed is not None:
            self.close()
            connection.send(Kind.ERROR, None, f"SCHED_PROBE: {self._failed}".encode(), self._request)
        else:
            connection.send(Kind.ACK, None, pack_json({"verb": "SCHED_PROBE", **self._found()}), self._request)
        connection.end_command()

    def _found(self) -> dict[str, int | float | None]:
        tokens, mismatches, differences = 0, 0, list[float]()
        for pair in self._pairs:
            batched, alone = (self._gained[fork] for fork in pair)
            equal = len(list(takewhile(lambda both: both[0] == both[1], zip(batched, alone, strict=False))))
            differs = equal < max(len(batched), len(alone))
            tokens += equal + differs
            mismatches += differs
            scores = zip(*(self._scores[fork][:equal] for fork in pair), strict=True)
            differences += [abs(one - other) for one, other in scores]
        return {
            "sessions": len(self._pairs),
            "tokens": tokens,
            "mismatches": mismatches,
            "logprob_difference": max(differences, default=None),
        }
