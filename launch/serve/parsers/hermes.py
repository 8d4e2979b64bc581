"""Tool calls as Hermes, Qwen2.5 and Qwen3 write them: <tool_call>{"name": ..., "arguments": ...}</tool_call>.

Knows: that form. Does not know: JSON (call_format.py), reasoning.

A mark inside a JSON text is text.
"""

from __future__ import annotations

from typing import Final

from launch.serve.parsers.call_format import CallFormat
from launch.serve.parsers.reader import Steps, mark

_OPEN: Final = mark("<tool_call>")
_CLOSE: Final = mark("</tool_call>")


class Hermes(CallFormat):
    """See CallFormat."""

    marks = _OPEN + _CLOSE
    starts = _OPEN

    def call(self, start: str) -> Steps[bool]:
        if not (yield from self.named_object()):
            return False
        yield from self.ends(_CLOSE)
        return True
