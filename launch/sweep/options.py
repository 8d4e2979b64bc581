"""The command line of `sweep`: which subcommands there are, and what each of them needs.

Knows: flags, defaults and units. Does not know: what a subcommand does (sweep/command.py), what a grid file may say
(grid.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from launch.values import above_zero, at_least_one, whole_number
from runtime.config import DEVICE_DEFAULTS

Subcommand = Literal["plan", "render", "run", "submit", "task", "status", "report"]

H200_GIB = 139.0  # memory of a device, as its driver shows it
GIVE_UP_AFTER = 3  # starts of a point that the time limit ended


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What the subcommands need; each reads its own fields and leaves the others at their defaults.

    ``points``: a file of keys that replaces the grid's own list. ``dry_run_world``: ranks to plan without starting any;
    the fields after it describe that plan.
    """

    grid: Path | None = None
    out: Path | None = None
    resume: bool = False
    retry_failed: bool = False
    max_array: int | None = None
    throttle: int | None = None
    show: bool = False
    to: Path | None = None
    watch: float | None = None
    json: bool = False
    against: Path | None = None
    html: Path | None = None
    points: Path | None = None
    action: Literal["begin", "end"] = "begin"
    index: int = 0
    exit_code: int = 0
    asked: str = ""
    attempt: Path | None = None
    dry_run_world: int | None = None
    model: str | None = None
    tp: int | None = None
    ep: int = 1
    dtype: str = "auto"
    gpus_per_node: int = 8
    memory_gib: float = H200_GIB
    memory_fraction: float = 0.9
    max_num_seqs: int = DEVICE_DEFAULTS["max_num_seqs"]["cuda"]


@dataclass(frozen=True, slots=True)
class SweepCommand:
    """A parsed `sweep` command line."""

    subcommand: Subcommand
    options: SweepOptions
    name: str = "sweep"


def sweep_command(given: dict[str, Any]) -> SweepCommand:
    """From what argparse found."""
    subcommand = given.pop("subcommand")
    return SweepCommand(subcommand, SweepOptions(**given))


def add_sweep_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The parser of `sweep` and those of its subcommands."""
    sweep = commands.add_parser(
        "sweep",
        help="run a grid of benchmarks, locally or under Slurm, and report on them",
        description="A YAML grid becomes points; each point is one `launch bench`. Finished points are kept on disk "
        "and never run again. docs/sweeps.md explains the file.",
        allow_abbrev=False,
    )
    subcommands = sweep.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name, add_options, summary, description in _SUBCOMMANDS:
        add_options(
            subcommands.add_parser(
                name, help=summary, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS
            )
        )


_DEFAULTS = {field.name: field.default for field in fields(SweepOptions)}


def _value(
    parser: argparse.ArgumentParser, flag: str, text: str, unit: str, read: Callable[[str], Any], shown: str = ""
) -> None:
    dest = flag[2:].replace("-", "_")
    text = f"{text} (default: {shown or _DEFAULTS[dest]}) [{unit}]"
    parser.add_argument(flag, dest=dest, help=text, type=read, metavar=unit.upper())


def _switch(parser: argparse.ArgumentParser, flag: str, text: str) -> None:
    parser.add_argument(flag, action="store_true", help=f"{text} (default: off) [switch]")


def _required(parser: argparse.ArgumentParser, dest: str, text: str, unit: str) -> None:
    parser.add_argument(dest, type=Path, metavar=dest.upper(), help=f"{text} (required) [{unit}]")


def _out(parser: argparse.ArgumentParser) -> None:
    text = "ledger folder, with one subfolder per point"
    _value(parser, "--out", text, "folder", Path, "the grid file's name without its ending")


def _grid_and_out(parser: argparse.ArgumentParser) -> None:
    _required(parser, "grid", "YAML file of the grid", "file")
    _out(parser)


def _going_on(parser: argparse.ArgumentParser) -> None:
    _switch(parser, "--resume", "continue an existing ledger; finished points are not run again")
    _switch(parser, "--retry-failed", "retry the points that failed")


def _cutting(parser: argparse.ArgumentParser) -> None:
    _value(parser, "--max-array", "maximum number of tasks in one array", "tasks", at_least_one, "Slurm's MaxArraySize")
    _value(
        parser,
        "--throttle",
        "maximum number of concurrent tasks of one array",
        "tasks",
        at_least_one,
        "the grid's, or all",
    )


def _plan_options(parser: argparse.ArgumentParser) -> None:
    text = "YAML file of the grid; may be omitted with --dry-run-world (default: none) [file]"
    parser.add_argument("grid", nargs="?", type=Path, metavar="GRID", default=None, help=text)
    _out(parser)
    _switch(parser, "--json", "print the plan as JSON")
    world = parser.add_argument_group("dry run of a world")

    def option(flag: str, text: str, unit: str, read: Callable[[str], Any], shown: str = "") -> None:
        dest = flag[2:].replace("-", "_")
        shown = shown or str(_DEFAULTS[dest])
        world.add_argument(flag, dest=dest, help=f"{text} (default: {shown}) [{unit}]", type=read, metavar=unit.upper())

    option("--dry-run-world", "plan this many ranks in one process and check them", "ranks", at_least_one, "off")
    option("--model", "model folder, or a shape that comes with Lockstride", "folder", str, "the models of GRID")
    option("--tp", "tensor-parallel ranks", "ranks", at_least_one, "the most that divide the model on one node")
    text = "expert-parallel ranks, each with whole experts; 1 splits every expert over the ranks of --tp"
    option("--ep", text, "ranks", at_least_one)
    option("--dtype", "type of weights and KV; auto takes the checkpoint's", "word", str)
    option("--gpus-per-node", "ranks per node", "ranks", at_least_one)
    option("--memory-gib", "memory of a device", "GiB", above_zero)
    option("--memory-fraction", "share of it that the engine may use", "fraction", above_zero)
    option("--max-num-seqs", "requests that run at once, each with a slot's state", "requests", at_least_one)


def _render_options(parser: argparse.ArgumentParser) -> None:
    _grid_and_out(parser)
    _cutting(parser)
    _value(parser, "--to", "write each script into this folder as well", "folder", Path, "not written")


def _run_options(parser: argparse.ArgumentParser) -> None:
    _grid_and_out(parser)
    _going_on(parser)


def _submit_options(parser: argparse.ArgumentParser) -> None:
    _grid_and_out(parser)
    _going_on(parser)
    _cutting(parser)
    _switch(parser, "--show", "print what would be submitted, and submit nothing")


def _task_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("begin", "end"), help="what to do (required) [word]")
    _out(parser)
    parser.add_argument("--grid", type=Path, metavar="FILE", help="YAML file of the grid (default: none) [file]")
    _value(parser, "--points", "file with one key a line, instead of the grid's points", "file", Path, "none")
    _value(parser, "--index", "begin: line of --points or number of the point, from 0", "number", whole_number)
    _value(parser, "--attempt", "end: the folder that begin printed", "folder", Path, "none")
    _value(parser, "--exit-code", "end: exit code of the ranks", "number", whole_number)
    _value(parser, "--asked", "end: signal by which Slurm asked the job to end", "word", str, "none")


def _status_options(parser: argparse.ArgumentParser) -> None:
    _required(parser, "out", "ledger folder", "folder")
    _value(parser, "--watch", "refresh at this interval until all points are done", "seconds", above_zero, "once")
    _switch(parser, "--json", "print it as JSON")


def _report_options(parser: argparse.ArgumentParser) -> None:
    _required(parser, "out", "ledger folder", "folder")
    text = "earlier report to compare with: a report.json, or a folder with one"
    _value(parser, "--against", text, "file", Path, "none")
    _value(
        parser, "--html", "report to write; images and report.json go beside it", "file", Path, "OUT/report/report.html"
    )


_SUBCOMMANDS: tuple[tuple[Subcommand, Callable[[argparse.ArgumentParser], None], str, str], ...] = (
    (
        "plan",
        _plan_options,
        "show the points, their GPUs and the time they may take",
        "The points of a grid as a table. With --dry-run-world N, also plans a world of N ranks in this process and "
        "checks that every rank gets its part of every parameter exactly once. Exit code 1 when it does not.",
    ),
    (
        "render",
        _render_options,
        "print the exact scripts that submit passes to sbatch",
        "The exact sbatch scripts of a grid. Nothing is submitted, and the ledger is not touched.",
    ),
    (
        "run",
        _run_options,
        "run the points on this machine, one after the other",
        "Every point as a process of its own, under torchrun where it has several ranks. Exit code: 0 all points are "
        "done, 1 some failed (their folders say why), 2 the command line or the grid is wrong or the ledger cannot be "
        "written, 130 or 143 interrupted.",
    ),
    (
        "submit",
        _submit_options,
        "submit the points to Slurm as job arrays",
        "Job arrays for the points that are neither done nor failed nor known to Slurm. Run it again with --resume to "
        "resubmit points that were cancelled or that Slurm has forgotten.",
    ),
    (
        "task",
        _task_options,
        "what slurm/sweep.sbatch calls around each point",
        "begin prints the folder of a new attempt at the task's next point (exit code 3: nothing is left to do); end "
        "records the outcome of that attempt.",
    ),
    (
        "status",
        _status_options,
        "show the state of each point",
        "The points of a ledger: done, failed and why, running with progress, in Slurm's queue, or not started. Exit "
        "code: 0 all are done, 1 some failed, 3 some are not done yet.",
    ),
    (
        "report",
        _report_options,
        "one HTML file with plots, tables and a comparison",
        "A self-contained HTML file of all finished points, its images as PNG files, and report.json, to compare "
        "later reports with. Needs matplotlib.",
    ),
)
