"""Prefill attention by the tiles of our Triton kernel, in plain torch: captured steps read their plan from a table.

Knows: how the kernel scans a table (models/kernels/attention/prefill.py): entry by entry, those without tokens aside.
Does not know: tiles of a GPU's size. These are small, so that short chunks have several. Needs Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.inputs import PrefillAttention, RepeatedPrefill
from models.kernels.attention.prefill import RepeatedTiles
from models.kernels.reference import ReferenceKernels
from tests.runtime.engine.exact_kernels import ExactKernels

TILE = 4  # tokens


class TiledKernels(ReferenceKernels):
    """The reference, but for chunks of captured steps."""

    def repeat_prefill(
        self, page_table_BP: Tensor, max_tokens: int, heads: int, kv_heads: int, kv_layer: Tensor
    ) -> RepeatedPrefill | None:
        return RepeatedTiles(kv_layer.device, len(page_table_BP), max_tokens, TILE)

    def prefill_attention(self, q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, scale: float) -> Tensor:
        tiles = inputs.planned
        if not isinstance(tiles, RepeatedTiles):
            return super().prefill_attention(q_THD, kv_layer, inputs, scale)
        out_THD = torch.full_like(q_THD, float("nan"))  # of no tile's token
        for token, count, position, row in tiles.tiles[: tiles.count(len(q_THD))].numpy():
            if count:
                here = slice(token, token + count)
                pages_P = inputs.page_table_BP[row]
                out_THD[here] = self._prefill_row(q_THD[here], kv_layer, pages_P, int(position + count), scale)
        return out_THD


class TiledExactKernels(TiledKernels, ExactKernels):
    """For activations and weights in float64."""
