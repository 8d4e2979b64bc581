"""Tool calls as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them: <tool_call>, <function=name>, <parameter=key>, value.

Knows: that form, where a value ends that holds its closing mark. Does not know: types (typed_values.py).
"""

from __future__ import annotations

from typing import Final

from launch.serve.parsers.call_format import LONGEST_NAME, CallFormat
from launch.serve.parsers.reader import Steps, mark

_OPEN: Final = mark("<tool_call>")
_CLOSE: Final = mark("</tool_call>")
_FUNCTION: Final = mark("<function=")
_END_FUNCTION: Final = mark("</function>")
_PARAMETER: Final = mark("<parameter=")
_END_PARAMETER: Final = mark("</parameter>")


class Qwen3Coder(CallFormat):
    """See CallFormat."""

    marks = _OPEN + _CLOSE + _FUNCTION + _END_FUNCTION + _PARAMETER + _END_PARAMETER
    starts = _OPEN

    def call(self, start: str) -> Steps[bool]:
        if not (yield from self.read.skip(_FUNCTION)):
            return False
        name, stop = yield from self.read.until(">" + self.marks, LONGEST_NAME)
        name = name.strip()
        if stop != ">" or not self.out.knows(name):
            return False
        arguments = self.typed(name)
        while (yield from self.read.skip(_PARAMETER)):
            key, stop = yield from self.read.until(">" + self.marks, LONGEST_NAME)
            if stop != ">":
                break
            arguments.begin(key.strip(), trims=True)
            if not (
                yield from self.value(arguments, _END_PARAMETER, _PARAMETER + _END_FUNCTION, _END_FUNCTION, _CLOSE)
            ):
                return True
        if self.read.next:  # else it is cut off
            arguments.finish()
            yield from self.read.skip(_END_FUNCTION)
            yield from self.ends(_CLOSE)
        return True
