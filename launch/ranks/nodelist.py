"""Slurm's short form of a list of hosts, as far as a launcher needs it: the names, in order.

Knows: the grammar of SLURM_JOB_NODELIST. Does not know: Slurm itself; `scontrol` is missing in many containers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from runtime.number_text import is_whole_number

_PIECE = re.compile(r"([^,\[\]]+)|\[([^\]]*)\]")


def first_host(node_list: str) -> str:
    """The first name of the list."""
    return next(hosts(node_list))


def hosts(node_list: str) -> Iterator[str]:
    """``gpu[01-02,7],login`` to gpu01, gpu02, gpu7, login. Raises ValueError for anything else."""
    names = _split(node_list)
    if not all(names):
        raise ValueError(f"the node list {node_list!r} has an empty name")
    for name in names:
        yield from _expand_name(name, node_list)


def _split(node_list: str) -> list[str]:
    """At the commas outside of brackets."""
    names, depth = [""], 0
    for character in node_list.strip():
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"the node list {node_list!r} has brackets that do not match")
        if character == "," and depth == 0:
            names.append("")
        else:
            names[-1] += character
    if depth:
        raise ValueError(f"the node list {node_list!r} has brackets that do not match")
    return names


def _expand_name(name: str, node_list: str) -> Iterator[str]:
    """Every combination of a name's brackets, the last one fastest."""
    found = _PIECE.search(name)
    pieces = [match.group(0) for match in _PIECE.finditer(name)]
    if found is None or "".join(pieces) != name:
        raise ValueError(f"the node list {node_list!r} cannot be read at {name!r}")
    head, rest = pieces[0], name[len(pieces[0]) :]
    choices = _numbers(head[1:-1], node_list) if head.startswith("[") else iter([head])
    for choice in choices:
        if rest:
            yield from (choice + tail for tail in _expand_name(rest, node_list))
        else:
            yield choice


def _numbers(ranges: str, node_list: str) -> Iterator[str]:
    """``01-03,7`` to 01, 02, 03, 7: as many digits as the first number has."""
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        high = high or low
        if not (is_whole_number(low) and is_whole_number(high) and int(low) <= int(high)):
            raise ValueError(f"the node list {node_list!r} has {part!r} in brackets, which is no range of numbers")
        yield from (f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1))
