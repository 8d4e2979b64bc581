"""What a drafter reads of its target besides the final hidden states: the residual stream after chosen layers.

Knows: which layers, and the streams of the latest forward pass. Does not know: who reads them, what a layer computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class LayerTap:
    """Give it to ``Decoder.forward``: after that it holds one stream a layer of ``layers``, copied side by side.

    ``layers``: numbers from 0, ascending. The stream of layer i is the sum of embedding and of everything that layers
    0..i added, before any norm: ``hidden_states[i + 1]`` of Hugging Face, but for the last layer, whose entry there is
    normed. With tensor parallelism every rank holds all of it.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._taken: set[int] = set()
        self._features_TLN: Tensor | None = None

    def begin(self) -> None:
        """A forward pass begins: what an earlier one left counts no more."""
        self._taken.clear()
        self._features_TLN = None

    def take(self, layer: int, stream_TN: Tensor) -> None:
        """Keep a copy of the stream after ``layer``, if it is one of ours: later kernels write over it."""
        if layer not in self.layers:
            return
        if self._features_TLN is None:
            self._features_TLN = stream_TN.new_empty(len(stream_TN), len(self.layers), stream_TN.shape[1])
        self._features_TLN[:, self.layers.index(layer)].copy_(stream_TN)
        self._taken.add(layer)

    def fill_up(self, stream_TN: Tensor) -> None:
        """Have it stand for every layer that was not run (Decoder.few_layers)."""
        for layer in self.layers:
            if layer not in self._taken:
                self.take(layer, stream_TN)

    @property
    def features_TF(self) -> Tensor:
        """[T, F = layers * N], in the order of ``layers``, of the latest forward pass. KeyError where it has not come
        past them all."""
        if missing := set(self.layers) - self._taken:
            raise KeyError(*sorted(missing))
        assert self._features_TLN is not None
        return self._features_TLN.flatten(1)
