"""The command line: which commands there are, and what each makes of its arguments.

Knows: the list of commands. Does not know: their options (each command's options.py), what a command does. Options that
are not known are refused, and none may be abbreviated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeAlias

from launch.bench.options import BenchCommand, add_bench_parser, bench_command
from launch.chat.options import ChatCommand, add_chat_parser
from launch.daemon.options import DaemonCommand, add_daemon_parser, daemon_command
from launch.doctor.options import DoctorCommand, add_doctor_parser
from launch.engine_options import engine_options
from launch.generate.options import Command, add_generate_parser, generate_command
from launch.serve.options import ServeCommand, add_serve_parser, serve_command
from launch.sweep.options import SweepCommand, add_sweep_parser, sweep_command
from launch.tune.options import TuneCommand, add_tune_parser

AnyCommand: TypeAlias = (
    Command | BenchCommand | ChatCommand | DaemonCommand | DoctorCommand | ServeCommand | SweepCommand | TuneCommand
)


def parse(arguments: Sequence[str]) -> AnyCommand:
    """Raises SystemExit(2), after an explanation on stderr, for a command line that is wrong."""
    found = vars(build_parser().parse_args(arguments))
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    name = given.pop("command")
    if name == "chat":
        return ChatCommand(**given)
    if name == "doctor":
        return DoctorCommand(**given)
    if name == "sweep":
        return sweep_command(given)
    if name == "tune":
        return TuneCommand(**given)
    engine = engine_options(given)
    if name == "serve":
        return serve_command(given, engine)
    if name == "daemon":
        return daemon_command(given, engine)
    return bench_command(given, engine) if name == "bench" else generate_command(given, engine)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstride",
        description="Multi-GPU LLM inference where every rank runs the same engine.",
        epilog="Start one rank a GPU: torchrun --nproc-per-node N -m launch COMMAND ..., srun python -m launch COMMAND "
        "..., or for one rank python -m launch COMMAND ...",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate_parser(commands)
    add_serve_parser(commands)
    add_daemon_parser(commands)
    add_chat_parser(commands)
    add_bench_parser(commands)
    add_doctor_parser(commands)
    add_sweep_parser(commands)
    add_tune_parser(commands)
    return parser
