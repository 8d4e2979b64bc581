"""What is measured, in which order, and about how long it takes: the most valuable first, since time may run out.

Knows: buckets, how thoroughly each is searched, and estimates of seconds. Does not know: GPUs, kernels, or choices.

Buckets that are powers of two are searched whole. The ones between try what was fastest next to them, cuBLAS, and
cuBLASLt's first algorithms for their own number of rows: nothing has to be compiled for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.tune.shapes import Asked
from models.kernels.attention.decode_variant import DecodeShape
from models.kernels.matmul.choice_table import LinearShape
from models.row_buckets import power_of_two_from

IN_LAYERS_UP_TO = 256  # rows; beyond, products are nearly all of a step, and one alone draws as much power
_POWER_LIMITED = 64  # rows; from about here on a step's clock follows its power (docs/lab/measurements/power.md)
_FIRST = (1, 8, 32, 128, 256, 64, 16, 2, 4)  # of the decode ladder: where engines are most often
_TFLOP_PER_S = 500.0
# Of a run on an H100 (docs/lab/measurements/h100.md): 8B, 74 choices, 426 s, 77 of them of compiling. Finalists'
# turns are 127 s by their number and length; the rest is the brief round's.
_LAYER_SECONDS = 0.045  # of a candidate's result, capture and replays inside layers
_COMPILE_SECONDS = 1.7  # of a whole search, where nothing is on disk yet
_CANDIDATES = 95  # of a whole search, about: 80 to 105
_VARIANTS = 13


@dataclass(frozen=True, slots=True)
class Effort:
    """How one thing is searched. ``candidates``: about how many. ``algorithms``: of cuBLASLt, at most. ``finalists``:
    of the brief round, which are timed again for ``seconds`` each, twice. ``replays``: of the brief round.
    """

    candidates: int
    algorithms: int
    finalists: int
    seconds: float
    replays: int


@dataclass(frozen=True, slots=True)
class Task:
    """One product or one launch of decode attention at ``rows``. ``whole``: every candidate is tried. ``in_layers``: in
    place, between the other kernels of its step. ``estimate``: seconds.
    """

    rows: int
    what: LinearShape | DecodeShape
    whole: bool
    in_layers: bool
    effort: Effort
    estimate: float

    @property
    def part(self) -> str:
        return "products" if isinstance(self.what, LinearShape) else "attention"

    @property
    def key(self) -> str:
        """Of this task among all; the table's key alone may be that of a product and of a launch of attention."""
        return f"{self.part} {self.what.key}"


def plan(
    asked: Sequence[Asked],
    attention: DecodeShape | None,
    most_rows: int,
    parts: Sequence[str],
    seconds: float | None = None,
) -> list[Task]:
    """Tasks in the order of their worth. ``attention``: that of one row; ``most_rows``: of the largest decode step.
    ``seconds``: of a finalist's turn, for all of them.
    """
    tasks = []
    for step in sorted(asked, key=_worth):
        if "products" in parts:
            tasks += [_product(step.rows, shape, in_layers=step.rows <= IN_LAYERS_UP_TO) for shape in step.layers]
            tasks += [_product(step.rows, shape, in_layers=False) for shape in (step.head,) if shape is not None]
        if "attention" in parts and attention is not None and step.rows <= most_rows and _is_whole(step.rows):
            tasks.append(_attention(step.rows, replace(attention, pairs=attention.pairs * step.rows)))
    return tasks if seconds is None else [_lasting(task, seconds) for task in tasks]


def _lasting(task: Task, seconds: float) -> Task:
    turns = 2 * (task.effort.finalists + 1)
    estimate = task.estimate + turns * (seconds - task.effort.seconds)
    return replace(task, effort=replace(task.effort, seconds=seconds), estimate=estimate)


def _worth(step: Asked) -> tuple[int, int]:
    """Whole searches of decode steps, the buckets between them, then steps with prompts, alike."""
    if step.rows in _FIRST:
        return 0, _FIRST.index(step.rows)
    prompts = 2 if step.rows > IN_LAYERS_UP_TO else 0
    return prompts + (0 if _is_whole(step.rows) else 1), step.rows


def _is_whole(rows: int) -> bool:
    return rows == power_of_two_from(rows)


def _product(rows: int, shape: LinearShape, *, in_layers: bool) -> Task:
    whole = _is_whole(rows)
    if rows > IN_LAYERS_UP_TO:
        effort = Effort(17, 16, 3, 0.15, 4) if whole else Effort(11, 8, 3, 0.15, 4)
    else:
        lasting = 0.3 if rows >= _POWER_LIMITED else 0.1
        effort = Effort(_CANDIDATES, 40, 4, lasting, 8) if whole else Effort(18, 8, 4, lasting, 8)
    flops = 2.0 * rows * shape.outputs * shape.inner * max(2, (256 << 20) // (2 * shape.outputs * shape.inner))
    brief = _LAYER_SECONDS if in_layers else 0.01 + flops * (effort.replays + 3) / (_TFLOP_PER_S * 1e12)
    compiling = _COMPILE_SECONDS if whole and rows <= IN_LAYERS_UP_TO else 0.0
    return Task(rows, shape, whole, in_layers, effort, compiling + _seconds(effort, brief))


def _attention(rows: int, shape: DecodeShape) -> Task:
    effort = Effort(_VARIANTS, 0, 3, 0.3 if rows >= _POWER_LIMITED else 0.1, 8)
    return Task(rows, shape, True, True, effort, _seconds(effort, _LAYER_SECONDS))


def _seconds(effort: Effort, brief: float) -> float:
    return effort.candidates * brief + 2 * (effort.finalists + 1) * effort.seconds
