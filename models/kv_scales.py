"""Scales of a float8 KV cache: value = code * scale, one a key/value head, from a checkpoint; 1 where it has none.

Knows: the names that producers give them, heads of this rank. Does not know: files (weights.py), kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.checkpoint import WeightsError
from models.kv_group import FP8
from models.layers.attention import Attention
from models.layers.checkpoint_parts import CheckpointParts
from models.weights_header import quoted


def place_kv_scales(model: CheckpointParts, found: Mapping[str, Tensor]) -> None:
    """Gives each layer of attention whose cache is float8 its scales. ``found``: float32 by checkpoint tensor, one for
    all heads or one a head of the whole model.

    Raises WeightsError, which names tensor and both sizes, for another number of scales.
    """
    for path, layer in model.named_modules():
        if isinstance(layer, Attention) and layer.kv_dtype == FP8:
            bases = [name.rsplit(".", 2)[0] for name in model.checkpoint_names_of(f"{path}.qkv.k.weight")]
            layer.hold_scales(*(_of_heads(layer, bases, plane, found) for plane in "kv"))


def _of_heads(layer: Attention, bases: list[str], plane: str, found: Mapping[str, Tensor]) -> Tensor:
    """[K] of this rank; ``bases``: names that the checkpoint may give the layer, ``plane``: k or v."""
    ends = (f"{plane}_scale", f"{plane}_proj.{plane}_scale", f"{plane}_proj.output_scale", "kv_scale")
    name = next((name for base in bases for end in ends if (name := f"{base}.{end}") in found), None)
    heads = layer.qkv.heads
    if name is None:
        return torch.ones(heads.local_kv_heads)
    scales = found[name].flatten()
    if len(scales) == 1:
        return scales.expand(heads.local_kv_heads)
    if len(scales) != heads.kv_heads:
        raise WeightsError(
            f"tensor {quoted(name)} holds {len(scales)} scales, but there are {heads.kv_heads} key/value heads: one "
            "for all or one a head is needed"
        )
    return scales[heads.first_kv_head :][: heads.local_kv_heads]
