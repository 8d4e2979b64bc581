"""Every Triton kernel of a rank's steps compiled for an H200, on a machine without a GPU: ``python -m ...``.

Prints what every kernel needs (registers, words that it spills, shared memory) and how many of its programs a
multiprocessor holds. ``--late`` compiles nothing: it tells which kernels a running engine would still have to compile.

Knows: which steps reach every kernel. Does not know: how a step runs without a GPU (rank_without_gpu.py), what is too
much (test_compiled_kernels.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.expert_load import start_counting
from models.inputs import DecodeAttention, PrefillAttention, StateRows, StateTree
from models.kernels.attention import rope_decode, rope_prefill
from models.kernels.attention.prefill import TiledPrefill
from models.kernels.attention.rope_prefill import Blocks
from models.kernels.bandwidth_probe import BLOCK, block_maxima
from models.kernels.experts import grouped, grouped_tma, streamed
from models.kernels.experts.tiles import long_list_tiles
from models.kernels.interface import AttentionKind, DeltaRule, Rotation
from models.kernels.matmul.candidates import wide_candidates
from models.kernels.matmul.choice_table import Choice, ChoiceTable, Decoded, Gemv, LinearShape, Skinny, Wide
from models.kernels.matmul.norm import joined_norms, relu2
from models.kernels.recurrent import mamba2_tree, mamba2_triton
from models.kernels.recurrent.mamba2 import Mamba2Weights
from models.kernels.sigmoid_routing import SigmoidRouting
from models.kernels.traits import H200
from models.kv_group import FP8
from models.ops.tuned import shipped_choices
from models.registry import config_from_folder
from parallel.comm.all_reduce_triton import all_reduce_rows
from parallel.comm.ep_exchange_triton import dispatch_rows
from parallel.comm.peer_buffers import PeerBuffers
from parallel.comm.quantised import Quantised
from parallel.comm.symmetric_exchange import ROW_BYTES, limits_of
from parallel.layers.weight import Weight, WeightFormat, fp8, int4, mxfp4, nvfp4
from runtime.execute.cache.block_copy_triton import copy_blocks, move_entries
from runtime.execute.sampling import draft_tree_triton, logit_edits_triton, rejection_triton, token_tables_triton
from runtime.execute.sampling.draft_tree import DraftTree
from runtime.execute.sampling.logit_edits import HISTORY, LogitEdits, RowEdits
from runtime.execute.sampling.token_tables import TokenTables
from runtime.execute.slots.feature import RowView
from runtime.execute.step import step_io_triton, window_io_triton
from runtime.execute.step.packed_step import shorter_prefills
from runtime.schedule.request import MAX_BAD_WORDS, MAX_LOGIT_BIAS
from runtime.speculate import draft_triton
from runtime.speculate.tree_triton import grow_trees
from tests.gpu.expert_cases import share_of
from tests.models.kernels.compiling_driver import Compiled, CompilingDriver
from tests.models.kernels.nvidia_kernels import invariant_nvidia_kernels, nvidia_kernels
from tests.models.kernels.rank_without_gpu import (
    BOUNDED,
    BUCKETS,
    DRAFTS,
    EDITED,
    META,
    MOST_PREFILL,
    SAMPLING,
    SHAPES,
    FirstRank,
    Rank,
    play_an_h200,
    products,
)
from tests.models.kv_layers import empty_kv_layer


def dense(driver: CompilingDriver) -> None:
    """What `make test` compiles of dense shapes: three buckets of 8B, what a row may ask of sampling; the doctor."""
    rank = Rank(driver, "8b")
    for bucket in (1, 32, 128):
        rank.decode(bucket)
    rank.decode(32, SAMPLING[-1])
    rank.decode(32, EDITED)
    for tokens in (MOST_PREFILL, 255):  # the rotation has a form of its own for many tokens
        rank.prefill(tokens)
    for rows, tokens in ((32, 16), (8, 4), (32, 5)):
        rank.several_queries(rows, tokens)
    rank.several_queries(32, 4, absent=True)
    rank.several_queries(1, 32, tree=True)
    two = Rank(driver, "8b", tp=2)
    two.decode(32)
    two.several_queries(1, 16)  # so few that every split is a program, and merged apart
    two.decode(32, BOUNDED)
    Rank(driver, "8b", dtype=torch.float32).decode(24)
    for rows in (32, 128):  # weights as the tall operand, and tokens
        products(driver, likeliest_wide(rows))
    driver.where = "a fork"
    pairs = torch.empty(2, 7, dtype=torch.int64, device=META)
    copy_blocks(torch.empty(36, dtype=torch.int64, device=META), pairs, 9000, words=16 * 8 * 128 // 2)
    copy_blocks(torch.empty(1, dtype=torch.int64, device=META), pairs, 300, words=32 * 128 * 128, halves=36)
    draft_trees(driver)
    windows(driver)
    drawn_guesses(driver)
    grammar_tables(driver)
    fp8_products(driver)
    four_bit_products(driver)
    same_bits(driver, "8b", buckets=(1, 64))
    driver.where = "squared ReLU"
    relu2(torch.empty(32, 3712, dtype=torch.bfloat16, device=META), True)
    driver.where = "doctor, reading"
    block_maxima(torch.empty(64 * BLOCK, dtype=torch.int32, device=META))


def float8_cache(driver: CompilingDriver) -> None:
    """What takes a float8 cache, of 8B: decode, windows, trees, prompts, with scales and without; the deterministic
    mode."""
    driver.codes = True
    rank = Rank(driver, "8b", kv_dtype=FP8)
    for bucket in (1, 32, 128):
        rank.decode(bucket)
    for tokens in (MOST_PREFILL, 255):
        rank.prefill(tokens)
    for rows, tokens in ((32, 16), (8, 4), (32, 5)):
        rank.several_queries(rows, tokens)
    rank.several_queries(1, 32, tree=True)
    for tokens in (2048, 255):
        driver.where = f"scaled, {tokens} tokens"
        rotate = rope_prefill.rope_and_cache if tokens > 255 else rope_decode.rope_and_cache
        packed = torch.empty(tokens, 48 * 128, dtype=torch.bfloat16, device=META)
        _rotate(rotate, packed, 32, kv_dtype=FP8, factors=torch.empty(2, 8, device=META))
    same_bits(driver, "8b", buckets=(1, 64), kv_dtype=FP8)


def more_dense(driver: CompilingDriver) -> None:
    """Further sizes of kernels that ``dense`` has: four ranks, wide products of 256 rows, the deterministic mode's
    other tiles."""
    Rank(driver, "8b", tp=4).decode(1)
    products(driver, likeliest_wide(256))
    same_bits(driver, "8b", buckets=(32, 128))


def draft_trees(driver: CompilingDriver) -> None:
    """What a round of 32 tokens a row has beside attention, of a drafter that guesses 15 places."""
    driver.where = "draft trees"
    rows, places, width, nodes = 8, 15, 16, 32
    wide_BQ, wide_BN, way_BW = (torch.empty(rows, n, dtype=torch.int64, device=META) for n in (nodes - 1, nodes, width))
    ids = torch.empty(rows, places, 8, dtype=torch.int64, device=META)
    grow_trees(ids, torch.empty(rows, places, 8, device=META), nodes - 1)
    draft_tree_triton.lay_out(wide_BQ, places)
    draft_tree_triton.walk(wide_BN, wide_BN, wide_BN, places, False)
    count = torch.empty(rows, dtype=torch.int32, device=META)
    move_entries(torch.empty(36, dtype=torch.int64, device=META), way_BW, way_BW, count, 9000 * 16, 8 * 128 // 2)


def windows(driver: CompilingDriver) -> None:
    """The two ends of a round of 16 tokens a row and of a tree of 32, windows beside chunks, what a single token shows,
    and what drafters do beside their layers."""
    driver.where = "windows"
    rows, width = 8, 16

    def made(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=META)

    numbers, few, records = made(rows), made(rows, dtype=torch.int32), made(65, 80, dtype=torch.int32)
    columns = records.view(torch.int64)[:, 0], records[:, 4], records[:, 6], records[:, 8]
    table, ring = made(65, 128, dtype=torch.int32), made(4, 2000, dtype=torch.int32)
    tables = table[None]
    for tokens, tree in ((width, None), (32, made(rows, 32))):
        last, length, finished, most = (column[:rows] for column in columns)
        window_io_triton.begin(
            numbers, records[:rows], (last, length, finished, most), made(rows, tokens - 1), tree, tables, 64
        )
        flat = made(rows * tokens, dtype=torch.int32)
        drawn, asked = (made(rows * tokens), flat, flat), (made(rows, tokens),) * 3
        nodes = None if tree is None else made(rows, width)
        guesses = made(rows, width - 1)
        for limit in (None, few):
            window_io_triton.commit(
                *(numbers, drawn, guesses, nodes, (limit, limit), asked, (last, length, finished), columns[:3], table),
                (ring, made(1), 2**31),
                codes=(1, 3),
                no_guess=-1,
            )
    step_io_triton.show(few, numbers)
    packed = made(96)
    for tree in (None, made(65, width)):
        guesses = made(65, width - 1)
        step_io_triton.begin_packed((packed, packed, packed, numbers, numbers), columns, tables, 64, guesses, tree)
    how: dict[str, Any] = {"block_size": 64, "positions": 40960}
    draft_triton.lay_out(numbers, last, length, finished, table, 3, **how)
    draft_triton.lay_out(numbers, last, length, finished, table, width, mask_token=151669, **how)
    draft_triton.choose(made(rows, 75), None, 151936)
    draft_triton.choose(made(rows, 75), made(32768), 32768)
    for ids, logits in ((None, made(120, 151936, dtype=torch.bfloat16)), (made(32768), made(120, 16384))):
        for merged in (False, True):
            draft_triton.ranked(draft_triton.shortlist(logits, 0, 8, merged=merged), 8, ids, 32768)
    draft_triton.script(last, length, made(width, dtype=torch.float32), purpose=1)
    state = made(rows, 4096, dtype=torch.bfloat16)
    draft_triton.keep(state, state, numbers, numbers, made(rows, dtype=torch.bool))
    joined_norms(state, state[0], state, state[0], 1e-6, True)


def drawn_guesses(driver: CompilingDriver) -> None:
    """Rejection sampling over windows of 4 tokens: guesses one by one, among all ids or some, with filters or without,
    of all rows or, as beside chunks, of those that decode."""
    driver.where = "drawn guesses"
    batch, guesses, vocab = 8, 3, 151936

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=META)

    def columns(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return made(rows), made(rows, dtype=torch.int64), made(rows, dtype=torch.int32)

    tokens = batch * (guesses + 1)
    index_BQ = made(batch, guesses, dtype=torch.int64)
    for draft, ids_D in ((vocab, None), (32768, made(32768, dtype=torch.int64))):
        for filtered in (False, True):
            threshold_B, threshold_T = (made(rows) if filtered else None for rows in (batch, tokens))
            rejection_triton.draw_guesses(
                made(batch, draft, dtype=torch.bfloat16), ids_D, *columns(batch), threshold_B, first=2, purpose=2
            )
            for drawn_B in (None, made(batch, dtype=torch.bool)):
                rejection_triton.window_candidates(
                    made(tokens, vocab, dtype=torch.bfloat16),
                    *(index_BQ, made(batch, guesses, draft), index_BQ, ids_D, drawn_B, *columns(tokens), threshold_T),
                    token=0,
                    accept=1,
                )


def grammar_tables(driver: CompilingDriver) -> None:
    """Edits of rows, with tables of grammars: a token a row, windows and trees of 8; copies and in place."""
    driver.where = "grammar tables"

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=META)

    batch, vocab, slots = 8, 151936, 9
    grammars = TokenTables(made(16, 1 << 20, dtype=torch.int16), made(slots, 4), made(slots, 15))
    own = made(slots, 3), made(slots, MAX_LOGIT_BIAS), made(slots, MAX_LOGIT_BIAS, dtype=torch.float32)
    bad, allowed, recent = made(slots, MAX_BAD_WORDS, HISTORY + 1), made(slots, vocab // 32), made(slots, HISTORY)
    tables = LogitEdits(*own, bad, allowed, recent, grammars)
    tree = DraftTree(made(batch, 8, dtype=torch.int64), made(batch, 8, dtype=torch.int64), made(batch, 8))
    for width, nodes in ((1, None), (8, None), (8, tree)):
        rows = batch * width
        of_rows = (None, None) if width == 1 else (made(rows, HISTORY), made(rows))
        edits = RowEdits(tables, made(rows, dtype=torch.int64), *of_rows)
        for in_place in (False, True):
            logit_edits_triton.edit_logits(made(rows, vocab, dtype=torch.bfloat16), edits, in_place=in_place)
        slots_B, tokens_BW = made(batch, dtype=torch.int64), made(batch, width, dtype=torch.int64)
        token_tables_triton.table_states(grammars, RowView(slots_B, tokens_BW, nodes))
        logit_edits_triton.advance_edits(tables, slots_B, tokens_BW, made(batch))
    logits, slots_B = made(batch, vocab, dtype=torch.bfloat16), made(batch, dtype=torch.int64)
    for ids_V in (None, made(vocab, dtype=torch.int64)):
        for before in (None, (made(batch), made(batch, 8, dtype=torch.int64)[:, 1])):
            token_tables_triton.bar(logits, grammars, slots_B, before, 0, vocab, ids_V)


def same_bits(driver: CompilingDriver, shape: str, buckets: Sequence[int] = (1, 32, 64, 128), **more: Any) -> None:
    """The deterministic mode: products in every tile, attention with a row's chunks in several programs and in one."""
    rank = Rank(driver, shape, same_bits=True, **more)
    for bucket in buckets:
        rank.decode(bucket)
    rank.prefill(MOST_PREFILL)
    rank.several_queries(2, 16)


def likeliest_wide(rows: int) -> ChoiceTable:
    """A wide kernel for 8B's gate-up and, with K split, for its down."""
    table = ChoiceTable()
    for outputs, inner, split in ((24576, 4096, 1), (4096, 12288, 4)):
        shape = LinearShape(rows, outputs, inner, torch.bfloat16, normed=split == 1, gate_up=split == 1)
        fitting = (c for c in wide_candidates(shape) if isinstance(c, Wide) and c.split == split)
        table.put(shape, max(fitting, key=lambda choice: choice.block_o))
    return table


def experts(driver: CompilingDriver) -> None:
    """And of the sparse one: the streamed and the grouped path, with the load counted; Mixtral's. What it shares with
    dense models is compiled for its sizes by ``--shape 30b-a3b`` only.
    """
    driver.package = "models.kernels.experts."
    rank = Rank(driver, "30b-a3b", tp=2, ep=True)
    start_counting(rank.model)
    for bucket in (1, 4, 32):
        rank.decode(bucket)
    rank.prefill(MOST_PREFILL)
    Rank(driver, "30b-a3b", tp=2, ep=True, dtype=torch.float32).prefill(300)
    mixtral(driver, 1, 64, 2048)
    without_a_gate(driver)
    four_bit_experts(driver)


def more_experts(driver: CompilingDriver) -> None:
    """All tiles."""
    mixtral(driver, 8, 128, 256, 8192)


def mixtral(driver: CompilingDriver, *lists: int) -> None:
    """Its experts over ``lists`` of so many rows."""
    layer = dataclasses.replace(share_of("mixtral-8x7b", 2), device="meta")
    for rows in lists:
        driver.where = f"Mixtral, {rows} rows"
        given = (layer.tokens(rows), *layer.weights(), *layer.chosen(rows), True)
        if rows == 1:
            streamed.expert_mlp(*given)
            continue
        grouped.expert_mlp(*given, all_experts=layer.experts)
        mean = rows * layer.choices / layer.experts
        if (tiles := long_list_tiles(mean, layer.held, layer.hidden, layer.inner)) is not None:
            grouped_tma.expert_mlp(*given, tiles)


def without_a_gate(driver: CompilingDriver) -> None:
    """The experts of Nemotron-3-Nano: the streamed path, short lists and long ones."""
    experts = config_from_folder(SHAPES / "nemotron-3-nano-30b-a3b").experts
    assert experts is not None
    hidden, inner, count, choices = 2688, experts.intermediate_size, experts.count, experts.per_token
    up, down = (
        torch.empty(count, *sizes, dtype=torch.bfloat16, device=META) for sizes in ((inner, hidden), (hidden, inner))
    )
    for rows in (1, 32, 8192):
        driver.where = f"experts of Nemotron-3-Nano, {rows} rows"
        x, weights = (
            torch.empty(rows, hidden, dtype=torch.bfloat16, device=META),
            torch.empty(rows, choices, device=META),
        )
        nvidia_kernels(META).expert_mlp(x, Weight.of(up), Weight.of(down), weights, weights.int(), all_experts=count)
    for groups in (1, 8):
        driver.where = f"sigmoid router, {groups} groups"
        logits, numbers = torch.empty(9, count, device=META), torch.empty(count, dtype=torch.int32, device=META)
        routing = SigmoidRouting(choices, True, groups, max(1, groups // 2), 2.5, softmax=groups == 1)
        real = logits[:, 0] > 0
        nvidia_kernels(META).route_sigmoid(logits, logits[0], routing, numbers, real, numbers.long())


def empty_tree(rows: int, nodes: int) -> StateTree:
    made = partial(torch.empty, rows, nodes, device=META)
    return StateTree(made(dtype=torch.int64), made(dtype=torch.int32))


def mamba(driver: CompilingDriver) -> None:
    """The launches of Nemotron-3-Nano's Mamba-2: decode of few rows and of many, a prefill; and in float32."""
    shape = config_from_folder(SHAPES / "nemotron-3-nano-30b-a3b").mamba
    assert shape is not None
    for dtype in (torch.float32, torch.bfloat16):
        made = partial(torch.empty, dtype=dtype, device=META)
        channels, heads, states = shape.conv_channels, shape.heads, shape.state_size
        of_heads, inner, groups = torch.empty(heads, device=META), shape.inner, shape.groups
        filters, bias = made(channels, shape.taps), made(channels)
        weights = Mamba2Weights(
            *(heads, shape.head_dim, groups, states, filters, bias, of_heads, of_heads, of_heads, made(inner), 1e-5),
            norm_groups=groups,
        )
        window, state = made(9, shape.taps, channels), torch.empty(9, heads, shape.head_dim, states, device=META)
        for rows in (1, 64) if dtype == torch.bfloat16 else (64,):
            driver.where = f"Mamba-2 of {heads} heads, {dtype}, step of {rows}"
            numbers = torch.empty(rows, dtype=torch.int64, device=META)
            projected = made(rows, inner + channels + heads)
            mamba2_triton.step(projected, weights, window, state, StateRows(numbers), numbers, True)
        driver.where = f"Mamba-2 of {heads} heads, {dtype}, scan"
        mamba2_triton.scan(projected, made(rows, channels), weights, state, StateRows(numbers, numbers), True)
    driver.where = f"Mamba-2 of {heads} heads, {dtype}, trees of 33"
    frozen = StateRows(numbers[:8], frozen=True, tree=empty_tree(8, 33))
    given = made(8 * 33, inner + channels + heads), made(8 * 33, channels), weights, state
    mamba2_tree.scan_tree(*given, frozen, True)
    taken = dataclasses.replace(
        frozen, frozen=False, kept_B=numbers[:8].int(), path_BW=numbers[:8].repeat(8).view(8, 8)
    )
    mamba2_triton.scan(*given, taken, True)


def rotation(driver: CompilingDriver) -> None:
    """Each form of a prefill's rotation and cache write, and what other heads make of the one for many tokens."""
    many = rope_prefill.rope_and_cache
    sizes = ((2, 4), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4))
    forms = {f"{heads} heads, {warps} warps": partial(many, blocks=Blocks(heads, warps)) for heads, warps in sizes}
    forms["token by token"] = partial(rope_decode.rope_and_cache)
    for heads in (32, 16):
        for name, run in forms.items():
            driver.where = f"{heads} query heads, {name}"
            _rotate(run, torch.empty(2048, (heads + 16) * 128, dtype=torch.bfloat16, device=META), heads)
    for dtype in (torch.bfloat16, torch.float32):
        for dim in (16, 64, 256, 512):
            for norm in (True, False):
                driver.where = f"{dtype}, heads of {dim}, norm {norm}"
                _rotate(many, torch.empty(512, 48 * dim, dtype=dtype, device=META), 32, norm)
    driver.where = "keys and values, columns of a wider tensor"
    wide = torch.empty(512, 5 * 2 * 8 * 128, dtype=torch.bfloat16, device=META)[:, 2048:4096]
    for run in forms.values():
        _rotate(run, wide, 0)


def _rotate(
    run: Callable[..., Tensor],
    packed: Tensor,
    heads: int,
    norm: bool = True,
    kv_dtype: torch.dtype | None = None,
    factors: Tensor | None = None,
) -> None:
    """``packed`` [tokens, (heads + 8 + 8) * dim] into pages of 64 tokens."""
    tokens, dim = packed.shape[0], packed.shape[1] // (heads + 16)
    q_norm, k_norm = (torch.empty(dim, dtype=packed.dtype, device=META) if norm else None for _ in "qk")
    at = torch.empty(tokens, dtype=torch.int64, device=META)
    kv = empty_kv_layer(tokens // 64 + 1, 64, 8, dim, kv_dtype or packed.dtype, str(META))
    angles = torch.empty(40960, dim, device=META)
    run(packed, heads, kv, Rotation(q_norm, k_norm, 1e-6, angles, at, at, factors), True)


def pushing(driver: CompilingDriver) -> None:
    """Products that keep their result, that push it to one other rank, and to seven."""
    kernels = nvidia_kernels(META)
    choices: tuple[tuple[Choice, int], ...] = (
        (Gemv(4, 512, 2, 1024), 2),
        (Skinny(16, 64, 128, 1, 5, 4, 1024), 16),
        (Skinny(16, 64, 128, 2, 5, 4, 128), 16),
    )
    for choice, rows in choices:
        for size in (1, 2, 8):
            driver.where = str(size)
            x, weight = (torch.empty(n, 2048, dtype=torch.bfloat16, device=META) for n in (rows, 3072))
            into = FirstRank(size).push_buffers(rows, 3072, torch.bfloat16)
            kernels.matmul.run(x, Weight.of(weight), choice, gate_up=False, buffers=into)


def late_products(driver: CompilingDriver) -> None:
    """Products that let the next launch start with their first weights, and behind their last ones, whole and split."""
    kernels = nvidia_kernels(META)
    x, weight = (torch.empty(n, 2048, dtype=torch.bfloat16, device=META) for n in (16, 3072))
    for choice in (
        Skinny(16, 32, 128, 1, 5, 2, 128),
        Skinny(16, 32, 128, 2, 5, 2, 128),
        Wide(16, 64, 128, 2, 5, 4, 256),
    ):
        for late in (False, True):
            driver.where = f"late {late}"
            kernels.matmul.run(x, Weight.of(weight), dataclasses.replace(choice, late=late), gate_up=False)


def fp8_weight(form: WeightFormat, *sizes: int) -> Weight:
    grid = (*sizes[:-2], *form.grid(*sizes[-2:]))
    codes = torch.empty(*sizes, dtype=form.dtype, device=META)
    return Weight(codes, form, None, torch.empty(grid, device=META))


def fp8_products(driver: CompilingDriver) -> None:
    """Steps with FP8 weights: activations as they are, or as codes made by norms, SiLU-mul, attention and all-reduces;
    and what these steps do not choose."""
    rank = Rank(driver, "8b-fp8")
    for rows in (1, 16, 128):
        rank.decode(rows)
    rank.prefill(255)
    rank.several_queries(16, 4, codes=True)
    Rank(driver, "8b-fp8", tp=2).decode(32)
    driver.where = "FP8"
    kernels, form = nvidia_kernels(META), fp8(128, 128)
    for choice, rows in (
        (Skinny(16, 64, 128, 4, 4, 4, 128), 16),
        (Wide(64, 128, 128, 1, 4, 4, 0), 64),
        (Wide(128, 64, 128, 1, 4, 4, 0), 128),
        (Decoded(), 128),
    ):
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, device=META)
        kernels.matmul.run(x, fp8_weight(form, 4096, 4096), choice, gate_up=False)
    for tokens, inner, block in ((32, 768, (128, 128)), (512, 768, (128, 128)), (64, 384, (1, 0))):
        form, x = fp8(*block), torch.empty(tokens, 2048, dtype=torch.bfloat16, device=META)
        up, down = fp8_weight(form, 128, 2 * inner, 2048), fp8_weight(form, 128, 2048, inner)
        chosen = torch.zeros(tokens, 8, dtype=torch.int32, device=META)
        kernels.expert_mlp(x, up, down, chosen.float(), chosen, all_experts=128)
    x = torch.empty(32, 4096, dtype=torch.bfloat16, device=META)
    for group in (128, 4096):
        into = Quantised.empty(32, 4096, group, x.dtype, META)
        kernels.sigmoid_mul(x, x, into=into)
        kernels.silu_mul(torch.cat((x, x), 1), into=into)


FOUR_BITS = (int4(128, torch.bfloat16), int4(32, torch.float16, zeros=True), mxfp4(), nvfp4())


def four_bit_weight(form: WeightFormat, *sizes: int, bias: bool = False) -> Weight:
    grid, rows = (*sizes[:-2], *form.grid(*sizes[-2:])), sizes[:-1]
    return Weight(
        torch.empty(*rows, sizes[-1] // 2, dtype=torch.uint8, device=META),
        form,
        torch.empty(rows, dtype=torch.bfloat16, device=META) if bias else None,
        torch.empty(grid, dtype=form.scale_dtype, device=META),
        zero=torch.empty(grid, dtype=torch.uint8, device=META) if form.zeros else None,
        factor=torch.empty(rows, device=META) if form.factors else None,
    )


def four_bit_products(driver: CompilingDriver) -> None:
    """The first candidate of each kind, and the largest tiles."""
    kernels = nvidia_kernels(META)
    for form in FOUR_BITS:
        for rows in (1, 32, 64, 256):
            driver.where = f"{form.name}, {rows} rows"
            x = torch.empty(rows, 4096, dtype=torch.bfloat16, device=META)
            for weight in (four_bit_weight(form, 4096, 4096), four_bit_weight(form, 24576, 4096)):
                choices = kernels.matmul.candidates(LinearShape.of(x, weight))
                for choice in {type(one): one for one in reversed(choices)}.values():
                    kernels.matmul.run(x, weight, choice, gate_up=weight.outputs > 4096)


def four_bit_experts(driver: CompilingDriver) -> None:
    """Of gpt-oss: a token, lists of few and of many tokens, with biases."""
    kernels = nvidia_kernels(META)
    for form in FOUR_BITS:
        for tokens in (1, 32, 2048):
            driver.where = f"experts of {form.name}, {tokens} tokens"
            x = torch.empty(tokens, 2880, dtype=torch.bfloat16, device=META)
            chosen = torch.zeros(tokens, 4, dtype=torch.int32, device=META)
            up, down = (four_bit_weight(form, 32, rows, 2880, bias=True) for rows in (5760, 2880))
            kernels.expert_mlp(x, up, down, chosen.float(), chosen, all_experts=32, limit=7.0)


def all_reduces(driver: CompilingDriver, *sizes: int) -> None:
    """Between so many ranks, with and without what follows a sum in a decoder. Of float32, whose rows only take more
    stores, between eight.
    """
    for size in sizes:
        made = FirstRank(size).dispatch
        for name, way in {"one-shot": made.one_shot, "pushed": made.pushed, "two-shot": made.two_shot}.items():
            for dtype in (torch.bfloat16, torch.float32)[: 1 + size // 8]:
                driver.where = f"{name}, {size} ranks"
                x, norm = (torch.empty(*shape, dtype=dtype, device=META) for shape in ((16, 4096), (4096,)))
                way(x)
                way(x, residual_TN=x, norm_N=norm, eps=1e-6)


def all_reduces_of_prompts(driver: CompilingDriver, *widths: int) -> None:
    """Of more rows than have a program each, as ranks take them whose buffers have so many: one-shot between two,
    two-shot between four; 8192 is the widest row that they take in bfloat16.
    """
    for ranks, name in ((2, "one-shot"), (4, "two-shot")):
        made = FirstRank(ranks).dispatch
        way = made.one_shot if ranks == 2 else made.two_shot
        for width in widths:
            driver.where = f"{name}, {width} wide"
            x, norm = (torch.empty(*shape, dtype=torch.bfloat16, device=META) for shape in ((2048, width), (width,)))
            way(x, residual_TN=x, norm_N=norm, eps=1e-6)


def exchanges(driver: CompilingDriver, *sizes: int) -> None:
    """There and back, between so many groups: any number of tokens runs the same code."""
    for size in sizes:
        buffers = _of_groups(size, limits_of(size).rows)
        for dtype, width, choices in ((torch.bfloat16, 2048, 8), (torch.bfloat16, 6144, 2), (torch.float32, 2048, 3)):
            driver.where = f"{size} groups"
            for tokens in (1, 13, 16):
                hidden = torch.empty(tokens, width, dtype=dtype, device=META)
                weights = torch.empty(tokens, choices, device=META)
                ids, numbers = (torch.empty(n, dtype=torch.int32, device=META) for n in ((tokens, choices), (128,)))
                dispatch_rows(hidden, weights, ids, 16, numbers, buffers, pdl=True)
            all_reduce_rows(torch.empty(size * 16, width, dtype=dtype, device=META), buffers, scatter=True, pdl=True)


def exchanges_of_prompts(driver: CompilingDriver, *widths: int) -> None:
    """Of more rows than have a program each, between two groups and between four; 8128 is the widest row that they take
    in bfloat16.
    """
    for groups in (2, 4):
        buffers = _of_groups(groups, limits_of(groups).rows)
        rows = 2 * buffers.rows - 1
        for width in widths:
            driver.where = f"{groups} groups, {width} wide"
            hidden, parts = (
                torch.empty(count, width, dtype=torch.bfloat16, device=META) for count in (rows, groups * rows)
            )
            weights, ids = (torch.empty(rows, 8, dtype=dtype, device=META) for dtype in (torch.float32, torch.int32))
            dispatch_rows(
                hidden, weights, ids, rows, torch.empty(128, dtype=torch.int32, device=META), buffers, pdl=True
            )
            all_reduce_rows(parts, buffers, scatter=True, pdl=True)


def _of_groups(size: int, rows: int) -> PeerBuffers:
    use_counts = torch.empty(rows, dtype=torch.int32, device=META)
    return PeerBuffers(tuple((1 + rank) << 40 for rank in range(size)), use_counts, 0, rows, ROW_BYTES)


def shipped_table(driver: CompilingDriver) -> None:
    products(driver, shipped_choices(META))


def too_much(driver: CompilingDriver) -> None:
    """Two products that do not fit: one spills, one asks for more shared memory than there is."""
    few = LinearShape(4, 4096, 4096, torch.bfloat16)
    many = LinearShape(128, 4096, 4096, torch.bfloat16)
    table = ChoiceTable()
    table.put(few, Gemv(block_o=8, chunk=4096, warps=4))
    table.put(many, Skinny(block_m=128, block_o=128, block_k=256, split=1, stages=4, warps=8, prefetch=0))
    products(driver, table)


def prefills(driver: CompilingDriver) -> None:
    """Prefill attention of other models: the largest heads of each dtype, those that need padding, the common ones."""
    prefill_attention(driver, torch.bfloat16, (32, 8, 128, 64), (16, 16, 96, 128), (16, 2, 256, 64), (16, 2, 512, 64))
    prefill_attention(driver, torch.float16, (32, 8, 128, 64))
    prefill_attention(driver, torch.float32, (6, 2, 24, 16), (16, 2, 256, 64))


def more_prefills(driver: CompilingDriver) -> None:
    """Other heads and pages that the shapes here do not have."""
    prefill_attention(driver, torch.bfloat16, (32, 8, 128, 16), (14, 2, 64, 64), (8, 1, 16, 8), (6, 2, 192, 48))
    prefill_attention(driver, torch.float32, (32, 8, 128, 64), (32, 1, 64, 64), (16, 2, 512, 64))


def prefill_attention(driver: CompilingDriver, dtype: torch.dtype, *shapes: tuple[int, int, int, int]) -> None:
    """``shapes``: (heads, key/value heads, head_dim, page size)."""
    for heads, kv_heads, dim, page in shapes:
        driver.where = f"{dtype}, {heads} heads of {dim} over {kv_heads}, pages of {page}"
        q, kv = (
            torch.empty(300, heads, dim, dtype=dtype, device=META),
            empty_kv_layer(9, page, kv_heads, dim, dtype, "meta"),
        )
        inputs = PrefillAttention(torch.empty(2, 641, dtype=torch.int32, device=META), (300,), (500,))
        tiled = TiledPrefill(META, H200)
        tiled.run(q, kv, inputs, tiled.plan(inputs, heads, kv), 0.1)


def kinds(driver: CompilingDriver) -> None:
    """Windows, sinks and soft caps at the heads of gpt-oss, Gemma 3 27B and Gemma 3 1B: decode by every split and over
    a list, draft windows, prompts, and the deterministic mode, that also at the full layers of Gemma 4."""
    driver.package = "models.kernels.attention."
    fast, same = nvidia_kernels(META, prefill="triton"), invariant_nvidia_kernels(META)
    for heads, kv_heads, dim, kind in (
        (64, 8, 64, AttentionKind(128, None, torch.empty(64, device=META))),
        (32, 16, 128, AttentionKind(1024)),
        (32, 16, 128, AttentionKind(1024, 50.0)),
        (4, 1, 256, AttentionKind(512)),
        (16, 2, 512, AttentionKind()),
    ):
        kv = empty_kv_layer(9, 64, kv_heads, dim, torch.bfloat16, "meta")
        made = partial(torch.empty, dtype=torch.bfloat16, device=META)
        for rows, new in ((1, 1), (256, 1), (32, 8)):
            driver.where = f"{heads} heads of {dim}, {rows} rows of {new}"
            whole = partial(torch.empty, dtype=torch.int32, device=META)
            inputs = DecodeAttention(whole(rows, 641), whole(rows), new, 40960)
            q = made(rows * new, heads, dim)
            if dim <= 256:
                fast.decode_attention(q, kv, fast.plan_decode(inputs, heads, kv, kind), 0.1, kind=kind)
            same.decode_attention(q, kv, inputs, 0.1, kind=kind)
        driver.where = f"{heads} heads of {dim}, prompts"
        for kernels in (fast, same):
            prompts = PrefillAttention(torch.empty(2, 641, dtype=torch.int32, device=META), (300,), (500,))
            kernels.prefill_attention(made(300, heads, dim), kv, kernels.plan_prefill(prompts, heads, kv), 0.1, kind)
    driver.package = "models.kernels.experts."
    up, down = Weight.of(made(32, 5760, 2880), made(32, 5760)), Weight.of(made(32, 2880, 2880), made(32, 2880))
    for tokens in (1, 32, 2048):
        driver.where = f"experts of gpt-oss 20B, {tokens} tokens"
        weights = torch.empty(tokens, 4, device=META)
        fast.expert_mlp(made(tokens, 2880), up, down, weights, weights.int(), all_experts=32, limit=7.0)
    up, down = dataclasses.replace(Weight.of(made(128, 1408, 2816)), gelu=True), Weight.of(made(128, 2816, 704))
    gate_up, norm_N = dataclasses.replace(Weight.of(made(4224, 2816)), gelu=True), made(2816)
    for tokens in (1, 32, 2048):
        driver.package = "models.kernels."
        driver.where = f"Gemma 4 26B-A4B, {tokens} tokens"
        weights, x = torch.empty(tokens, 8, device=META), made(tokens, 2816)
        logits, local = made(tokens, 128), torch.empty(128, dtype=torch.int32, device=META)
        fast.route_top_k(logits, 8, True, local, torch.empty(tokens, dtype=torch.bool, device=META), None, 0, weights)
        fast.expert_mlp(x, up, down, weights, weights.int(), all_experts=128)
        fast.add_norm_gate_up(x, x, norm_N, 1e-6, gate_up)
        at = torch.empty(tokens, dtype=torch.int64, device=META)
        for dim, kv_heads, keys_alone in ((256, 8, False), (512, 2, True)):
            turn = Rotation(made(dim), made(dim), 1e-6, torch.empty(4096, dim, device=META), at, at)
            turn = dataclasses.replace(turn, value_norm=True, values_are_keys=keys_alone)
            packed = made(tokens, (16 + kv_heads * (2 - keys_alone)) * dim)
            kv = empty_kv_layer(tokens // 64 + 1, 64, kv_heads, dim, torch.bfloat16, "meta")
            fast.rope_and_cache(packed, 16, kv, turn)


def more_same_bits(driver: CompilingDriver) -> None:
    """The deterministic mode of float32 and of other heads."""
    same_bits(driver, "0.6b")
    same_bits(driver, "30b-a3b", tp=2)
    same_bits(driver, "8b", dtype=torch.float32)


def slot_state(driver: CompilingDriver) -> None:
    """The kernels over slot state at the sizes of Qwen3-Next, and of small float32 heads; Mamba-2's."""
    gated_delta(driver, (16, 32, 128, torch.bfloat16), (2, 4, 24, torch.float32))
    mamba(driver)


def more_slot_state(driver: CompilingDriver) -> None:
    """Heads that do not make a power of two."""
    gated_delta(driver, (8, 24, 128, torch.bfloat16))


def gated_delta(driver: CompilingDriver, *shapes: tuple[int, int, int, torch.dtype]) -> None:
    """Every launch of a prefill, of a mixed step and of decode."""
    driver.package = "models.kernels.recurrent."
    kernels = nvidia_kernels(META)
    for k_heads, v_heads, dim, dtype in shapes:
        driver.where = f"{v_heads} heads of {dim}, {dtype}"
        channels, values = (2 * k_heads + v_heads) * dim, v_heads * dim
        number = torch.empty(v_heads, device=META)
        rule = DeltaRule(k_heads, v_heads, dim, dim, number, number, torch.empty(dim, device=META), 1e-6)
        filters = torch.empty(channels, 4, dtype=dtype, device=META)
        banks = (
            torch.empty(9, 4, channels, dtype=dtype, device=META),
            rule,
            torch.empty(9, v_heads, dim, dim, device=META),
        )
        for tokens, rows in ((2048, 8), (32, 32), (8, 8)):
            projected = torch.empty(tokens, channels + values + 2 * v_heads, dtype=dtype, device=META)
            slots, positions = (torch.empty(n, dtype=torch.int64, device=META) for n in (rows, tokens))
            ends = torch.empty(rows, dtype=torch.int64, device=META)
            kernels.conv_gated_delta(projected, filters, *banks, StateRows(slots, ends), positions)
            if tokens == rows:
                kernels.conv_gated_delta(projected, filters, *banks, StateRows(slots), positions)
        window = torch.empty(8 * 32, channels + values + 2 * v_heads, dtype=dtype, device=META)
        slots, positions = (torch.empty(n, dtype=torch.int64, device=META) for n in (8, 8 * 32))
        kept = torch.empty(8, dtype=torch.int32, device=META)
        path = torch.empty(8, 8, dtype=torch.int64, device=META)
        tree = empty_tree(8, 32)
        of_trees = StateRows(slots, frozen=True, tree=tree), StateRows(slots, kept_B=kept, tree=tree, path_BW=path)
        kernels.conv_gated_delta(window[: 8 * 16], filters, *banks, StateRows(slots, kept_B=kept), positions[: 8 * 16])
        for rows_of_window in (
            *(StateRows(slots, frozen=True), StateRows(slots, kept_B=kept)),
            *(of_trees if v_heads != 24 else ()),  # a second one of 128 would tell nothing new
        ):
            kernels.conv_gated_delta(window, filters, *banks, rows_of_window, positions)
        x = torch.empty(9, 2048, dtype=dtype, device=META)
        kernels.sigmoid_mul(x, x)
        kernels.gated_add(x, x, x, torch.empty(2048, dtype=dtype, device=META))


def small_gpus(driver: CompilingDriver) -> None:
    """For an L40S or RTX 4090 (99 KiB of shared memory a program): every launch that has larger tiles on an H200; FP8
    weights and caches."""
    driver.capability = (8, 9)
    play_an_h200(driver.capability)
    kernels, same = nvidia_kernels(META, prefill="triton"), invariant_nvidia_kernels(META)
    made = partial(torch.empty, dtype=torch.bfloat16, device=META)
    driver.package = "models.kernels.experts.grouped"
    for tokens in (700, 8192):
        driver.where = f"experts of 30B-A3B, {tokens} tokens"
        weights = torch.empty(tokens, 8, device=META)
        up, down = Weight.of(made(128, 2 * 768, 2048)), Weight.of(made(128, 2048, 768))
        kernels.expert_mlp(made(tokens, 2048), up, down, weights, weights.int(), all_experts=128)
    driver.package = "models.kernels.attention."
    driver.where = "prefill attention, heads of 256"
    kv = empty_kv_layer(9, 64, 2, 256, torch.bfloat16, "meta")
    inputs = PrefillAttention(torch.empty(2, 641, dtype=torch.int32, device=META), (300,), (500,))
    inputs = kernels.plan_prefill(inputs, 16, kv)
    kernels.prefill_attention(made(300, 16, 256), kv, inputs, 0.1)
    driver.package = "models.kernels.matmul.invariant"
    for outputs in (24576, 4096):  # K whole and in segments
        driver.where = f"deterministic product of {outputs} columns"
        same.linear(made(8192, 4096), Weight.of(made(outputs, 4096)))
    driver.package = "models.kernels.recurrent.delta_chunk"
    driver.where = "gated delta net, a prompt"
    head = torch.empty(32, device=META)
    rule = DeltaRule(16, 32, 128, 128, head, head, torch.empty(128, device=META), 1e-6)
    slots, positions = (torch.empty(n, dtype=torch.int64, device=META) for n in (8, 2048))
    given = made(2048, 8192 + 4096 + 64), made(8192, 4), made(9, 4, 8192), rule
    state = torch.empty(9, 32, 128, 128, device=META)
    kernels.conv_gated_delta(*given, state, StateRows(slots, slots), positions)
    driver.package = ""
    form = fp8(128, 128)
    for tokens in (1, 32):
        driver.where = f"FP8, {tokens} tokens"
        kernels.linear(made(tokens, 4096), fp8_weight(form, 6144, 4096))
        up, down = fp8_weight(form, 128, 2 * 768, 2048), fp8_weight(form, 128, 2048, 768)
        chosen = torch.zeros(tokens, 8, dtype=torch.int32, device=META)
        kernels.expert_mlp(made(tokens, 2048), up, down, chosen.float(), chosen, all_experts=128)
    driver.where = "float8 cache"
    kv = empty_kv_layer(9, 64, 8, 128, FP8, "meta")
    for rows in (1, 32):
        table = torch.zeros(rows, 64, dtype=torch.int32, device=META)
        decode = kernels.plan_decode(DecodeAttention(table, table[:, 0].contiguous(), 1, 4096), 32, kv)
        kernels.decode_attention(made(rows, 32, 128), kv, decode, 0.1)
    inputs = kernels.plan_prefill(PrefillAttention(table[:2], (300,), (500,)), 32, kv)
    kernels.prefill_attention(made(300, 32, 128), kv, inputs, 0.1)


def ampere(driver: CompilingDriver) -> None:
    """For an A100, which has no instruction for codes of float8_e4m3fn: FP8 weights with activations as they are, and
    four-bit weights with such scales."""
    driver.capability = (8, 0)
    play_an_h200(driver.capability)
    kernels = nvidia_kernels(META, prefill="triton")
    kernels.fp8_activations = kernels.matmul.fp8_activations = "never"
    weight, up, down = (
        fp8_weight(fp8(128, 128), *sizes) for sizes in ((4096, 4096), (32, 1536, 2048), (32, 2048, 768))
    )
    for tokens in (1, 32):
        driver.where, x = f"FP8, {tokens} tokens", torch.empty(tokens, 4096, dtype=torch.bfloat16, device=META)
        kernels.linear(x, weight)
        chosen = torch.zeros(tokens, 4, dtype=torch.int32, device=META)
        kernels.expert_mlp(x[:, :2048].contiguous(), up, down, chosen.float(), chosen, all_experts=32)
    kernels.matmul.run(x, weight, Decoded(), gate_up=False)
    driver.where, weight = "NVFP4", four_bit_weight(nvfp4(), 4096, 4096)
    choices = kernels.matmul.candidates(LinearShape.of(x[:1], weight))
    for choice in {type(one): one for one in reversed(choices)}.values():
        kernels.matmul.run(x[:1], weight, choice, gate_up=False)


PARTS: dict[str, Callable[[CompilingDriver], None]] = {
    "dense": dense,
    "drawn": drawn_guesses,
    "grammars": grammar_tables,
    "more-dense": more_dense,
    "experts": experts,
    "more-experts": more_experts,
    "rotation": rotation,
    "same-bits": more_same_bits,
    "prefill": prefills,
    "more-prefill": more_prefills,
    "kinds": kinds,
    "push": pushing,
    "late-products": late_products,
    "all-reduce": lambda driver: all_reduces(driver, 8),
    "all-reduces-of-prompts": lambda driver: all_reduces_of_prompts(driver, 8192),
    "more-all-reduces-of-prompts": lambda driver: all_reduces_of_prompts(driver, 2048, 4096),
    "more-all-reduce": lambda driver: all_reduces(driver, 2, 3, 5),
    "exchanges": lambda driver: exchanges(driver, 8),
    "exchanges-of-prompts": lambda driver: exchanges_of_prompts(driver, 8192 - 64),
    "more-exchanges-of-prompts": lambda driver: exchanges_of_prompts(driver, 2048, 4096),
    "more-exchanges": lambda driver: exchanges(driver, 2, 3, 5),
    "slot-state": slot_state,
    "float8-cache": float8_cache,
    "more-slot-state": more_slot_state,
    "table": shipped_table,
    "small-gpus": small_gpus,
    "ampere": ampere,
    "too-much": too_much,
}


def whole_rank(rank: Rank) -> None:
    """Every bucket, every kind of sampling, prefill steps of many sizes."""
    start_up(rank)
    for tokens in (777, 200, 40, 13, 5, 1):
        rank.prefill(tokens)
    for features in SAMPLING:
        for bucket in (1, 8, 40, 256):
            rank.decode(bucket, features)
    rank.prefill(300, scored=299)
    for rows, query_len in ((1, 4), (8, 16), (32, 8)):
        rank.several_queries(rows, query_len)


def start_up(rank: Rank) -> None:
    """The steps that an engine rehearses before its first request (runtime/execute/executor.py)."""
    for bucket in reversed(BUCKETS):
        rank.decode(bucket)
    rank.compile_sampling()
    for tokens in (MOST_PREFILL, *shorter_prefills(MOST_PREFILL)):
        rank.prefill(tokens)


def late(driver: CompilingDriver, rank: Rank) -> list[dict[str, str]]:
    """The compilations that the first prefills and the first rows with sampling parameters would wait for."""
    start_up(rank)
    known = set(driver.asked)
    around_steps = (2**power + more for power in range(1, 13) for more in (-1, 0, 1))  # where choices and tiles change
    for tokens in (*around_steps, 13, 40, 200, 777, MOST_PREFILL - 1):
        if not rank.drafts:  # which change no prefill
            rank.prefill(tokens)
    for features in SAMPLING:
        for bucket in (1, 2, 8, 40, BUCKETS[-1]):
            rank.decode(bucket, features)
    return [{"kernel": key[0], "where": where} for key, where in driver.asked.items() if key not in known]


def show(found: Iterable[Compiled]) -> None:
    """As a table in Markdown."""
    print("| kernel | first launched by | constants | warps | registers | spills | shared KiB | programs |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in found:
        constants = " ".join(f"{key}={value}" for key, value in one.constants.items() if value not in (False, None))
        numbers: tuple[Any, ...] = (one.warps, one.registers, one.spills, f"{one.shared / 1024:.1f}", one.programs)
        print(f"| {one.kernel} | {one.where} | {constants} | {' | '.join(map(str, numbers))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=("0.6b", "8b", "32b", "30b-a3b"), help="default: %(default)s")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the group (default: %(default)s)")
    parser.add_argument("--ep", action="store_true", help="each rank has whole experts")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--part", choices=PARTS, help="one of these instead of everything that a rank of --shape runs")
    parser.add_argument("--most-demanding", action="store_true", help="a launch a kernel and its 8-bit types")
    parser.add_argument("--drafts", choices=DRAFTS, help="steps with draft windows, too; what --late tells of them")
    parser.add_argument("--same-bits", action="store_true", help="the kernels of the deterministic mode")
    parser.add_argument("--late", action="store_true", help="tell what would be compiled after start-up; fast")
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    options = parser.parse_args()
    play_an_h200()
    driver = CompilingDriver(compile=not options.late).activate()
    if options.part is not None:
        if options.most_demanding:
            survey = CompilingDriver(compile=False).activate()
            PARTS[options.part](survey)
            driver = CompilingDriver(only=survey.most_demanding()).activate()
        PARTS[options.part](driver)
        found = [*driver.found.values()]
    else:
        dtype = getattr(torch, options.dtype)
        rank = Rank(
            driver,
            options.shape,
            tp=options.tp,
            ep=options.ep,
            dtype=dtype,
            same_bits=options.same_bits,
            drafts=options.drafts,
        )
        if options.late:
            for line in late(driver, rank):
                print(json.dumps(line) if options.json else f"{line['kernel']}: {line['where']}")
            return
        whole_rank(rank)
        found = [*driver.found.values()]
    if options.json:
        for one in found:
            print(json.dumps(one.as_dict()))
    else:
        show(found)


if __name__ == "__main__":
    main()
