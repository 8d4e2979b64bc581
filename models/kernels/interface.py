"""Values that kernels take besides tensors, and words of the options that choose them.

Knows: their fields. Does not know: ops (models/ops/contract.py), kernels.
Shape letters as in models/ops/contract.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

# The implementation of prefill attention (prefill_choice.py); auto: FlashInfer where it is built already.
PrefillWanted = Literal["auto", "flashinfer", "triton"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the tokens of a step are normed and rotated, and where their keys and values go in the cache.

    ``q_norm_D``, ``k_norm_D``: weights of the RMSNorm of every query and key head, None without; ``eps`` is theirs.
    ``cos_sin_LR`` float32: cos | sin halves by position, R the rotated dims. ``positions_T``, ``kv_slots_T`` int64:
    each token's position, and its place in the cache (page * S + offset). ``kv_factors_2K`` float32: the reciprocals of
    the scales of a float8 cache, of keys and of values of each head; None: all are 1. ``value_norm``: every value head
    is normed, too, without a weight; ``values_are_keys``: values are the keys as projected, and packed q | k has none.
    """

    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    cos_sin_LR: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    kv_factors_2K: Tensor | None = None
    value_norm: bool = False
    values_are_keys: bool = False


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What attention adds to softmax(scale q k) v over all keys up to the query; AttentionSpec explains the fields.

    ``window``: not for blocks that are not causal. In a draft tree positions are depths. ``sinks_H``: float32, of this
    rank's query heads, natural logarithms: the result is multiplied by sigmoid(logsumexp of the scores - sink).
    """

    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def key(self) -> tuple[int | None, float | None, bool]:
        """What kernels are chosen by."""
        return self.window, self.softcap, self.sinks_H is not None

    @property
    def plain(self) -> bool:
        return self.key == (None, None, False)


PLAIN = AttentionKind()


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """What a gated delta net is besides its projections and its convolution: this rank's heads, and their parameters.

    ``v_heads`` value heads, of which v_heads / k_heads share one key head. ``decay_log_H``, ``decay_bias_H`` float32
    [v_heads]: A_log and dt_bias. ``norm_V``: weight of the RMSNorm of every value head, ``eps`` its epsilon.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    decay_log_H: Tensor
    decay_bias_H: Tensor
    norm_V: Tensor
    eps: float

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Columns of qkv, z, b and a in the result of the input projections."""
        values = self.v_heads * self.v_dim
        return 2 * self.k_heads * self.k_dim + values, values, self.v_heads, self.v_heads


@dataclass(frozen=True, slots=True)
class FlashInferSwitches:
    """FlashInfer's own environment variables, read by launch (launch/ranks/flashinfer_switches.py).

    ``compiles``: False where FLASHINFER_DISABLE_JIT forbids it. ``nvcc``: FLASHINFER_NVCC, the compiler in place of
    CUDA_HOME's; None where it is not set.
    """

    compiles: bool = True
    nvcc: str | None = None


NO_SWITCHES = FlashInferSwitches()
