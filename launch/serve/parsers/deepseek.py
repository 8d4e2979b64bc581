"""Tool calls as DeepSeek-V3 and R1 write them, with JSON in a code fence, and as V3.1 does, without.

Knows: both forms. Does not know: JSON (call_format.py).
"""

from __future__ import annotations

from typing import Final

from launch.serve.parsers.call_format import LONGEST_NAME, CallFormat
from launch.serve.parsers.reader import Steps, mark

_GROUP: Final = mark("<｜tool▁calls▁begin｜>")
_END_GROUP: Final = mark("<｜tool▁calls▁end｜>")
_OPEN: Final = mark("<｜tool▁call▁begin｜>")
_CLOSE: Final = mark("<｜tool▁call▁end｜>")
_SEPARATOR: Final = mark("<｜tool▁sep｜>")


class Deepseek(CallFormat):
    """See CallFormat."""

    marks = _GROUP + _END_GROUP + _OPEN + _CLOSE + _SEPARATOR
    starts = _GROUP + _END_GROUP + _OPEN

    def call(self, start: str) -> Steps[bool]:
        if start != _OPEN:
            return True  # of a group: it says nothing
        name, stop = yield from self.read.until(self.marks, LONGEST_NAME)
        if stop != _SEPARATOR:
            return False
        if name.strip() == "function":  # else the name itself
            found, stop = yield from self.read.until("\n{" + self.marks, LONGEST_NAME)
            name = found if stop == "\n" else name
            if stop == "{":
                self.read.unread()
        fence, stop = yield from self.read.until("{" + self.marks, LONGEST_NAME)
        name = name.strip()
        if stop != "{" or fence.strip() not in ("", "```json", "```") or not self.out.knows(name):
            return False
        self.read.unread()
        self.begin(name)
        yield from self.arguments()
        yield from self.ends(_CLOSE)
        return True
