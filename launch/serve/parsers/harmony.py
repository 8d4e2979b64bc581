"""Answers of gpt-oss: messages with a channel each, and calls as messages to a function (the harmony format).

Knows: channels, recipients before and after the channel. Does not know: JSON (call_format.py).
"""

from __future__ import annotations

import re
from typing import Final

from launch.serve.parsers.call_format import LONGEST_NAME, CallFormat
from launch.serve.parsers.reader import BLANKS, Steps, mark

_START: Final = mark("<|start|>")
_CHANNEL: Final = mark("<|channel|>")
_CONSTRAIN: Final = mark("<|constrain|>")
_MESSAGE: Final = mark("<|message|>")
_ENDS: Final = mark("<|end|>") + mark("<|call|>") + mark("<|return|>")
_RECIPIENT: Final = re.compile(r"to=([^\s\ud800-\udfff]+)")
_WORD: Final = re.compile(r"\s*\w*")
_LONGEST_HEAD: Final = 4 * LONGEST_NAME


class Harmony(CallFormat):
    """See CallFormat. The prompt ends with <|start|>assistant."""

    marks = _START + _CHANNEL + _CONSTRAIN + _MESSAGE + _ENDS
    has_reasoning = True

    def message(self) -> Steps[None]:
        read = self.read
        while True:
            read.hold()
            head, stop = yield from read.until(_MESSAGE + _ENDS, _LONGEST_HEAD)
            if stop == _MESSAGE:
                read.go_on()
                yield from self._body(head)
            elif not stop:
                break
        read.back()
        yield from super().message()  # what is no message is content

    def _body(self, head: str) -> Steps[None]:
        to = _RECIPIENT.search(head)
        name = to[1].removeprefix("functions.") if to is not None else ""
        if to is not None and self.out.knows(name):
            yield from self._call(name)
            return
        word = _WORD.match(head.partition(_CHANNEL)[2])
        thinks = word is not None and word[0].strip() == "analysis"
        while True:
            text, stop = self.read.upto(_ENDS + _START)
            (self.out.think if thinks else self.out.say)(text)
            if stop or self.read.closed:
                break
            yield
        if thinks:
            self.out.thought()
        if stop == _START:
            self.read.unread()

    def _call(self, name: str) -> Steps[None]:
        first = yield from self.read.after_blanks()
        if first == "{":
            self.out.begin(name)
            yield from self.arguments()
        elif first and first in _ENDS:
            self.out.begin(name)
            self.out.arguments("{}")
        text, stop = yield from self.read.until(_ENDS + _START)
        if stop == _START:
            self.read.unread()
        if text.strip(BLANKS):
            self.out.say(text)
