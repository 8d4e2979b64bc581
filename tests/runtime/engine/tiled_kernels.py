"""Prefill attention by the tiles of our Triton kernel, in plain torch: captured steps read their plan from a table.

Knows: how the kernel scans a table (prefill_tiles.py): entry by entry, those without tokens aside.
Does not know: tiles of a GPU's size. These are small, so that short chunks have several. Needs Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.inputs import PrefillAttention, RepeatedPrefill
from models.kernels.attention.prefill_tiles import RepeatedTiles
from tests.plant import Kernels, Op, kernels_with

TILE = 4  # tokens


def tiled_kernels(over: Kernels | None = None) -> Kernels:
    """``over``, or the reference, but for chunks of captured steps."""
    return kernels_with(over, repeat_prefill=repeat_prefill, prefill_attention=prefill_attention)


def repeat_prefill(
    _: Op, page_table_BP: Tensor, max_tokens: int, heads: int, kv_layer: Tensor
) -> RepeatedPrefill | None:
    return RepeatedTiles(kv_layer.device, len(page_table_BP), max_tokens, TILE)


def prefill_attention(attend: Op, q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, *given: Any) -> Tensor:
    tiles = inputs.planned
    if not isinstance(tiles, RepeatedTiles):
        untiled_THD: Tensor = attend(q_THD, kv_layer, inputs, *given)
        return untiled_THD
    out_THD = torch.full_like(q_THD, float("nan"))  # of no tile's token
    for token, count, position, row in tiles.tiles[: tiles.count(len(q_THD))].tolist():
        if count:
            here = slice(token, token + count)
            tile = PrefillAttention(inputs.page_table_BP[row : row + 1], (count,), (position + count,))
            out_THD[here] = attend(q_THD[here], kv_layer, tile, *given)
    return out_THD
