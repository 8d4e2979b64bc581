"""Tool calls as GLM-4.5 to GLM-5 write them: <tool_call>name, then <arg_key>key</arg_key><arg_value>value</arg_value>.

Knows: that form, with newlines (4.5, 4.6) and without (4.7, 5). Does not know: types (typed_values.py).
"""

from __future__ import annotations

from typing import Final

from launch.serve.parsers.call_format import LONGEST_NAME, CallFormat
from launch.serve.parsers.reader import Steps, mark

_OPEN: Final = mark("<tool_call>")
_CLOSE: Final = mark("</tool_call>")
_KEY: Final = mark("<arg_key>")
_END_KEY: Final = mark("</arg_key>")
_VALUE: Final = mark("<arg_value>")
_END_VALUE: Final = mark("</arg_value>")


class Glm(CallFormat):
    """See CallFormat."""

    marks = _OPEN + _CLOSE + _KEY + _END_KEY + _VALUE + _END_VALUE
    starts = _OPEN

    def call(self, start: str) -> Steps[bool]:
        name, stop = yield from self.read.until("\n" + self.marks, LONGEST_NAME)
        if not name.strip() and stop == "\n":
            name, stop = yield from self.read.until("\n" + self.marks, LONGEST_NAME)
        name = name.strip()
        if not self.out.knows(name) or stop not in ("\n", _KEY, _CLOSE):
            return False
        if stop != "\n":
            self.read.unread()
        elif (yield from self.read.after_blanks()) not in ("", _KEY, _CLOSE):
            return False
        arguments = self.typed(name)
        while (yield from self.read.skip(_KEY)):
            key, stop = yield from self.read.until(self.marks, LONGEST_NAME)
            if stop != _END_KEY or not (yield from self.read.skip(_VALUE)):
                break
            arguments.begin(key.strip())
            if not (yield from self.value(arguments, _END_VALUE, _KEY + _CLOSE)):
                return True
        if self.read.next:  # else it is cut off
            arguments.finish()
            yield from self.ends(_CLOSE)
        return True
