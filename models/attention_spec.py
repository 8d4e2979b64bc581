"""AttentionSpec: how one layer attends, as its family reads it from config.json.

Knows: the fields. Does not know: how a config spells them (models/families), which kernel takes what (models/ops).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Of one layer; sizes are those of the whole model. Scores are ``scale`` q k.

    ``window``: a query at position q sees keys k with q - window < k <= q; None: all up to its own.
    ``softcap``: scores become softcap tanh(scores / softcap) before the mask; None: they stay.
    ``sinks``: each query head has one more score, learned, whose softmax weight meets no value.
    ``value_norm``: each head's values are normed, without a weight. ``values_are_keys``: there is no projection of
    values, they are the keys before norm and rotation.
    ``rope``: which of ``ModelConfig.ropes`` rotates queries and keys; None: none does.
    """

    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rope: int | None = 0
    value_norm: bool = False
    values_are_keys: bool = False
