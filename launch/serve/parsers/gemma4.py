"""Tool calls as Gemma 4 writes them: <|tool_call>call:name{key:value,...}<tool_call|>, texts between <|"|> and <|"|>.

Knows: that form, whose keys are bare at any depth, and JSON in its place. Does not know: reasoning (think.py).
"""

from __future__ import annotations

import json
from typing import Final

from launch.serve.parsers.call_format import LONGEST_NAME, CallFormat
from launch.serve.parsers.json_text import JsonText
from launch.serve.parsers.reader import Steps, mark, named
from launch.serve.parsers.typed_values import types_of, written

_OPEN: Final = mark("<|tool_call>")
_CLOSE: Final = mark("<tool_call|>")
_QUOTE: Final = mark('<|"|>')
_CLOSED_BY: Final = {"{": "}", "[": "]"}
_ANY: Final = types_of(None, {})


class Gemma4(CallFormat):
    """See CallFormat."""

    marks = _OPEN + _CLOSE + _QUOTE
    starts = _OPEN

    def call(self, start: str) -> Steps[bool]:
        head, stop = yield from self.read.until("{" + self.marks, LONGEST_NAME)
        prefix, _, name = head.partition(":")
        name = name.strip()
        if stop != "{" or prefix.strip() != "call" or not self.out.knows(name):
            return False
        self.begin(name)
        self.read.unread()
        self.read.hold()
        yield from self.read.skip("{")
        is_json = (yield from self.read.after_blanks()) == '"'
        self.read.back()
        yield from self.arguments() if is_json else self._bare()
        yield from self.ends(_CLOSE)
        return True

    def _bare(self) -> Steps[None]:
        """An object whose keys are bare, from its brace on; closed where a mark of the call comes too early."""
        read, say, before, closers = self.read, self.out.arguments, "", list[str]()
        while (character := (yield from read.after_blanks())) not in ("", _OPEN, _CLOSE):
            if character in ",}]":
                yield from read.skip(character)
                if character != ",":
                    say(closers.pop())
                    before = ", "
                    if not closers:
                        return
                continue
            say(before)
            if closers and closers[-1] == "}":
                key = yield from self._key(character)
                if key is None:
                    break
                say(f"{json.dumps(named(key), ensure_ascii=False)}: ")
                character = yield from read.after_blanks()
            before = ", "
            if character in _CLOSED_BY:
                yield from read.skip(character)
                say(character)
                closers.append(_CLOSED_BY[character])
                before = ""
            elif not (yield from self._scalar(character)):
                return
        if not read.closed:
            say("".join(reversed(closers)))

    def _key(self, first: str) -> Steps[str | None]:
        """With its colon; None where none follows."""
        if first == _QUOTE:
            yield from self.read.skip(_QUOTE)
            key, _ = yield from self.read.until(_QUOTE)
            return key if (yield from self.read.skip(":")) else None
        key, stop = yield from self.read.until(":" + self.marks, LONGEST_NAME)
        return key.strip().strip('"') if stop == ":" else None

    def _scalar(self, first: str) -> Steps[bool]:
        """A text, which is passed on as it grows, a number or a word. False: it is cut off."""
        if first == '"':
            document = JsonText()
            yield from self.arguments(document)
            return not self.read.closed or document.done
        if first != _QUOTE:
            text, stop = yield from self.read.until(",}]" + self.marks)
            if stop:
                self.read.unread()
                self.out.arguments(written(named(text.strip()), _ANY))
            return bool(stop)
        yield from self.read.skip(_QUOTE)
        self.out.arguments('"')
        while True:
            text, stop = self.read.upto(_QUOTE)
            self.out.arguments(json.dumps(named(text), ensure_ascii=False)[1:-1])
            if stop:
                self.out.arguments('"')
                return True
            if self.read.closed:
                return False
            yield
