"""`sweep`: which subcommand is which function, and where its ledger is.

Knows: the list. Does not know: how anything of it is done. Needs no torch, but for planning a world: it starts the
processes that do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from launch.sweep.grid import Grid, read_grid
from launch.sweep.ledger import Ledger
from launch.sweep.options import Subcommand, SweepCommand, SweepOptions
from launch.sweep.plan import plan_json, plan_text
from launch.sweep.point import SweepError
from launch.sweep.render import Chunk
from launch.sweep.run import run_here
from launch.sweep.slurm import Slurm
from launch.sweep.status import status
from launch.sweep.submit import render, submit
from launch.sweep.task import task

USAGE = 2


def run(command: SweepCommand, environ: Mapping[str, str]) -> int:
    """The whole command; returns its exit code."""
    try:
        return _SUBCOMMANDS[command.subcommand](command.options, environ)
    except SweepError as error:
        print(f"lockstride sweep {command.subcommand}: error: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # a pager that was left
        _print_to_nobody()
        return 0
    except OSError as error:  # a disk that is full, a folder that is not ours
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"lockstride sweep {command.subcommand}: error: {said}", file=sys.stderr)
        return USAGE


def _say(line: str) -> None:
    """A line of progress, seen at once in a file, too. The work continues when its reader has left."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        _print_to_nobody()


def _print_to_nobody() -> None:
    nobody = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nobody, sys.stdout.fileno())
    os.close(nobody)


def _grid_and_ledger(options: SweepOptions) -> tuple[Grid, Ledger]:
    if options.grid is None:
        raise SweepError("a grid file is needed: sweep plan GRID")
    out = options.out or Path(options.grid.stem)
    if out.is_file():  # such as a grid file whose name has no ending
        raise SweepError(f"the ledger would be {out}, which is a file: type --out FOLDER")
    return read_grid(options.grid), Ledger(out)


def _out(options: SweepOptions) -> Path:
    assert options.out is not None  # the command line requires it
    return options.out


def _plan(options: SweepOptions, environ: Mapping[str, str]) -> int:
    models = [options.model] if options.model else []
    if options.grid is not None:
        grid, ledger = _grid_and_ledger(options)
        print(plan_json(grid, ledger) if options.json else plan_text(grid, ledger))
        named = [str(point.settings["model"]) for point in grid.points if "model" in point.settings]
        models = models or list(dict.fromkeys(named))
    elif options.dry_run_world is None:
        raise SweepError("name a grid, or a world: sweep plan GRID, or sweep plan --dry-run-world N --model M")
    if options.dry_run_world is None:
        return 0
    from launch.sweep.world import plan_world  # needs torch, for parameters without memory

    return plan_world(models, options.dry_run_world, options)


def _render(options: SweepOptions, environ: Mapping[str, str]) -> int:
    grid, ledger = _grid_and_ledger(options)
    chunks = render(grid, ledger, max_array=options.max_array, throttle=options.throttle, to=options.to)
    print("\n".join(_shown(chunk) for chunk in chunks) if chunks else "nothing is left to submit")
    return 0


def _shown(chunk: Chunk) -> str:
    return f"# {chunk.folder}/job.sbatch: {len(chunk.keys)} point(s)\n{chunk.script}"


def _run(options: SweepOptions, environ: Mapping[str, str]) -> int:
    grid, ledger = _grid_and_ledger(options)
    return run_here(grid, ledger, environ, resume=options.resume, retry_failed=options.retry_failed, say=_say)


def _submit(options: SweepOptions, environ: Mapping[str, str]) -> int:
    grid, ledger = _grid_and_ledger(options)
    submit(
        grid,
        ledger,
        Slurm(environ),
        resume=options.resume,
        retry_failed=options.retry_failed,
        max_array=options.max_array,
        throttle=options.throttle,
        show=options.show,
        say=_say,
    )
    return 0


def _status(options: SweepOptions, environ: Mapping[str, str]) -> int:
    try:
        return status(_out(options), Slurm(environ), watch=options.watch, as_json=options.json)
    except KeyboardInterrupt:  # how a person ends --watch
        return 0


def _report(options: SweepOptions, environ: Mapping[str, str]) -> int:
    from launch.sweep.report.command import write_report  # it needs matplotlib

    return write_report(_out(options), against=options.against, target=options.html)


_SUBCOMMANDS: dict[Subcommand, Callable[[SweepOptions, Mapping[str, str]], int]] = {
    "plan": _plan,
    "render": _render,
    "run": _run,
    "submit": _submit,
    "task": task,
    "status": _status,
    "report": _report,
}
