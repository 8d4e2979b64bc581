"""How producers pack four-bit weights, and the form in which all of them are kept: codes are moved, never computed.

Knows: the tensors of each format, their shapes and dtypes, and how a piece of each is read: codes two a byte with the
even column in the low half, scales and zeros [rows, groups].
Does not know: configs (quantization.py), models, files, or where a piece goes (four_bit_load.py).
Sources: compressed-tensors (compressors/pack_quantized, nvfp4, mxfp4), AutoAWQ, GPTQModel, NVIDIA modelopt
(nvfp4_tensor.py), openai/gpt-oss (torch/weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parallel.layers.shard import Sliceable

Kind = Literal["codes", "scale", "zero", "factor", "order"]
Read = Callable[[Sliceable, "Region"], Tensor]
FLOATS = ("F16", "BF16", "F32")
_AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of a word holds each of its 8 columns


@dataclass(frozen=True, slots=True)
class Region:
    """What is read of a checkpoint matrix [rows, columns]: ``rows`` (which may have a step), ``columns``, and of fused
    experts the number of one. ``group``: columns that share a scale in the checkpoint."""

    rows: slice
    columns: slice
    group: int
    expert: int | None = None

    @property
    def groups(self) -> slice:
        return slice(self.columns.start // self.group, -(-self.columns.stop // self.group))


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a matrix: ``suffix`` follows the module's name. ``shape`` of (rows, columns, groups); () also means
    (1,). ``read(tensor, region)``: codes [rows, columns / 2], scales or zeros [rows, groups]; None: read as a whole."""

    suffix: str
    dtypes: tuple[str, ...]
    shape: Callable[[int, int, int], tuple[int, ...]]
    read: Read | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """``parts`` of a matrix; "zero" is read where a scheme has zeros. ``unread``: suffixes of tensors that repeat what
    is known. ``fused``: matrices have all experts in front. ``divides``: by the factor of all
    rows, which multiplies otherwise."""

    code: Literal["int4", "e2m1"]
    parts: Mapping[Kind, Part]
    unread: tuple[str, ...] = ()
    fused: bool = False
    divides: bool = False


def _nibbles(words: Tensor) -> Tensor:
    """uint8 [..., 8 n] of int32 [..., n], the lowest four bits first."""
    return unpaired(_bytes(words))


def _bytes(words: Tensor) -> Tensor:
    """uint8 [..., 4 n] of int32 [..., n] in any layout."""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def paired(codes: Tensor) -> Tensor:
    """Codes [..., columns] two a byte."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpaired(data: Tensor) -> Tensor:
    """Of bytes [..., columns / 2] the codes."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def _words(rows: slice) -> tuple[slice, slice]:
    """(words of 8 rows that have all of ``rows``, ``rows`` of them)"""
    first = rows.start // 8
    return slice(first, -(-rows.stop // 8)), slice(rows.start - 8 * first, rows.stop - 8 * first)


def _bytes_by_row(full: Sliceable, of: Region) -> Tensor:
    return full[of.rows, slice(of.columns.start // 2, of.columns.stop // 2)]


def _words_by_row(full: Sliceable, of: Region) -> Tensor:
    words, columns = _words(of.columns)
    found = _bytes(full[of.rows, words])
    return found[:, columns.start // 2 : columns.stop // 2]


def _grid(full: Sliceable, of: Region) -> Tensor:
    return full[of.rows, of.groups]


def _grid_by_group(full: Sliceable, of: Region) -> Tensor:
    """[groups, N]"""
    return full[of.groups, of.rows].t()


def _zeros_by_row(full: Sliceable, of: Region) -> Tensor:
    """Words [N / 8, groups] of 8 rows."""
    words, rows = _words(of.rows)
    return _nibbles(full[words, of.groups].t())[:, rows].t()


def _awq_codes(full: Sliceable, of: Region) -> Tensor:
    """Words [K, N / 8]."""
    words, rows = _words(of.rows)
    return paired(_awq(full[of.columns, words])[:, rows].t())


def _awq_zeros(full: Sliceable, of: Region) -> Tensor:
    words, rows = _words(of.rows)
    return _awq(full[of.groups, words])[:, rows].t()


def _awq(words: Tensor) -> Tensor:
    codes = _nibbles(words)
    return codes.view(*words.shape, 8)[..., _AWQ_COLUMNS].flatten(-2)


def _gptq_codes(full: Sliceable, of: Region) -> Tensor:
    """Words [K / 8, N] of 8 columns."""
    words, columns = _words(of.columns)
    found = _bytes(full[words, of.rows].t())
    return found[:, columns.start // 2 : columns.stop // 2]


def _gptq_zeros(less: int) -> Read:
    """Words [groups, N / 8] of 8 rows, of zeros minus ``less``."""

    def read(full: Sliceable, of: Region) -> Tensor:
        words, rows = _words(of.rows)
        return _nibbles(full[of.groups, words])[:, rows].t() + less

    return read


def _blocks(full: Sliceable, of: Region) -> Tensor:
    """[E, N, K / 32, 16] of gpt-oss, whose rows are gate's and up's in turn."""
    assert of.expert is not None
    rows, expert = slice(of.rows.start, of.rows.stop), slice(of.expert, of.expert + 1)
    found = full[expert, rows, of.groups, slice(0, 16)][0, :: of.rows.step or 1].flatten(1)
    first = of.columns.start - of.groups.start * of.group
    return found[:, first // 2 : (first + of.columns.stop - of.columns.start) // 2]


def _block_scales(full: Sliceable, of: Region) -> Tensor:
    assert of.expert is not None
    rows = slice(of.rows.start, of.rows.stop)
    return full[slice(of.expert, of.expert + 1), rows, of.groups][0, :: of.rows.step or 1]


def _by_row(rows: int, columns: int, groups: int) -> tuple[int, ...]:
    return rows, groups


def _by_group(rows: int, columns: int, groups: int) -> tuple[int, ...]:
    return groups, rows


def _eighths(size: int) -> int:
    return -(-size // 8)


def _gptq(less: int) -> Layout:
    return Layout(
        "int4",
        {
            "codes": Part(".qweight", ("I32",), lambda n, k, g: (k // 8, n), _gptq_codes),
            "scale": Part(".scales", FLOATS, _by_group, _grid_by_group),
            "zero": Part(".qzeros", ("I32",), lambda n, k, g: (g, _eighths(n)), _gptq_zeros(less)),
            "order": Part(".g_idx", ("I32",), lambda n, k, g: (k,)),
        },
    )


_PACKED_BYTES = Part(".weight_packed", ("U8",), lambda n, k, g: (n, k // 2), _bytes_by_row)
LAYOUTS: Mapping[str, Layout] = {
    "pack-quantized": Layout(
        "int4",
        {
            "codes": Part(".weight_packed", ("I32",), lambda n, k, g: (n, _eighths(k)), _words_by_row),
            "scale": Part(".weight_scale", FLOATS, _by_row, _grid),
            "zero": Part(".weight_zero_point", ("I32",), lambda n, k, g: (_eighths(n), g), _zeros_by_row),
            "order": Part(".weight_g_idx", ("I32",), lambda n, k, g: (k,)),
        },
        unread=(".weight_shape",),
    ),
    "awq": Layout(
        "int4",
        {
            "codes": Part(".qweight", ("I32",), lambda n, k, g: (k, _eighths(n)), _awq_codes),
            "scale": Part(".scales", FLOATS, _by_group, _grid_by_group),
            "zero": Part(".qzeros", ("I32",), lambda n, k, g: (g, _eighths(n)), _awq_zeros),
        },
    ),
    "gptq": _gptq(less=1),
    "gptq_v2": _gptq(less=0),
    "nvfp4-pack-quantized": Layout(
        "e2m1",
        {
            "codes": _PACKED_BYTES,
            "scale": Part(".weight_scale", ("F8_E4M3",), _by_row, _grid),
            "factor": Part(".weight_global_scale", ("F32",), lambda n, k, g: ()),
        },
        divides=True,
    ),
    "NVFP4": Layout(
        "e2m1",
        {
            "codes": Part(".weight", ("U8",), lambda n, k, g: (n, k // 2), _bytes_by_row),
            "scale": Part(".weight_scale", ("F8_E4M3",), _by_row, _grid),
            "factor": Part(".weight_scale_2", ("F32",), lambda n, k, g: ()),
        },
    ),
    "mxfp4-pack-quantized": Layout(
        "e2m1", {"codes": _PACKED_BYTES, "scale": Part(".weight_scale", ("U8",), _by_row, _grid)}
    ),
    "mxfp4": Layout(
        "e2m1",
        {
            "codes": Part("_blocks", ("U8",), lambda n, k, g: (n, g, 16), _blocks),
            "scale": Part("_scales", ("U8",), _by_row, _block_scales),
        },
        fused=True,
    ),
}
