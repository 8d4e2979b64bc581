"""Draws the control plane's tables into docs/control-plane.md: ``python -m tests.tools.diagrams.control``
(``--check``: exit code 1 if they are stale).

Knows: the transition tables, the header's layout and the kinds of frames, as the code has them.
Does not know: what they mean; the prose around the drawings is written by hand.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from parallel.control.protocol.handshake import FOLLOWER_GREETING, LEADER_GREETING
from parallel.control.protocol.states import FOLLOWER_TABLE, LEADER_TABLE
from parallel.control.wire import frames as record
from tests.tools.diagrams.drawn import DOCS

State = TypeVar("State", bound=Enum)
Input = TypeVar("Input", bound=Enum)

PAGE = DOCS / "control-plane.md"
_SIZES = {"4s": 4, "B": 1, "H": 2, "I": 4, "Q": 8}
_FIELDS = (
    ("magic", "`LSCP`"),
    ("version", "of kinds and bodies; this layout is the same in all versions"),
    ("kind", "see below"),
    ("flags", "RECORD: 1 = STOP. PROBE: 1 = the leader's answer"),
    ("job", "the job's random 64-bit id"),
    ("epoch", "restarts of the job so far"),
    ("rank", "sender (follower) or receiver (leader); 65535: all followers"),
    ("horizon", "RECORD: L"),
    ("step", "turn"),
    ("digest", "the sender's rolling digest at the beginning of that turn"),
    ("payload length", "bytes after the header, at most 32 MiB"),
    ("CRC-32", "of everything before it and of the payload"),
)


def header_table() -> str:
    formats = re.findall(r"4s|[A-Z]", record._HEADER_AND_CRC.format.removeprefix("<"))
    rows, at = ["| offset | bytes | field | content |", "| --- | --- | --- | --- |"], 0
    for form, (name, content) in zip(formats, _FIELDS, strict=True):
        rows.append(f"| {at} | {_SIZES[form]} | {name} | {content} |")
        at += _SIZES[form]
    assert at == record.HEADER_SIZE
    return "\n".join(rows)


def kind_table() -> str:
    """From the comments of the Kind enum itself."""
    rows = ["| kind | number | sent by | says |", "| --- | --- | --- | --- |"]
    for name, number, who, what in re.findall(r"(\w+) = (\d+)  # ([FL, ]+): (.+)", inspect.getsource(record.Kind)):
        sender = {"F": "follower", "L": "leader", "F, L": "both"}[who]
        rows.append(f"| {name} | {number} | {sender} | {what} |")
    assert len(rows) == len(record.Kind) + 2
    return "\n".join(rows)


def states(table: Mapping[State, Mapping[Input, State]]) -> str:
    """A Mermaid state diagram; inputs that lead from one state to another share an arrow."""
    first = next(iter(table))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.value}"]
    for state, inputs in table.items():
        arrows: dict[str, list[str]] = {}
        for given, after in inputs.items():
            arrows.setdefault(after.value, []).append(str(given.value if isinstance(given.value, str) else given.name))
        lines += [f"    {state.value} --> {after}: {', '.join(given)}" for after, given in arrows.items()]
    return "\n".join([*lines, "```"])


def drawings() -> dict[str, str]:
    """What stands between ``<!-- name -->`` and ``<!-- end name -->``."""
    return {
        "header": header_table(),
        "kinds": kind_table(),
        "leader": states(LEADER_TABLE),
        "follower": states(FOLLOWER_TABLE),
        "leader greeting": states(LEADER_GREETING),
        "follower greeting": states(FOLLOWER_GREETING),
    }


def drawn(page: str) -> str:
    """The page with every drawing as the code has it now. Raises ValueError when a drawing has no place in it."""
    for name, drawing in drawings().items():
        begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        if begin not in page or end not in page:
            raise ValueError(f"{PAGE.name} has no place {begin} ... {end}")
        before, _, rest = page.partition(begin)
        page = before + begin + "\n" + drawing + "\n" + end + rest.partition(end)[2]
    return page


def main() -> int:
    page = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        return int(drawn(page) != page)
    PAGE.write_text(drawn(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
