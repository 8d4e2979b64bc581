"""A process beside rank 0 that compiles each grammar before any rank does, and refuses what cannot be used.

Knows: what its verdict is made of. Does not know: requests, ranks, pipes (helper_process.py).

So neither a grammar on which the library crashes or hangs, nor work in Python, touches a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from runtime.grammar import GrammarError, Grammars
from runtime.grammar_tables.automaton import known
from runtime.helper_process import HelperProcess, answer_all

_PATIENCE_S: Final = 60.0  # limits of work end a compilation within a second


class Verdict(NamedTuple):
    """``regular``: whether a table may replace its matcher. ``error``: why it cannot be used; empty: it can."""

    number: int
    regular: bool
    error: str


class GrammarChecker:
    """Rank 0 has one. ``tokenizer_json`` is called in a thread."""

    def __init__(self, tokenizer_json: Callable[[], str | None], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._process = HelperProcess(
            __name__,
            "check_all()",
            lambda: msgspec.msgpack.encode((tokenizer_json(), vocab_size, tuple(eos_token_ids))),
            _PATIENCE_S,
        )

    def start(self) -> None:
        self._process.start()

    def ask(self, number: int, grammar: str) -> None:
        """``verdicts`` will have one about it."""
        self._process.ask(b"%d" % number, grammar.encode())

    def verdicts(self) -> list[Verdict]:
        """Since the last call."""
        return [_verdict(int(key), answer) for key, answer in self._process.answers()]

    def close(self) -> None:
        self._process.close()


def _verdict(number: int, answer: bytes | None) -> Verdict:
    if answer is None:
        return Verdict(number, regular=False, error="the process that compiles grammars ended")
    regular, error = msgspec.msgpack.decode(answer, type=tuple[bool, str])
    return Verdict(number, regular, error)


def check_all() -> None:
    """Main of the process: a verdict for each grammar."""

    def opened(first: bytes) -> Callable[[bytes], bytes]:
        text, vocab_size, eos_token_ids = msgspec.msgpack.decode(first)
        grammars = Grammars(lambda: text, vocab_size, eos_token_ids)

        def check(said: bytes) -> bytes:
            grammar, error = said.decode(), ""
            regular = known(grammar)
            try:
                grammars.begin(grammar, regular).result()
            except GrammarError as why:
                error = str(why)
            grammars.drop(grammar)
            return msgspec.msgpack.encode((regular, error))

        grammars.warm()
        return check

    answer_all(opened)
