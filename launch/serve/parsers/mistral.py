"""Tool calls as Mistral's models write them: [TOOL_CALLS][{"name": ..., "arguments": ...}], and since version 11 of
their tokenizer [TOOL_CALLS]name[ARGS]{...}, with [CALL_ID] before [ARGS] in some.

Knows: both forms, ids of nine letters and digits. Does not know: JSON (call_format.py).
"""

from __future__ import annotations

from typing import Final

from launch.serve.parsers.call_format import LONGEST_NAME, CallFormat
from launch.serve.parsers.deltas import short_id
from launch.serve.parsers.reader import Steps, mark

_CALLS: Final = mark("[TOOL_CALLS]")
_ARGUMENTS: Final = mark("[ARGS]")
_ID: Final = mark("[CALL_ID]")


class Mistral(CallFormat):
    """See CallFormat."""

    marks = _CALLS + _ARGUMENTS + _ID
    starts = _CALLS

    def begin(self, name: str, call_id: str | None = None) -> None:
        super().begin(name, call_id or short_id())

    def call(self, start: str) -> Steps[bool]:
        if (yield from self.read.after_blanks()) == "[":
            return (yield from self._list())
        name, stop = yield from self.read.until(_ARGUMENTS + _ID + "{" + _CALLS, LONGEST_NAME)
        given = ""
        if stop == _ID:
            given, stop = yield from self.read.until(_ARGUMENTS + "{" + _CALLS, LONGEST_NAME)
        if stop == _ARGUMENTS and (yield from self.read.after_blanks()) != "{":
            return False
        if stop in ("", _CALLS) or not self.out.knows(name.strip()):
            return False
        if stop == "{":
            self.read.unread()
        self.begin(name.strip(), given.strip() or None)
        yield from self.arguments()
        return True

    def _list(self) -> Steps[bool]:
        yield from self.read.skip("[")
        before = self.out.calls
        while (yield from self.named_object()):
            if not (yield from self.read.skip(",")):
                yield from self.read.skip("]")
                break
        return self.out.calls > before
