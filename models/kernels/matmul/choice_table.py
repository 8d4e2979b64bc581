"""Which kernel computes a matrix product, by shape: a table from a shipped file, a cache on disk, or measurement.

Knows: shapes, choices and their names on disk. Does not know: how choices are measured (autotune.py), the candidates
(candidates.py), the kernels themselves.

A table is plain data. All ranks of a job must use the same one: measure on one rank, and hand ``to_json`` to the
others.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

log = logging.getLogger(__name__)

FORMAT = 1


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
        """The same shape with rows rounded up to a power of two: choices are kept by bucket."""
        return dataclasses.replace(self, rows=1 << max(0, self.rows - 1).bit_length())

    @property
    def key(self) -> str:
        variant = ("normed " if self.normed else "") + ("gate_up " if self.gate_up else "")
        return f"{str(self.dtype).removeprefix('torch.')} {self.outputs}x{self.inner} {variant}x{self.bucket.rows}"


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
    """models/kernels/matmul/gemv.py with these block sizes."""

    block_o: int
    chunk: int
    warps: int
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class Skinny:
    """models/kernels/matmul/skinny.py with these block sizes; ``fold``: a norm in front is fused, not a launch."""

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
    """models/kernels/matmul/wide.py with these block sizes."""

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
        """Takes every choice of ``other``, replacing its own."""
        self.choices.update(other.choices)

    def fill(self, other: ChoiceTable) -> None:
        """Takes the choices of ``other`` for which it has none."""
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
    """The cache of this GPU model's measured choices under ``folder``; torch's version is part of its name."""
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return folder / "kernels" / f"{name}-torch-{torch.__version__}.json"


def load(path: Path) -> ChoiceTable:
    """The table in ``path``, an empty one if there is no such file."""
    return ChoiceTable.from_json(path.read_text()) if path.exists() else ChoiceTable()


def save(path: Path, table: ChoiceTable) -> None:
    """Writes ``table`` atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(table.to_json())
    temporary.replace(path)


def recall(path: Path) -> ChoiceTable:
    """``load`` of a cache: an unreadable one is logged, and measured again."""
    try:
        return load(path)
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, so kernels are measured again: %s", path, error)
        return ChoiceTable()


def keep(path: Path, table: ChoiceTable) -> None:
    """``save`` of a cache: where it cannot be written, the next start measures again."""
    try:
        save(path, table)
    except OSError as error:
        log.warning("choices of kernels cannot be kept in %s (%s): name a folder with --kernel-cache", path, error)
