"""The command line of `sweep`: which subcommands there are, and what each of them needs.

Knows: flags, defaults and units. Does not know: what a subcommand does (sweep/command.py), what a grid file may say
(grid.py).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from launch.options import add_command, choice, option, switch
from launch.values import above_zero, at_least_one, whole_number
from runtime.config import DEVICE_DEFAULTS, KvCacheDtype

Subcommand = Literal["plan", "render", "run", "submit", "task", "status", "report"]

H200_GIB = 139.0  # memory of a device, as its driver shows it
GIVE_UP_AFTER = 3  # starts of a point that the time limit ended


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What the subcommands need; each reads its own fields (_SUBCOMMANDS) and leaves the others at their defaults."""

    grid: Path | None = option("YAML file of the grid", "file", Path, None)
    out: Path | None = option(
        "ledger folder, with one subfolder per point", "folder", Path, None, "the grid file's name without its ending"
    )
    resume: bool = switch("continue an existing ledger; finished points are not run again")
    retry_failed: bool = switch("retry the points that failed")
    max_array: int | None = option(
        "maximum number of tasks in one array", "tasks", at_least_one, None, "Slurm's MaxArraySize"
    )
    throttle: int | None = option(
        "maximum number of concurrent tasks of one array", "tasks", at_least_one, None, "the grid's, or all"
    )
    show: bool = switch("print what would be submitted, and submit nothing")
    to: Path | None = option("write each script into this folder as well", "folder", Path, None, "not written")
    watch: float | None = option(
        "refresh at this interval until all points are done", "seconds", above_zero, None, "once"
    )
    json: bool = switch("print it as JSON")
    against: Path | None = option(
        "earlier report to compare with: a report.json, or a folder with one", "file", Path, None
    )
    html: Path | None = option(
        "report to write; images and report.json go beside it", "file", Path, None, "OUT/report/report.html"
    )
    action: Literal["begin", "end"] = choice("what to do", ("begin", "end"), "begin")
    points: Path | None = option("file with one key a line, instead of the grid's points", "file", Path, None)
    index: int = option("begin: line of --points or number of the point, from 0", "number", whole_number, 0)
    attempt: Path | None = option("end: the folder that begin printed", "folder", Path, None)
    exit_code: int = option("end: exit code of the ranks", "number", whole_number, 0)
    asked: str = option("end: signal by which Slurm asked the job to end", "word", str, "", "none")
    dry_run_world: int | None = option(
        "plan this many ranks in one process and check them", "ranks", at_least_one, None, "off"
    )
    model: str | None = option(
        "dry run: model folder, or a shape that comes with Lockstride", "folder", str, None, "the models of GRID"
    )
    tp: int | None = option(
        "dry run: tensor-parallel ranks", "ranks", at_least_one, None, "the most that divide the model on one node"
    )
    ep: int = option(
        "dry run: expert-parallel ranks, each with whole experts; 1 splits every expert over the ranks of --tp",
        "ranks",
        at_least_one,
        1,
    )
    dtype: str = option("dry run: type of weights and KV; auto takes the checkpoint's", "word", str, "auto")
    quantization: str | None = choice("dry run: fp8 quantises a bfloat16 checkpoint at load", ("fp8",), None, "none")
    kv_cache_dtype: str = choice(
        "dry run: type of the KV cache; auto takes that of --dtype", get_args(KvCacheDtype), "auto"
    )
    gpus_per_node: int = option("dry run: ranks per node", "ranks", at_least_one, 8)
    memory_gib: float = option("dry run: memory of a device", "GiB", above_zero, H200_GIB)
    memory_fraction: float = option("dry run: share of it that the engine may use", "fraction", above_zero, 0.9)
    max_num_seqs: int = option(
        "dry run: requests that run at once, each with a slot's state",
        "requests",
        at_least_one,
        DEVICE_DEFAULTS["max_num_seqs"]["cuda"],
    )


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
    for name, takes, arguments, summary, description in _SUBCOMMANDS:
        parser = add_command(
            subcommands, name, summary, description, SweepOptions, only=takes.split(), positional=arguments.split()
        )
        if name == "plan":
            text = "YAML file of the grid; may be omitted with --dry-run-world (default: none) [file]"
            parser.add_argument("grid", nargs="?", type=Path, metavar="GRID", default=None, help=text)


# Of each the names of its options, which of them are arguments without a flag, and two texts of --help.
_SUBCOMMANDS: tuple[tuple[Subcommand, str, str, str, str], ...] = (
    (
        "plan",
        "out json dry_run_world model tp ep dtype quantization kv_cache_dtype gpus_per_node memory_gib memory_fraction "
        "max_num_seqs",
        "",
        "show the points, their GPUs and the time they may take",
        "The points of a grid as a table. With --dry-run-world N, also plans a world of N ranks in this process and "
        "checks that every rank gets its part of every parameter exactly once. Exit code 1 when it does not.",
    ),
    (
        "render",
        "grid out max_array throttle to",
        "grid",
        "print the exact scripts that submit passes to sbatch",
        "The exact sbatch scripts of a grid. Nothing is submitted, and the ledger is not touched.",
    ),
    (
        "run",
        "grid out resume retry_failed",
        "grid",
        "run the points on this machine, one after the other",
        "Every point as a process of its own, under torchrun where it has several ranks. Exit code: 0 all points are "
        "done, 1 some failed (their folders say why), 2 the command line or the grid is wrong or the ledger cannot be "
        "written, 130 or 143 interrupted.",
    ),
    (
        "submit",
        "grid out resume retry_failed max_array throttle show",
        "grid",
        "submit the points to Slurm as job arrays",
        "Job arrays for the points that are neither done nor failed nor known to Slurm. Run it again with --resume to "
        "resubmit points that were cancelled or that Slurm has forgotten.",
    ),
    (
        "task",
        "action out grid points index attempt exit_code asked",
        "action",
        "what slurm/sweep.sbatch calls around each point",
        "begin prints the folder of a new attempt at the task's next point (exit code 3: nothing is left to do); end "
        "records the outcome of that attempt.",
    ),
    (
        "status",
        "out watch json",
        "out",
        "show the state of each point",
        "The points of a ledger: done, failed and why, running with progress, in Slurm's queue, or not started. Exit "
        "code: 0 all are done, 1 some failed, 3 some are not done yet.",
    ),
    (
        "report",
        "out against html",
        "out",
        "one HTML file with plots, tables and a comparison",
        "A self-contained HTML file of all finished points, its images as PNG files, and report.json, to compare "
        "later reports with. Needs matplotlib.",
    ),
)
