"""One answer's text to deltas: its reasoning, its content, its tool calls, by one parser that reads as text comes.

Knows: how a format of reasoning and one of calls follow each other. Does not know: any format, tokens (a place in the
text says where one is a mark), chunks (chunks.py).

However the text is cut, the deltas join to the same message.
"""

from __future__ import annotations

from collections.abc import Collection

from launch.serve.parsers.call_format import CallFormat
from launch.serve.parsers.deltas import Delta, Message, Tools
from launch.serve.parsers.reader import MarkedText, Reader, Steps, named
from launch.serve.parsers.table import CALLS, HARMONY, KEPT, REASONING
from launch.serve.parsers.think import reasoning


class AnswerParser:
    """``calls`` and ``thoughts``: names of formats (table.py); None for answers that have none. ``tools``: those that
    may be called; None for any. ``tokens``: names of the tokenizer's added tokens. ``begun``: the prompt ends with the
    beginning of the reasoning. ``filled``: as of Message.
    """

    def __init__(
        self,
        calls: str | None,
        thoughts: str | None,
        tools: Tools | None = None,
        tokens: Collection[str] = (),
        *,
        begun: bool = False,
        filled: bool = False,
    ) -> None:
        self._out, self._read = Message(tools, filled=filled), Reader()
        kind = CALLS["openai"] if thoughts == HARMONY else CallFormat if calls is None else CALLS[calls]
        marks = "" if thoughts is None or kind.has_reasoning else REASONING[thoughts]
        self._text = MarkedText(marks + kind.marks, tokens)
        self.marks = tuple(map(named, marks + kind.marks))
        self._steps = self._message(kind(self._read, self._out), marks, thoughts == KEPT, begun)
        self._over = False
        self._advance()

    def _message(self, calls: CallFormat, marks: str, kept: bool, begun: bool) -> Steps[None]:
        if kept and begun:  # it stays in the content, since the model wants it back so
            self._out.say(marks[0])
        elif marks and not kept:
            yield from reasoning(self._read, self._out, marks, calls.starts, begun)
        yield from calls.message()

    @property
    def calls(self) -> int:
        """That began."""
        return self._out.calls

    @property
    def thinking(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._out.thinking

    def push(self, text: str, place: tuple[int, int] | None = None) -> list[Delta]:
        """What is certain by now. ``place``: of a token that is a mark, in the whole text (see MarkedText)."""
        if text or place is not None:
            self._read.feed(self._text.push(text, place))
            self._advance()
        return self._out.take()

    def finish(self) -> list[Delta]:
        """No text follows: a call that is cut off ends where it is."""
        rest = self._text.finish()
        self._read.feed("" if self._out.in_call else rest)  # half of a mark belongs to no argument
        self._read.closed = True
        self._advance()
        self._out.finish()
        return self._out.take()

    def _advance(self) -> None:
        if not self._over:
            self._over = next(self._steps, self) is self
