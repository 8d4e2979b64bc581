"""Tool calls as Llama 3 writes them: {"name": ..., "parameters": ...}, with a semicolon between several.

Knows: that an answer is calls or content from its first characters on. Does not know: JSON (call_format.py).
"""

from __future__ import annotations

from typing import Final

from launch.serve.parsers.call_format import CallFormat
from launch.serve.parsers.reader import Steps, mark

_TAG: Final = mark("<|python_tag|>")


class Llama3Json(CallFormat):
    """See CallFormat. A call needs no mark."""

    marks = _TAG

    def message(self) -> Steps[None]:
        read = self.read
        while True:
            read.hold()
            yield from read.skip(_TAG)
            if self.out.calls:
                yield from read.skip(";")
            if not (yield from self.named_object()):
                read.back()
                break
        yield from super().message()
