"""Tool calls as Qwen3-Coder, Qwen3.5, Nemotron 3 and Seed-OSS write them: <function=name>, <parameter=key>, value.

Knows: that form, where a value ends that holds its closing mark. Does not know: types (typed_values.py).
"""

from __future__ import annotations

from typing import ClassVar, Final

from launch.serve.parsers.call_format import LONGEST_NAME, CallFormat
from launch.serve.parsers.reader import Steps, mark

_FUNCTION: Final = mark("<function=")
_END_FUNCTION: Final = mark("</function>")
_PARAMETER: Final = mark("<parameter=")
_END_PARAMETER: Final = mark("</parameter>")
_PARTS: Final = _FUNCTION + _END_FUNCTION + _PARAMETER + _END_PARAMETER


class Qwen3Coder(CallFormat):
    """See CallFormat. ``around``: how a call begins, and how it ends."""

    around: ClassVar[str] = mark("<tool_call>") + mark("</tool_call>")
    marks = around + _PARTS
    starts = around[0]

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
            ends = _PARAMETER + _END_FUNCTION
            if not (yield from self.value(arguments, _END_PARAMETER, ends, _END_FUNCTION, self.around[1])):
                return True
        if self.read.next:  # else it is cut off
            arguments.finish()
            yield from self.read.skip(_END_FUNCTION)
            yield from self.ends(self.around[1])
        return True


class SeedOss(Qwen3Coder):
    """See CallFormat. Seed-OSS."""

    around = mark("<seed:tool_call>") + mark("</seed:tool_call>")
    marks = around + _PARTS
    starts = around[0]
