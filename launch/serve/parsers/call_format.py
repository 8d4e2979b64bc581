"""What formats of tool calls have in common: content with calls in it, and calls whose arguments are JSON.

Knows: what is content where something looks like a call and is none. Does not know: any model's marks.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar, Final

from launch.serve.parsers.deltas import Message
from launch.serve.parsers.json_text import JsonText
from launch.serve.parsers.reader import BLANKS, Reader, Steps, named
from launch.serve.parsers.typed_values import TypedArguments
from runtime.frontend.validation import is_unicode

_MOST_FAILED: Final = 64  # things like calls that are none: what follows them is content
_LONGEST_HEAD: Final = 4096  # characters within which the name must stand
_FIRST_KEY: Final = re.compile(r'\{\s*"([^"\\]*)"')
_KEYS: Final = ("name", "arguments", "parameters", "type", "id")
_HEAD: Final = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
LONGEST_NAME: Final = 256  # characters


class CallFormat:
    """A format of tool calls: one answer's text from ``read`` to ``out``.

    ``marks``: characters of its marks (reader.py). ``starts``: those with which a call begins, or a group of calls;
    they end reasoning, too. ``has_reasoning``: it reads reasoning itself.
    """

    marks: ClassVar[str] = ""
    starts: ClassVar[str] = ""
    has_reasoning: ClassVar[bool] = False

    def __init__(self, read: Reader, out: Message) -> None:
        self.read = read
        self.out = out

    def message(self) -> Steps[None]:
        """All of an answer, reasoning aside."""
        failed = 0
        while True:
            text, start = self.read.upto(self.starts if failed < _MOST_FAILED else "")
            self.out.say(text)
            if start:
                self.read.hold()
                if (yield from self.call(start)):
                    self.read.go_on()
                else:
                    self.read.back()
                    self.out.say(start)
                    failed += 1
            elif self.read.closed:
                return
            else:
                yield

    def call(self, start: str) -> Steps[bool]:
        """What follows the mark ``start``. False: it is no call, and nothing of it is in ``out``."""
        raise NotImplementedError

    # ---- calls whose arguments stand between marks ----

    def typed(self, name: str, call_id: str | None = None) -> TypedArguments:
        """Begins a call, which is read for good."""
        self.begin(name, call_id)
        return TypedArguments(self.out, self.out.schema(name))

    def value(
        self, arguments: TypedArguments, end: str, followers: str, outer: str = "", after: str = ""
    ) -> Steps[bool]:
        """The value of an argument that has begun, up to the mark ``end``. That mark cannot be quoted: it is text where
        none of ``followers`` comes next. Where ``end`` is left out, the call's own end does, ``outer`` with ``after``
        next. False: the value is cut off."""
        while True:
            text, stop = self.read.upto(end + outer)
            arguments.more(text)
            if not stop:
                if self.read.closed:
                    return False
                yield
            elif not (yield from self._followed(followers if stop == end else after)):
                arguments.more(stop)
            else:
                if stop != end:
                    self.read.unread()
                arguments.end()
                return True

    def _followed(self, by: str) -> Steps[bool]:
        """Whether one of ``by``, or the end of the text, comes next, blanks aside."""
        self.read.hold()
        found = yield from self.read.after_blanks()
        self.read.back()
        return found in by

    # ---- calls whose arguments are JSON ----

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call, which is read for good."""
        self.out.begin(name, call_id)
        self.read.go_on()

    def arguments(self, document: JsonText | None = None) -> Steps[None]:
        """An object, from its brace on; where it is no JSON it ends. ``document``: of which it is a value."""
        document = document or JsonText()
        while True:
            self.out.arguments(self._fed(document))
            if document.broken:
                self.out.arguments(document.closing())
            if document.done or document.broken or self.read.closed:
                return
            yield

    def _fed(self, document: JsonText) -> str:
        text, at = self.read.rest()
        found, at = document.feed(text, at)
        self.read.read_to(at)
        return found

    def ends(self, ends: str) -> Steps[None]:
        """What is left of a call whose arguments are over, up to one of ``ends``, which is read, or to another call."""
        text, stop = yield from self.read.until(ends + self.starts)
        if stop and stop not in ends:
            self.read.unread()
        if text.strip(BLANKS + "}`"):  # else a brace too many, or the end of a code fence
            self.out.say(text)

    def named_object(self) -> Steps[bool]:
        """{"name": ..., "arguments": {...}}, up to its end. Where the name comes first, arguments are passed on as they
        grow. False: it is no call, and but blanks nothing is read."""
        if (yield from self.read.after_blanks()) != "{":
            return False
        whole, seen, long = JsonText(), 0, False
        while True:
            text, at = self.read.rest()
            first = _FIRST_KEY.match(text, at)
            if first is not None and first[1] not in _KEYS:
                return False
            head = None if long else _HEAD.match(text, at, at + _LONGEST_HEAD)
            long = len(text) - at >= _LONGEST_HEAD
            if head is not None:
                return (yield from self._growing(head))
            seen = whole.feed(text, at + seen)[1] - at
            if whole.broken or (self.read.closed and not whole.done):
                return False
            if whole.done:
                self.read.read_to(at + seen)
                return self._complete(named(text[at : at + seen]))
            yield

    def _growing(self, head: re.Match[str]) -> Steps[bool]:
        name = _name(head[1])
        if name is None or not self.out.knows(name):
            return False
        self.read.read_to(head.end())
        self.begin(name)
        document = JsonText()
        document.feed(head[0])
        document.value()
        yield from self.arguments(document)
        document.rest()
        while True:
            self._fed(document)
            if document.done or document.broken or self.read.closed:
                return True
            yield

    def _complete(self, written: str) -> bool:
        """One whose name comes last, or that has no object as arguments."""
        try:
            call = json.loads(written)
            name, arguments = call["name"], call.get("arguments", call.get("parameters"))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, KeyError, RecursionError):
            return False
        if arguments is None:
            arguments = {}
        if not isinstance(name, str) or not is_unicode(name) or not isinstance(arguments, dict):
            return False
        if not self.out.knows(name):
            return False
        self.begin(name)
        text = json.dumps(arguments, ensure_ascii=False)
        self.out.arguments(text if is_unicode(text) else json.dumps(arguments))
        return True


def _name(written: str) -> str | None:
    """A JSON text as it stands in the head of a call; None for one that no JSON text can be."""
    try:
        name = json.loads(named(written), strict=False)
    except ValueError:
        return None
    return name if isinstance(name, str) and is_unicode(name) else None
