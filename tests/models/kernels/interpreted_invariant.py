"""The kernels of the deterministic mode through Triton's interpreter, on a CPU: ``TRITON_INTERPRET=1 python -m ...``.

A row's result has the same bits in any batch, at any place in it, in tiles of any size, however its sum is shared
between programs, in decode, in windows and in prefill. Products are taken column by column here, as a tensor core does
16 at a time, so bits tell the order of additions. And each result is what the formula says. Exits with an error where
one differs.

Knows: shapes that reach every branch of the kernels, and mutants that must be caught. Does not know: GPUs
(tests/gpu/test_deterministic_gpu.py), where the same kernels run compiled.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from models.inputs import DecodeAttention, MixedAttention, PrefillAttention, StateRows
from models.kernels.attention import invariant as attention
from models.kernels.attention.prefill_tiles import RepeatedTiles
from models.kernels.matmul import invariant as matmul
from models.kernels.matmul.invariant import Tile
from models.kernels.sigmoid_routing import SigmoidRouting
from parallel.layers.weight import Weight
from tests.models.kernels.interpreted_kernels import REFERENCE, TRAITS, Cache, check, randn
from tests.models.kernels.nvidia_kernels import InvariantNvidia, check_counters, invariant_nvidia_kernels_on_cpu
from tests.models.kernels.recurrent.delta_cases import DeltaCase
from tests.models.kernels.recurrent.mamba_cases import banks, random_weights, width
from tests.models.kernels.recurrent.tree_cases import FORKED, along_ancestors, grown, path, positions, state_tree
from tests.runtime.engine.rig import request, rig, run

_plain_dot = interpreter.InterpreterBuilder.create_dot


def _dot_by_columns(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """d + a @ b in float32, one column of a after the other."""
    left, right, total = a.data.astype(np.float32), b.data.astype(np.float32), d.data.astype(np.float32)
    for k in range(left.shape[1]):
        total = total + left[:, k : k + 1] * right[k : k + 1]
    return interpreter.TensorHandle(total, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot_by_columns


def same(found: Tensor, expected: Tensor, what: object) -> None:
    assert torch.equal(found, expected), f"{what}: {int((found != expected).sum())} of {found.numel()} differ"


# -- products ------------------------------------------------------------------------------------------------------

TILES = (Tile(16, 64, 128, 3, 4), Tile(32, 32, 64, 2, 4), Tile(64, 64, 128, 3, 4))


def products(kernels: InvariantNvidia) -> None:
    """Three segments; a weight that is no multiple of a tile or step; with SiLU-mul and with a bias."""
    for outputs, inner, dtype, gate_up in (
        (96, 1536, torch.float16, 0),
        (96, 1536, torch.float32, 1),
        (48, 72, torch.float32, 2),
        (50, 72, torch.float16, 0),
    ):
        x, weight = randn(70, inner, dtype=dtype), randn(outputs, inner, dtype=dtype) * inner**-0.5
        bias = None if gate_up else randn(outputs, dtype=dtype)
        segments = matmul.segments_of(outputs, inner)
        assert segments == (3 if inner == 1536 else 1)

        def product(
            x: Tensor, more: dict[str, Any], w: Tensor = weight, b: Tensor | None = bias, g: int = gate_up
        ) -> Tensor:
            return matmul.linear(x, w, b, kernels.sums, kernels.counters, gate_up=g, pdl=False, **more)

        together = product(x, {})
        plain = REFERENCE.linear(x, Weight.of(weight, bias))
        gated = REFERENCE.silu_mul(plain, gelu=gate_up == 2) if gate_up else plain
        check(together, gated, dtype, ("product", outputs, inner))
        for rows in (1, 7, 16, 33):
            picked = torch.randperm(70)[:rows]
            same(product(x[picked], {}), together[picked], ("rows", rows, outputs, inner))
        for tile in TILES[: None if segments > 1 else 1]:
            for apart in (False, True):
                same(product(x[:20], {"tile": tile, "apart": apart}), together[:20], (tile, apart, outputs, inner))
        check_counters(kernels)
    same(kernels.linear(torch.zeros(0, 72), Weight.of(torch.ones(8, 72))), torch.zeros(0, 8), "no rows")


def a_split_by_rows_is_caught(kernels: InvariantNvidia) -> None:
    """The mutant: more segments for fewer rows, as the fastest kernels have it."""
    x, weight = randn(70, 1536, dtype=torch.float32), Weight.of(randn(96, 1536, dtype=torch.float32))
    together = kernels.linear(x, weight)
    plain, matmul.segments_of = matmul.segments_of, lambda weight_rows, inner: 6
    few = kernels.linear(x[:7], weight)
    matmul.segments_of = plain
    check(few, together[:7], torch.float32, "the mutant is right but for its bits")
    assert not torch.equal(few, together[:7])


# -- attention -----------------------------------------------------------------------------------------------------

CASES = (
    (4, 2, 16, 32, torch.float32, 32),  # heads, kv heads, head dim, page, dtype, chunk
    (6, 2, 24, 24, torch.float16, 64),  # blocks of keys that straddle pages; heads that are no power of two
    (40, 1, 16, 16, torch.float32, 32),  # more heads of a kv head than a tile of float32 has rows
)


def attentions(kernels: InvariantNvidia) -> None:
    """A row's queries in one prefill, in chunks, each in a decode step, in windows, alone and beside others."""
    for heads, kv_heads, dim, page, dtype, chunk in CASES:
        length, scale, what = 100, dim**-0.5, (heads, kv_heads, dim, page, dtype)
        cache = Cache([length, length], kv_heads, dim, page, dtype)
        q = randn(length, heads, dim, dtype=dtype)

        def prefill(
            first: int,
            end: int,
            *more: tuple[int, int],
            c: Cache = cache,
            q: Tensor = q,
            s: float = scale,
            n: int = chunk,
        ) -> Tensor:
            """Queries [first, end) of row 0 behind ``more`` (first, end) of row 1."""
            spans = (*more, (first, end))
            inputs = PrefillAttention(
                c.table[[1] * len(more) + [0]], tuple(e - f for f, e in spans), tuple(e for _, e in spans)
            )
            planned = attention.listed_tiles(inputs, q.shape[1], c.kv)
            packed = torch.cat([q[f:e] for f, e in spans])
            found = attention.prefill_attention(
                packed, c.kv, inputs.page_table_BP, planned, s, programs=5, chunk=n, pdl=False
            )
            return found[-(end - first) :]

        whole = prefill(0, length)
        inputs = PrefillAttention(cache.table[:1], (length,), (length,))
        check(whole, REFERENCE.prefill_attention(q, cache.kv, inputs, scale), dtype, ("prefill", what))
        for first, end, more in ((0, 33, ()), (70, 90, ((0, 9), (60, 90))), (99, 100, ((3, 4),))):
            same(prefill(first, end, *more), whole[first:end], ("chunk", first, end, what))

        def decode(
            ends: list[int],
            new: int,
            more: dict[str, Any],
            c: Cache = cache,
            q: Tensor = q,
            s: float = scale,
            n: int = chunk,
        ) -> Tensor:
            lengths = torch.tensor(ends, dtype=torch.int32)
            inputs = DecodeAttention(c.table[[0] * len(ends)], lengths, new, c.table.shape[1] * c.page)
            mine = torch.cat([q[max(0, end - new) : max(new, end)] for end in ends])
            chunks, counters = kernels.attention_sums, kernels.attention_counters
            return attention.decode_attention(
                mine, c.kv, inputs, s, chunks, counters, multiprocessors=8, chunk=n, pdl=False, **more
            )

        places = [1, 32, 65, 100]
        for sharing in (1, 2):
            found = decode(places, 1, {"sharing": sharing})
            same(found, whole[[place - 1 for place in places]], ("decode", sharing, what))
            windows = decode([3, 66], 3, {"sharing": sharing}).view(2, 3, heads, dim)
            for window, end in zip(windows, (3, 66), strict=True):
                same(window, whole[end - 3 : end], ("window", end, sharing, what))
        assert decode([0, 7], 1, {}).isfinite().all()
        check_counters(kernels)


def trees(kernels: InvariantNvidia) -> None:
    """A node of a draft tree as a decode step whose keys lie in the order of its path, over slot state as a chain."""
    parents = [grown(6, 2), FORKED[:6]]
    tree = state_tree(parents)
    for heads, kv_heads, dim, page, dtype, chunk in CASES[:2]:
        roots, scale = (29, 4), dim**-0.5  # one tree lies over two blocks of keys
        cache = Cache([root + 6 for root in roots], kv_heads, dim, page, dtype)
        q = randn(12, heads, dim, dtype=dtype)
        most = cache.table.shape[1] * page
        inputs = DecodeAttention(cache.table, cache.lengths, 6, most, tree_BQ=tree.seen_BN)
        rest = (scale, kernels.attention_sums, kernels.attention_counters)
        how: dict[str, Any] = {"multiprocessors": 8, "chunk": chunk, "pdl": False}
        found = attention.decode_attention(q, cache.kv, inputs, *rest, sharing=1, **how)
        check(found, REFERENCE.decode_attention(q, cache.kv, inputs, scale), dtype, ("trees", heads, dim))
        shared = attention.decode_attention(q, cache.kv, inputs, *rest, sharing=2, **how)
        same(shared, found, ("trees", heads, dim, page, dtype))
        for row, (root, of_row) in enumerate(zip(roots, parents, strict=True)):
            for node in range(6):
                way = torch.tensor(path(of_row, node))
                kv, length = cache.kv.clone(), torch.tensor([root + len(way)], dtype=torch.int32)
                targets = cache.slots(row, root + torch.arange(len(way)))
                kv.flatten(1, 2)[:, targets] = cache.kv.flatten(1, 2)[:, cache.slots(row, root + way)]
                step = DecodeAttention(cache.table[row : row + 1], length, 1, most)
                token = slice(6 * row + node, 6 * row + node + 1)
                expected = attention.decode_attention(q[token], kv, step, *rest, **how)
                same(found[token], expected, ("node", node, heads, dim, page, dtype))
        check_counters(kernels)
    made = DeltaCase(k_heads=1, v_heads=2, k_dim=12, v_dim=20, lengths=(12, 5)).made()
    made.window_SJC[1:3].normal_()
    made.state_SHVK[1:3].normal_()
    banks = made.weight_CJ, made.window_SJC, made.rule, made.state_SHVK

    def run_it(tokens_TX: Tensor, rows: StateRows, positions_T: Tensor) -> Tensor:
        return kernels.conv_gated_delta(tokens_TX, *banks, rows, positions_T)

    rows, at = StateRows(torch.tensor([1, 2]), frozen=True, tree=tree), positions(parents, (7, 2))
    expected = along_ancestors(run_it, made.projected[0], [1, 2], parents)(made.projected[0], rows, at)
    same(run_it(made.projected[0], rows, at), expected, "nodes over slot state")


def blocks(kernels: InvariantNvidia) -> None:
    """Each token of a block as the last one of its row: that sees all of them, too. More tokens than a tile has."""
    heads, kv_heads, dim, page, dtype, chunk = CASES[0]
    block, rest = 17, (dim**-0.5, kernels.attention_sums, kernels.attention_counters)
    how: dict[str, Any] = {"multiprocessors": 8, "chunk": chunk, "pdl": False}
    cache = Cache([block, 70], kv_heads, dim, page, dtype)
    q = randn(2 * block, heads, dim, dtype=dtype)
    inputs = dataclasses.replace(cache.inputs(block), causal=False)
    found = attention.decode_attention(q, cache.kv, inputs, *rest, sharing=1, **how)
    shared = attention.decode_attention(q, cache.kv, inputs, *rest, sharing=2, **how)
    same(shared, found, "a block whose chunks are shared")
    check(found, REFERENCE.decode_attention(q, cache.kv, inputs, dim**-0.5), dtype, "blocks")
    for token in (0, 9, block - 1):
        mine = torch.tensor([token, block + token])
        last = attention.decode_attention(q[mine], cache.kv, cache.inputs(1), *rest, **how)
        same(found[mine], last, ("token of a block", token))
    check_counters(kernels)


def mixed(kernels: InvariantNvidia) -> None:
    """Rows that decode before rows that prefill, planned for a replay; what belongs to no row stays as it is."""
    heads, kv_heads, dim, page, dtype, scale = 4, 2, 16, 16, torch.float32, 0.25
    cache = Cache([700, 90, 600], kv_heads, dim, page, dtype)
    q = randn(3 + 40, heads, dim, dtype=dtype)
    lengths = torch.tensor([700, 0, 600], dtype=torch.int32)
    decode = DecodeAttention(cache.table, lengths, 1, 704, skip_empty=True)
    place = kernels.repeat_prefill(cache.table, 48, heads, cache.kv)
    assert isinstance(place, RepeatedTiles)
    place.plan((0, 40, 0), (700, 90, 600), 3)
    both = MixedAttention(decode, PrefillAttention(cache.table, (43,), (43,), place))
    out = kernels.mixed_attention(q, cache.kv, both, scale)
    alone = PrefillAttention(cache.table[1:2], (40,), (90,))
    alone = kernels.plan_prefill(alone, heads, cache.kv)
    same(out[3:], kernels.prefill_attention(q[3:], cache.kv, alone, scale), "prefill of a mixed step")
    for row in (0, 2):
        one = DecodeAttention(cache.table[row : row + 1], lengths[row : row + 1], 1, 704)
        same(
            out[row : row + 1],
            kernels.decode_attention(q[row : row + 1], cache.kv, one, scale),
            "a row of a mixed step",
        )
        check(out[row : row + 1], REFERENCE.decode_attention(q[row : row + 1], cache.kv, one, scale), dtype, "a row")
    for tree in (None, torch.tensor([[0, 1, 2]], dtype=torch.int32).repeat(3, 1)):  # the root, and two children
        windows = dataclasses.replace(decode, query_len=3, tree_BQ=tree)
        place.plan((0, 34, 0), (700, 90, 600), 9)
        wide = MixedAttention(windows, PrefillAttention(cache.table, (43,), (43,), place))
        out = kernels.mixed_attention(q, cache.kv, wide, scale)
        for row in (0, 2):
            of_row, here = slice(row, row + 1), slice(3 * row, 3 * row + 3)
            seen = None if tree is None else tree[of_row]
            three = DecodeAttention(cache.table[of_row], lengths[of_row], 3, 704, tree_BQ=seen)
            same(out[here], kernels.decode_attention(q[here], cache.kv, three, scale), "a window of a mixed step")
    check_counters(kernels)


# -- experts -------------------------------------------------------------------------------------------------------


def experts(kernels: InvariantNvidia) -> None:
    """Lists of one token and of many, in tiles for either."""
    tokens, hidden, inner, held, choices, dtype = 40, 64, 32, 4, 2, torch.float16
    x = randn(tokens, hidden, dtype=dtype)
    gate_up = Weight.of(randn(held, 2 * inner, hidden, dtype=dtype) * 0.1)
    down = Weight.of(randn(held, hidden, inner, dtype=dtype) * 0.1)
    logits, local = randn(tokens, held, dtype=torch.float32), torch.arange(held, dtype=torch.int32)
    real = torch.ones(tokens, dtype=torch.bool)

    def mlp(rows: Tensor) -> Tensor:
        weights, chosen = kernels.route_top_k(logits[rows], choices, True, local, real[rows])
        return kernels.expert_mlp(x[rows], gate_up, down, weights, chosen, all_experts=held)

    together = mlp(torch.arange(tokens))
    weights, chosen = REFERENCE.route_top_k(logits, choices, True, local, real)
    expected = REFERENCE.expert_mlp(x, gate_up, down, weights, chosen, all_experts=held)
    check(together, expected, dtype, "experts")
    for count in (1, 3, 17):
        picked = torch.randperm(tokens)[:count]
        same(mlp(picked), together[picked], ("experts", count))


def sigmoid_router(kernels: InvariantNvidia) -> None:
    """Scores and choices of a token alone, and among others."""
    tokens, experts, routing = 9, 8, SigmoidRouting(3, True, groups=4, top_groups=2, scale=1.5, shared=1)
    x, router = randn(tokens, 48, dtype=torch.float16), Weight.of(randn(experts, 48, dtype=torch.float16))
    bias, local = randn(experts, dtype=torch.float32), torch.arange(experts + 1, dtype=torch.int32)
    real = torch.ones(tokens, dtype=torch.bool)

    def route(rows: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.route_sigmoid(kernels.router_logits(x[rows], router), bias, routing, local, real[rows])

    together = route(torch.arange(tokens))
    logits = REFERENCE.router_logits(x, router)
    check(together[0], REFERENCE.route_sigmoid(logits, bias, routing, local, real)[0], torch.float32, "sigmoid router")
    for token in range(tokens):
        for found, expected in zip(route(torch.tensor([token])), together, strict=True):
            same(found, expected[token : token + 1], ("sigmoid router", token))
    x = randn(5, 24, dtype=torch.float16)
    same(kernels.relu2(x), REFERENCE.relu2(x), "relu2")
    check_counters(kernels)


# -- slot state ----------------------------------------------------------------------------------------------------


def mamba(kernels: InvariantNvidia) -> None:
    """Rows of several lengths beside each other, and the same tokens of each alone, cut anywhere; nodes of a tree."""
    dtype, lengths = torch.float16, (7, 1, 12)
    weights = random_weights(2, 12, 1, 10, 4, dtype)
    made = [randn(length, width(weights), dtype=dtype) for length in lengths]
    together, alone = banks(weights, dtype, slots=5), banks(weights, dtype, slots=5)
    for mine, theirs in zip(alone, together, strict=True):
        mine.copy_(theirs)
    at = torch.cat([torch.arange(length) for length in lengths])
    rows = StateRows(torch.tensor([1, 2, 3]), torch.tensor(lengths).cumsum(0))
    found = kernels.mamba2(torch.cat(made), weights, *together, rows, at)
    begin = 0
    for slot, tokens in enumerate(made, 1):
        for start, end in ((0, 1), (1, 3), (3, len(tokens))):
            if (count := min(end, len(tokens)) - start) <= 0:
                continue
            one = StateRows(torch.tensor([slot]), torch.tensor([count]))
            part = kernels.mamba2(
                tokens[start : start + count], weights, *alone, one, torch.arange(start, start + count)
            )
            same(found[begin + start : begin + start + count], part, ("mamba", slot, start))
        begin += len(tokens)
    for mine, theirs in zip(alone, together, strict=True):
        same(mine[1:-1], theirs[1:-1], "mamba, banks")

    parents = [grown(6, 2), FORKED[:6]]
    tokens, tree = randn(12, width(weights), dtype=dtype), state_tree(parents)

    def run_it(tokens_TX: Tensor, some: StateRows, positions_T: Tensor) -> Tensor:
        return kernels.mamba2(tokens_TX, weights, *together, some, positions_T)

    rows, at = StateRows(torch.tensor([1, 3]), frozen=True, tree=tree), positions(parents, (7, 12))
    expected = along_ancestors(run_it, tokens, [1, 3], parents)(tokens, rows, at)
    same(run_it(tokens, rows, at), expected, "mamba, nodes")


# -- a whole engine ------------------------------------------------------------------------------------------------

SHAPE: dict[str, object] = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 32, "vocab_size": 64}


def engine(kernels: InvariantNvidia) -> None:
    """Alone and together, serial and chained: the same tokens."""
    requests = [
        request(i, range(3 + i, 9 + 3 * i), max_tokens=2 + i, temperature=0.9 * (i % 2), stops=()) for i in range(2)
    ]
    options: dict[str, Any] = {
        "shape": SHAPE | {"num_hidden_layers": 1},
        "blocks": 24,
        "max_model_len": 64,
        "max_prefill_tokens": 16,
        "kernels": kernels,
    }
    with rig(rows=2, depth=2, buckets=(1, 2), **options) as together:
        found = run(together, requests)
    for one in requests:
        with rig(rows=1, depth=0, **options) as alone:
            assert run(alone, [one])[one.request_id].token_ids == found[one.request_id].token_ids
    check_counters(kernels)


PARTS: tuple[Callable[[InvariantNvidia], None], ...] = (
    products,
    a_split_by_rows_is_caught,
    attentions,
    trees,
    blocks,
    mixed,
    experts,
    sigmoid_router,
    mamba,
    engine,
)


def main() -> None:
    torch.set_num_threads(1)
    for part in PARTS:
        torch.manual_seed(0)
        began = time.perf_counter()
        part(invariant_nvidia_kernels_on_cpu(TRAITS))
        print(f"{part.__name__}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
