"""Texts of a command line, of the environment and of a grid as numbers.

Knows: the complaints that argparse shows. Does not know: what a number may look like (runtime/number_text.py), which
option or variable a number is for; argparse puts its name before the complaint.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import Any

from runtime.number_text import integer_from, is_whole_number, number_from


def whole_number(text: str) -> int:
    """From 0. Raises ArgumentTypeError."""
    value = integer(text)
    if value < 0:
        raise ArgumentTypeError(f"{text} is not at least 0")
    return value


def at_least_one(text: str) -> int:
    """Raises ArgumentTypeError."""
    value = integer(text)
    if value < 1:
        raise ArgumentTypeError(f"{text} is not at least 1")
    return value


def whole_numbers(text: str) -> tuple[int, ...]:
    """``1,2,4``. Raises ArgumentTypeError."""
    if not all(map(is_whole_number, text.split(","))):
        raise ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,4,8")
    return tuple(map(int, text.split(",")))


def counts(text: str) -> tuple[int, ...]:
    """``1,2,4``: each from 1, none twice. Raises ArgumentTypeError."""
    found = tuple(map(at_least_one, text.split(",")))
    if len(set(found)) != len(found):
        raise ArgumentTypeError(f"{text} names a number twice")
    return found


def integer(text: str) -> int:
    """Of any sign; its range is checked where it is used. Raises ArgumentTypeError."""
    try:
        return integer_from(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None


def json_object(text: str) -> dict[str, Any]:
    """As ``{"name": true}``. Raises ArgumentTypeError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f'{text!r} is no JSON object such as {{"enable_thinking": false}}')
    return value


def number(text: str) -> float:
    """As ``0.5`` or ``1e-3``. Raises ArgumentTypeError."""
    try:
        return number_from(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None


def above_zero(text: str) -> float:
    """Finite. Raises ArgumentTypeError."""
    value = number(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text} is not a finite number above 0")
    return value


def variable(environ: Mapping[str, str], *names: str) -> int:
    """The first of these variables that is a whole number; 0 where none is."""
    return next((int(text) for name in names if is_whole_number(text := environ.get(name, ""))), 0)


def bounded(read: Callable[[str], Any], low: float, high: float = sys.float_info.max) -> Callable[[str], Any]:
    """``read``, then from ``low`` to ``high``; what is no number at all is refused as well.

    ``read`` takes numbers of any sign (``integer``, ``number``), so that each one out of range gets the range.
    """

    def checked(text: str) -> Any:
        value = read(text)
        if not low <= value <= high:
            limit = f"at least {_plain(low)}" if high == sys.float_info.max else f"{_plain(low)} to {_plain(high)}"
            raise ArgumentTypeError(f"{text} is not {limit}")
        return value

    return checked


def _plain(bound: float) -> str:
    """Whole numbers with all their digits."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
