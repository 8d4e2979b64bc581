"""What a dependently launched kernel touches before it waits, read from its PTX and from its machine code.

Knows: how the rules of models/kernels/dependent_launch.py look in both. Does not know: any kernel, or which of its
arguments are constant while its predecessor runs (test_compiled_kernels.py).

Code is read in the order in which it is written down, which is the order in which it runs as long as nothing loops
back over the wait; no kernel does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_WAIT, _RELEASE = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_LINE = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?P<code>[a-z][\w.:]*)\s+(?P<rest>[^;]*);", re.MULTILINE)
_READS = ("ld.global", "ld.volatile", "cp.async", "atom", "ld.relaxed", "ld.acquire")
_WRITES = ("st.global", "st.volatile", "red.", "atom", "st.relaxed", "st.release")
_SASS_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_SASS_READS, _SASS_WRITES = (
    re.compile(r"(LDG|LDGSTS|LD|UBLKCP|UTMALDG)(\.|$)"),
    re.compile(r"(STG|ST|RED\w*|ATOM\w*)(\.|$)"),
)


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """``waits``: there is one wait, and the release of dependents comes after it. ``early_reads``: pointers and
    descriptors from which, or with whose help, an address is made that is read before the wait. ``early_writes``:
    writes before it. ``moved``: reads and writes of memory that ptxas placed before the wait though PTX has them after
    it; 0 where the machine code was not read. ``late``: the release comes behind the last product on tensor cores.
    """

    waits: bool
    early_reads: tuple[str, ...]
    early_writes: int
    moved: int
    late: bool


def launch_order(ptx: str, sass: str | None, arguments: Sequence[str]) -> LaunchOrder:
    """``arguments``: names of the kernel's parameters in PTX, without the two that Triton adds at the end."""
    before, wait, after = ptx.partition(_WAIT)
    waits = bool(wait) and _WAIT not in after and _RELEASE in after and _RELEASE not in before
    reads = [sources for code, sources in _accesses(before) if code.startswith(_READS)]
    writes = [code for code, _ in _accesses(before) if code.startswith(_WRITES)]
    moved = 0 if sass is None else _touched_early(sass) - len(reads) - len(writes)
    pointers = {arguments[number] for sources in reads for number in sources if number < len(arguments)}
    names = tuple(name for name in arguments if name in pointers and name.endswith(("_ptr", "_desc")))
    late = 0 <= after.rfind("mma.") < after.find(_RELEASE)
    return LaunchOrder(waits, names, len(writes), moved, late)


def _touched_early(sass: str) -> int:
    """Reads and writes of memory before the wait."""
    machine = _SASS_LINE.findall(sass)
    early = machine[: machine.index("ACQBULK")] if "ACQBULK" in machine else machine
    return sum(bool(_SASS_READS.match(code)) + bool(_SASS_WRITES.match(code)) for code in early)


def _accesses(ptx: str) -> Iterator[tuple[str, set[int]]]:
    """(instruction, numbers of the parameters that went into its address) of every access to global memory."""
    sources: dict[str, set[int]] = {}  # register -> parameters that went into it
    for found in _LINE.finditer(ptx):
        code, rest = found["code"], found["rest"]
        parameter = re.search(r"\b\w+_param_(\d+)\b", rest)
        registers = re.findall(r"%[a-z]+\d+", rest)
        if code.startswith(("ld.param", "mov")) and parameter:  # a descriptor's address is moved
            sources[registers[0]] = {int(parameter[1])}
        elif code.startswith((*_READS, *_WRITES)):
            address = re.findall(r"\[\s*(%rd\d+)", rest)[-1]  # of a copy, the second is where it reads
            yield code, sources.get(address, set())
            if not code.startswith(_WRITES):
                for register in re.findall(r"%[a-z]+\d+", rest.partition("[")[0]):
                    sources[register] = sources.get(address, set())
        elif registers:
            made = set().union(*(sources.get(register, set()) for register in registers[1:]))
            sources[registers[0]] = made
