"""Which kernel multiplies by a weight: a table by shape, filled from a shipped file, a cache on disk, or measurement.

Knows: choices, their names on disk, and how to time candidates fairly (graph replays over more weights than the L2
holds, so that every replay reads device memory). Does not know: the kernels themselves.

A table is plain data. Ranks of one job must use the same one: measure on one rank, hand ``to_json`` to the others.
Nothing here runs during a graph capture; a shape that was never measured gets ``default_choice``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

FIRST_WAVE = 1056  # programs of a GEMV that an H200 holds at once, about
FORMAT = 1
_COLD_BYTES = 256 << 20  # several times the 50-60 MB of L2


@dataclass(frozen=True, slots=True)
class LinearShape:
    """x [rows, inner] times a weight [outputs, inner].

    ``normed``: a residual add and RMSNorm come first. ``gate_up``: SiLU-mul of the two halves of the result follows.
    """

    rows: int
    outputs: int
    inner: int
    dtype: torch.dtype
    normed: bool = False
    gate_up: bool = False

    @property
    def bucket(self) -> LinearShape:
        """The same with rows rounded up to a power of two: what a choice is kept for."""
        return dataclasses.replace(self, rows=1 << max(0, self.rows - 1).bit_length())

    @property
    def key(self) -> str:
        form = ("normed " if self.normed else "") + ("gate_up " if self.gate_up else "")
        return f"{str(self.dtype).removeprefix('torch.')} {self.outputs}x{self.inner} {form}x{self.bucket.rows}"


@dataclass(frozen=True, slots=True)
class Blas:
    """torch's matrix product (cuBLAS by its own heuristic)."""


@dataclass(frozen=True, slots=True)
class CublasLt:
    """One algorithm of cuBLASLt, as its opaque bytes in hexadecimal; good for one cuBLASLt version."""

    algorithm: str
    version: int


@dataclass(frozen=True, slots=True)
class Gemv:
    """models/kernels/gemv_triton.py with these block sizes."""

    block_o: int
    chunk: int
    warps: int
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class Skinny:
    """models/kernels/skinny_triton.py with these block sizes; ``fold``: a norm in front is part of it, not a launch."""

    block_m: int
    block_o: int
    block_k: int
    split: int
    stages: int
    warps: int
    prefetch: int
    fold: bool = False


@dataclass(frozen=True, slots=True)
class Wide:
    """models/kernels/wide_triton.py with these block sizes."""

    block_m: int
    block_o: int
    block_k: int
    split: int
    stages: int
    warps: int
    prefetch: int


Choice = Blas | CublasLt | Gemv | Skinny | Wide
_KINDS: dict[str, type[Blas] | type[CublasLt] | type[Gemv] | type[Skinny] | type[Wide]] = {
    "blas": Blas,
    "cublaslt": CublasLt,
    "gemv": Gemv,
    "skinny": Skinny,
    "wide": Wide,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(slots=True)
class ChoiceTable:
    """LinearShape.key -> Choice."""

    choices: dict[str, Choice] = field(default_factory=dict)

    def get(self, shape: LinearShape) -> Choice | None:
        return self.choices.get(shape.key)

    def put(self, shape: LinearShape, choice: Choice) -> None:
        self.choices[shape.key] = choice

    def update(self, other: ChoiceTable) -> None:
        """Take over every choice of ``other``, replacing its own."""
        self.choices.update(other.choices)

    def fill(self, other: ChoiceTable) -> None:
        """Take over the choices of ``other`` for which it has none of its own."""
        self.choices = other.choices | self.choices

    def to_json(self) -> str:
        rows = {key: [_NAMES[type(choice)], dataclasses.asdict(choice)] for key, choice in self.choices.items()}
        body = ",\n".join(f"  {json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows))
        return f'{{"format": {FORMAT}, "choices": {{\n{body}\n}}}}\n'

    @staticmethod
    def from_json(text: str) -> ChoiceTable:
        """Raises ValueError, saying what is wrong, for anything ``to_json`` did not write."""
        try:
            held = json.loads(text)
            written = held["format"]
            if written == FORMAT:
                return ChoiceTable({key: _KINDS[name](**values) for key, (name, values) in held["choices"].items()})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a table of kernel choices: {error!r}; delete the file to measure again") from error
        raise ValueError(f"kernel choices in format {written}, not {FORMAT}; delete the file to measure again")


def cache_file(folder: Path, device: torch.device) -> Path:
    """Where this GPU model's measured choices are kept under ``folder``; torch's version is part of the name."""
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return folder / "kernels" / f"{name}-torch-{torch.__version__}.json"


def load(path: Path) -> ChoiceTable:
    """The table in ``path``, an empty one if there is no such file."""
    return ChoiceTable.from_json(path.read_text()) if path.exists() else ChoiceTable()


def save(path: Path, table: ChoiceTable) -> None:
    """Write ``table`` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(table.to_json())
    temporary.replace(path)


def recall(path: Path) -> ChoiceTable:
    """``load`` of a cache: what cannot be read is told, and measured again."""
    try:
        return load(path)
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, so kernels are measured again: %s", path, error)
        return ChoiceTable()


def keep(path: Path, table: ChoiceTable) -> None:
    """``save`` of a cache: where nothing can be written, the next start measures again."""
    try:
        save(path, table)
    except OSError as error:
        log.warning("choices of kernels cannot be kept in %s (%s): name a folder with --kernel-cache", path, error)


def default_choice(shape: LinearShape) -> Choice:
    """A fair choice without measuring: GEMV for 1 or 2 rows, the skinny kernel to 64, cuBLAS beyond, for large weights
    from 8 rows, and for shapes that fit neither.
    """
    rows = shape.bucket.rows
    if rows > 64 or (rows >= 8 and shape.outputs * shape.inner >= _LARGE_WEIGHT):
        return Blas()
    fitting = candidates_for(shape.bucket)
    return fitting[0] if fitting else Blas()


def worth_measuring(shape: LinearShape) -> bool:
    """Decode steps, and the prefill step of a full budget if that is a power of two: cuBLASLt's algorithms are good for
    one number of rows, and prefill steps of any other have too many different ones.
    """
    return shape.rows <= _DECODE_ROWS or shape.rows == shape.bucket.rows


def quick_candidates(shape: LinearShape, lt: Iterable[Choice]) -> list[Choice]:
    """What a start-up can afford to try: nothing that has to be compiled for the sake of the trial. ``lt``: cuBLASLt's
    algorithms, of which the first are the likeliest.
    """
    default = default_choice(shape)
    return [*([] if isinstance(default, Blas) else [default]), Blas(), *itertools.islice(lt, _QUICK_ALGORITHMS)]


def candidates_for(shape: LinearShape) -> list[Choice]:
    """Kernels worth timing beside cuBLAS for a bucket, the likeliest first; none where the shape does not fit them."""
    gemv, skinny = gemv_candidates(shape), skinny_candidates(shape)
    return [*gemv, *skinny] if shape.rows <= 2 else [*skinny, *gemv, *wide_candidates(shape)]


def gemv_candidates(shape: LinearShape) -> list[Choice]:
    """Block sizes that fit: a chunk a power of two that divides the inner width, at most 64 weights a thread."""
    if shape.rows > 4:
        return []
    widest = shape.inner & -shape.inner
    halves = 2 if shape.gate_up else 1
    found: list[Choice] = []
    ahead: list[Choice] = []
    for chunk, warps in ((1024, 4), (512, 2), (2048, 8), (4096, 8), (2048, 4)):
        for block_o in (4, 2, 1, 8):
            weights_a_thread = block_o * halves * chunk // (warps * 32)
            fits = chunk <= widest and (shape.outputs // halves) % block_o == 0
            if fits and weights_a_thread <= 64 and weights_a_thread * shape.rows <= 128:
                rows_at_once = min(shape.outputs, block_o * halves * FIRST_WAVE)
                found.append(Gemv(block_o, chunk, warps))
                ahead.append(Gemv(block_o, chunk, warps, prefetch_columns(rows_at_once, shape.inner - chunk)))
    return [*found, *(choice for choice in ahead if choice not in found)]


def skinny_candidates(shape: LinearShape) -> list[Choice]:
    """Tiles and splits of K that give most multiprocessors one to four programs."""
    if shape.rows > 256 or shape.dtype not in (torch.bfloat16, torch.float16):
        return []
    block_m = min(128, max(8, shape.rows))
    tiles_to_try = _WIDE_TILES if shape.rows > 64 else _SKINNY_TILES
    found: list[Skinny] = []
    for block_o, block_k, stages, warps in tiles_to_try:
        if shape.outputs % block_o or shape.inner % block_k:
            continue
        warps = max(warps, block_m // 32)  # one warp has no registers for 64 rows
        tiles, steps = shape.outputs // block_o * -(-shape.rows // block_m), shape.inner // block_k
        if tiles > 1056 and block_o < 64:
            continue
        for split in (1, 2, 3, 4, 8):
            if steps % split == 0 and steps // split >= 2 and (split == 1 or 100 <= tiles * split <= 528):
                chosen = Skinny(block_m, block_o, block_k, split, stages, warps, min(256, block_k))
                found.append(chosen)
                if shape.normed and shape.rows <= 32:
                    found.append(dataclasses.replace(chosen, fold=True))
                far = prefetch_columns(shape.outputs * split, shape.inner // split)
                if shape.rows <= 32 and far > chosen.prefetch:
                    found.append(dataclasses.replace(chosen, prefetch=far))
    # A program for every multiprocessor first, then the fewest splits.
    found.sort(key=lambda c: (shape.outputs // c.block_o * c.split < 100, c.split, c.fold or c.prefetch > 256))
    return list(found)


def wide_candidates(shape: LinearShape) -> list[Choice]:
    """Tiles and splits of K that give every multiprocessor of an H200 one program, or two, and few none."""
    if not 8 <= shape.rows <= 256 or shape.dtype not in (torch.bfloat16, torch.float16):
        return []
    block_m = max(64, shape.rows)
    found: list[Choice] = []
    for block_o, block_k, split in itertools.product(_TILES, (64, 128), (1, 2, 3, 4)):
        programs, columns = shape.outputs // block_o * split, shape.inner // split
        if shape.outputs % block_o or shape.inner % (block_k * split) or columns < 8 * block_k:
            continue
        if not any(0.75 * held <= programs <= held for held in (_MULTIPROCESSORS, 2 * _MULTIPROCESSORS)):
            continue
        if block_m > 4 * block_o:  # every program reads the tokens: from the L2, but that is not free
            continue
        together = -(-programs // _MULTIPROCESSORS)
        stages = min(8, (_SHARED_BYTES // together - 1024) // (2 * block_k * (block_m + block_o)))
        if stages < 3:
            continue
        prefetch = min(256, prefetch_columns(shape.outputs * split, columns))
        for warps in sorted({max(4, block_m // 32), block_m // 16}):
            if block_m * block_o // (32 * warps) <= _MOST_SUMS[warps] // (1 if split == 1 else 2):
                found.append(Wide(block_m, block_o, block_k, split, stages, warps, prefetch))
    return found


def prefetch_columns(rows: int, columns: int) -> int:
    """Columns of ``rows`` weight rows to bring to L2 ahead of time: a power of two, all of them under half the L2."""
    most = min(columns, _PREFETCH_ELEMENTS // rows)
    return 1 << (most.bit_length() - 1) if most >= 64 else 0


_DECODE_ROWS = 256  # more are a prefill's
_QUICK_ALGORITHMS = 8
_PREFETCH_ELEMENTS = 12 << 20  # 24 MiB of 16-bit weights
_MULTIPROCESSORS = 132  # of an H200
_SHARED_BYTES = 227 << 10  # of one of them
_TILES = (16, 32, 48, 64, 96, 128, 192, 256)  # weight rows of a program of wide_triton.py
_MOST_SUMS = {4: 128, 8: 192, 16: 128}  # a thread's, by the warps of a program; half of them where K is split
_LARGE_WEIGHT = 64 << 20  # elements: the gate-up of an 8B model, but not its other matrices

# (block_o, block_k, stages, warps): what won somewhere on an H200, out of a wider search.
_SKINNY_TILES = ((64, 128, 5, 4), (64, 256, 3, 4), (128, 128, 3, 4), (32, 128, 5, 2), (16, 256, 4, 1))
_WIDE_TILES = ((128, 64, 4, 8), (64, 64, 5, 4), (128, 64, 3, 4), (128, 128, 3, 8))


Run = Callable[[Tensor, Tensor, Choice], Tensor]


def fastest(shape: LinearShape, choices: Iterable[Choice], run: Run, device: torch.device) -> tuple[Choice, float]:
    """The choice with the least median time and that time in microseconds, as ``measure`` tells it.

    Raises RuntimeError if none of them runs.
    """
    timed = measure(shape, choices, run, device)
    us, index = min((us, index) for index, (_, us) in enumerate(timed))
    if us == float("inf"):
        raise RuntimeError(f"none of {len(timed)} kernels ran a product of shape {shape.key}")
    return timed[index][0], us


def measure(
    shape: LinearShape, choices: Iterable[Choice], run: Run, device: torch.device
) -> list[tuple[Choice, float]]:
    """Every choice with its median microseconds for one product with cold weights; infinity if it does not run.

    ``run(x, weight, choice)`` must be capturable once warm.
    """
    x = torch.randn(shape.rows, shape.inner, dtype=shape.dtype, device=device)
    copies = max(2, min(64, -(-_COLD_BYTES // (shape.outputs * shape.inner * shape.dtype.itemsize))))
    weights = torch.randn(copies, shape.outputs, shape.inner, dtype=shape.dtype, device=device).mul_(shape.inner**-0.5)
    timed: list[tuple[Choice, float]] = []
    for choice in choices:
        try:
            run(x, weights[0], choice)
            torch.cuda.synchronize(device)
        except Exception:  # whatever a compiler or a launcher refuses with means the same here: not this one
            timed.append((choice, float("inf")))
            continue
        launch = functools.partial(_each, run, x, weights, choice)
        timed.append((choice, median_graph_us(launch, device) / copies))
    return timed


def _each(run: Run, x: Tensor, weights: Tensor, choice: Choice) -> None:
    for weight in weights:
        run(x, weight, choice)


def median_graph_us(launch: Callable[[], Any], device: torch.device, replays: int = 12) -> float:
    """Median microseconds of one replay of ``launch`` captured in a graph."""
    event: Any = torch.cuda.Event  # untyped in some versions of torch
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # other threads may be at work
        launch()
    graph.replay()
    pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(replays)]
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return float(statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs))


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """One for all measurements: cuBLAS keeps a workspace of 32 MiB for every stream that it has seen."""
    stream: Any = torch.cuda.Stream  # untyped in some versions of torch
    return stream(device)
