"""What a drafter reads of its target besides the final hidden states: the residual stream behind chosen layers.

Knows: which layers, and the streams of the latest forward pass. Does not know: who reads them, what a layer computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerTap:
    """Give it to ``Decoder.forward``: behind that it holds one stream a layer of ``layers``, as fresh tensors.

    ``layers``: numbers from 0, ascending. The stream of layer i is the sum of embedding and of everything that layers
    0..i added, before any norm: ``hidden_states[i + 1]`` of Hugging Face, but for the last layer, whose entry there is
    normed. With tensor parallelism every rank holds all of it.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._streams: dict[int, Tensor] = {}

    def begin(self) -> None:
        """A forward pass begins: what an earlier one left counts no more."""
        self._streams.clear()

    def take(self, layer: int, stream_TN: Tensor) -> None:
        """Keep a copy of the stream behind ``layer``, if it is one of ours: later kernels write over it."""
        if layer in self.layers:
            self._streams[layer] = stream_TN.clone()

    def fill_up(self, stream_TN: Tensor) -> None:
        """Have it stand for every layer that was not run (Decoder.few_layers)."""
        for layer in self.layers:
            self._streams.setdefault(layer, stream_TN)

    @property
    def features_TF(self) -> Tensor:
        """[T, F = layers * N], in the order of ``layers``, of the latest forward pass."""
        return torch.cat([self._streams[layer] for layer in self.layers], 1)
