"""Which kernel computes a matrix product, by shape: a table from a shipped file, a cache on disk, or measurement.

Knows: shapes, choices, their names on disk, which file is for which GPU, and which measured bucket stands in for one
that was not measured. A table also carries what else was measured on its GPU: variants of decode attention
(attention/decode_variant.py) and limits of all-reduces. Does not know: how choices are measured (autotune.py,
launch/tune), the candidates (candidates.py), the kernels themselves.

A table is plain data. All ranks of a job must use the same one: measure on one rank, and hand ``to_json`` to the
others.

A product is looked up by its real bucket (models/row_buckets.py). Without an entry of its own it takes the entry of the
next larger measured bucket whose kernel can run it: up to 256 rows at most the next power of two, since a product there
reads its weights once, whatever its rows, and the larger one's tiles hold them all; beyond, where the time follows the
rows, at most a quarter more. A smaller bucket's entry is never taken: its tiles would read the weights again. So a
table made for powers of two means what it always meant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch

from models.kernels.attention.decode_variant import DecodeVariant
from models.kernels.traits import DeviceTraits
from models.row_buckets import power_of_two_from, product_bucket
from parallel.comm.quantised import Activations
from parallel.comm.symmetric_all_reduce import SizeLimits
from parallel.layers.weight import Weight, WeightFormat, format_of, plain

log = logging.getLogger(__name__)

SHIPPED_CHOICES = Path(__file__).parents[1] / "tuned"
FORMAT = 2
_READ = (1, FORMAT)  # 1 named neither its GPU nor buckets between powers of two
_READS_WEIGHTS_ONCE = 128  # rows. Kernels for 256 rows took up to 1.6 times as long as the best for 160 (gemm.md)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """x [rows, inner] times a weight [outputs, inner].

    ``normed``: a residual add and RMSNorm come first. ``gate_up``: SiLU-mul of the two halves of the result follows.
    ``stored``: the format of weights that are codes; None for weights in ``dtype``.
    """

    rows: int
    outputs: int
    inner: int
    dtype: torch.dtype
    normed: bool = False
    gate_up: bool = False
    stored: WeightFormat | None = None

    @classmethod
    def of(cls, x_MK: Activations, weight: Weight, *, normed: bool = False, gate_up: bool = False) -> LinearShape:
        sizes = x_MK.shape[0], weight.outputs, weight.inner
        return cls(*sizes, x_MK.dtype, normed, gate_up, weight.format if weight.format.block else None)

    @property
    def format(self) -> WeightFormat:
        return self.stored or plain(self.dtype)

    @property
    def block(self) -> tuple[int, int] | None:
        """As in WeightFormat."""
        return self.format.block

    @property
    def four_bits(self) -> bool:
        return self.format.code is not None

    @property
    def bucket(self) -> LinearShape:
        """The same shape with rows rounded up to a rung of the ladders of steps: choices are kept by bucket."""
        return dataclasses.replace(self, rows=product_bucket(self.rows))

    @property
    def product(self) -> str:
        """What is multiplied, without the rows."""
        variant = (" normed" if self.normed else "") + (" gate_up" if self.gate_up else "")
        variant += "" if self.stored is None else f" {self.stored.name}"
        return f"{plain(self.dtype).name} {self.outputs}x{self.inner}{variant}"

    @property
    def key(self) -> str:
        return f"{self.product} x{self.bucket.rows}"

    @staticmethod
    def from_key(key: str) -> LinearShape:
        """The bucket that ``key`` stands for. Raises ValueError for anything that is no ``key``."""
        dtype, size, *form, rows = key.split()
        outputs, inner = map(int, size.split("x"))
        kind = getattr(torch, dtype, None)
        if isinstance(kind, torch.dtype) and rows[1:].isdecimal():
            stored = next((format_of(name) for name in form if name not in ("normed", "gate_up")), None)
            shape = LinearShape(int(rows[1:]), outputs, inner, kind, "normed" in form, "gate_up" in form, stored)
            if shape.key == key:
                return shape
        raise ValueError(f"{key!r} is not the key of a product")

    @property
    def standing_in(self) -> Iterator[LinearShape]:
        """The buckets whose entry this shape may take, its own first, then larger ones, ascending."""
        bucket = self.bucket
        most = power_of_two_from(self.rows) if self.rows <= _READS_WEIGHTS_ONCE else bucket.rows * 5 // 4
        while bucket.rows <= most:
            yield bucket
            bucket = dataclasses.replace(bucket, rows=product_bucket(bucket.rows + 1))


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
    """models/kernels/matmul/skinny.py with these block sizes; ``fold``: a norm in front is fused, not a launch;
    ``late``: the next launch may start after the last weights, not with the first ones. ``narrow``: with FP8 weights
    activations are quantised, too.
    """

    block_m: int
    block_o: int
    block_k: int
    split: int
    stages: int
    warps: int
    prefetch: int
    fold: bool = False
    late: bool = False
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Wide:
    """models/kernels/matmul/wide.py with these block sizes; ``late``: see Skinny. With FP8 weights activations are
    quantised beforehand."""

    block_m: int
    block_o: int
    block_k: int
    split: int
    stages: int
    warps: int
    prefetch: int
    late: bool = False


@dataclass(frozen=True, slots=True)
class FourBits:
    """models/kernels/matmul/four_bits.py with these block sizes."""

    block_m: int
    block_o: int
    block_k: int
    parts: int
    split: int
    stages: int
    warps: int
    prefetch: int


@dataclass(frozen=True, slots=True)
class Fragments:
    """models/kernels/matmul/fragments.py: programs that share K, warps of each, and how many steps are loaded early."""

    split: int
    ahead: int
    warps: int


@dataclass(frozen=True, slots=True)
class Warpgroup:
    """models/kernels/matmul/warpgroup.py: programs that share K, and how many steps are loaded early."""

    split: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """FP8 weights: torch's scaled product (cuBLASLt) of quantised activations."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Weights that are codes: decoded into the activations' dtype, then cuBLAS."""


_Made = TypeVar("_Made")
Choice = Blas | CublasLt | Gemv | Skinny | Wide | FourBits | Fragments | Warpgroup | Scaled | Decoded
_KINDS: dict[str, type[Choice]] = {
    "scaled": Scaled,
    "decoded": Decoded,
    "blas": Blas,
    "cublaslt": CublasLt,
    "gemv": Gemv,
    "skinny": Skinny,
    "wide": Wide,
    "four_bits": FourBits,
    "fragments": Fragments,
    "warpgroup": Warpgroup,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_FIELD_TYPES: dict[type, dict[str, Any]] = {
    kind: get_type_hints(kind) for kind in (*_KINDS.values(), DecodeVariant, SizeLimits, DeviceTraits)
}


@dataclass(slots=True)
class ChoiceTable:
    """LinearShape.key -> Choice. ``attention``: DecodeShape.key -> DecodeVariant. ``all_reduce``: by number of ranks.
    ``gpu``: the one it was measured on, None where nobody noted it.
    """

    choices: dict[str, Choice] = field(default_factory=dict)
    attention: dict[str, DecodeVariant] = field(default_factory=dict)
    all_reduce: dict[int, SizeLimits] = field(default_factory=dict)
    gpu: DeviceTraits | None = None

    def get(self, shape: LinearShape) -> Choice | None:
        """The entry of the shape's own bucket."""
        return self.choices.get(shape.key)

    def near(self, shape: LinearShape) -> Iterator[tuple[int, Choice]]:
        """(measured rows, choice) of every entry that the shape may take, the nearest first; not each can run it."""
        for bucket in shape.standing_in:
            if (choice := self.choices.get(bucket.key)) is not None:
                yield bucket.rows, choice

    def put(self, shape: LinearShape, choice: Choice) -> None:
        self.choices[shape.key] = choice

    def update(self, other: ChoiceTable) -> None:
        """Takes every choice of ``other``, replacing its own."""
        self.choices.update(other.choices)
        self.attention.update(other.attention)
        self.all_reduce.update(other.all_reduce)

    def fill(self, other: ChoiceTable) -> None:
        """Takes the choices of ``other`` for which it has none."""
        self.choices = other.choices | self.choices
        self.attention = other.attention | self.attention
        self.all_reduce = other.all_reduce | self.all_reduce

    def to_json(self) -> str:
        sections: dict[str, dict[str, Any]] = {
            "choices": {key: choice_as_json(self.choices[key]) for key in sorted(self.choices, key=_by_rows)},
            "attention": {key: dataclasses.asdict(self.attention[key]) for key in sorted(self.attention, key=_by_rows)},
            "all_reduce": {str(n): dataclasses.asdict(self.all_reduce[n]) for n in sorted(self.all_reduce)},
        }
        parts = [f'"format": {FORMAT}']
        if self.gpu is not None:
            parts.append(f'"gpu": {json.dumps(dataclasses.asdict(self.gpu))}')
        for name, entries in sections.items():
            body = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
            if entries or name == "choices":
                parts.append(f'"{name}": {{\n{body}\n}}')
        return "{" + ",\n ".join(parts) + "}\n"

    @staticmethod
    def from_json(text: str) -> ChoiceTable:
        """Raises ValueError, saying what is wrong, for anything that ``to_json`` never wrote, of this format or the one
        before.
        """
        try:
            held = json.loads(text)
            written = held["format"]
            if written in _READ:
                return ChoiceTable(
                    {
                        LinearShape.from_key(key).key: choice_from_json(entry, f"choices {key!r}")
                        for key, entry in held["choices"].items()
                    },
                    {
                        key: _typed(DecodeVariant, entry, f"attention {key!r}")
                        for key, entry in held.get("attention", {}).items()
                    },
                    {
                        int(ranks): _typed(SizeLimits, entry, f"all_reduce {ranks!r}")
                        for ranks, entry in held.get("all_reduce", {}).items()
                    },
                    _gpu(held.get("gpu")),
                )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a table of kernel choices: {error!r}; delete the file to measure again") from error
        raise ValueError(f"kernel choices in format {written}, not {FORMAT}; delete the file to measure again")


def choice_as_json(choice: Choice) -> list[Any]:
    """[kind, fields], as files have it."""
    return [_NAMES[type(choice)], dataclasses.asdict(choice)]


def choice_from_json(entry: list[Any], what: str = "a choice") -> Choice:
    """The inverse; ``what`` is how errors call it. Raises KeyError, TypeError or ValueError for anything else."""
    name, values = entry
    return _typed(_KINDS[name], values, what)


def _typed(kind: type[_Made], values: dict[str, Any], what: str) -> _Made:
    """``kind`` of ``values``. Raises TypeError or ValueError: a kernel that is handed a text would fail much later."""
    made = kind(**values)
    for name, wanted in _FIELD_TYPES[kind].items():
        value = getattr(made, name)
        if not _is(value, wanted):
            shown = wanted.__name__ if isinstance(wanted, type) and not get_args(wanted) else wanted
            raise ValueError(f"{name} of {what} is {value!r}, but must be {shown}")
    return made


def _is(value: object, wanted: Any) -> bool:
    """By the type itself: a bool is no number. JSON has a float without a fraction as an int."""
    if parts := get_args(wanted):
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_is, value, parts))
    return type(value) is wanted or (wanted is float and type(value) is int)


def _by_rows(key: str) -> tuple[str, int]:
    product, _, rows = key.rpartition(" x")
    return product, int(rows) if rows.isdecimal() else 0


def _gpu(held: dict[str, Any] | None) -> DeviceTraits | None:
    return None if held is None else _typed(DeviceTraits, {**held, "capability": tuple(held["capability"])}, "gpu")


def file_name(gpu_name: str) -> str:
    """``NVIDIA H200`` as it is part of file names."""
    return gpu_name.lower().replace(" ", "-")


def shipped_for(folder: Path, traits: DeviceTraits) -> ChoiceTable:
    """The table in ``folder`` for a GPU: the one that was measured on this model, else on one like it
    (DeviceTraits.like), else an empty one.
    """
    tables = {path: load(path) for path in sorted(folder.glob("*.json"))}
    for path, table in tables.items():
        if path.stem == file_name(traits.name) or (table.gpu is not None and table.gpu.name == traits.name):
            return table
    for table in tables.values():
        if table.gpu is not None and traits.like(table.gpu):
            log.info("no kernels were measured on a %s: those of a %s are used", traits.name, table.gpu.name)
            return table
    return ChoiceTable()


def machine_table(folder: Path, traits: DeviceTraits) -> ChoiceTable:
    """What is known of a GPU before anything is measured: the shipped table, overruled by what `launch tune` chose."""
    table = shipped_for(SHIPPED_CHOICES, traits)
    table.update(recall(tuned_file(folder, traits.name)))
    return table


def cache_file(folder: Path, device: torch.device) -> Path:
    """The cache of this GPU model's measured choices under ``folder``; torch's version is part of its name."""
    name = file_name(torch.cuda.get_device_name(device))
    return folder / "kernels" / f"{name}-torch-{torch.__version__}.json"


def tuned_file(folder: Path, gpu_name: str) -> Path:
    """The table under ``folder`` that `launch tune` makes on this GPU model; it overrules shipped choices."""
    return folder / "kernels" / f"{file_name(gpu_name)}.tuned.json"


def load(path: Path) -> ChoiceTable:
    """The table in ``path``, an empty one if there is no such file."""
    return ChoiceTable.from_json(path.read_text()) if path.exists() else ChoiceTable()


def save(path: Path, table: ChoiceTable) -> None:
    """Writes ``table`` atomically: a reader sees the old file or the new one. Raises OSError, and keeps the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(table.to_json())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # of a full disk, too: nobody else would remove it
        raise


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
