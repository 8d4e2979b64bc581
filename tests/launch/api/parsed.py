"""A command line as the kind of command that a test is about.

Knows: that parse gives one of four kinds. Does not know: what any of them holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from launch.bench.options import BenchCommand
from launch.cli import parse
from launch.doctor.options import DoctorCommand
from launch.generate.options import Command
from launch.serve.options import ServeCommand
from launch.sweep.options import SweepCommand

AnyCommand = TypeVar("AnyCommand", Command, BenchCommand, DoctorCommand, ServeCommand, SweepCommand)


def parsed(kind: type[AnyCommand], arguments: Sequence[str]) -> AnyCommand:
    """What parse makes of ``arguments``. Raises AssertionError where that is another kind of command."""
    command = parse(arguments)
    assert isinstance(command, kind), f"{arguments} is a {type(command).__name__}"
    return command
