"""Formats of a model's matrices, planned from the codes that a checkpoint holds before any memory is allocated.

Knows: which pieces of which checkpoint tensors fill a matrix, where codes and numbers would mix, and how blocks of
scales are cut without rounding: a block that a shard's edge crosses is repeated in finer blocks.
Does not know: how codes or scales are stored (fp8_load.py, four_bit_load.py), layers, kernels.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from models.checkpoint import WeightsError
from models.weights_header import quoted
from parallel.layers.shard import ScatteredShard, Shard
from parallel.layers.weight import PlannedWeight, Weight, WeightFormat

FINEST_GROUP = 16  # columns of four-bit weights that share a scale, where edges of shards cut larger groups
_FIXED = "routers, embeddings and heads are not quantised here; use a checkpoint that leaves them as they are"


class Coded(Protocol):
    """One checkpoint matrix of codes. ``form``: of a rank's matrix of them, with the blocks that a whole matrix has."""

    @property
    def form(self) -> WeightFormat: ...

    @property
    def entry(self) -> str:
        """What in the config decided it, for errors."""
        ...


Piece = tuple[str, Shard, int, int, int]  # tensor, piece, and of the rank's matrix: expert, first row, first column


def planned(
    made: Sequence[PlannedWeight], shards: Mapping[str, Shard | ScatteredShard], codes: Mapping[str, Coded]
) -> list[tuple[WeightFormat | None, ...]]:
    """For each matrix of a model, the format of each part: that of ``codes`` where ``shards`` fill it from them.

    Neighbouring parts whose codes are scaled alike become one matrix with the largest block that no piece cuts.
    Raises WeightsError where a part would mix codes with numbers, or codes that are scaled differently, and for codes
    of a matrix that is never quantised, or that cannot be cut so.
    """
    by_matrix = pieces_by_matrix([one.weight for one in made], shards)
    return [_formats(one, by_matrix.get(number, []), codes) for number, one in enumerate(made)]


def pieces_by_matrix(
    matrices: Sequence[Weight], shards: Mapping[str, Shard | ScatteredShard]
) -> dict[int, list[Piece]]:
    """Index in ``matrices`` -> the pieces that fill it, found by the memory that they share."""
    numbers = {matrix.cells.untyped_storage()._cdata: number for number, matrix in enumerate(matrices)}
    found: dict[int, list[Piece]] = {}
    for name, shard in shards.items():
        for piece in shard.pieces:
            number = numbers.get(piece.target.untyped_storage()._cdata)
            if number is not None and piece.target.numel():
                matrix = matrices[number]
                expert, within = divmod(int(piece.target.storage_offset()), matrix.outputs * matrix.inner)
                found.setdefault(number, []).append((name, piece, expert, *divmod(within, matrix.inner)))
    return found


def _formats(
    one: PlannedWeight, pieces: Sequence[Piece], codes: Mapping[str, Coded]
) -> tuple[WeightFormat | None, ...]:
    ends = list(itertools.accumulate(one.parts))
    parts: list[list[Piece]] = [[] for _ in ends]
    for piece in pieces:
        parts[bisect.bisect_right(ends, piece[3])].append(piece)
    found: list[WeightFormat | None] = []
    forms = [_form(one, part, codes) for part in parts]
    for number, group in itertools.groupby(range(len(parts)), lambda n: _merged_with(forms, n)):
        run, form = list(group), forms[number]
        if form is not None and form.block is not None:
            first = ends[run[0]] - one.parts[run[0]]
            moved = [(p[1], p[3] - first, p[4]) for n in run for p in parts[n]]
            form = form.in_blocks(*_refined(form.block, moved))
            if form.code is not None:
                _check_cuts(one, form, [p for n in run for p in parts[n]], codes)
        found += [form] * len(run)
    return tuple(found)


def _merged_with(forms: Sequence[WeightFormat | None], part: int) -> int:
    """The first of the parts with which one makes a matrix. Each order of columns is a part's own."""
    form = forms[part]
    if form is not None and form.ordered:
        return part
    while part and forms[part - 1] == form:
        part -= 1
    return part


def _form(one: PlannedWeight, part: Sequence[Piece], codes: Mapping[str, Coded]) -> WeightFormat | None:
    """Of a part's codes, before shards cut blocks; None without codes."""
    found = {piece[0]: codes[piece[0]].form if piece[0] in codes else None for piece in part}
    kinds = set(found.values())
    if one.fixed and (coded := [form for form in kinds if form is not None]):
        stored = "F8_E4M3" if coded[0].code is None else "of four bits"
        raise WeightsError(f"tensor {quoted(min(found))} is {stored}, but {_FIXED}")
    if len(kinds) > 1:
        names = [next(name for name in sorted(found) if found[name] == kind) for kind in kinds]
        raise WeightsError(
            f"tensors {' and '.join(map(quoted, sorted(names)))} are parts of one matrix, but not quantised alike; "
            "use a checkpoint that quantises all of them, or none"
        )
    return kinds.pop() if kinds else None


def _refined(block: tuple[int, int], pieces: Iterable[tuple[Shard, int, int]]) -> tuple[int, int]:
    """The largest block of which every edge of ``pieces`` (shard, first row and column in the rank's matrix) is a
    multiple: a block that an edge crosses is repeated in finer ones. A checkpoint dim that is whole has no edge at its
    end."""
    sizes = list(block)
    for shard, *first in pieces:
        for dim in (0, 1):
            if sizes[dim]:
                taken, full = shard.ranges[dim - 2], shard.full_shape[dim - 2]
                partial = taken.stop - taken.start if taken.stop - taken.start < full else 0
                sizes[dim] = math.gcd(sizes[dim], taken.start, first[dim], partial)
    return sizes[0], sizes[1]


def _check_cuts(one: PlannedWeight, form: WeightFormat, pieces: Sequence[Piece], codes: Mapping[str, Coded]) -> None:
    """Of four-bit weights."""
    name, shard, *_ = pieces[0]
    columns, full = shard.ranges[-1], shard.full_shape[-1]
    split = columns.stop - columns.start < full
    if form.ordered and (split or one.weight.cells.dim() == 3):
        what = f"the {full} columns are split over ranks: use one rank" if split else "they are experts'"
        raise WeightsError(
            f"tensor {quoted(name)} is quantised in an order of its own ({codes[name].entry}), which is not supported "
            f"where {what}, or a checkpoint without it"
        )
    if split and form.block is not None and form.block[1] < min(FINEST_GROUP, _group(codes[name])):
        raise WeightsError(
            f"tensor {quoted(name)} has {full} columns in groups of {_group(codes[name])} that share a scale "
            f"({codes[name].entry}), of which a rank would have {columns.stop - columns.start}: use a tensor-parallel "
            f"size that leaves a multiple of {FINEST_GROUP}, or --expert-parallel for experts"
        )


def _group(codes: Coded) -> int:
    assert codes.form.block is not None
    return codes.form.block[1]
