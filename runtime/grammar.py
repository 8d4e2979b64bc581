"""Grammars: which tokens may come next in an answer that must be a text of one. By llguidance, an optional package.

Knows: the notation (llguidance's: Lark with JSON schemas, or several of these as JSON), limits on the work that one may
cause, where stop ids are allowed. Does not know: fields of requests (frontend/structured.py), slots, steps, devices.

Every rank has a matcher for each request, so no mask travels. Limits are counts, not times: a grammar that
is refused on one rank is refused on all.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from runtime.grammar_tables.lark import unforced
from runtime.grammar_tables.token_table import TokenTable
from runtime.schedule.request import Request, SamplingParams
from runtime.schedule.tables import PLACES

MASK_THREADS: Final = 8  # at most, that compute masks of several rows
REPLICAS: Final = 4  # of a compiled grammar: copies of one matcher wait for each other
WORD_BITS: Final = 32
_LIMITS: Final = {
    "initial_lexer_fuel": 200_000,  # to compile one: 10 ms; where its text is forced, 0.1 s and 35 MB
    "step_lexer_fuel": 50_000,  # to find what may come next: 4 ms
    "step_max_items": 20_000,  # 1 ms
    "max_lexer_states": 25_000,  # 50 MB
    "max_grammar_size": 100_000,  # symbols
    "verbose_errors": False,
}

Words = npt.NDArray[np.int32]

log = logging.getLogger(__name__)


class GrammarError(ValueError):
    """A grammar that cannot be used, or no package to use it with; the text says what to do."""


@dataclass
class GrammarCounters:
    """``grammar_compiles``: grammars that this rank compiled, tokenizer's tables included, in
    ``grammar_compile_seconds`` of a thread of their own.
    ``grammar_masks``: masks that matchers computed for rows, in ``grammar_mask_seconds``."""

    grammar_compiles: int = 0
    grammar_compile_seconds: float = 0.0
    grammar_masks: int = 0
    grammar_mask_seconds: float = 0.0


def library() -> Any:
    """llguidance. Raises GrammarError."""
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise GrammarError(
            "structured output needs the package llguidance: install it on every node, "
            f"pip install 'lockstride[grammar]' ({error})"
        ) from None


class MakesTables(Protocol):
    """grammar_tables/maker.py"""

    def want(self, request: Request) -> bool: ...
    def made(self) -> list[tuple[bytes, bytes]]: ...
    def forget(self, key: bytes) -> None: ...
    def close(self) -> None: ...


class ChecksGrammars(Protocol):
    """grammar_check.py"""

    def ask(self, number: int, grammar: str) -> None: ...
    def verdicts(self) -> Sequence[tuple[int, bool, str]]: ...
    def close(self) -> None: ...


class Grammars:
    """Compiles grammars over one tokenizer. ``tokenizer_json`` returns the text of its tokenizer.json, None if there is
    none; it is called once, when the first grammar comes. ``vocab_size``: of the model. Safe in any thread.

    ``tables``: those that all ranks hold, by Request.table_key. ``maker``, ``checker``: of rank 0."""

    def __init__(self, tokenizer_json: Callable[[], str | None], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size, self.eos_token_ids = vocab_size, tuple(eos_token_ids)
        self.counters = GrammarCounters()
        self.tables: dict[bytes, TokenTable] = {}
        self.maker: MakesTables | None = None
        self.checker: ChecksGrammars | None = None
        self.places = PLACES  # on the device, for tables; 0: requests have no grammars
        self._tokenizer_json = tokenizer_json
        self._compiled: dict[str, Future[_Compiled]] = {}
        self._lock = threading.Lock()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammars")

    @cached_property
    def _executor(self) -> Any:
        return library().LLExecutor(num_threads=min(MASK_THREADS, os.cpu_count() or 1))

    @cached_property
    def _tokens(self) -> Any:
        """Called in one thread only."""
        made = library().LLTokenizer
        if (text := self._tokenizer_json()) is None:
            raise GrammarError("structured output needs a tokenizer, and the model folder has no tokenizer.json")
        if not self.eos_token_ids:
            raise GrammarError("structured output needs an end-of-text token: set eos_token_id in config.json")
        try:
            return made(text, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids))
        except BaseException as error:  # the library raises plain ones, or panics
            raise GrammarError(f"structured output is not possible with this tokenizer: {error}") from error

    def begin(self, grammar: str, regular: bool) -> Future[_Compiled]:
        """Compile it in another thread. ``regular``: its text is never forced, as in its table. The future raises
        GrammarError for one that cannot be used."""
        with self._lock:
            if (future := self._compiled.get(grammar)) is None:
                future = self._compiled[grammar] = self._threads.submit(self._compile, grammar, regular)
        return future

    def drop(self, grammar: str) -> None:
        """Its requests have all ended."""
        with self._lock:
            self._compiled.pop(grammar, None)

    def warm(self) -> None:
        """Begin to build what all grammars share; without llguidance nothing happens."""
        self.begin('start: "a"', regular=False)

    def _compile(self, grammar: str, regular: bool) -> _Compiled:
        began = perf_counter()
        written = unforced(grammar) if regular else grammar
        try:
            return _Compiled(written, [self._compiled_matcher(written)], spare=0 if regular else REPLICAS - 1)
        finally:
            self.counters.grammar_compiles += 1
            self.counters.grammar_compile_seconds += perf_counter() - began

    def _compiled_matcher(self, written: str) -> Any:
        matcher = _matcher(self._tokens, written)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            why = matcher.get_error().split("\n")[0] or "no text is allowed"
            raise GrammarError(" ".join(why.split()))
        return matcher

    def _copy(self, found: _Compiled) -> Any:
        """A matcher at the beginning. From the second use on there are more to copy, which do not keep others waiting
        that are to be compiled for the first time."""
        found.copies += 1
        if found.copies > 1 and found.spare:
            found.spare -= 1
            self._threads.submit(lambda: found.matchers.append(self._compiled_matcher(found.written)))
        return found.matchers[found.copies % len(found.matchers)].deep_copy()

    def matcher(self, sampling: SamplingParams, stop_token_ids: Iterable[int], answer: Sequence[int]) -> Matcher:
        """For a request that has generated ``answer``, whose grammar is compiled."""
        future = self._compiled.get(sampling.grammar)
        if future is None or not future.done() or future.exception() is not None:
            log.error("a request ends, since this rank holds no matcher of its grammar")
            compiled = None
        else:
            compiled = self._copy(future.result())
        matcher = Matcher(compiled, self, sampling, stop_token_ids)
        matcher.accept(answer)
        return matcher

    def allow(
        self, matchers: Sequence[Matcher | None], allowed_GW: Words, most: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Fill in the tokens that may come next in each answer, from zeros: bit i % 32 of word i // 32 is set for id i.
        None without a matcher, or if a grammar, or the work for it, came to an end.

        Returns the tokens that are forced before that, of each answer at most ``most`` (None: 0), stop ids excepted:
        each is the only one that may come where it does."""
        began, runs = perf_counter(), [list[int]() for _ in matchers]
        asked = [(row, one) for row, one in enumerate(matchers) if one is not None]
        while asked:
            compiled = [(one.compiled, row) for row, one in asked if one.usable]
            if compiled:  # outside the interpreter's lock
                row_bytes = allowed_GW.strides[0]
                self._executor.unsafe_compute_mask_ptr(compiled, allowed_GW.ctypes.data, row_bytes, len(allowed_GW))
            for row, one in asked:
                one.restrict(allowed_GW[row])
            self.counters.grammar_masks += len(asked)
            asked = [(row, one) for row, one in asked if most is not None and len(runs[row]) < most[row]]
            asked = [(row, one) for row, one in asked if one.forced(allowed_GW[row], runs[row])]
        for matcher, run in zip(matchers, runs, strict=True):
            if matcher is not None and run:
                matcher.back(len(run))
        self.counters.grammar_mask_seconds += perf_counter() - began
        return runs

    def hold(self, key: bytes, table: bytes, held: Container[bytes]) -> None:
        """A table that all ranks have got, if it is one of those that are ``held``; drop those that are not."""
        self.tables[key] = TokenTable.from_bytes(table, self.vocab_size)
        for other in [other for other in self.tables if other not in held]:
            del self.tables[other]
            if self.maker is not None:
                self.maker.forget(other)

    def token_texts(self) -> list[bytes]:
        """What each id stands for; nothing where that is no text."""
        tokens = self._tokens
        return [b"" if tokens.is_special_token(i) else tokens.decode_bytes([i]) for i in range(self.vocab_size)]

    def close(self) -> None:
        """End threads and processes."""
        for process in (self.maker, self.checker):
            if process is not None:
                process.close()
        if (threads := self.__dict__.pop("_threads", None)) is not None:
            threads.shutdown(cancel_futures=True)


@dataclass
class _Compiled:
    """``written``: what was compiled. ``matchers``: at the beginning, to be copied ``copies`` times so far; ``spare``:
    so many more may be made."""

    written: str
    matchers: list[Any]
    spare: int
    copies: int = 0


class Matcher:
    """What one request's answer may continue with; nothing, if its grammar failed."""

    def __init__(self, compiled: Any, of: Grammars, sampling: SamplingParams, stop_token_ids: Iterable[int]) -> None:
        self.compiled = compiled
        self._generated = 0
        self._sampling = sampling
        eos, stops = set(of.eos_token_ids), {*stop_token_ids, *of.eos_token_ids}
        self._all_W, self._eos_W = _bits(stops, of.vocab_size), _bits(eos, of.vocab_size)
        self._stops_W = self._all_W & ~self._eos_W if sampling.ignore_eos else self._all_W
        allowed = sampling.allowed_token_ids
        self._allowed_W = _bits(allowed, of.vocab_size) if allowed else None

    @property
    def usable(self) -> bool:
        return self.compiled is not None and not self.compiled.is_error()

    def accept(self, token_ids: Sequence[int]) -> None:
        """Of the answer, after those before."""
        self._generated += len(token_ids)
        if self.compiled is not None and len(token_ids):
            self.compiled.consume_tokens(list(token_ids))

    def forced(self, allowed_W: Words, run: list[int]) -> bool:
        """Whether one token may come next, and it is no stop id; it is accepted then, and appended to ``run``."""
        if np.count_nonzero(allowed_W) != 1:  # a microsecond
            return False
        at = int(np.flatnonzero(allowed_W)[0])
        word = int(allowed_W[at]) % (1 << WORD_BITS)
        if word & (word - 1) or word & int(self._all_W[at]):
            return False
        run.append(at * WORD_BITS + word.bit_length() - 1)
        self.accept(run[-1:])
        return True

    def back(self, count: int) -> None:
        """As if the latest ``count`` tokens had not come."""
        self._generated -= count
        if self.usable:
            self.compiled.rollback(count)

    def allow(self, allowed_W: Words) -> None:
        """Fill in the tokens that may come next."""
        if self.usable:
            self.compiled.unsafe_compute_mask_ptr(allowed_W.ctypes.data, allowed_W.nbytes)
        self.restrict(allowed_W)

    def restrict(self, allowed_W: Words) -> None:
        """From what a text of the grammar may go on with to what may be sampled.

        Stop ids may come where a text of the grammar ends. With ``min_tokens`` or ``ignore_eos`` they may not, unless
        nothing else may.
        """
        if not self.usable:
            allowed_W.fill(0)
            return
        allowed_W &= ~self._all_W
        if self.compiled.is_accepting():
            if self._generated >= self._sampling.min_tokens:
                allowed_W |= self._stops_W
            if not allowed_W.any():
                allowed_W |= self._all_W
        if self._allowed_W is not None:
            allowed_W &= self._allowed_W


def _matcher(tokens: Any, written: str) -> Any:
    made = library()
    return made.LLMatcher(tokens, written, log_level=0, limits=made.LLParserLimits(**_LIMITS))


class ByteMatcher:
    """Reads texts byte by byte. ``special``: ids of tokens in the grammar, which are 257 and following ones here."""

    bos_token_id, eos_token_id = None, 256

    def __init__(self, grammar: str, special: Sequence[int] = ()) -> None:
        made = library()
        number = {str(token): str(257 + at) for at, token in enumerate(special)}
        grammar = re.sub(r"(?<=<\[)\d+(?=\]>)", lambda found: number.get(found[0], found[0]), grammar)
        self.special_token_ids = range(256, 257 + len(special))
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(b"<%d>" % at for at in self.special_token_ids)]
        tokens = made.LLTokenizer(made.TokenizerWrapper(self), n_vocab=len(self.tokens))
        self._matcher = _matcher(tokens, unforced(grammar))
        self._mask_W = np.zeros(-(-len(self.tokens) // WORD_BITS), np.int32)
        self.mask_bytes = self._mask_W.nbytes

    def __call__(self, said: str | bytes) -> list[int]:
        """Bytes as tokens, for the library."""
        return list(said.encode() if isinstance(said, str) else said)

    def mask(self) -> bytes:
        """A bit for each byte that may follow, one for the end of the text, and one for each special token."""
        self._matcher.unsafe_compute_mask_ptr(self._mask_W.ctypes.data, self._mask_W.nbytes)
        return self._mask_W.tobytes()

    def consume(self, byte: int) -> bool:
        return bool(self._matcher.consume_token(byte))

    def back(self) -> None:
        """As if the latest byte had not come."""
        self._matcher.rollback(1)


def _bits(token_ids: Iterable[int], vocab_size: int) -> Words:
    bits_V = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, np.bool_)
    bits_V[list(token_ids)] = True
    return np.packbits(bits_V, bitorder="little").view(np.int32)
