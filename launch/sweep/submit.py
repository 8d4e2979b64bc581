"""`sweep submit` and `sweep render`: what is left of a grid, as Slurm arrays.

Knows: which points are in Slurm's hands, in what order files, sbatch and the record of the job id come.
Does not know: how a script is made (render.py), how Slurm is asked (slurm.py).

    OUT/slurm/<chunk>/job.sbatch, points    what was handed in; written before sbatch is called
    OUT/slurm/<chunk>/task-<n>.log          what the batch scripts say
    OUT/slurm/jobs.jsonl                    one line a job id

The ledger is the truth, not Slurm: a job id that Slurm has forgotten, or a task that ended without filing its point,
means that the point is still to be done.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launch.sweep.grid import Grid
from launch.sweep.ledger import SUBMIT, Ledger, write_file
from launch.sweep.point import Point, SweepError
from launch.sweep.render import MAX_ARRAY, Chunk, chunks_of
from launch.sweep.slurm import Slurm


class Submitted(msgspec.Struct, frozen=True):
    """One array that sbatch took. ``at``: seconds since 1970."""

    job: str
    chunk: str
    at: float


@dataclass(frozen=True, slots=True)
class InHand:
    """A point that Slurm has: the array's task, and its state in Slurm's word."""

    job: str
    task: int
    state: str


class Jobs:
    """The arrays of a ledger that were handed in."""

    def __init__(self, ledger: Ledger) -> None:
        self.folder = ledger.out / "slurm"
        self._file = self.folder / "jobs.jsonl"

    def recorded(self) -> list[Submitted]:
        """Oldest first. A line that a kill tore is left out: its job is found again by its name."""
        if not self._file.is_file():
            return []
        found = []
        for line in self._file.read_bytes().splitlines():
            try:
                found.append(msgspec.json.decode(line, type=Submitted))
            except msgspec.DecodeError:
                continue
        return found

    def record(self, job: str, chunk: str) -> None:
        line = msgspec.json.encode(Submitted(job, chunk, time.time()))
        with self._file.open("ab") as stream:
            stream.write(b"\n" + line + b"\n")  # the line before may be torn
            stream.flush()
            os.fsync(stream.fileno())

    def tasks(self, chunk: str) -> list[list[str]]:
        """The keys of each task."""
        return [line.split() for line in (self.folder / chunk / "points").read_text().splitlines()]

    def in_hand(self, slurm: Slurm) -> dict[str, InHand]:
        """Key -> the task that has it, of the points that Slurm runs or will run. Raises SweepError."""
        found: dict[str, InHand] = {}
        for job in self.recorded():
            tasks = self.tasks(job.chunk)
            for number, state in slurm.live_tasks(job.job, job.chunk).items():
                if number < len(tasks):
                    found |= dict.fromkeys(tasks[number], InHand(job.job, number, state))
        return found

    def adopt(self, slurm: Slurm) -> list[str]:
        """Record arrays of ours that are in the queue but not in the record: a kill came between. Returns their ids."""
        known = {job.job for job in self.recorded()}
        found = []
        for job, name in slurm.queued().items():
            if job not in known and (self.folder / name / "points").is_file():
                self.record(job, name)
                found.append(job)
        return found


def left_of(grid: Grid, ledger: Ledger, retry_failed: bool) -> list[Point]:
    """The points that are neither done nor, unless those are wanted again, failed."""
    finished = ledger.done() | (set() if retry_failed else ledger.failed().keys())
    return [point for point in grid.points if point.key not in finished]


def measured_points(ledger: Ledger) -> list[tuple[Point, float]]:
    """What finished points took, for estimates; nothing where there is no ledger yet."""
    try:
        return [(point, outcome.seconds) for point, _, outcome in ledger.finished_points()]
    except SweepError:
        return []


def render(grid: Grid, ledger: Ledger, *, max_array: int | None, throttle: int | None, to: Path | None) -> list[Chunk]:
    """The scripts for what is left of the grid; each also in ``to`` where that is given. The ledger is not touched."""
    left = left_of(grid, ledger, retry_failed=False)
    measured = measured_points(ledger)
    chunks = chunks_of(grid, left, ledger.out, max_array=max_array or MAX_ARRAY, throttle=throttle, measured=measured)
    for chunk in chunks if to is not None else ():
        assert to is not None
        to.mkdir(parents=True, exist_ok=True)
        (to / f"{chunk.name}.sbatch").write_text(chunk.script)
    return chunks


def submit(
    grid: Grid,
    ledger: Ledger,
    slurm: Slurm,
    *,
    resume: bool,
    retry_failed: bool,
    max_array: int | None,
    throttle: int | None,
    show: bool,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Hand in arrays for the points that no job has; returns their job ids. Raises SweepError, also while points of the
    ledger are handed in or run by another process."""
    with contextlib.nullcontext(0) if show else ledger.claim(SUBMIT) as lock:
        if lock is None:
            raise SweepError(
                f"another `sweep submit` or a `sweep run` over {ledger.out} is under way: wait for its end"
            )
        jobs = Jobs(ledger)
        if jobs.recorded() and not resume:
            raise SweepError(f"{ledger.out} has jobs in Slurm already: type --resume to hand in what they do not have")
        max_array = max_array or slurm.max_array()
        if not show:
            ledger.begin_sweep(grid, resume=resume)
            jobs.folder.mkdir(exist_ok=True)
            for job in jobs.adopt(slurm):
                say(f"job {job} was handed in before, but not recorded: it is now")
        in_hand = jobs.in_hand(slurm)
        left = [point for point in left_of(grid, ledger, retry_failed) if point.key not in in_hand]
        say(
            f"{len(grid.points)} points: {len(ledger.done())} done, {len(ledger.failed())} failed, {len(in_hand)} in "
            f"Slurm's hands, {len(left)} to hand in"
        )
        chunks = chunks_of(
            grid, left, ledger.out, max_array=max_array, throttle=throttle, measured=measured_points(ledger)
        )
        submitted = []
        for chunk in chunks:
            shape = f"{len(chunk.tasks)} tasks x {chunk.shape.nodes} node(s) x {chunk.shape.ranks_per_node} rank(s)"
            if show:
                say(f"{chunk.name}: {shape}, {chunk.minutes} min each")
                continue
            submitted.append(_hand_in(chunk, jobs, slurm))
            say(f"job {submitted[-1]}: {shape}, {chunk.minutes} min each; logs in {chunk.folder}")
        return submitted


def _hand_in(chunk: Chunk, jobs: Jobs, slurm: Slurm) -> str:
    chunk.folder.mkdir(parents=True, exist_ok=True)
    write_file(chunk.folder / "points", chunk.points_text.encode())
    write_file(chunk.folder / "job.sbatch", chunk.script.encode())
    job = slurm.submit(chunk.folder / "job.sbatch")
    jobs.record(job, chunk.name)
    return job


def keys_of_task(file: Path, index: int) -> Sequence[str]:
    """Line ``index`` of a chunk's points. Raises SweepError."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise SweepError(f"--points {file} cannot be read: {error.strerror}") from None
    if index >= len(lines):
        raise SweepError(f"--index is {index}, but {file} has {len(lines)} line(s), numbered from 0")
    return lines[index].split()
