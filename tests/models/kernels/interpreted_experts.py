"""The expert kernels through Triton's interpreter, against float64 formulas: ``TRITON_INTERPRET=1 python -m ...``.

Exits with an error where one differs. Knows: shapes that reach every branch. Does not know: GPUs (tests/gpu).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor

from models.kernels.experts import grouped as grouped_kernel
from models.kernels.experts import grouped_tma, streamed
from models.kernels.experts.grouped import most_blocks
from models.kernels.experts.route import pairs_by_expert, route_sigmoid, route_top_k
from models.kernels.experts.tiles import LongListTiles, Tiles
from models.kernels.sigmoid_routing import SigmoidRouting
from parallel.layers.weight import Weight
from tests.models.kernels.interpreted_kernels import REFERENCE

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}  # the interpreter's dot does not know bfloat16


def check(found: Tensor, expected: Tensor, limit: float, what: object) -> None:
    error = float((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-30))
    assert error < limit, f"{what}: relative error {error:.1e}"


def check_route(
    experts: int, choices: int, renormalise: bool, count: bool, shared: int = 0, *, scaled: bool = False
) -> None:
    tokens = 6
    # Coarse: with equal scores among them. Then the gate of shared experts, and columns that are not read.
    logits = torch.randn(tokens, experts + 3 * (shared > 0)).half().float()
    logits[1] = 0.0
    logits[:, experts + 1 :] = math.nan
    local = torch.randperm(experts, dtype=torch.int32)
    local[local >= experts // 2] = -1
    local = torch.cat((local, torch.arange(experts, experts + shared, dtype=torch.int32)))
    real = torch.arange(tokens) != 2
    mine, theirs = (torch.ones(experts, dtype=torch.int64) if count else None for _ in range(2))
    scale = torch.randn(experts) if scaled else None
    weights, chosen = route_top_k(logits, choices, renormalise, local, real, mine, shared, scale, pdl=False)
    expected = REFERENCE.route_top_k(logits, choices, renormalise, local, real, theirs, shared, scale)
    check(weights, expected[0], 1e-6, ("weights", experts, choices))
    assert torch.equal(chosen, expected[1]), (experts, choices)
    assert mine is None or theirs is None or torch.equal(mine, theirs)


def check_route_sigmoid(experts: int, routing: SigmoidRouting, count: bool) -> None:
    tokens = 6
    logits, bias = torch.randn(tokens, experts).half().float(), torch.randn(experts) / 4
    logits[1], bias[: experts // 2] = 0.0, 0.25  # equal scores among experts and groups
    local = torch.randperm(experts, dtype=torch.int32)
    local[local >= experts // 2] = -1
    local = torch.cat((local, torch.arange(experts, experts + routing.shared, dtype=torch.int32)))
    real = torch.arange(tokens) != 2
    mine, theirs = (torch.ones(experts, dtype=torch.int64) if count else None for _ in range(2))
    weights, chosen = route_sigmoid(logits, bias, routing, local, real, mine, pdl=False)
    expected = REFERENCE.route_sigmoid(logits, bias, routing, local, real, theirs)
    check(weights, expected[0], 1e-6, ("weights", experts, routing))
    assert torch.equal(chosen, expected[1]), (experts, routing)
    assert mine is None or theirs is None or torch.equal(mine, theirs)
    logits[3] = math.nan
    numbers = torch.arange(experts + routing.shared, dtype=torch.int32)
    weights, chosen = route_sigmoid(logits, bias, routing, numbers, real, None, pdl=False)
    assert weights[3, : routing.choices].isnan().all()
    assert len(set(chosen[3].tolist())) == routing.choices + routing.shared
    assert weights[[0, 1, 2, 4, 5]].isfinite().all()


def check_broken_token() -> None:
    """NaN logits choose real experts, each once, with NaN weights; the neighbours do not notice."""
    logits = torch.randn(3, 5)
    logits[1] = math.nan
    local, real = torch.arange(5, dtype=torch.int32), torch.ones(3, dtype=torch.bool)
    weights, chosen = route_top_k(logits, 3, True, local, real, None, pdl=False)
    assert weights[1].isnan().all()
    assert chosen[1].tolist() == [0, 1, 2]
    assert weights[::2].isfinite().all()


def choice_of(tokens: int, choices: int, experts: int, elsewhere: float) -> Tensor:
    """Distinct experts a token, some of them on other ranks (-1); the last token goes nowhere."""
    chosen = torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)]).int()
    chosen[torch.rand(tokens, choices) < elsewhere] = -1
    chosen[-1] = -1
    return chosen


def check_lists(tokens: int, choices: int, experts: int) -> None:
    chosen = choice_of(tokens, choices, experts, 0.3)
    order, counts = pairs_by_expert(chosen, experts, False)
    flat, blocks = chosen.flatten(), 0
    for expert in range(experts):
        pairs = (flat == expert).nonzero()[:, 0]
        assert int(counts[expert]) == len(pairs)
        assert torch.equal(order[expert, : len(pairs)].long(), pairs)
        blocks += -(-len(pairs) // 4)
    assert blocks <= most_blocks(tokens, choices, experts, 4)


def check_mlp(
    form: Callable[..., Tensor],
    tokens: int,
    choices: int,
    experts: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    matrices: int = 2,
    limit: float | None = None,
    gelu: bool = False,
) -> None:
    """``matrices``: 1 without a gate. ``limit``: with biases, too."""
    hidden, inner = sizes
    x = torch.randn(tokens, hidden).to(dtype)
    x[-1] = math.nan  # goes nowhere, and nobody sees it
    gate_up = (torch.randn(experts, matrices * inner, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype)
    weights, chosen = torch.rand(tokens, choices), choice_of(tokens, choices, experts, 0.4)
    clamped = {} if limit is None else {"limit": limit}
    up_bias, down_bias = (
        None if limit is None else torch.randn(experts, n).to(dtype) for n in (matrices * inner, hidden)
    )
    up, wide_up = (
        replace(Weight.of(gate_up, up_bias), gelu=gelu),
        replace(Weight.of(gate_up.double(), None if up_bias is None else up_bias.double()), gelu=gelu),
    )
    last = Weight.of(down, down_bias), Weight.of(down.double(), None if down_bias is None else down_bias.double())
    found = form(x, up, last[0], weights, chosen, False, **clamped)
    expected = REFERENCE.expert_mlp(
        x.double(), wide_up, last[1], weights.double(), chosen, all_experts=2 * experts, limit=limit
    )
    check(found[:-1], expected[:-1], TOLERANCE[dtype], (tokens, choices, experts, sizes, dtype, form))
    assert found[-1].tolist() == [0.0] * hidden


def main() -> None:
    torch.manual_seed(0)
    for (experts, choices), renormalise, count in product(
        [(8, 2), (12, 5), (5, 5), (128, 8)], [True, False], [True, False]
    ):
        check_route(experts, choices, renormalise, count)
    for shared, count in ((1, True), (2, False)):
        check_route(8, 2, True, count, shared)
    check_route(12, 5, True, count=False, scaled=True)
    for experts, count in product((16, 24), (True, False)):
        for groups, top_groups, renormalise in ((1, 1, True), (4, 2, False), (8, 3, True), (2, 2, True)):
            routing = SigmoidRouting(5, renormalise, groups, top_groups, 2.5, shared=groups % 3, softmax=groups == 8)
            check_route_sigmoid(experts, routing, count)
    check_broken_token()
    for shape in [(1, 3, 4), (40, 3, 7), (50, 2, 2), (5000, 2, 3)]:
        check_lists(*shape)
    for dtype in TOLERANCE:
        check_mlp(streamed.expert_mlp, 1, 3, 6, (64, 48), dtype)
        check_mlp(streamed.expert_mlp, 4, 2, 3, (48, 32), dtype)
        grouped = partial(grouped_kernel.expert_mlp, all_experts=14)
        check_mlp(grouped, 5, 3, 7, (64, 48), dtype)
        small, large = (
            partial(grouped, tiles=(tiles, tiles)) for tiles in (Tiles(16, 16, 16, 2, 4), Tiles(32, 32, 16, 2, 4))
        )
        check_mlp(small, 40, 2, 3, (32, 16), dtype)
        for form in (streamed.expert_mlp, grouped):
            check_mlp(form, 3, 2, 3, (48, 32), dtype, 1)
            if dtype is torch.float16:
                check_mlp(form, 2, 1, 2, (1344, 464), dtype, 1)  # Nemotron's widths have no large power of two
            check_mlp(form, 3, 2, 3, (48, 32), dtype, limit=1.0)
            check_mlp(form, 3, 2, 3, (48, 32), dtype, gelu=True)
        with patch.object(streamed, "_WHOLE_COLUMNS", 256):
            check_mlp(streamed.expert_mlp, 2, 1, 2, (1344, 464), dtype, 1)
        check_mlp(large, 70, 3, 4, (32, 48), dtype)
        check_mlp(small, 40, 2, 3, (32, 16), dtype, limit=0.7)
        for group in (
            (1, 2, 8) if dtype is torch.float16 else ()
        ):  # of lists of about 5 blocks: no group, the last one cut short, one of all
            tiles = Tiles(16, 16, 16, 2, 4, group)
            check_mlp(partial(grouped, tiles=(tiles, tiles)), 200, 2, 3, (32, 48), dtype)
    for group, split in ((1, 1), (2, 3), (8, 1)):
        up, down = Tiles(16, 16, 16, 2, 4, group), Tiles(32, 16, 16, 2, 4, group)
        form = partial(grouped_tma.expert_mlp, tiles=LongListTiles(up, down, split))
        check_mlp(form, 60, 2, 3, (32, 48), torch.float16)
        check_mlp(form, 7, 3, 5, (48, 48), torch.float16)
        check_mlp(form, 40, 2, 3, (32, 48), torch.float16, 1)
        check_mlp(form, 40, 2, 3, (32, 48), torch.float16, gelu=True)


if __name__ == "__main__":
    main()
