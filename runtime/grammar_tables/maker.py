"""A process on rank 0 that makes token tables of grammars, so that the engine never waits for one.

Knows: how specs and tables travel over pipes, that llguidance must read a grammar in the same way. Does not know: how a
table is made (token_table.py), when ranks use it.
"""

from __future__ import annotations

import logging
import os
import struct
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Final

import msgspec
import numpy as np

from runtime.grammar import ByteMatcher, Grammars
from runtime.grammar_tables.automaton import Automaton, automaton_of
from runtime.grammar_tables.token_table import TokenTable, Vocabulary
from runtime.schedule.request import Request, TableSpec

_MOST_QUEUED: Final = 64  # tables that wait to be made
_MOST_KNOWN: Final = 1024
_LENGTH: Final = struct.Struct("<I")
POLICY = os.SCHED_IDLE  # scheduling of the process: cores are the engine's and the front end's first

log = logging.getLogger(__name__)


class TableMaker:
    """Makes tables in a separate process, one after the other. Rank 0 has one, and sends its tables to the others.

    ``tokenizer_json`` is called in a thread. A process that ends early makes none: matchers serve its requests.
    """

    def __init__(self, tokenizer_json: Callable[[], str | None], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._given = tokenizer_json, vocab_size, tuple(eos_token_ids)
        self._queue: SimpleQueue[tuple[bytes, TableSpec] | None] = SimpleQueue()
        self._made: deque[tuple[bytes, bytes]] = deque()
        self._known: OrderedDict[bytes, None] = OrderedDict()  # made, being made, or known to have none
        self._thread: threading.Thread | None = None

    def want(self, request: Request) -> bool:
        """Queues the table of its grammar. Returns whether ``made`` will have it: False for one that is made, queued or
        refused already (``forget`` allows it again), or if the queue is full."""
        key = request.table_key
        if key in self._known or self._queue.qsize() >= _MOST_QUEUED:
            return False
        self._known[key] = None
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tables", daemon=True)
            self._thread.start()
        self._queue.put((key, request.table_spec))
        return True

    def made(self) -> list[tuple[bytes, bytes]]:
        """Since the last call: Request.table_key, and the table as bytes; empty for a grammar without a table."""
        return [self._made.popleft() for _ in range(len(self._made))]

    def forget(self, key: bytes) -> None:
        """Allows ``want`` for this key again."""
        self._known.pop(key, None)

    def close(self) -> None:
        self._queue.put(None)

    def _work(self) -> None:
        text, *rest = self._given
        with suppress(BrokenPipeError), _opened() as process:
            _answer(process, msgspec.msgpack.encode((text(), *rest)))
            while (job := self._queue.get()) is not None:
                self._made.append((job[0], _answer(process, msgspec.msgpack.encode(job[1]))))
            process.kill()


def _answer(process: subprocess.Popen[bytes], said: bytes) -> bytes:
    """The process's answer to a message; empty if the process has ended."""
    if process.poll() is None and process.stdin is not None and process.stdout is not None:
        try:
            _write(process.stdin, said)
            return _read(process.stdout)
        except (OSError, EOFError) as error:
            process.kill()
            process.wait()
            log.warning("no grammar gets a table on the device any more: the process that makes them ended (%s)", error)
    return b""


def _opened() -> subprocess.Popen[bytes]:
    """The process, in a group of its own so that Ctrl-C does not reach it; it ends when its stdin is closed."""
    root = str(Path(__file__).resolve().parents[2])
    words = f"import sys; sys.path.insert(0, {root!r}); from runtime.grammar_tables.maker import make; make({POLICY})"
    return subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    )


def make(policy: int) -> None:
    """Main of the process: reads the tokenizer, answers with no bytes, then answers each TableSpec with a table."""
    os.sched_setscheduler(0, policy, os.sched_param(0))
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    text, vocab_size, eos_token_ids = msgspec.msgpack.decode(_read(given))
    vocabulary = Vocabulary(Grammars(lambda: text, vocab_size, eos_token_ids).token_texts(), eos_token_ids)
    table = None
    with suppress(EOFError, BrokenPipeError):
        while True:
            _write(answers, b"" if table is None else table.to_bytes())
            table = made_table(vocabulary, msgspec.msgpack.decode(_read(given), type=TableSpec))


def made_table(vocabulary: Vocabulary, spec: TableSpec) -> TokenTable | None:
    """None for a grammar that is not regular, or too large, or that llguidance reads otherwise."""
    automaton = automaton_of(spec.grammar)
    if automaton is None:
        return None
    if not agrees(automaton, spec.grammar):
        log.warning("a grammar gets no table on the device: llguidance reads it otherwise")
        return None
    return vocabulary.table(automaton, spec)


def agrees(automaton: Automaton, grammar: str) -> bool:
    """Whether llguidance allows the same bytes, ends and special tokens in each state, each reached in one way."""
    classes, special = automaton.next_SC.shape[1], len(automaton.special)
    allowed_SC = automaton.next_SC > 0
    allowed = allowed_SC[:, automaton.class_of_256], automaton.accepting_S[:, None], allowed_SC[:, classes - special :]
    allowed_SN = np.concatenate(allowed, 1)
    matcher = ByteMatcher(grammar, automaton.special)
    masks = [row.tobytes() for row in np.packbits(allowed_SN, axis=1, bitorder="little")]
    masks = [mask.ljust(matcher.mask_bytes, b"\0") for mask in masks]
    symbols = [*np.unique(automaton.class_of_256, return_index=True)[1].tolist(), *range(257, 257 + special)]
    seen, way = {1}, [(1, iter(range(classes)))]
    if matcher.mask() != masks[1]:
        return False
    while way:
        state, left = way[-1]
        for byte_class in left:
            after = int(automaton.next_SC[state, byte_class])
            if after and after not in seen:
                seen.add(after)
                if not matcher.consume(symbols[byte_class]) or matcher.mask() != masks[after]:
                    return False
                way.append((after, iter(range(classes))))
                break
        else:
            way.pop()
            if way:
                matcher.back()
    return True


def _write(to: IO[bytes], said: bytes) -> None:
    to.write(_LENGTH.pack(len(said)) + said)
    to.flush()


def _read(of: IO[bytes]) -> bytes:
    """Raises EOFError."""
    if len(head := of.read(_LENGTH.size)) < _LENGTH.size:
        raise EOFError("no answer")
    if len(said := of.read(size := _LENGTH.unpack(head)[0])) < size:
        raise EOFError("half an answer")
    return said
