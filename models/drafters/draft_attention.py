"""Attention of a drafter: entries for tokens whose keys come from the target's states, queries of draft tokens.

Knows: that writing entries and asking are different passes over the same weights. Does not know: whose tokens those
are, how attention is computed (models/kernels).
Shape letters as in models/inputs.py; W tokens of a block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.drafters.draft_config import BlockView
from models.inputs import DecodeAttention, MixedAttention, PrefillAttention, StepInputs
from models.kernels.interface import Rotation
from models.layers.attention import Attention
from parallel.comm.quantised import Quantised

_ONLY_ROWS = "a drafter guesses for rows of DecodeAttention"


class DraftAttention(Attention):
    """As a target's attention, over rows of DecodeAttention only. ``view``: what the rows of a block see."""

    def __init__(self, *arguments: Any, view: BlockView | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.view = view or BlockView(causal=True)

    def append(self, x_TN: Tensor, positions_T: Tensor, kv_slots_T: Tensor, kv_layer: Tensor) -> None:
        """Writes keys and values of ``x`` (normed where the layer norms) at its positions; nothing attends."""
        self.write(self.kernels.linear(x_TN, self.entry_rows), positions_T, kv_slots_T, kv_layer)

    def write(self, kv_TX: Tensor, positions_T: Tensor, kv_slots_T: Tensor, kv_layer: Tensor) -> None:
        """Writes keys and values made by ``entry_rows`` at their positions; ``kv`` may be columns of a wider tensor."""
        self.kernels.rope_and_cache(kv_TX, 0, kv_layer, self._rotation(positions_T, kv_slots_T))

    def attend(self, qkv_TX: Tensor, inputs: StepInputs, kv_layer: Tensor) -> Tensor:
        """Rotates, writes the cache, attends; [T, H, D]. TypeError for other rows than DecodeAttention's."""
        if not isinstance(inputs.attention, DecodeAttention):
            raise TypeError(_ONLY_ROWS)
        rotation = self._rotation(inputs.positions_T, inputs.kv_slots_T)
        return self._attend_rows(qkv_TX, rotation, inputs.attention, kv_layer)

    def _room_for_codes(self, tokens: int, dtype: torch.dtype) -> Quantised | None:
        return super()._room_for_codes(tokens, dtype) if self.view.window is None else None

    def _attend_rows(
        self,
        qkv_TX: Tensor,
        rotation: Rotation,
        attention: DecodeAttention,
        kv_layer: Tensor,
        into: Quantised | None = None,
    ) -> Tensor:
        attention = replace(attention, causal=self.view.causal)
        if self.view.window is None:
            return super()._attend_rows(qkv_TX, rotation, attention, kv_layer, into)
        q_THD = self._rotate(qkv_TX, kv_layer, rotation)
        out_THD = self.kernels.window_attention(q_THD, kv_layer, attention, self.scale, self.view.window)
        return self._scaled(out_THD)

    def _attend_chunks(self, q_THD: Tensor, attention: PrefillAttention | MixedAttention, kv_layer: Tensor) -> Tensor:
        raise TypeError(_ONLY_ROWS)
