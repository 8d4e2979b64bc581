"""Tables of tokens for the device: which token may follow in a state of a regular grammar, and the state after it.

Knows: how an automaton over bytes and a tokenizer make one, rules of stop ids (those of grammar.Matcher), limits by
count. Does not know: who makes them (maker.py), which requests have one, where tables lie on the device.

A token is a function of states. Tokens that are the same function are one class, so a table is small: a class for each
token, and a state for each state and class (Willard and Louf 2023 have the table, without classes).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.grammar_tables.automaton import MOST_STATES, Automaton
from runtime.schedule.request import TableSpec

SINK, END, START = range(3)  # states: nothing may follow a text that is none, or that a stop id has ended
MOST_ENTRIES: Final = 1 << 21  # states times classes
MOST_CLASSES: Final = 1 << 12  # also of beginnings of tokens
_LENGTH: Final = struct.Struct("<I")


class TokenTable(NamedTuple):
    """``class_V`` int16: of each token; 0: never allowed. ``next_SK`` int16: the state after a token of a class; SINK:
    it is not allowed."""

    class_V: npt.NDArray[np.int16]
    next_SK: npt.NDArray[np.int16]

    def to_bytes(self) -> bytes:
        return _LENGTH.pack(self.next_SK.shape[1]) + self.class_V.tobytes() + self.next_SK.tobytes()

    @classmethod
    def from_bytes(cls, raw: bytes, vocab_size: int) -> TokenTable:
        numbers = np.frombuffer(raw, np.int16, offset=_LENGTH.size)
        return cls(numbers[:vocab_size], numbers[vocab_size:].reshape(-1, _LENGTH.unpack_from(raw)[0]))

    def after(self, token_ids: Sequence[int]) -> int:
        """The state after these tokens of an answer."""
        state = START
        for token in token_ids:
            state = int(self.next_SK[state, self.class_V[token]])
        return state


class Vocabulary:
    """``tokens``: the bytes of each id; empty where it is no text."""

    def __init__(self, tokens: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        self.size, self.eos_token_ids = len(tokens), eos_token_ids
        self.lengths_V = np.array([len(token) for token in tokens])
        self._bytes = np.frombuffer(b"".join(tokens), np.uint8)
        self._begins_V = np.cumsum(self.lengths_V) - self.lengths_V

    def table(self, automaton: Automaton, spec: TableSpec) -> TokenTable | None:
        """None if it would be too large."""
        states, byte_classes = automaton.next_SC.shape
        columns = {bytes(4 * states): 0}  # number of each function, by the states that it leads to
        functions_FS = [np.zeros(states, np.int32), np.arange(states, dtype=np.int32)]
        columns[functions_FS[1].tobytes()] = 1
        function_V = (self.lengths_V > 0).astype(np.int64)
        for at in range(int(self.lengths_V.max(initial=0))):
            going_T = np.flatnonzero((self.lengths_V > at) & (function_V > 0))
            if not len(going_T):
                break
            byte_T = automaton.class_of_256[self._bytes[self._begins_V[going_T] + at]]
            pairs, pair_T = np.unique(function_V[going_T] * byte_classes + byte_T, return_inverse=True)
            found = []
            for function, byte_class in zip(*divmod(pairs, byte_classes), strict=True):
                column_S = automaton.next_SC[functions_FS[function], byte_class]
                found.append(number := columns.setdefault(column_S.tobytes(), len(functions_FS)))
                if number == len(functions_FS):
                    functions_FS.append(column_S)
                if len(functions_FS) > MOST_CLASSES:
                    return None
            function_V[going_T] = np.array(found)[pair_T]
        columns_TS = automaton.next_SC.T[byte_classes - len(automaton.special) :]
        for token, column_S in zip(automaton.special, columns_TS, strict=True):
            if token >= self.size or self.lengths_V[token]:
                return None  # a text, which may come in two ways
            function_V[token] = len(functions_FS)
            functions_FS.append(column_S)
        return self._with_stops(automaton, spec, function_V, functions_FS)

    def _with_stops(
        self,
        automaton: Automaton,
        spec: TableSpec,
        function_V: npt.NDArray[np.int64],
        functions_FS: list[npt.NDArray[np.int32]],
    ) -> TokenTable | None:
        """The same rules as Matcher.allow."""
        eos = [token for token in self.eos_token_ids if token < self.size]
        stops = list({*spec.stop_token_ids, *eos})
        function_V[stops] = 0
        used, class_V = np.unique(np.append(0, function_V), return_inverse=True)
        next_KS = np.stack([functions_FS[function] for function in used])
        next_KS = np.pad(next_KS + (next_KS > 0), ((0, 2), (1, 0)))  # END between the sink and the others
        next_KS[:, END] = SINK
        accepting_S = np.insert(automaton.accepting_S, END, False)
        class_V = class_V[1:]
        ends, alone = len(used), len(used) + 1
        next_KS[ends] = np.where(accepting_S, END, SINK)
        next_KS[alone] = np.where(accepting_S & (next_KS[:ends] == SINK).all(0), END, SINK)
        class_V[stops] = ends
        if spec.ignore_eos:
            class_V[eos] = 0 if len(stops) > len(set(eos)) else alone
        if spec.allowed_token_ids:
            forbidden_V = np.ones(self.size, np.bool_)
            forbidden_V[list(spec.allowed_token_ids)] = False
            class_V[forbidden_V] = 0
        if next_KS.shape[1] > MOST_STATES or next_KS.size > MOST_ENTRIES:
            return None
        return TokenTable(class_V.astype(np.int16), np.ascontiguousarray(next_KS.T, np.int16))
