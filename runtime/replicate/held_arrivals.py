"""Requests with grammars, held on rank 0 until all ranks have compiled them, so that no step waits for a compiler.

Knows: which grammars rank 0's process has checked, which ones ranks were asked to compile (event ``Compile``), which
rank has reported, which requests use one.
Does not know: how a grammar is compiled (runtime/grammar.py), how reports travel (parallel/control).

A held request is known to rank 0 alone: other requests pass it, and one that is cancelled ends without any agreement.
Reports change no plan; the admission that follows the last one is an event like others.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

from runtime.grammar import ChecksGrammars
from runtime.grammar_tables.automaton import known
from runtime.schedule.plan import Admit, Cancel, Compile, Event, Finished, Pause, Resume
from runtime.schedule.request import FinishReason

LEAST_HELD: Final = 64  # grammars that ranks may hold, whether requests use them or not
_REPORT: Final = struct.Struct("<sQ")  # REPORT, the grammar's number; why it cannot be used follows
REPORT: Final = b"G"  # first byte of a message that is one; those of outputs are msgpack arrays


def reports(compiling: dict[int, Future[Any]]) -> list[bytes]:
    """Messages about those that are done, which are removed."""
    done = [(number, future) for number, future in compiling.items() if future.done()]
    for number, _ in done:
        del compiling[number]
    return [_REPORT.pack(REPORT, number) + _error(future).encode()[:4096] for number, future in done]


def _error(future: Future[Any]) -> str:
    error = future.exception()
    return "" if error is None else str(error) or type(error).__name__


@dataclass(slots=True, eq=False)
class _Held:
    """A request. ``after``: events about it. ``cancelled``: its answers that are, with the reason."""

    arrival: Admit
    since: float
    after: list[Event] = field(default_factory=list)
    cancelled: dict[int, FinishReason] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Grammar:
    """``missing``: ranks that have not reported. ``regular``: as Compile has it. ``error``: why requests with it end.
    ``held``: by the first answer's id. ``users``: answers that were admitted and have not ended."""

    number: int
    missing: set[int]
    regular: bool = False
    error: str = ""
    held: dict[int, _Held] = field(default_factory=dict)
    users: int = 0

    @property
    def idle(self) -> bool:
        return not (self.missing or self.held or self.users)


class HeldArrivals:
    """Of rank 0. ``announce`` gets the events. ``most``: grammars that ranks hold at a time; requests with further ones
    wait until some request ends. ``checker``: without one, what cannot be used is found by the ranks.

    ``ended``: answers that have ended here. ``expects``: verdicts and reports that have not come. ``waited``: seconds,
    of all that were held.
    """

    def __init__(
        self, announce: Callable[[Event], None], ranks: int, most: int, checker: ChecksGrammars | None = None
    ) -> None:
        self.ended: list[Finished] = []
        self.expects = 0
        self.waited = 0.0
        self._announce, self._ranks, self._most, self._checker = announce, ranks, most, checker
        self._grammars: dict[str, _Grammar] = {}  # the one that was used longest ago first
        self._texts: dict[int, str] = {}  # by number, of those that ranks were asked to compile
        self._checking: dict[int, str] = {}
        self._queued: deque[str] = deque()  # of those that ranks were not asked to compile yet
        self._held: dict[int, tuple[_Grammar, _Held]] = {}  # by each answer's id
        self._using: dict[int, _Grammar] = {}  # by each admitted answer's id
        self._next = 0

    def __len__(self) -> int:
        """Answers that are held."""
        return len(self._held)

    def add(self, arrival: Admit) -> None:
        """A request with a grammar: it is announced when all ranks hold that."""
        text, request = arrival.request.sampling.grammar, arrival.request
        grammar = self._grammars.pop(text, None)
        if grammar is None:
            grammar = self._grammars[text] = _Grammar(self._next, set(range(self._ranks)))
            self._next += 1
            self._check(grammar.number, text)
        else:
            self._grammars[text] = grammar
        held = grammar.held[request.request_id] = _Held(arrival, perf_counter())
        self._held.update((answer, (grammar, held)) for answer in request.answer_ids)
        self._go_on(grammar)

    def _check(self, number: int, text: str) -> None:
        if self._checker is None:
            self._grammars[text].regular = known(text)
            self._queued.append(text)
            return
        self.expects += 1
        self._checking[number] = text
        self._checker.ask(number, text)

    def read_verdicts(self) -> None:
        """Requests with grammars that cannot be used end; ranks are to compile the others."""
        for number, regular, error in () if self._checker is None else self._checker.verdicts():
            self.expects -= 1
            grammar = self._grammars[text := self._checking.pop(number)]
            grammar.regular, grammar.error = regular, error
            if error:
                self._end(grammar)
                del self._grammars[text]
            else:
                self._queued.append(text)
        self._compile_next()

    def about(self, event: Cancel | Pause | Resume) -> bool:
        """Whether it is about a request that is held: then it follows the request, which ends here if all of its
        answers are cancelled."""
        if (found := self._held.get(event.request_id)) is None:
            return False
        grammar, held = found
        held.after.append(event)
        if isinstance(event, Cancel):
            held.cancelled[event.request_id] = event.reason
            if len(held.cancelled) == held.arrival.request.sampling.n:
                self._let_go(grammar, held)
                self.ended += [Finished(answer, reason, ()) for answer, reason in sorted(held.cancelled.items())]
                self._go_on(grammar)
        return True

    def reported(self, rank: int, message: bytes) -> None:
        """A rank holds a grammar, or cannot use it."""
        _, number = _REPORT.unpack_from(message)
        grammar, error = self._grammars[self._texts[number]], message[_REPORT.size :].decode(errors="replace")
        grammar.missing.remove(rank)
        self.expects -= 1
        if error and not grammar.error:
            grammar.error = f"rank {rank} cannot use its grammar: {error}"
        self._go_on(grammar)

    def over(self, finished: Iterable[Finished]) -> None:
        """Answers have ended."""
        for one in finished:
            if (grammar := self._using.pop(one.request_id, None)) is not None:
                grammar.users -= 1
                self._go_on(grammar)

    def _go_on(self, grammar: _Grammar) -> None:
        if not grammar.missing and grammar.error:
            self._end(grammar)
        elif not grammar.missing:
            for held in list(grammar.held.values()):
                self._let_go(grammar, held)
                answers = held.arrival.request.answer_ids
                for event in (held.arrival, *held.after):
                    self._announce(event)
                self._using.update(dict.fromkeys(answers, grammar))
                grammar.users += len(answers)
        self._compile_next()

    def _end(self, grammar: _Grammar) -> None:
        for held in list(grammar.held.values()):
            self._let_go(grammar, held)
            answers = held.arrival.request.answer_ids
            self.ended += [Finished(answer, FinishReason.ERROR, (), grammar.error) for answer in answers]

    def _let_go(self, grammar: _Grammar, held: _Held) -> None:
        self.waited += perf_counter() - held.since
        request = held.arrival.request
        del grammar.held[request.request_id]
        for answer in request.answer_ids:
            del self._held[answer]

    def _compile_next(self) -> None:
        """Have ranks compile what is queued, as far as they may hold more; drop what no request uses for it."""
        while self._queued:
            if not self._grammars[self._queued[0]].held:  # all of its requests were cancelled
                del self._grammars[self._queued.popleft()]
                continue
            dropped: tuple[int, ...] = ()
            if len(self._texts) >= self._most:
                idle = next((one for one in self._grammars.values() if one.number in self._texts and one.idle), None)
                if idle is None:
                    return
                dropped = (idle.number,)
                del self._grammars[self._texts.pop(idle.number)]
            text = self._queued.popleft()
            number = self._grammars[text].number
            self._texts[number] = text
            self.expects += self._ranks
            self._announce(Compile(number, text, self._grammars[text].regular, dropped))
