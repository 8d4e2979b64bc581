"""`python -m launch COMMAND` and the console script `lockstride`.

Knows: which command is which function, and which errors are the user's. Does not know: what a command does.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from launch.bench.options import BenchCommand
from launch.chat.options import ChatCommand
from launch.cli import AnyCommand, parse
from launch.daemon.options import DaemonCommand
from launch.doctor.options import DoctorCommand
from launch.generate.options import Command
from launch.ranks.home import settle_home
from launch.ranks.rendezvous import MeetingError, RendezvousError, discover
from launch.ranks.signals import raises_on_sigterm
from launch.serve.options import ServeCommand
from launch.sweep.options import SweepCommand
from launch.tune.options import TuneCommand
from runtime.watchdog.parent_death import die_with_parent

FAILED = 1
USAGE = 2
INTERRUPTED = 130  # as shells say it of SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Raises SystemExit(2) for a command line that does not parse."""
    command = parse(sys.argv[1:] if arguments is None else arguments)
    _log_as(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0")
    settle_home()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model's answer may have characters that a terminal has not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _main(command)
    except KeyboardInterrupt:  # where nothing has begun that would end in its own way: imports, loading, benches
        print(f"lockstride {command.name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _main(command: AnyCommand) -> int:
    if isinstance(command, DoctorCommand):
        from launch.doctor import command as doctor

        return doctor.run(command)  # where torch cannot be imported, too
    if isinstance(command, SweepCommand):
        from launch.sweep import command as sweep

        return sweep.run(command, os.environ)  # it is no rank, but starts those of its points
    if isinstance(command, ChatCommand):
        return run_chat(command)
    _end_with_launcher()
    try:
        alone = discover(os.environ).topology.world == 1
    except RendezvousError as error:  # before torch is imported, which takes seconds, and minutes on some file systems
        return _refused(command, error)
    from torch.distributed.elastic.multiprocessing.errors import record  # after parsing: --help needs no torch

    # One rank alone has no watchdog, and as PID 1 of a container it would ignore a SIGTERM without a handler.
    with raises_on_sigterm() if alone else nullcontext():
        code: int | None = record(_run)(command)
    return 0 if code is None else code


def run_chat(command: ChatCommand) -> int:
    """It is no rank: it talks to one."""
    from launch.chat.command import run
    from launch.errors import UsageError
    from runtime.daemon.client import SlotError

    try:
        return run(command)
    except UsageError as error:
        return _refused(command, error)
    except SlotError as error:
        print(f"lockstride chat: error: {error}", file=sys.stderr)
        return FAILED


def _end_with_launcher() -> None:
    """A rank does not outlive torchrun's agent or Slurm's step daemon, however those end."""
    if sys.platform == "linux" and ("RANK" in os.environ or "SLURM_STEP_ID" in os.environ):
        die_with_parent()


def _log_as(rank: str) -> None:
    """The leader reports what happens, the others only what is wrong, under their own names."""
    name, level = ("lockstride", logging.INFO) if rank == "0" else (f"lockstride rank {rank}", logging.WARNING)
    logging.basicConfig(level=level, format=f"{name} %(levelname)s: %(message)s", stream=sys.stderr)


def _run(command: Command | BenchCommand | DaemonCommand | ServeCommand | TuneCommand) -> int:
    from launch.errors import BenchError, UsageError
    from launch.generate.output_file import ResultsFileError, ResultsWriteError
    from launch.serve.command import ApiProcessesFailed
    from models.checkpoint import WeightsError
    from models.config import ModelConfigError
    from runtime.config import ConfigError
    from runtime.execute.cache.sizing import CacheMemoryError
    from runtime.execute.step.graphs import CaptureError
    from runtime.frontend.tokenizer_files import TokenizerError
    from runtime.speculative_config import SpeculativeConfigError

    of_the_command_line = (
        UsageError,
        ConfigError,
        RendezvousError,
        TokenizerError,
        ResultsFileError,
        SpeculativeConfigError,
    )
    of_the_model = (ModelConfigError, WeightsError, CacheMemoryError, CaptureError)
    try:
        return _run_its_module(command)
    except (MeetingError, ResultsWriteError, BenchError, ApiProcessesFailed) as error:
        print(f"lockstride {command.name}: error: {error}", file=sys.stderr)
        return FAILED
    except (*of_the_command_line, *of_the_model) as error:
        return _refused(command, error)


def _run_its_module(command: Command | BenchCommand | DaemonCommand | ServeCommand | TuneCommand) -> int:
    """Each command imports its own module only: that of ``tune`` imports Triton, which takes each rank 0.1 to 0.3 s."""
    from launch.ranks.start_engine import open_engine

    if isinstance(command, TuneCommand):
        from launch.tune import command as tune

        return tune.run(command, os.environ)
    if isinstance(command, BenchCommand):
        from launch.bench import command as bench
        from launch.sweep.report.load_plot import LoadPictures

        return bench.run(command, os.environ, open_engine, LoadPictures())
    if isinstance(command, ServeCommand):
        from launch.serve import command as serve

        return serve.run(command, os.environ, open_engine)
    if isinstance(command, DaemonCommand):
        from launch.daemon import command as daemon

        return daemon.run(command, os.environ, open_engine)
    from launch.generate.command import run

    return run(command, os.environ, open_engine)


def _refused(
    command: Command | BenchCommand | ChatCommand | DaemonCommand | ServeCommand | TuneCommand, error: Exception
) -> int:
    print(f"lockstride {command.name}: error: {error}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
