"""The command line of `doctor`.

Knows: its flags. Does not know: what is looked at (doctor/command.py).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DoctorCommand:
    """``json``: print one JSON object instead of text. ``measure``: also what takes a second or more a GPU."""

    json: bool = False
    measure: bool = True
    name: str = "doctor"


def doctor_command(given: dict[str, Any]) -> DoctorCommand:
    """From what argparse found."""
    return DoctorCommand(**given)


def add_doctor_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine: what it offers, what is wrong, how to fix it",
        description="Versions and whether they fit each other, GPUs and their links, sockets, shared memory, network, "
        "the time ranks need to agree, and the kernels that would run. Needs no GPU and no model. On every node of a "
        "job: srun --ntasks-per-node 1 python -m launch doctor. Exit code: 0 the runtime can run here (warnings say "
        "what would be slow), 1 it cannot.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: off) [switch]")
    parser.add_argument(
        "--measure",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the peak rates of GPUs and links, about a second each (default: on) [switch]",
    )
