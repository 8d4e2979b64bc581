"""FP8 codes made while a checkpoint of numbers is loaded (``--quantization fp8``), with a scale for each row.

Knows: how the numbers of a matrix become codes, on the device that holds them. Does not know: files, layers.

A whole row of the checkpoint decides its scale, also where a rank holds some of its columns: codes are the same at
every tensor-parallel size.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from models.config import ModelConfig, ModelConfigError
from models.quantization import Fp8Scheme, Quantization
from parallel.layers.shard import ScatteredShard, Shard, Sliceable

if TYPE_CHECKING:
    from models.fp8_load import Codes

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
