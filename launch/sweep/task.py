"""`sweep task`: the two ends of a point under Slurm, called by slurm/sweep.sbatch; what is between is bash and srun.

Knows: which point a task does next, what a batch script needs, how its end is filed.
Does not know: how ranks are started (slurm/job.sh).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launch.sweep.grid import read_grid
from launch.sweep.ledger import Ledger
from launch.sweep.options import GIVE_UP_AFTER, SweepOptions
from launch.sweep.outcome import why_failed
from launch.sweep.point import Point, SweepError
from launch.sweep.render import shape_of
from launch.sweep.submit import keys_of_task
from launch.values import variable

NOTHING_LEFT = 3
SOME_FAILED = 1


def task(options: SweepOptions, environ: Mapping[str, str]) -> int:
    """The subcommand. Raises SweepError."""
    if options.action == "end":
        return _end(options)
    return _begin(options, environ)


def _begin(options: SweepOptions, environ: Mapping[str, str]) -> int:
    """Prints the folder of a new attempt at the first of the task's points that is not finished.

    In it, for bash: ``command``, the arguments after ``python -m launch``, each followed by a zero byte, and
    ``ranks-per-node``. A point that failed in an earlier start of the job is tried again: its node may have been lost.
    One that the time limit ended too often is not.
    """
    job, start = _this_task(environ)
    ledger, points = _task_points(options)
    done = ledger.done()
    failed = {
        key
        for key, folders in ledger.failed().items()
        if any(
            (found := ledger.outcome(folder)) and found.job == job and (found.start == start or found.given_up)
            for folder in folders
        )
    }
    left = [(point, ranks) for point, ranks in points if point.key not in done and point.key not in failed]
    if not left:
        return SOME_FAILED if any(point.key in failed for point, _ in points) else NOTHING_LEFT
    point, ranks_per_node = left[0]
    ledger.clear_work(point.key, job)
    attempt = ledger.begin(point, job, start)
    arguments = point.flags(str(attempt.folder / "results"))
    (attempt.folder / "command").write_bytes(b"".join(argument.encode() + b"\0" for argument in arguments))
    (attempt.folder / "ranks-per-node").write_text(f"{ranks_per_node}\n")
    print(attempt.folder)
    return 0


def _task_points(options: SweepOptions) -> tuple[Ledger, list[tuple[Point, int]]]:
    """The points of the task, each with its ranks a node."""
    if options.points is not None:
        if options.out is None:
            raise SweepError("--points needs --out, the folder of the ledger")
        ledger = Ledger(options.out.resolve())
        plan = ledger.plan()
        planned = {entry.key: entry for entry in plan.points}
        keys = keys_of_task(options.points, options.index)
        if unknown := [key for key in keys if key not in planned]:
            raise SweepError(f"{options.points} names {unknown[0]}, which is not in {ledger.out}/plan.json")
        return ledger, [(point := planned[key].point, min(point.ranks, plan.gpus_per_node)) for key in keys]
    if options.grid is None:
        raise SweepError("a task needs --grid GRID or --points FILE")
    grid = read_grid(options.grid)
    if options.index >= len(grid.points):
        raise SweepError(
            f"--index is {options.index}, but {options.grid} has {len(grid.points)} points: "
            f"type --array=0-{len(grid.points) - 1}"
        )
    ledger = Ledger((options.out or Path(options.grid.stem)).resolve())
    ledger.begin_sweep(grid, resume=True)
    point = grid.points[options.index]
    return ledger, [(point, shape_of(point, grid.cluster).ranks_per_node)]


def _end(options: SweepOptions) -> int:
    if options.attempt is None or options.out is None:
        raise SweepError("end needs --out and --attempt, the folder that begin printed")
    ledger = Ledger(options.out)
    attempt = ledger.reopen(options.attempt)
    given_up = False
    if options.exit_code == 0 or options.asked not in ("USR1", "TERM"):
        reason = why_failed(attempt.folder, options.exit_code)
    elif options.asked == "TERM":
        ledger.abandon(attempt)
        return NOTHING_LEFT
    else:
        before = len(ledger.interrupted(attempt.point.key))
        if before + 1 < GIVE_UP_AFTER:
            ledger.interrupt(attempt)
            return NOTHING_LEFT
        given_up = True  # the script requeues itself after any USR1
        reason = f"the time limit ended it {before + 1} times: write more minutes: in the grid"
    ledger.file(attempt, reason, options.exit_code, given_up=given_up)
    return SOME_FAILED if reason else 0


def _this_task(environ: Mapping[str, str]) -> tuple[str, int]:
    """A name that stays the same after a requeue, and the number of requeues."""
    start = variable(environ, "SLURM_RESTART_COUNT")
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '0')}", start
    return environ.get("SLURM_JOB_ID", "none"), start
