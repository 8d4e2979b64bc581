"""The lines that a client says: one command a line, in UTF-8.

Knows: the grammar, and what each verb is for. Does not know: sessions, engines, whether a command can be carried out.

    line   := [REQ id] [SLOT place] verb arguments        ids 0 to 2^30 - 1; `=` may stand for the blank before a number
    prompt := "text", a JSON string | [1, 2, 3], JSON | a path to a file of little-endian int32 token ids
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from runtime.number_text import integer_from, is_whole_number, number_from
from runtime.schedule.request import NUMBERS

MAX_ID: Final = (1 << 30) - 1
MAX_NUMBER: Final = (1 << 31) - 1
MOST_TOKENS: Final = 1 << 24  # of a prompt
_LONGEST_OPTIONS: Final = 1 << 18  # characters
_ID_BYTES: Final = 4

Prompt = str | tuple[int, ...]


class BadLine(ValueError):
    """A line that is no command; the text says what is wrong and what to type."""


@dataclass(frozen=True, slots=True)
class Command:
    """``verb`` is one of VERBS; ``request`` and ``place`` are what stood before it. The rest by verb; see the table."""

    verb: str
    request: int | None = None
    place: int | None = None
    prompt: Prompt | None = None
    total: int = 0
    quantum: int = 0
    epoch: int | None = None
    other: int | None = None  # another session, or the most sessions that are meant
    word: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verb:
    """``arguments`` as they are written; what it does; what follows the ACK; the verb of the daemons that this protocol
    comes from."""

    arguments: str
    effect: str
    reply: str
    seed: str
    parse: Callable[[_Words], dict[str, Any]]


class _Words:
    """What is left of a line, in which a prompt may have ``most`` tokens."""

    def __init__(self, text: str, most: int) -> None:
        self.text = text.strip()
        self._most = most

    def word(self) -> str:
        first, _, self.text = self.text.partition(" ")
        self.text = self.text.strip()
        return first

    def value(self) -> str:
        """The next word, or all of a text or list in JSON, with its blanks."""
        if self.text[:1] not in ('"', "["):
            return self.word()
        if len(self.text) > _LONGEST_OPTIONS:
            raise BadLine(f"the options have {len(self.text)} characters, but at most {_LONGEST_OPTIONS} are read")
        try:
            end = json.JSONDecoder().raw_decode(self.text)[1]
        except (ValueError, RecursionError) as error:
            raise BadLine(f"{self.text[:40]!r} is no JSON: {error}") from error
        found, self.text = self.text[:end], self.text[end:].strip()
        return found

    def number(self, what: str, low: int = 0, high: int = MAX_NUMBER) -> int:
        found = self.word()
        if not (is_whole_number(found) and len(found) <= 10 and low <= int(found) <= high):
            raise BadLine(f"{what} is {found[:40]!r}, but must be a whole number from {low} to {high}")
        return int(found)

    def maybe_number(self, what: str, low: int = 0) -> int | None:
        return self.number(what, low) if self.text else None

    def prompt(self) -> Prompt:
        if not self.text:
            raise BadLine('there is no prompt: a "text", [token, ids], or a file of int32 ids')
        if self.text[0] == "[" and (ids := self.text.count(",")) > self._most + _LONGEST_OPTIONS:
            raise BadLine(f"the prompt has some {ids} tokens, but at most {self._most} are possible: shorten it")
        if self.text[0] in '"[':
            try:
                found, end = json.JSONDecoder().raw_decode(self.text)
            except (ValueError, RecursionError) as error:
                raise BadLine(f"the prompt is no JSON: {error}") from error
            self.text = self.text[end:].strip()
            return self._checked(found)
        return _read_ids(Path(self.word()), self._most)

    @staticmethod
    def _checked(found: object) -> Prompt:
        if isinstance(found, str):
            return found
        if isinstance(found, list) and all(type(token) is int and 0 <= token <= MAX_NUMBER for token in found):
            return tuple(found)
        raise BadLine("the prompt is neither a text nor a list of token ids")

    def end(self) -> None:
        if self.text:
            raise BadLine(f"{self.text[:40]!r} is too much")


def _read_ids(path: Path, most: int) -> tuple[int, ...]:
    """Of a regular file: opening or reading another one may wait for its writer."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadLine(f"{path} is no regular file: name one of int32 ids")
            packed_ids = file.read(_ID_BYTES * most + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadLine(f"the prompt file {str(path)[:200]!r} cannot be read: {why}") from error
    if not packed_ids or len(packed_ids) % _ID_BYTES:
        raise BadLine(f"{path} has {len(packed_ids)} bytes or more, but must hold int32 token ids, {most} at most")
    return struct.unpack(f"<{len(packed_ids) // _ID_BYTES}i", packed_ids)


# ---- options of START ----


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _texts(text: str) -> tuple[str, ...]:
    found = json.loads(text)
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(type(one) is str for one in texts):
        raise ValueError("a text, or a list of texts")
    return tuple(texts)


def _ids(text: str) -> tuple[int, ...]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(type(token) is int and 0 <= token <= MAX_NUMBER for token in found):
        raise ValueError("a list of token ids")
    return tuple(found)


OPTIONS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "keep": (_flag, "1: park the session when its answer is complete, for EXTEND; else it closes"),
    "text": (_flag, "1: TEXT frames as well"),
    **{field.name: (integer_from if field.type is int else number_from, "") for field in NUMBERS},
    "seed": (integer_from, "default: chosen by the daemon"),
    "temperature": (number_from, "0 is greedy"),
    "top_k": (integer_from, "0 is all tokens"),
    "min_tokens": (integer_from, "of each turn"),
    "logprobs": (integer_from, "LOGPROBS frames with the top N alternatives of each token"),
    "ignore_eos": (_flag, "1: ignore the model's own end ids"),
    "stop": (_texts, 'JSON, "text" or ["text", ...]: the token that completes one is the last of the answer'),
    "stop_ids": (_ids, "JSON, [token, ...]: in addition to the model's own end ids"),
    "priority": (integer_from, "lower runs earlier"),
    "add_special_tokens": (_flag, "0: no BOS before the text, as for one that a chat template wrote"),
}
for _absent in ("max_tokens", "n", "prompt_logprobs"):  # a turn has its own, and one answer
    del OPTIONS[_absent]


def _options(words: _Words) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while words.text:
        name, given, rest = words.text.partition("=")
        if not given or name not in OPTIONS or name in found:
            name = words.word().partition("=")[0]
            raise BadLine(f"{name[:40]!r} is no option, or is there twice: {', '.join(OPTIONS)}, each as name=value")
        words.text = rest
        value = words.value()
        try:
            found[name] = OPTIONS[name][0](value)
        except (ValueError, RecursionError):
            raise BadLine(f"option {name} is {value[:40]!r}, which it cannot be") from None
    return found


# ---- verbs ----


def _start(words: _Words) -> dict[str, Any]:
    return {**_turn(words), "options": _options(words)}


def _turn(words: _Words) -> dict[str, Any]:
    prompt, total = words.prompt(), words.number("the budget", 1)
    return {"prompt": prompt, "total": total, "quantum": words.number("the quantum", 1)}


def _continue(words: _Words) -> dict[str, Any]:
    return {"quantum": words.number("the quantum", 1), "epoch": words.maybe_number("the epoch")}


def _parent(words: _Words) -> dict[str, Any]:
    return {"other": words.number("the parent", 0, MAX_ID)}


def _maybe_other(words: _Words) -> dict[str, Any]:
    return {"other": words.maybe_number("the number")}


def _mode(words: _Words) -> dict[str, Any]:
    word = words.word()
    if word not in ("client", "auto"):
        raise BadLine(f"the mode is {word[:40]!r}, but must be client or auto")
    return {"word": word}


def _tagged(words: _Words) -> dict[str, Any]:
    return {"other": words.number("the version", 1, 255)}


def _nothing(words: _Words) -> dict[str, Any]:
    return {}


VERBS: Final[dict[str, Verb]] = {
    "TAGGED": Verb(
        "version", "the first line of a connection that wants tagged frames", "", "`--stream-tagged`", _tagged
    ),
    "START": Verb(
        "prompt total quantum [option=value ...]",
        "a session with a budget of `total` tokens: prefill and one quantum. Without SLOT: the first free place; a "
        "place in use is refused",
        "TOKEN..., then QUANTUM_DONE or DONE",
        "`START path total quantum`",
        _start,
    ),
    "CONTINUE": Verb(
        "n [epoch]",
        "another quantum, of n tokens, without recomputation; also while the last one runs. A stale epoch is refused",
        "TOKEN..., then QUANTUM_DONE or DONE",
        "`CONTINUE n`, `CONT n`, `CONTINUE=n`",
        _continue,
    ),
    "EXTEND": Verb(
        "prompt total quantum",
        "the next turn of a parked session: computes these tokens and the last one before them. New epoch",
        "TOKEN..., then QUANTUM_DONE or DONE",
        "none",
        _turn,
    ),
    "FORK": Verb(
        "parent", "a new session, REQ, with the context of the parked session `parent`", "", "`SNAPSHOT slot`", _parent
    ),
    "RESTORE": Verb("parent", "the same; if REQ exists, it is closed first", "", "`RESTORE slot`", _parent),
    "CANCEL": Verb("[id]", "end a session in any state; new epoch", "CLOSED", "`CANCEL [id]`", _maybe_other),
    "SCHED_STEP": Verb(
        "", "one quantum of the next session, from the cursor, that has budget", "as CONTINUE", "`SCHED_STEP`", _nothing
    ),
    "SCHED_BATCH_STEP": Verb(
        "[max]",
        "one token for every parked session with budget, from the cursor, in one batch",
        "as CONTINUE",
        "`SCHED_BATCH_TARGET_STEP [max]`",
        _maybe_other,
    ),
    "SCHED_DRAIN": Verb(
        "",
        "quanta in round-robin until every budget is spent; lines are read meanwhile. ACK comes at the end",
        "as CONTINUE, with QUANTUM_DONE at each boundary",
        "`SCHED_DRAIN`, `SCHED_BATCH_DRAIN`",
        _nothing,
    ),
    "SCHED_PEEK": Verb(
        "[max]", "the sessions that SCHED_BATCH_STEP would take", "", "`SCHED_BATCH_PEEK [max]`", _maybe_other
    ),
    "SCHED_PROBE": Verb(
        "[max]",
        "two tokens of each such session, in one batch and alone, on forks: tokens that differ and the largest "
        "difference of log-probabilities before them. Commits nothing; START, FORK and RESTORE that need its places "
        "are refused meanwhile. ACK comes at the end",
        "",
        "`SCHED_BATCH_PROBE [max]`",
        _maybe_other,
    ),
    "MODE": Verb(
        "client | auto",
        "auto: sessions of this connection run until their budgets end, as in a drain",
        "",
        "none",
        _mode,
    ),
    "LIST_REQUESTS": Verb("", "the sessions of this connection", "", "`LIST_REQUESTS`", _nothing),
    "LIST_SLOTS": Verb("", "all places, and which of them are taken", "", "`LIST_SLOTS`", _nothing),
    "RESET_PREFIX_CACHE": Verb(
        "", "later sessions find no KV that was computed before; live sessions keep theirs", "", "none", _nothing
    ),
    "STATS": Verb("", "counters of the engine", "STATS instead of ACK", "none", _nothing),
    "QUIT": Verb("", "close the connection and its sessions", "", "`quit`", _nothing),
}
ALIASES: Final = {"CONT": "CONTINUE", "CLOSE": "CANCEL", "SNAPSHOT": "FORK", "quit": "QUIT"}
ALIASES_OF_BATCHES: Final = {
    "SCHED_BATCH_TARGET_STEP": "SCHED_BATCH_STEP",
    "SCHED_BATCH_DRAIN": "SCHED_DRAIN",
    "SCHED_BATCH_PEEK": "SCHED_PEEK",
    "SCHED_BATCH_PROBE": "SCHED_PROBE",
}


def parse(line: str, most: int = MOST_TOKENS) -> Command:
    """``most``: tokens that a prompt may have. Raises BadLine."""
    words = _Words(line, most)
    prefixes: dict[str, int] = {}
    while True:
        verb = _with_number(words)
        name = {"REQ": "request", "SLOT": "place", "slot": "place"}.get(verb)
        if name is None:
            break
        if name in prefixes or (name == "request" and prefixes):
            raise BadLine(f"{verb} is there twice, or behind SLOT: [REQ id] [SLOT place] verb")
        prefixes[name] = words.number(f"the number of {verb}", 0, MAX_ID)
    verb = ALIASES.get(verb, ALIASES_OF_BATCHES.get(verb, verb))
    if verb not in VERBS:
        raise BadLine(f"{verb[:40]!r} is no verb: {', '.join(VERBS)}")
    found = VERBS[verb].parse(words)
    words.end()
    return Command(verb, prefixes.get("request"), prefixes.get("place"), **found)


def _with_number(words: _Words) -> str:
    """The next word; ``word=7`` is two words."""
    verb, given, rest = words.word().partition("=")
    if given:
        words.text = f"{rest} {words.text}"
    return verb
