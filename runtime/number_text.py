"""Texts as numbers: one reading for command lines, the environment, grids and the lines of a daemon's clients.

Knows: what a number may look like: ASCII digits, although Python's int() and float() take those of every script, and
underscores between them. Does not know: where a text comes from, which range is legal.
"""

from __future__ import annotations


def is_whole_number(text: str) -> bool:
    """Whether ``text`` is digits alone, 0 to 9: no sign, no space, no other script's."""
    return text.isascii() and text.isdecimal()


def integer_from(text: str) -> int:
    """Of any sign, but a plus is not written. Raises ValueError."""
    if not is_whole_number(text.removeprefix("-")):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def number_from(text: str) -> float:
    """As ``0.5`` or ``1e-3``. Raises ValueError."""
    if not text.isascii() or "_" in text:
        raise ValueError(f"{text!r} is not a number")
    return float(text)
