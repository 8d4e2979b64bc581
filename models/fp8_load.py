"""FP8 matrices of a checkpoint: which tensors are codes, which hold their scales, and a rank's piece of each.

Knows: the names under which producers store scales, what must agree before anything is allocated, and how block scales
are cut without rounding: a block that a shard's edge crosses is repeated in finer blocks; codes made while a checkpoint
of numbers is loaded (``--quantization fp8``): a whole row decides its scale, also where a rank holds some of its
columns, so that codes are the same at every tensor-parallel size.
Does not know: the spelling of configs (quantization.py), layers, kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint import WeightsError, open_file
from models.config import ModelConfig, ModelConfigError
from models.dummy import reach
from models.four_bit_load import FourBitCodes, Headers, dummy_four_bits
from models.kv_group import KV_SCALES
from models.planned_weights import pieces_by_matrix
from models.quantization import FourBitScheme, Fp8Scheme, Quantization
from models.weights_header import quoted
from parallel.layers.shard import ScatteredShard, Shard, Sliceable
from parallel.layers.weight import PlannedWeight, WeightFormat, fp8

_MOST_CODE = 448.0  # the largest float8_e4m3fn
_AT_ONCE = 1 << 24  # numbers of a matrix that are read before they are codes
AT_LOAD = Quantization(
    "--quantization fp8", ((lambda module: True, Fp8Scheme("row", None, "--quantization fp8")),), (), at_load=True
)


def quantised_at_load(config: ModelConfig, option: str | None) -> ModelConfig:
    """``config`` of a model whose matrices become codes as ``option`` (None, "fp8") asks; one that is quantised
    already stays as it is. Raises ModelConfigError for experts whose rows are columns of the checkpoint's tensors."""
    if option is None or config.quantization is not None:
        return config
    if config.experts is not None and config.experts.limit is not None:
        raise ModelConfigError(
            f"--quantization {option} is not implemented for {config.architecture}, whose checkpoint holds its experts "
            "transposed: leave the option out"
        )
    return replace(config, quantization=AT_LOAD)


def load_as_codes(stored: Sliceable, shard: Shard | ScatteredShard, codes: Codes) -> bool:
    """Fills a rank's pieces of the matrix ``stored``, and ``codes.scales`` of their rows. Whether all were finite."""
    finite = True
    for piece in shard.pieces:
        *experts, rows, columns = piece.ranges
        width = piece.full_shape[-1]
        step = max(1, _AT_ONCE // width)
        for place in itertools.product(*(range(one.start, one.stop) for one in experts)):  # of fused tensors
            into = piece.target
            for number, one in zip(place, experts, strict=True):
                into = into[number - one.start]
            for start in range(rows.start, rows.stop, step):
                here = slice(start, min(start + step, rows.stop))
                whole = stored[(*(slice(number, number + 1) for number in place), here, slice(0, width))]
                numbers_RK = whole.reshape(-1, width).to(into.device, torch.float32)
                most_R1 = numbers_RK.abs().amax(1, keepdim=True)
                scale_R1 = torch.where(most_R1 > 0, most_R1 / _MOST_CODE, 1.0)
                into[here.start - rows.start : here.stop - rows.start].copy_(numbers_RK[:, columns] / scale_R1)
                codes.scales[place][here] = scale_R1.cpu()
                finite = finite and bool(torch.isfinite(scale_R1).all())
    return finite


MOST_CODE = 448.0  # the largest float8_e4m3fn
CODES = "F8_E4M3"  # in headers of safetensors
_OTHER_CODES = ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_SCALES = ("weight_scale_inv", "weight_scale")  # next to ``weight``; of fused experts ``_scale_inv`` and ``_scale``
_SCALE_ENDS = tuple(f".{suffix}" for suffix in _SCALES)
# Static scales of activations, which are checked and not used; and those of keys and values.
_OTHERS = ("input_scale", "input_global_scale", "activation_scale", "q_scale", *KV_SCALES)
_SUPPORTED = "supported are float8_e4m3fn codes with scales for the matrix, its rows or its blocks"


@dataclass(frozen=True, slots=True)
class Codes:
    """One checkpoint matrix of codes [N, K], or [E, N, K] of fused experts. ``scales``: float32, on the CPU, [grid of
    the scheme], with E in front likewise."""

    scheme: Fp8Scheme
    shape: tuple[int, ...]
    scales: Tensor

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the tensor that share a scale."""
        rows, columns = self.shape[-2:]
        if self.scheme.block is not None:
            return self.scheme.block
        return (1 if self.scheme.granularity == "row" else rows), columns

    @property
    def form(self) -> WeightFormat:
        """Of a rank's matrix. One scale for a tensor becomes one for each of its rows, so that matrices of different
        scales can be stacked."""
        return fp8(*(self.scheme.block or (1, 0)), self.scheme.activation_cap)

    @property
    def entry(self) -> str:
        return self.scheme.entry


def split_off_codes(
    stored: Mapping[str, Path], headers: Headers, quantization: Quantization | None
) -> tuple[dict[str, Path], dict[str, Codes], dict[str, Tensor]]:
    """(the tensors that are no scales, the matrices of codes by name, other scales in float32), of a checkpoint.

    Reads scales. Raises WeightsError, which names file, tensor and the config's entry, for
    codes that the config leaves unquantised, codes without scales and scales without codes, another kind of codes, and
    a scale that is not finite and positive, or has another shape than the config says. Without a config, and where
    numbers become codes at load, there are scales of keys and values only.
    """
    if quantization is None or quantization.at_load:
        others = {name: file for name, file in stored.items() if name.rsplit(".", 1)[-1] in KV_SCALES}
        left = {name: file for name, file in stored.items() if name not in others}
        return left, {}, {name: _positive(name, others[name], value) for name, value in _read(others)}
    owners: dict[str, tuple[str, Fp8Scheme]] = {}  # scale -> matrix
    for name, (kind, shape) in ((name, headers[name]) for name in stored if name in headers):
        if kind in _OTHER_CODES:
            raise WeightsError(f"{stored[name]}: tensor {quoted(name)} has dtype {kind}; {_SUPPORTED}")
        if kind == CODES and len(shape) >= 2 and name.rsplit(".", 1)[-1] not in _SCALES:
            scheme = _scheme(name, stored[name], quantization)
            owners[_scale_of(name, stored, scheme)] = (name, scheme)
    left = {name: file for name, file in stored.items() if name not in owners}
    others = {name: left.pop(name) for name in list(left) if name.rsplit(".", 1)[-1] in _OTHERS}
    for name, file in left.items():
        if name.endswith(_SCALE_ENDS):
            raise WeightsError(f"{file}: tensor {quoted(name)} is the scale of a matrix that is not {CODES}")
    for scale, (name, scheme) in owners.items():
        _check_scale(scale, stored[scale], headers[scale], headers[name][1], scheme)
    codes: dict[str, Codes] = {}
    unowned: dict[str, Tensor] = {}
    for scale, value in _read({**others, **{scale: stored[scale] for scale in owners}}):
        numbers = _positive(scale, stored[scale], value)
        if scale in owners:
            name, scheme = owners[scale]
            *experts, rows, columns = headers[name][1]
            codes[name] = Codes(scheme, headers[name][1], numbers.reshape(*experts, *scheme.grid(rows, columns)))
        else:
            unowned[scale] = numbers
    return left, codes, unowned


def codes_by_config(
    made: Sequence[PlannedWeight], shards: Mapping[str, Shard | ScatteredShard], quantization: Quantization
) -> dict[str, Codes | FourBitCodes]:
    """The matrices that a checkpoint of this config would store as codes, with one scale for all of them, which keeps
    dummy activations near 1."""
    free = pieces_by_matrix([one.weight for one in made if not one.fixed], shards)
    codes: dict[str, Codes | FourBitCodes] = {}
    for name in {piece[0]: None for pieces in free.values() for piece in pieces}:
        scheme = quantization.scheme(name.removesuffix(".weight").removesuffix("_blocks"))
        if isinstance(scheme, FourBitScheme):
            codes[name] = dummy_four_bits(scheme, shards[name].full_shape)
        elif scheme is not None:
            *experts, rows, columns = shape = shards[name].full_shape
            scales = torch.full((*experts, *scheme.grid(rows, columns)), reach(shape) / MOST_CODE)
            codes[name] = Codes(scheme, shape, scales)
    return codes


def place_all_scales(
    made: Sequence[PlannedWeight], shards: Mapping[str, Shard | ScatteredShard], codes: Mapping[str, Codes]
) -> None:
    """Fills the scales of every FP8 matrix of a model that was built with the formats of ``planned``."""
    leaves = [leaf for one in made for leaf in one.weight.parts or (one.weight,)]
    for number, pieces in pieces_by_matrix(leaves, shards).items():
        leaf = leaves[number]
        if leaf.scale is not None and leaf.format.block is not None and leaf.format.code is None:
            for name, piece, expert, row, column in pieces:
                into = leaf.scale if leaf.scale.dim() == 2 else leaf.scale[expert]
                block = leaf.format.block[0], leaf.format.block[1] or leaf.inner
                _place(codes[name], piece, (row, column), block, into)


def refuse_nan_codes(shards: Mapping[str, Shard | ScatteredShard], codes: Mapping[str, Path]) -> None:
    """Raises WeightsError, with file and tensor, for a loaded code that is no number. Reads the device once."""
    names = [name for name in codes if any(piece.target.numel() for piece in shards[name].pieces)]
    bad = [torch.stack([_has_nan(piece.target) for piece in shards[name].pieces]).any() for name in names]
    wrong = [name for name, is_bad in zip(names, torch.stack(bad).tolist() if bad else [], strict=True) if is_bad]
    if wrong:
        raise WeightsError(f"{codes[wrong[0]]}: tensor {quoted(wrong[0])} holds codes that are no numbers (NaN)")


def _has_nan(codes: Tensor) -> Tensor:
    """NaN are 127 and 255, the largest int8 and the largest uint8: without memory for what is compared."""
    return (codes.view(torch.int8).amax() == 127) | (codes.view(torch.uint8).amax() == 255)


def _place(codes: Codes, shard: Shard, first: tuple[int, int], block: tuple[int, int], into: Tensor) -> None:
    """Copies the scales of one piece, which lies from row and column ``first`` of the rank's matrix on, into ``into``:
    the matrix's scales, one a ``block``."""
    picked = codes.scales if codes.scales.dim() == 2 else codes.scales[shard.ranges[0].start]
    for dim in (0, 1):
        taken = shard.ranges[dim - 2]
        starts = torch.arange(taken.start, taken.stop, block[dim])
        picked = picked.index_select(dim, starts // codes.block[dim])
        into = into.narrow(dim, first[dim] // block[dim], len(starts))
    into.copy_(picked)


def _scheme(name: str, file: Path, quantization: Quantization) -> Fp8Scheme:
    module = name.removesuffix(".weight")
    scheme = quantization.scheme(module)
    if isinstance(scheme, Fp8Scheme):
        return scheme
    entry = quantization.kept_by(module)
    said = f"no group of 'quantization_config' ({quantization.method}) names it"
    if entry or scheme is not None:
        said = f"{entry} leaves it as it is" if entry else f"it has four bits by {scheme.entry if scheme else None}"
    raise WeightsError(f"{file}: tensor {quoted(name)} is {CODES}, but {said}")


def _scale_of(name: str, stored: Mapping[str, Path], scheme: Fp8Scheme) -> str:
    """The tensor with the scales of a matrix. Raises WeightsError where no file holds one."""
    if name.endswith(".weight"):
        spelled = [name.removesuffix("weight") + suffix for suffix in _SCALES]
    else:  # fused experts
        spelled = [f"{name}_{suffix.removeprefix('weight_')}" for suffix in _SCALES]
    found = next((scale for scale in spelled if scale in stored), None)
    if found is None:
        raise WeightsError(
            f"{stored[name]}: tensor {quoted(name)} is {CODES}, but no file holds its scale ("
            f"{' or '.join(map(quoted, spelled))}); {scheme.entry}"
        )
    return found


def _check_scale(
    name: str, file: Path, header: tuple[str, tuple[int, ...]], matrix: tuple[int, ...], scheme: Fp8Scheme
) -> None:
    kind, found = header
    if kind not in _SCALE_DTYPES:
        raise WeightsError(
            f"{file}: scale {quoted(name)} has dtype {kind}; scales must be one of {', '.join(_SCALE_DTYPES)}"
        )
    *experts, rows, columns = matrix
    grid = [*experts, *scheme.grid(rows, columns)]
    if [size for size in found if size > 1] != [size for size in grid if size > 1]:
        raise WeightsError(
            f"{file}: scale {quoted(name)} has shape {list(found)}, but a matrix {list(matrix)} with {scheme.entry} "
            f"has {grid}"
        )


def _positive(name: str, file: Path, scale: Tensor) -> Tensor:
    numbers = scale.float()
    if not bool((torch.isfinite(numbers) & (numbers > 0)).all()):
        raise WeightsError(f"{file}: scale {quoted(name)} holds a number that is not finite and positive")
    return numbers


def _read(stored: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(set(stored.values())):
        with open_file(file) as reader:
            for name in (name for name, home in stored.items() if home == file):
                yield name, reader.get_tensor(name)
