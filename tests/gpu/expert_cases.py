"""Random layers of experts on a GPU, for the parity tests and the micro-benchmark.

Knows: shapes, and choices that look like a router's. Does not know: which kernel is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.layers.weight import Weight

SHAPES = {  # hidden size, intermediate size, experts, chosen
    "30b-a3b": (2048, 768, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
}


@dataclass(frozen=True)
class Layer:
    """``experts`` of a whole layer of which the first ``held`` are on this rank."""

    hidden: int
    inner: int
    experts: int
    held: int
    choices: int
    dtype: torch.dtype
    device: str = "cuda"

    def weights(self) -> tuple[Weight, Weight]:
        """gate_up [G, 2I, N] and down [G, N, I] that keep activations near 1."""
        gate_up = torch.empty(self.held, 2 * self.inner, self.hidden, dtype=self.dtype, device=self.device)
        down = torch.empty(self.held, self.hidden, self.inner, dtype=self.dtype, device=self.device)
        return Weight.of(gate_up.normal_(std=self.hidden**-0.5)), Weight.of(down.normal_(std=self.inner**-0.5))

    def tokens(self, count: int) -> Tensor:
        return torch.randn(count, self.hidden, device=self.device).to(self.dtype)

    def logits(self, count: int) -> Tensor:
        return torch.randn(count, self.experts, device=self.device).to(self.dtype)

    def local(self) -> Tensor:
        numbers = torch.arange(self.experts, dtype=torch.int32, device=self.device)
        return torch.where(numbers < self.held, numbers, -1)

    def chosen(self, count: int) -> tuple[Tensor, Tensor]:
        """Weights [T, C] and local numbers [T, C] of uniform routing."""
        scores, ids = torch.rand(count, self.experts, device=self.device).topk(self.choices)
        return scores / scores.sum(-1, keepdim=True), self.local()[ids]


def share_of(shape: str, ranks: int) -> Layer:
    """The layer of a model in ``SHAPES`` as the first of ``ranks`` ranks holds it, in bfloat16."""
    hidden, intermediate, experts, chosen = SHAPES[shape]
    return Layer(hidden, intermediate, experts, experts // ranks, chosen, torch.bfloat16)
