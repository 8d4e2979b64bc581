"""Attention of every kind by its formula, one query and head at a time in float64: what kernels are compared with.

Knows: windows by position and by a node's depth, sinks as one more column of a softmax, soft caps, scales. Does not
know: pages or batches; the caller looks keys up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.kernels.interface import AttentionKind

KINDS = {
    "window": AttentionKind(window=5),
    "sinks": AttentionKind(sinks_H=torch.linspace(-2.0, 2.0, 6)),
    "softcap": AttentionKind(softcap=1.5),
    "all": AttentionKind(window=7, softcap=2.0, sinks_H=torch.linspace(1.5, -1.5, 6)),
}


def attention_of(q_HD: Tensor, keys_LKD: Tensor, values_LKD: Tensor, scale: float, kind: AttentionKind) -> Tensor:
    """[H, D] in float64, of one query, the last of L tokens."""
    first = 0 if kind.window is None else max(0, len(keys_LKD) - kind.window)
    group, out = len(q_HD) // keys_LKD.shape[1], []
    for head, q_D in enumerate(q_HD.double()):
        scores = keys_LKD[first:, head // group].double() @ q_D * scale
        if kind.softcap is not None:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        if kind.sinks_H is not None:
            scores = torch.cat((scores, kind.sinks_H[head : head + 1].double()))
        weights = scores.softmax(0)[: len(keys_LKD) - first]
        out.append(weights @ values_LKD[first:, head // group].double())
    return torch.stack(out)
