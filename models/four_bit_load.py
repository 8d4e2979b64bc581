"""Four-bit matrices of a checkpoint: which tensors make one, and a rank's piece of each.

Knows: what must agree before anything is allocated, and where codes, scales and zeros of a piece go. Groups that a
shard's edge crosses are repeated in finer groups, which rounds nothing.
Does not know: the spelling of configs (quantization.py), how producers pack (four_bit.py), layers, kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.checkpoint import WeightsError, open_file
from models.dummy import DummyTensor, reach
from models.four_bit import LAYOUTS, Kind, Layout, Region, paired, unpaired
from models.planned_weights import pieces_by_matrix
from models.quantization import FourBitScheme, Quantization
from models.weights_header import quoted
from parallel.layers.shard import ScatteredShard, Shard
from parallel.layers.weight import INT4_ZERO, PlannedWeight, Weight, WeightFormat, int4, mxfp4, nvfp4

MOST_EXPONENT = 130  # of an MXFP4 scale 2^(s - 127): kernels would cut larger ones in float16 (factors_of)
_CHANNEL_GROUP = 128  # columns of a group where a whole row has one scale: it is repeated
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_NAMES = {"codes": "codes", "scale": "scales", "zero": "zeros", "factor": "second scale", "order": "group indices"}
_WHOLE: tuple[Kind, ...] = ("factor", "order")  # read before memory is allocated
# Between neighbouring magnitudes of E2M1, where the nearest code changes.
_E2M1_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

Headers = Mapping[str, tuple[str, tuple[int, ...]]]  # tensor -> (dtype, shape)


class FourBitMatrix(NamedTuple):
    """How a checkpoint matrix is stored, and in which tensors."""

    scheme: FourBitScheme
    tensors: Mapping[Kind, str]


@dataclass(frozen=True, slots=True)
class FourBitCodes:
    """One checkpoint matrix of four-bit codes. ``tensors``: what holds each kind of its numbers; ``form``: of a rank's
    matrix, with the groups of the whole one; ``factor``: float32, of all rows; ``order``: int64 [columns], sorted by
    their groups."""

    scheme: FourBitScheme
    tensors: Mapping[Kind, str]
    form: WeightFormat
    factor: float | None = None
    order: Tensor | None = None

    @property
    def entry(self) -> str:
        return self.scheme.entry

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.scheme.layout]


def headers_of(stored: Mapping[str, Path]) -> Headers:
    """Reads headers only."""
    found = {}
    for file in sorted(set(stored.values())):
        with open_file(file) as reader:
            for name in sorted(name for name, home in stored.items() if home == file):
                header = reader.get_slice(name)
                found[name] = header.get_dtype(), tuple(header.get_shape())
    return found


def split_off_four_bits(
    stored: Mapping[str, Path], headers: Headers, quantization: Quantization | None
) -> tuple[dict[str, Path], dict[str, FourBitMatrix]]:
    """(the other tensors, and for each matrix of four-bit codes the file of its codes; tensors of these matrices).

    Matrices have the names that they have as numbers; fused experts keep those of their codes. Raises WeightsError for
    codes that the config leaves as they are or describes otherwise, for missing tensors, and for scales without codes.
    """
    left, found = dict(stored), dict[str, FourBitMatrix]()
    if quantization is None:
        return left, found
    layouts = {one.layout: LAYOUTS[one.layout] for _, one in quantization.groups if isinstance(one, FourBitScheme)}
    for name, (kind, _) in headers.items():
        for layout in layouts.values():
            codes = layout.parts["codes"]
            if name.endswith(codes.suffix) and kind in ("U8", "I32"):
                module = name.removesuffix(codes.suffix)
                scheme = _scheme(name, stored[name], module, quantization)
                if LAYOUTS[scheme.layout].parts["codes"].suffix == codes.suffix:
                    tensors = _tensors(module, scheme, stored)
                    matrix = name if layout.fused else f"{module}.weight"
                    for one in (*tensors.values(), *(module + suffix for suffix in layout.unread)):
                        left.pop(one, None)
                    left[matrix], found[matrix] = stored[name], FourBitMatrix(scheme, tensors)
                    break
    lone = {part.suffix for layout in layouts.values() for part in layout.parts.values()} - {".weight", ".weight_scale"}
    for name, file in left.items():
        if name not in found and name.endswith(tuple(lone)):
            raise WeightsError(f"{file}: tensor {quoted(name)} is of a matrix of four-bit codes, which no file holds")
    return left, found


def _scheme(name: str, file: Path, module: str, quantization: Quantization) -> FourBitScheme:
    scheme = quantization.scheme(module)
    if isinstance(scheme, FourBitScheme):
        return scheme
    entry = quantization.kept_by(module)
    said = f"no group of 'quantization_config' ({quantization.method}) names it"
    if entry or scheme is not None:
        said = f"{entry} leaves it as it is" if entry else f"it is FP8 by {scheme.entry if scheme else None}"
    raise WeightsError(f"{file}: tensor {quoted(name)} is of four-bit codes, but {said}")


def _tensors(module: str, scheme: FourBitScheme, stored: Mapping[str, Path]) -> Mapping[Kind, str]:
    found: dict[Kind, str] = {}
    for kind, part in LAYOUTS[scheme.layout].parts.items():
        name = module + part.suffix
        needed = {"zero": scheme.zeros, "order": False}.get(kind, True)
        if name in stored:
            found[kind] = name
        elif needed:
            raise WeightsError(
                f"{stored[found['codes']]}: tensor {quoted(found['codes'])} is of four-bit codes, but no file holds "
                f"its {_NAMES[kind]} ({quoted(name)}); {scheme.entry}"
            )
    return found


def four_bit_codes(
    matrices: Mapping[str, FourBitMatrix],
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Path],
    headers: Headers,
) -> dict[str, FourBitCodes]:
    """The matrices of ``split_off_four_bits`` that a model wants, ``shapes`` of which it knows.

    Raises WeightsError for tensors of another shape or dtype than the config asks for. Reads second scales and orders
    of columns."""
    codes = {}
    wanted = [one.tensors[kind] for one in matrices.values() for kind in _WHOLE if kind in one.tensors]
    whole = _read(wanted, stored)
    for matrix, (scheme, tensors) in matrices.items():
        if matrix not in shapes:
            continue
        layout, (*experts, rows, columns) = LAYOUTS[scheme.layout], shapes[matrix]
        group = scheme.group or columns
        for kind, name in tensors.items():
            part, (dtype, shape) = layout.parts[kind], headers[name]
            expected = (*experts, *part.shape(rows, columns, -(-columns // group)))
            if dtype not in part.dtypes or (shape != expected and not (expected == () and shape == (1,))):
                raise WeightsError(
                    f"{stored[name]}: tensor {quoted(name)} is {dtype} {list(shape)}, but {_NAMES[kind]} of a matrix "
                    f"[{rows}, {columns}] with {scheme.entry} are {' or '.join(part.dtypes)} {list(expected)}"
                )
        factor = float(whole[tensors["factor"]]) if "factor" in tensors else None
        if factor is not None and not (math.isfinite(factor) and factor > 0):
            name = tensors["factor"]
            raise WeightsError(f"{stored[name]}: scale {quoted(name)} holds a number that is not finite and positive")
        if factor is not None and layout.divides:
            factor = float(torch.tensor(1.0) / whole[tensors["factor"]].reshape(()))
        order = None
        if scheme.ordered and "order" in tensors:
            order = _order(tensors["order"], stored, whole[tensors["order"]], group)
        codes[matrix] = FourBitCodes(
            scheme, tensors, _form(scheme, columns, headers[tensors["scale"]][0], order), factor, order
        )
    return codes


def _form(scheme: FourBitScheme, columns: int, scale_dtype: str, order: Tensor | None) -> WeightFormat:
    if LAYOUTS[scheme.layout].code == "int4":
        group = scheme.group or math.gcd(_CHANNEL_GROUP, columns)
        return int4(group, _DTYPES[scale_dtype], zeros=scheme.zeros, ordered=order is not None)
    return nvfp4(scheme.group) if "factor" in LAYOUTS[scheme.layout].parts else mxfp4(scheme.group)


def _order(name: str, stored: Mapping[str, Path], groups: Tensor, size: int) -> Tensor | None:
    """The columns sorted by their groups; None where they are in order, or none is given (-1)."""
    order = torch.argsort(groups, stable=True)
    usual = torch.arange(len(groups), dtype=groups.dtype) // size
    if torch.equal(groups, usual) or bool((groups == -1).all()):
        return None
    if not torch.equal(groups[order], usual):
        raise WeightsError(f"{stored[name]}: tensor {quoted(name)} does not give {size} columns to each group")
    return order


def dummy_four_bits(scheme: FourBitScheme, shape: tuple[int, ...]) -> FourBitCodes:
    """Of a checkpoint with this scheme, with one scale for all, which keeps dummy activations near 1."""
    form = _form(scheme, shape[-1], "F16", None)
    return FourBitCodes(scheme, {}, form, reach(shape) / 6 if form.factors else None)


@dataclass(frozen=True, slots=True)
class _Place:
    """A ``region`` of a checkpoint matrix in a rank's ``matrix``, from ``row`` and ``column`` of ``expert`` on."""

    region: Region
    matrix: Weight
    expert: int
    row: int
    column: int

    @property
    def rows(self) -> int:
        rows = self.region.rows
        return len(range(rows.start, rows.stop, rows.step or 1))

    @property
    def width(self) -> int:
        return int(self.region.columns.stop - self.region.columns.start)

    @property
    def block(self) -> int:
        _, columns = self.matrix.format.block or (1, 0)
        return int(columns)

    def of(self, tensor: Tensor, columns: int) -> Tensor:
        """The part of the matrix's ``tensor`` that has one column for so many ``columns``."""
        mine = tensor if tensor.dim() == 2 else tensor[self.expert]
        return mine.narrow(0, self.row, self.rows).narrow(1, self.column // columns, -(-self.width // columns))


@dataclass(frozen=True, slots=True)
class FourBitTensor:
    """One checkpoint tensor of codes, scales or zeros, and what this rank holds of it."""

    kind: Kind
    codes: FourBitCodes
    places: tuple[_Place, ...]

    def load(self, full: Any) -> None:
        """Reads only this rank's pieces. Raises ValueError for scales that are not finite, and for zeros of a matrix
        that is said to have none."""
        read = self.codes.layout.parts[self.kind].read
        assert read is not None
        for place in self.places:
            found = read(_Moved(full, place.matrix.data.device), place.region)
            if self.kind == "codes":
                place.of(place.matrix.data, 2).copy_(self._in_order(found))
            elif self.kind == "scale":
                _check_scales(found)
                self._spread(place, found, place.matrix.scale)
            elif place.matrix.zero is not None:
                self._spread(place, found, place.matrix.zero)
            elif not bool((found == 7).all() | (found == INT4_ZERO).all()):
                raise ValueError(f"zeros are neither all 7 nor all 8, but the matrix has none by {self.codes.entry}")

    def _in_order(self, data: Tensor) -> Tensor:
        order = self.codes.order
        return data if order is None else paired(unpaired(data)[:, order.to(data.device)])

    def _spread(self, place: _Place, found: Tensor, into: Tensor | None) -> None:
        """Groups are repeated where those of the rank's matrix are finer."""
        assert into is not None
        region, target = place.region, place.of(into, place.block)
        starts = torch.arange(region.columns.start, region.columns.stop, place.block, device=found.device)
        if found.itemsize == 1:
            found, target = found.view(torch.uint8), target.view(torch.uint8)
        target.copy_(found.index_select(1, starts // region.group - region.groups.start))


class _Moved:
    """A checkpoint tensor whose pieces are brought to a device as they are read."""

    def __init__(self, full: Any, device: torch.device) -> None:
        self._full, self._device = full, device

    def __getitem__(self, ranges: tuple[slice, ...]) -> Tensor:
        piece: Tensor = self._full[ranges]
        return piece.to(self._device)


def _check_scales(scales: Tensor) -> None:
    if scales.dtype == torch.uint8:
        if bool((scales == 255).any()):
            raise ValueError("a scale is 255, which stands for no number")
        if bool((scales > MOST_EXPONENT).any()):
            raise ValueError(f"a scale is {int(scales.max())}; supported: up to {MOST_EXPONENT}")
    elif not bool(torch.isfinite(scales.float()).all()):
        raise ValueError("a scale is not finite")


def four_bit_tensors(
    made: Sequence[PlannedWeight], shards: Mapping[str, Shard | ScatteredShard], codes: Mapping[str, FourBitCodes]
) -> dict[str, FourBitTensor]:
    """By name, the tensors to read for ``codes``, of a model that was built with their formats. Fills what is known
    already: factors and orders of columns."""
    places = _places(made, shards, codes)
    found = {}
    for name, one in codes.items():
        for place in places.get(name, ()):
            _fill_known(place, one)
        for kind, tensor in one.tensors.items():
            if one.layout.parts[kind].read is not None:
                found[tensor] = FourBitTensor(kind, one, tuple(places.get(name, ())))
    return found


def _fill_known(place: _Place, codes: FourBitCodes) -> None:
    factor = place.matrix.factor
    if factor is not None:
        mine = factor if factor.dim() == 1 else factor[place.expert]
        mine.narrow(0, place.row, place.rows).fill_(codes.factor or 1.0)
    if place.matrix.order is not None and codes.order is not None:
        place.matrix.order.copy_(codes.order)


def _places(
    made: Sequence[PlannedWeight], shards: Mapping[str, Shard | ScatteredShard], codes: Mapping[str, FourBitCodes]
) -> dict[str, list[_Place]]:
    matrices = [leaf for one in made for leaf in one.weight.parts or (one.weight,)]
    found: dict[str, list[_Place]] = {}
    for number, pieces in pieces_by_matrix(matrices, shards).items():
        for name, piece, expert, row, column in pieces:
            if name in codes:
                *experts, rows, columns = piece.ranges
                group = codes[name].scheme.group or piece.full_shape[-1]
                region = Region(rows, columns, group, experts[0].start if experts else None)
                found.setdefault(name, []).append(_Place(region, matrices[number], expert, row, column))
    return found


def fill_dummy_codes(
    made: Sequence[PlannedWeight],
    shards: Mapping[str, Shard | ScatteredShard],
    codes: Mapping[str, FourBitCodes],
    seed: int,
) -> None:
    """Dummy weights as codes: of each number the nearest, with one scale for a matrix."""
    for name, places in _places(made, shards, codes).items():
        shape, form = shards[name].full_shape, codes[name].form
        for place in places:
            region, matrix = place.region, place.matrix
            assert matrix.scale is not None
            _fill_known(place, codes[name])
            rows = slice(region.rows.start, region.rows.stop)
            expert = () if region.expert is None else (slice(region.expert, region.expert + 1),)
            numbers = DummyTensor(seed, name, shape, 0.0, matrix.data.device)[(*expert, rows, region.columns)]
            numbers = numbers.flatten(0, -2)[:: region.rows.step or 1]
            scale = place.of(matrix.scale, place.block)
            if form.code == "int4":
                scale.fill_(reach(shape) / 7)
                found = (numbers / scale[0, 0].float()).round_().add_(INT4_ZERO).clamp_(0, 15).to(torch.uint8)
                if matrix.zero is not None:
                    place.of(matrix.zero, place.block).fill_(INT4_ZERO)
            else:
                exponent = math.ceil(math.log2(reach(shape) / 6))
                scale.fill_(1.0 if form.factors else exponent + 127)
                numbers /= codes[name].factor or 2.0**exponent
                edges = torch.tensor(_E2M1_EDGES, device=numbers.device)
                found = torch.bucketize(numbers.abs(), edges).to(torch.uint8) | (numbers < 0).to(torch.uint8) << 3
            place.of(matrix.data, 2).copy_(paired(found))


def _read(names: Sequence[str], stored: Mapping[str, Path]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file, of_file in itertools.groupby(sorted(names, key=lambda name: stored[name]), key=lambda name: stored[name]):
        with open_file(file) as reader:
            found |= {name: reader.get_tensor(name) for name in of_file}
    return found
