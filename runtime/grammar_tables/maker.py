"""A process on rank 0 that makes token tables of grammars, so that the engine never waits for one.

Knows: that llguidance must read a grammar in the same way. Does not know: how a table is made (token_table.py), when
ranks use it, pipes (runtime/helper_process.py).
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from runtime.grammar import ByteMatcher, Grammars
from runtime.grammar_tables.automaton import Automaton, automaton_of
from runtime.grammar_tables.token_table import TokenTable, Vocabulary
from runtime.helper_process import HelperProcess, answer_all
from runtime.schedule.request import Request, TableSpec

_MOST_QUEUED: Final = 64  # tables that wait to be made
_MOST_KNOWN: Final = 1024
POLICY = os.SCHED_IDLE  # scheduling of the process: cores are the engine's and the front end's first

log = logging.getLogger(__name__)


class TableMaker:
    """Makes tables in a separate process, one after the other. Rank 0 has one, and sends its tables to the others.

    ``tokenizer_json`` is called in a thread. A process that ends makes none: the matcher serves its requests.
    """

    def __init__(self, tokenizer_json: Callable[[], str | None], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        given = vocab_size, tuple(eos_token_ids)
        self._process = HelperProcess(
            __name__, f"make({POLICY})", lambda: msgspec.msgpack.encode((tokenizer_json(), *given))
        )
        self._known: OrderedDict[bytes, None] = OrderedDict()  # made, being made, or known to have none

    def want(self, request: Request) -> bool:
        """Queues the table of its grammar. Returns whether ``made`` will have it: False for one that is made, queued or
        refused already (``forget`` allows it again), or if the queue is full."""
        key = request.table_key
        if key in self._known or self._process.queued >= _MOST_QUEUED:
            return False
        self._known[key] = None
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        self._process.ask(key, msgspec.msgpack.encode(request.table_spec))
        return True

    def made(self) -> list[tuple[bytes, bytes]]:
        """Since the last call: Request.table_key, and the table as bytes; empty for a grammar without a table."""
        return [(key, table or b"") for key, table in self._process.answers()]

    def forget(self, key: bytes) -> None:
        """Allows ``want`` for this key again."""
        self._known.pop(key, None)

    def close(self) -> None:
        self._process.close()


def make(policy: int) -> None:
    """Main of the process: reads the tokenizer, then answers each TableSpec with a table, or no bytes."""
    os.sched_setscheduler(0, policy, os.sched_param(0))

    def opened(first: bytes) -> Callable[[bytes], bytes]:
        text, vocab_size, eos_token_ids = msgspec.msgpack.decode(first)
        vocabulary = Vocabulary(Grammars(lambda: text, vocab_size, eos_token_ids).token_texts(), eos_token_ids)

        def answer(said: bytes) -> bytes:
            table = made_table(vocabulary, msgspec.msgpack.decode(said, type=TableSpec))
            return b"" if table is None else table.to_bytes()

        return answer

    answer_all(opened)


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
