"""Tool calls as Kimi-K2 writes them: in a section, each with an id such as functions.name:0.

Knows: that form; that the id goes out as it is, since the model counts on with it. Does not know: JSON.
"""

from __future__ import annotations

from typing import Final

from launch.serve.parsers.call_format import LONGEST_NAME, CallFormat
from launch.serve.parsers.reader import Steps, mark

_SECTION: Final = mark("<|tool_calls_section_begin|>")
_END_SECTION: Final = mark("<|tool_calls_section_end|>")
_OPEN: Final = mark("<|tool_call_begin|>")
_ARGUMENTS: Final = mark("<|tool_call_argument_begin|>")
_CLOSE: Final = mark("<|tool_call_end|>")


class Kimi(CallFormat):
    """See CallFormat."""

    marks = _SECTION + _END_SECTION + _OPEN + _ARGUMENTS + _CLOSE
    starts = _SECTION + _END_SECTION + _OPEN

    def call(self, start: str) -> Steps[bool]:
        if start != _OPEN:
            return True  # of a section: it says nothing
        call_id, stop = yield from self.read.until(self.marks, LONGEST_NAME)
        call_id = call_id.strip()
        name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id
        if stop != _ARGUMENTS or not self.out.knows(name) or (yield from self.read.after_blanks()) != "{":
            return False
        self.begin(name, call_id)
        yield from self.arguments()
        yield from self.ends(_CLOSE)
        return True
