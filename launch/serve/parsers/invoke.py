"""Tool calls as MiniMax-M2 and DeepSeek-V3.2 write them: a group of <invoke name="...">, each with parameters.

Knows: that form, under both names. Does not know: types (typed_values.py).
"""

from __future__ import annotations

from typing import ClassVar, Final

from launch.serve.parsers.call_format import LONGEST_NAME, CallFormat
from launch.serve.parsers.reader import Steps, mark

_TAG: Final = "｜DSML｜"


class MinimaxM2(CallFormat):
    """See CallFormat. ``group``, ``invoke`` and ``parameter``: how each begins, and how it ends."""

    group: ClassVar[str] = mark("<minimax:tool_call>") + mark("</minimax:tool_call>")
    invoke: ClassVar[str] = mark('<invoke name="') + mark("</invoke>")
    parameter: ClassVar[str] = mark('<parameter name="') + mark("</parameter>")
    marks = group + invoke + parameter
    starts = group[0]

    def call(self, start: str) -> Steps[bool]:
        before = self.out.calls
        while (yield from self._one()):
            self.read.hold()
        if self.out.calls == before:
            return False
        self.read.back()
        yield from self.read.skip(self.group[1])
        return True

    def _one(self) -> Steps[bool]:
        """Reads one call of a group. False, at the mark, if none follows."""
        read = self.read
        if not (yield from read.skip(self.invoke[0])):
            return False
        name, stop = yield from read.until('"' + self.marks, LONGEST_NAME)
        if stop != '"' or not self.out.knows(name) or not (yield from read.skip(">")):
            return False
        arguments = self.typed(name)
        while (yield from read.skip(self.parameter[0])):
            key, stop = yield from read.until('"' + self.marks, LONGEST_NAME)
            rest, stop = (yield from read.until(">" + self.marks, LONGEST_NAME)) if stop == '"' else ("", "")
            if stop != ">":
                break
            arguments.begin(key, text=_says_text(rest))
            ends = self.parameter[0] + self.invoke[1]
            if not (
                yield from self.value(arguments, self.parameter[1], ends, self.invoke[1], self.group + self.invoke)
            ):
                return True
        if read.next:  # else it is cut off
            arguments.finish()
            yield from read.skip(self.invoke[1])
        return True


class DeepseekV32(MinimaxM2):
    """See CallFormat. DeepSeek-V3.2."""

    group = mark(f"<{_TAG}function_calls>") + mark(f"</{_TAG}function_calls>")
    invoke = mark(f'<{_TAG}invoke name="') + mark(f"</{_TAG}invoke>")
    parameter = mark(f'<{_TAG}parameter name="') + mark(f"</{_TAG}parameter>")
    marks = group + invoke + parameter
    starts = group[0]


def _says_text(attributes: str) -> bool | None:
    """What string="true" says; None where nothing does."""
    if "string=" not in attributes:
        return None
    return 'string="true"' in attributes
