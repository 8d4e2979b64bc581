"""Random FP8 checkpoints of every scheme, and the float32 weights that they mean: the oracle of quantised loading.

Knows: the formulas (weight = code * scale) and the names that producers use. Imports nothing of the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MOST = 448.0  # largest e4m3fn
Kept = Callable[[str], bool]


@dataclass(frozen=True)
class Scheme:
    """One producer's way to store a matrix. ``grid``: rows and columns that share a scale, 0 for all of them.

    ``scale``: the suffix of the scale's name. ``shape``: its stored shape, of the grid (rows, columns).
    ``config``: quantization_config without its ignore list, which stands under ``ignore``.
    """

    grid: tuple[int, int]
    scale: str
    config: Mapping[str, Any]
    ignore: str = "modules_to_not_convert"
    dtype: torch.dtype = torch.float32
    shape: Callable[[int, int], tuple[int, ...]] = lambda rows, columns: (rows, columns)
    beside: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def _compressed(strategy: str, **weights: object) -> dict[str, Any]:
    held = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **weights}
    group = {"targets": ["Linear"], "weights": held, "input_activations": {"dynamic": True, "strategy": "token"}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def schemes(block: int = 16) -> dict[str, Scheme]:
    """By the letters of the survey: A DeepSeek blocks ... J fbgemm; blocks of ``block`` where a config names them."""
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    blocks = {**fp8, "weight_block_size": [block, block]}
    modelopt = {"quant_method": "modelopt"}
    return {
        "A": Scheme((block, block), "weight_scale_inv", blocks),
        "A-bf16": Scheme((block, block), "weight_scale_inv", blocks, dtype=torch.bfloat16),
        "A-e8m0": Scheme((block, block), "weight_scale_inv", {**blocks, "scale_fmt": "ue8m0"},
                         dtype=torch.float8_e8m0fnu),
        "A-renamed": Scheme((block, block), "weight_scale", {**blocks, "scale_fmt": "ue8m0"}),
        "B": Scheme((0, 0), "weight_scale", {**fp8, "activation_scheme": "static"}, "ignored_layers", shape=_none,
                    beside={"input_scale": ()}),
        "B-inv": Scheme((0, 0), "weight_scale_inv", fp8, shape=_none, beside={"activation_scale": ()}),
        "C": Scheme((1, 0), "weight_scale", _compressed("channel"), "ignore", torch.bfloat16),
        "D": Scheme((0, 0), "weight_scale", _compressed("tensor"), "ignore", shape=_one, beside={"input_scale": (1,)}),
        "E": Scheme((block, block), "weight_scale", _compressed("block", block_structure=[block, block]), "ignore",
                    torch.bfloat16),
        "F": Scheme((0, 0), "weight_scale", {**modelopt, "quant_algo": "FP8"}, "ignore", shape=_none,
                    beside={"input_scale": ()}),
        "G": Scheme((1, 0), "weight_scale", {**modelopt, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "ignore",
                    shape=lambda rows, _: (rows,)),
        "H": Scheme((128, 128), "weight_scale", {**modelopt, "quant_algo": "FP8_PB_WO"}, "ignore",
                    shape=lambda rows, columns: (rows, 1, columns, 1)),
        "I": Scheme((0, 0), "weight_scale", {**modelopt, "quant_algo": "MIXED_PRECISION",
                    "quantized_layers": {"*": {"quant_algo": "FP8"}}}, "ignore", shape=_none),
        "J": Scheme((1, 0), "weight_scale", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    }  # fmt: skip


def _none(rows: int, columns: int) -> tuple[int, ...]:
    return ()


def _one(rows: int, columns: int) -> tuple[int, ...]:
    return (1,)


def quantise(
    tensors: Mapping[str, Tensor], scheme: Scheme, kept: Kept, ignored: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """(stored tensors, the float32 tensors that they mean, quantization_config).

    A ``.weight`` of two dims that is not ``kept`` becomes codes. ``ignored`` are the config's entries for the others.
    Every third matrix is ten times as large, and the first block of each is zero: its scale is 1.
    """
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if kept(name) or tensor.dim() != 2 or not name.endswith(".weight"):
            stored[name] = meant[name] = tensor
            continue
        value = tensor.float() * (10.0 if number % 3 == 0 else 1.0)
        rows, columns = (size or whole for size, whole in zip(scheme.grid, value.shape, strict=True))
        value[: min(rows, 4), : min(columns, 4)] = 0.0
        scale = _scales(value, rows, columns).to(scheme.dtype)
        wide = spread(scale.float(), rows, columns, value.shape)
        code = (value / wide).clamp(-MOST, MOST).to(torch.float8_e4m3fn)
        base = name.removesuffix("weight")
        stored[name] = code
        stored[base + scheme.scale] = scale.reshape(scheme.shape(*scale.shape)).contiguous()
        for suffix, shape in scheme.beside.items():
            stored[base + suffix] = torch.full(shape, 0.5)
        meant[name] = code.float() * wide
    return stored, meant, {**scheme.config, scheme.ignore: ignored}


def _scales(value: Tensor, rows: int, columns: int) -> Tensor:
    """amax / 448 of each block of the grid, 1 where a block is zero."""
    grid = [
        torch.stack([part.abs().amax() for part in torch.split(strip, columns, 1)])
        for strip in torch.split(value, rows)
    ]
    most = torch.stack(grid)
    return torch.where(most > 0, most / MOST, 1.0)


def spread(scale: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """Each scale at every element of its block, cut to ``shape``: the last blocks may be ragged."""
    wide = scale.repeat_interleave(rows, 0)[: shape[0]]
    return wide.repeat_interleave(columns, 1)[:, : shape[1]]
