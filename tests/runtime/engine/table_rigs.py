"""Grammars whose tables are made in the test's own thread, at once.

Knows: what a rig's engine asks of a maker. Does not know: requests, processes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from runtime.grammar import Grammars
from runtime.grammar_tables.automaton import known
from runtime.grammar_tables.maker import made_table
from runtime.grammar_tables.token_table import Vocabulary
from runtime.schedule.request import Request
from tests.runtime.frontend import small_tokenizers


def small_grammars(vocab_size: int, eos_token_id: int) -> Grammars:
    """Over the small byte-level tokenizer, without tables."""
    return Grammars(lambda: small_tokenizers.byte_level().to_json(), vocab_size, (eos_token_id,))


def hold(grammars: Grammars, grammar: str) -> None:
    """Waits until it is compiled. Raises GrammarError."""
    grammars.begin(grammar, known(grammar)).result()


class MakerAtOnce:
    """``tables``: those made, as bytes. ``late``: how many calls of ``made`` come before one has a table.

    Ranks of a test, which share it, run in threads; only the leader, which runs in the thread that made it, uses it.
    """

    def __init__(self, vocabulary: Vocabulary, late: int = 0) -> None:
        self.tables: list[bytes] = []
        self._vocabulary, self._late, self._leader = vocabulary, late, threading.get_ident()
        self._known: set[bytes] = set()
        self._due: list[tuple[int, bytes, bytes]] = []
        self._calls = 0

    def want(self, request: Request) -> bool:
        key = request.table_key
        if key in self._known or threading.get_ident() != self._leader:
            return False
        self._known.add(key)
        table = made_table(self._vocabulary, request.table_spec)
        raw = b"" if table is None else table.to_bytes()
        self.tables += [raw] if raw else []
        self._due.append((self._calls + self._late, key, raw))
        return True

    def made(self) -> list[tuple[bytes, bytes]]:
        if threading.get_ident() != self._leader:
            return []
        self._calls += 1
        ready = [one for one in self._due if one[0] < self._calls]
        self._due = [one for one in self._due if one[0] >= self._calls]
        return [(key, raw) for _, key, raw in ready]

    def forget(self, key: bytes) -> None:
        self._known.discard(key)

    def close(self) -> None: ...


def with_tables(grammars: Grammars, eos_token_ids: Sequence[int], late: int = 0) -> Grammars:
    """The same grammars, whose tables are on the device a few turns after a request came."""
    grammars.maker = MakerAtOnce(Vocabulary(grammars.token_texts(), eos_token_ids), late)
    return grammars
