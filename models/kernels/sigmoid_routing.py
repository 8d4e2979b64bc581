"""Sigmoid routers in plain torch: what every device runs without a kernel for it.

Knows: the choice by corrected scores among the experts of the best groups (DeepSeek-V3, Liu et al. 2024, section
2.1.2). Does not know: how experts lie on ranks beyond their local numbers.
Shape letters as in interface.py. Shapes are fixed and nothing is read on the host, so a graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """``choices`` experts a token, of the best ``top_groups`` of ``groups`` groups of consecutive experts. Weights are
    scaled to a sum of 1 where ``renormalise``, then multiplied by ``scale``. ``shared``: so many experts, numbered
    after those that are chosen from, serve every token with weight 1, as further choices after its own. ``softmax``:
    scores are softmax(logits) over all experts instead.
    """

    choices: int
    renormalise: bool
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared: int = 0
    softmax: bool = False


def wide_linear(x_TN: Tensor, weight_EN: Tensor) -> Tensor:
    """x @ weight^T in float32, or float64 where x is: products of 16-bit values are exact, and no score is rounded."""
    wide = torch.promote_types(x_TN.dtype, torch.float32)
    return F.linear(x_TN.to(wide), weight_EN.to(wide))


def route_sigmoid(
    logits_TE: Tensor, bias_E: Tensor, routing: SigmoidRouting, local_E: Tensor, real_T: Tensor,
    load_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See models/ops/contract.py."""
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    scores_TE = wide_TE.softmax(-1) if routing.softmax else wide_TE.sigmoid()
    ranked_TE = scores_TE + bias_E
    if routing.groups > 1:
        grouped_TGX = ranked_TE.view(len(ranked_TE), routing.groups, -1)
        of_groups_TG = grouped_TGX.topk(2, dim=-1).values.sum(-1)
        best_TG = of_groups_TG.sort(stable=True, dim=-1, descending=True).indices[:, : routing.top_groups]
        open_TG = torch.zeros_like(of_groups_TG, dtype=torch.bool).scatter_(1, best_TG, True)
        ranked_TE = grouped_TGX.where(open_TG.unsqueeze(2), float("-inf")).flatten(1)
    experts_TC = ranked_TE.sort(stable=True, dim=-1, descending=True).indices[:, : routing.choices]
    weights_TC = scores_TE.gather(1, experts_TC)
    if routing.renormalise:
        weights_TC = weights_TC / (weights_TC.sum(-1, keepdim=True) + 1e-20)
    if load_E is not None:
        counted = real_T.to(load_E.dtype).repeat_interleave(routing.choices, output_size=experts_TC.numel())
        load_E.scatter_add_(0, experts_TC.flatten(), counted)
    weights_TC = weights_TC * routing.scale
    if routing.shared:
        tokens, first = experts_TC.shape[0], logits_TE.shape[1]
        everyone_S = torch.arange(first, first + routing.shared, device=experts_TC.device)
        experts_TC = torch.cat((experts_TC, everyone_S.expand(tokens, -1)), 1)
        weights_TC = torch.cat((weights_TC, weights_TC.new_ones(tokens, routing.shared)), 1)
    return weights_TC, torch.where(real_T[:, None], local_E[experts_TC], -1)
