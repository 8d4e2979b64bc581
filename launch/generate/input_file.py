"""The input file: its lines, which of them are done already, and which use an id twice.

Knows: lines and their limits, ids across lines. Does not know: what a line means (parser.py), engines.
A line is never held in memory beyond its limit of length, and a file is read as it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from launch.api.parser import BadLine, Form, LineId, Peeked, PreparedRequest, RequestParser

_SKIP_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A line as it stands in the file. ``number`` counts from 1; ``data`` is None when it is longer than allowed."""

    number: int
    data: bytes | None
    length: int


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """What an earlier run has written: ids with an answer, and line numbers (with their ids) with an error."""

    ids: AbstractSet[LineId] = frozenset()
    errors: Mapping[int, LineId | None] = field(default_factory=dict)


def read_lines(stream: BinaryIO, max_bytes: int) -> Iterator[Line]:
    """The lines of a file without their ends; blank lines are passed over, but counted."""
    number = 0
    while data := stream.readline(max_bytes + 2):
        number += 1
        length = len(data)
        if number == 1:
            data = data.removeprefix(_BOM)
        stripped = data.rstrip(b"\r\n")
        if len(stripped) > max_bytes:
            while not data.endswith(b"\n") and (data := stream.readline(_SKIP_BYTES)):
                length += len(data)
            yield Line(number, None, length)
        elif stripped.strip():
            yield Line(number, stripped, length)


def count_lines(path: Path) -> int:
    """Lines that hold something, for the progress bar: at a gigabyte a second, without parsing."""
    with path.open("rb") as stream:
        return sum(1 for _ in read_lines(stream, _SKIP_BYTES))


def read_requests(
    stream: BinaryIO, parser: RequestParser, finished: FinishedRows, max_line_bytes: int
) -> Iterator[PreparedRequest | BadLine]:
    """The requests that are still to be served, and the bad lines still to be reported, lazily and in file order.

    An id that an earlier line has used, whatever became of it, makes a bad line. Only ids are kept in memory.
    """
    first_use: dict[LineId, int] = {}
    for line in read_lines(stream, max_line_bytes):
        if line.data is None:
            peeked = Peeked(
                Form.SIMPLE, None, f"the line has {line.length} bytes: --max-line-bytes is {max_line_bytes}"
            )
        else:
            peeked = parser.peek(line.number, line.data)
        first = line.number if peeked.id is None else first_use.setdefault(peeked.id, line.number)
        if line.number in finished.errors and finished.errors[line.number] == peeked.id:
            continue
        if first != line.number:
            message = f"id {peeked.id!r} was used by line {first}: give each line its own"
            yield BadLine(line.number, peeked.id, peeked.form, "duplicate_id", message)
        elif line.data is None:
            yield BadLine(line.number, None, peeked.form, "line_too_long", peeked.trouble or "")
        elif peeked.id is None or peeked.id not in finished.ids:
            yield parser.parse(line.number, line.data, peeked)
