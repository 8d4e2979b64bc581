"""The command line of `doctor`.

Knows: its flags. Does not know: what is looked at (doctor/command.py).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from launch.options import add_command, switch


@dataclass(frozen=True, slots=True)
class DoctorCommand:
    """A parsed command line."""

    json: bool = switch("print one JSON object")
    measure: bool = switch("measure the peak rates of GPUs and links, about a second each", True)
    name: str = "doctor"


def add_doctor_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_command(
        commands,
        "doctor",
        "check this machine: what it offers, what is wrong, how to fix it",
        "Versions and whether they fit each other, GPUs and their links, sockets, shared memory, network, "
        "the time ranks need to agree, and the kernels that would run. Needs no GPU and no model. On every node of a "
        "job: srun --ntasks-per-node 1 python -m launch doctor. Exit code: 0 the runtime can run here (warnings say "
        "what would be slow), 1 it cannot.",
        DoctorCommand,
    )
