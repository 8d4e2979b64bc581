"""From points to sbatch scripts: which points share an array, and the exact text that Slurm gets.

Knows: slurm/sweep.sbatch, how many nodes and GPUs a point needs. Does not know: Slurm's answers (slurm.py), which
points are left (submit.py).

Points that need the same nodes and GPUs go into one array, cut where Slurm allows no more tasks. A chunk's name is a
hash of its script and its points: the same points give the same text.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from launch.sweep.estimate import estimate_seconds
from launch.sweep.grid import Cluster, Grid
from launch.sweep.point import Point, SweepError

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "slurm" / "sweep.sbatch"
MARK = "# ==== lines of `sweep submit` ====\n"
MAX_ARRAY = 1001  # Slurm's own default of MaxArraySize
_SLACK = 3.0  # an estimate may be off, and nodes are not alike
_SLACK_MINUTES = 10
_WARNED_MINUTES = 3  # sweep.sbatch asks for its signal two minutes before the limit, and Slurm may send it one sooner
_PLAIN_PATH = re.compile(r"[\w./+,@=-]+")


@dataclass(frozen=True, slots=True)
class Shape:
    """What Slurm is asked for."""

    nodes: int
    ranks_per_node: int
    gpus: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """One array. ``tasks``: the keys of each task's points. ``folder`` holds script, keys and logs."""

    name: str
    folder: Path
    tasks: tuple[tuple[str, ...], ...]
    shape: Shape
    minutes: int
    script: str

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for task in self.tasks for key in task)

    @property
    def points_text(self) -> str:
        """One line a task."""
        return "".join(" ".join(task) + "\n" for task in self.tasks)


def shape_of(point: Point, cluster: Cluster) -> Shape:
    """Raises SweepError where ranks do not fill whole nodes."""
    size, gpus = cluster.gpus_per_node, point.settings.get("device") != "cpu"
    if point.ranks <= size:
        return Shape(1, point.ranks, gpus)
    if point.ranks % size:
        raise SweepError(
            f"a point of {point.ranks} ranks does not fill nodes of cluster: gpus-per-node {size}: write a tp that is "
            f"a multiple of {size}, or other gpus-per-node"
        )
    return Shape(point.ranks // size, size, gpus)


def chunks_of(
    grid: Grid,
    points: Sequence[Point],
    out: Path,
    *,
    max_array: int = MAX_ARRAY,
    throttle: int | None = None,
    measured: Sequence[tuple[Point, float]] = (),
    template: Path = TEMPLATE,
) -> list[Chunk]:
    """The arrays for ``points``, in their order. ``max_array``: tasks of one array at most.

    Raises SweepError where a script cannot be written.
    """
    out = out.resolve()
    for path in (out, ROOT):
        if not _PLAIN_PATH.fullmatch(str(path)):
            raise SweepError(f"{path}: Slurm's options cannot carry this path: use letters, digits and ._+,@=- only")
    text = _template(template)
    by_shape: dict[Shape, list[Point]] = {}
    for point in points:
        by_shape.setdefault(shape_of(point, grid.cluster), []).append(point)
    found = []
    for shape, alike in by_shape.items():
        size = grid.cluster.points_per_task
        tasks = [alike[first : first + size] for first in range(0, len(alike), size)]
        for first in range(0, len(tasks), max_array):
            found.append(
                _chunk(
                    grid,
                    out,
                    shape,
                    tasks[first : first + max_array],
                    throttle or grid.cluster.throttle,
                    measured,
                    text,
                )
            )
    return found


def _chunk(
    grid: Grid,
    out: Path,
    shape: Shape,
    tasks: Sequence[Sequence[Point]],
    throttle: int | None,
    measured: Sequence[tuple[Point, float]],
    template: str,
) -> Chunk:
    minutes = max(_minutes(grid, task, measured) for task in tasks)
    keys = tuple(tuple(point.key for point in task) for task in tasks)
    lines = [f"--array=0-{len(tasks) - 1}{f'%{throttle}' if throttle else ''}", f"--nodes={shape.nodes}"]
    if shape.gpus:
        lines.append(f"--gpus-per-node={shape.ranks_per_node}")
    if grid.cluster.cpus_per_rank or not shape.gpus:
        lines.append(f"--cpus-per-task={shape.ranks_per_node * (grid.cluster.cpus_per_rank or 1)}")
    lines += [f"--time={minutes}", *grid.cluster.sbatch]
    seed = "\n".join([str(out), *lines, template, *map(" ".join, keys)])
    name = f"lockstride-{blake2b(seed.encode(), digest_size=5).hexdigest()}"
    folder = out / "slurm" / name
    lines += [f"--job-name={name}", f"--output={folder}/task-%a.log"]
    head = "".join(f"#SBATCH {line}\n" for line in lines)
    head += f'export LOCKSTRIDE_ROOT="${{LOCKSTRIDE_ROOT:-{ROOT}}}"\n'
    head += f"set -- {shlex.join(['--points', str(folder / 'points'), '--out', str(out)])}\n"
    return Chunk(name, folder, keys, shape, minutes, template.replace(MARK, head))


def _minutes(grid: Grid, task: Sequence[Point], measured: Sequence[tuple[Point, float]]) -> int:
    """Time limit of a task."""
    if grid.minutes is not None:
        return grid.minutes * len(task) + _WARNED_MINUTES
    seconds = [estimate_seconds(point, measured) for point in task]
    if None in seconds:
        raise SweepError(
            f"how long {task[seconds.index(None)].settings.get('model')} takes cannot be estimated, since its "
            "config.json is not readable here: write minutes: N in the grid"
        )
    return math.ceil(_SLACK * sum(second for second in seconds if second is not None) / 60) + _SLACK_MINUTES


def _template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SweepError(
            f"{path} cannot be read ({error.strerror}): Slurm jobs need a clone of the repository"
        ) from None
    if text.count(MARK) != 1:
        raise SweepError(f"{path} must have the line {MARK.strip()!r} exactly once")
    return text
