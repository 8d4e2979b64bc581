"""Routing: the top experts of each token, and the list of (token, choice) pairs of each expert.

Knows: softmax top-k over experts, sigmoid top-k with a correction bias and groups (models/kernels/sigmoid_routing.py
has the formulas), and lists of fixed size with counts. Does not know: what an expert computes (grouped.py, streamed.py,
grouped_tma.py). Shape letters as in interface.py; a pair is t * C + c, one expert choice of
one token.

Shapes are fixed: every expert has room for all tokens, and a count says how many it got. Lists are in the order of
pairs, so the same routing makes the same lists in every run and on every rank. ``pdl``: see dependent_launch.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.sigmoid_routing import SigmoidRouting

# Batch-invariant: a token by itself; lists are integers
_CHUNK, _MOST_CHUNK = 2048, 8192  # pairs that a program sorts into a list, after counting those before them
_CHUNKS = 32  # beyond so many chunks they get longer: each program counts all pairs before its own


@triton.jit
def _store_choices(
    weights, chosen, token, choices, local_ptr, real_ptr, weights_ptr, chosen_ptr, load_ptr,
    CHOICES: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    real = tl.load(real_ptr + token) != 0
    asked = choices < CHOICES + SHARED
    local = tl.load(local_ptr + chosen, mask=asked, other=-1)
    where = token * (CHOICES + SHARED) + choices
    tl.store(weights_ptr + where, weights, mask=asked)
    tl.store(chosen_ptr + where, tl.where(real, local, -1), mask=asked)
    if COUNT:
        own = real & (choices < CHOICES)
        tl.atomic_add(load_ptr + chosen, tl.full(choices.shape, 1, tl.int64), mask=own, sem="relaxed")


@triton.jit
def _first_best(left, ids, BLOCK: tl.constexpr):
    """The lowest id of those with the largest value."""
    return tl.min(tl.where(left == tl.max(left, 0), ids, BLOCK), 0)


@triton.jit
def _best_of(left, ids, choices, CHOICES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr):
    """The ids [BLOCK_C] of the CHOICES largest values, the largest first; 0 behind them.

    As integers in the same order: the largest of a warp's integers is one instruction, of its floats five shuffles.
    """
    bits = left.to(tl.int32, bitcast=True)
    left = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    chosen = tl.zeros((BLOCK_C,), tl.int32)
    for choice in tl.static_range(CHOICES):
        best = _first_best(left, ids, BLOCK_E)
        chosen = tl.where(choices == choice, best, chosen)
        left = tl.where(ids == best, -2147483648, left)
    return chosen


@triton.jit
def _route_kernel(
    logits_ptr, local_ptr, real_ptr, weights_ptr, chosen_ptr, load_ptr,
    scale_ptr,  # float32 [E], with SCALED
    E,
    pitch,  # columns of the logits
    CHOICES: tl.constexpr, SHARED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
    RENORMALISE: tl.constexpr, SCALED: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    ids = tl.arange(0, BLOCK_E)
    choices = tl.arange(0, BLOCK_C)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row_ptr = logits_ptr + token.to(tl.int64) * pitch
    logits = tl.load(row_ptr + ids, mask=ids < E, other=float("-inf")).to(tl.float32)
    peak = tl.max(logits, 0)
    scores = tl.exp(logits - peak)
    total = tl.sum(scores, 0)
    scores = scores / total
    # A token of NaN gets the first experts with NaN weights.
    left = tl.where(ids < E, tl.where(scores == scores, scores, 0.0), float("-inf"))
    chosen = _best_of(left, ids, choices, CHOICES, BLOCK_C, BLOCK_E)
    weights = tl.exp(tl.load(row_ptr + chosen).to(tl.float32) - peak) / total
    weights = tl.where(choices < CHOICES, weights, 0.0)
    if RENORMALISE:
        weights = weights / tl.sum(weights, 0)
    if SCALED:
        weights *= tl.load(scale_ptr + chosen)
    if SHARED > 0:
        everyone = choices >= CHOICES
        weights = tl.where(everyone, tl.sigmoid(tl.load(row_ptr + E).to(tl.float32)), weights)
        chosen = tl.where(everyone, E + choices - CHOICES, chosen)
    _store_choices(
        weights, chosen, token, choices, local_ptr, real_ptr, weights_ptr, chosen_ptr, load_ptr, CHOICES, SHARED, COUNT
    )


@triton.jit
def _score(logits, most, total, SOFTMAX: tl.constexpr):
    """``most``, ``total``: the largest logit, and the sum of exp(logit - most), where SOFTMAX."""
    return tl.exp(logits - most) / total if SOFTMAX else tl.sigmoid(logits)


@triton.jit
def _route_sigmoid_kernel(
    logits_ptr,  # float32
    bias_ptr, local_ptr, real_ptr, weights_ptr, chosen_ptr, load_ptr, scale, E,
    CHOICES: tl.constexpr, SHARED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALISE: tl.constexpr, COUNT: tl.constexpr,
    SOFTMAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    ids, choices = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    none = float("-inf")
    bias = tl.load(bias_ptr + ids, mask=ids < E, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row_ptr = logits_ptr + token.to(tl.int64) * E
    logits = tl.load(row_ptr + ids, mask=ids < E, other=none if SOFTMAX else 0.0)
    most, total = 0.0, 1.0
    if SOFTMAX:
        most = tl.max(logits, 0)
        total = tl.sum(tl.exp(logits - most), 0)
    scores = _score(logits, most, total, SOFTMAX)
    # A token of NaN gets the first experts with NaN weights. Padding, and what is not open or left, has -inf.
    ranked = tl.where(scores == scores, scores + bias, 0.0)
    left = tl.where(ids < E, ranked, none)
    if GROUPS > 1:
        group_ids, group_of = tl.arange(0, BLOCK_G), ids // (E // GROUPS)
        sums = tl.full((BLOCK_G,), none, tl.float32)
        for group in tl.static_range(GROUPS):
            inside = tl.where(group_of == group, left, none)
            others = tl.where(ids == _first_best(inside, ids, BLOCK_E), none, inside)
            sums = tl.where(group_ids == group, tl.max(inside, 0) + tl.max(others, 0), sums)
        is_open = tl.zeros((BLOCK_E,), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best_group = _first_best(sums, group_ids, BLOCK_G)
            is_open = tl.where(group_of == best_group, 1, is_open)
            sums = tl.where(group_ids == best_group, none, sums)
        left = tl.where(is_open == 1, left, none)
    chosen = _best_of(left, ids, choices, CHOICES, BLOCK_C, BLOCK_E)
    weights = tl.where(choices < CHOICES, _score(tl.load(row_ptr + chosen), most, total, SOFTMAX), 0.0)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    everyone = choices >= CHOICES
    weights = tl.where(everyone, 1.0, weights * scale)
    chosen = tl.where(everyone, E + choices - CHOICES, chosen)
    _store_choices(
        weights, chosen, token, choices, local_ptr, real_ptr, weights_ptr, chosen_ptr, load_ptr, CHOICES, SHARED, COUNT
    )


@triton.jit(do_not_specialize=["tokens"])  # steps of any number of tokens run the same code
def _order_kernel(
    chosen_ptr, order_ptr, counts_ptr, tokens,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert, chunk = tl.program_id(0), tl.program_id(1)
    pairs = tokens * CHOICES
    ids = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.zeros((BLOCK,), tl.int32)
    for earlier in range(chunk):
        before += (tl.load(chosen_ptr + earlier * BLOCK + ids) == expert).to(tl.int32)
    here = chunk * BLOCK + ids
    mine = (tl.load(chosen_ptr + here, mask=here < pairs, other=-1) == expert).to(tl.int32)
    found = tl.sum(before, 0)
    tl.store(order_ptr + expert.to(tl.int64) * tokens + found + tl.cumsum(mine, 0) - 1, here, mask=mine != 0)
    if chunk == tl.num_programs(1) - 1:
        tl.store(counts_ptr + expert, found + tl.sum(mine, 0))


def route_top_k(
    logits_TE: Tensor, choices: int, renormalise: bool, local_E: Tensor, real_T: Tensor, load_E: Tensor | None = None,
    shared: int = 0, scale_E: Tensor | None = None, *, pdl: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See models/ops/contract.py."""
    (tokens, pitch), experts, columns = logits_TE.shape, len(local_E) - shared, choices + shared
    weights_TC = torch.empty(tokens, columns, dtype=torch.float32, device=logits_TE.device)
    local_TC = torch.empty(tokens, columns, dtype=torch.int32, device=logits_TE.device)
    if tokens == 0:
        return weights_TC, local_TC
    block = triton.next_power_of_2(experts)
    _route_kernel[(tokens,)](
        logits_TE, local_E, real_T.view(torch.uint8), weights_TC, local_TC, local_E if load_E is None else load_E,
        local_E if scale_E is None else scale_E, experts, pitch,
        CHOICES=choices, SHARED=shared, BLOCK_C=triton.next_power_of_2(columns), BLOCK_E=block, RENORMALISE=renormalise,
        SCALED=scale_E is not None, COUNT=load_E is not None, PDL=pdl, num_warps=max(1, min(4, block // 512)),
        launch_pdl=pdl,
    )  # fmt: skip
    return weights_TC, local_TC


def route_sigmoid(
    logits_TE: Tensor, bias_E: Tensor, routing: SigmoidRouting, local_E: Tensor, real_T: Tensor,
    load_E: Tensor | None = None, *, pdl: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See models/ops/contract.py; logits and bias are float32."""
    (tokens, experts), columns = logits_TE.shape, routing.choices + routing.shared
    weights_TC = torch.empty(tokens, columns, dtype=torch.float32, device=logits_TE.device)
    local_TC = torch.empty(tokens, columns, dtype=torch.int32, device=logits_TE.device)
    if tokens == 0:
        return weights_TC, local_TC
    block = triton.next_power_of_2(experts)
    _route_sigmoid_kernel[(tokens,)](
        logits_TE, bias_E, local_E, real_T.view(torch.uint8), weights_TC, local_TC,
        local_E if load_E is None else load_E, routing.scale, experts,
        CHOICES=routing.choices, SHARED=routing.shared, BLOCK_C=triton.next_power_of_2(columns), BLOCK_E=block,
        GROUPS=routing.groups, BLOCK_G=triton.next_power_of_2(routing.groups), TOP_GROUPS=routing.top_groups,
        RENORMALISE=routing.renormalise, COUNT=load_E is not None, SOFTMAX=routing.softmax, PDL=pdl,
        num_warps=max(1, min(4, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return weights_TC, local_TC


def pairs_by_expert(local_TC: Tensor, experts: int, pdl: bool) -> tuple[Tensor, Tensor]:
    """int32 [G, T] and [G]: the pairs that chose each of ``experts`` local experts, ascending, and how many they are.

    Entries past the count are undefined.
    """
    tokens, pairs = local_TC.shape[0], local_TC.numel()
    order_GT = torch.empty(experts, tokens, dtype=torch.int32, device=local_TC.device)
    counts_G = torch.empty(experts, dtype=torch.int32, device=local_TC.device)
    longer = min(_MOST_CHUNK, triton.next_power_of_2(triton.cdiv(pairs, _CHUNKS)))
    block = max(32, min(max(_CHUNK, longer), triton.next_power_of_2(pairs)))
    _order_kernel[(experts, triton.cdiv(pairs, block))](
        local_TC, order_GT, counts_G, tokens,
        CHOICES=local_TC.shape[1], BLOCK=block, PDL=pdl, num_warps=max(1, min(16, block // 256)), launch_pdl=pdl,
    )  # fmt: skip
    return order_GT, counts_G
