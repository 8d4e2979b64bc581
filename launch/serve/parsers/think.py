"""Reasoning between two marks, as all models but gpt-oss write it.

Knows: that it begins in the prompt or with the answer, and that a call ends it, too. Does not know: calls.
"""

from __future__ import annotations

from launch.serve.parsers.deltas import Message
from launch.serve.parsers.reader import Reader, Steps, mark


def reasoning(read: Reader, out: Message, marks: str, calls: str, begun: bool) -> Steps[None]:
    """The reasoning at the beginning of an answer, if any, up to its end. ``marks``: its first and its last;
    ``calls``: those that begin a call. ``begun``: the prompt ends with the first mark."""
    read.hold()
    if not (yield from read.skip(marks[0])) and not begun:
        read.back()
        return
    read.go_on()
    if marks == CHANNEL and not begun:
        yield from read.until("\n")  # the channel's name
    out.thinking = True
    while True:
        text, stop = read.upto(marks[1] + calls)
        out.think(text)
        if stop or read.closed:
            break
        yield
    if stop != marks[1] and stop:
        read.unread()
    out.thought()


THINK = mark("<think>") + mark("</think>")
BRACKETS = mark("[THINK]") + mark("[/THINK]")
SEED = mark("<seed:think>") + mark("</seed:think>")
CHANNEL = mark("<|channel>") + mark("<channel|>")
