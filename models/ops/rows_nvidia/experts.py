"""Rows of routers and experts on NVIDIA GPUs.

Knows: which kernel of experts takes how many tokens of which matrices. Does not know: how tiles are chosen
(models/kernels/experts/tiles.py). ``ops`` has ``pdl`` and ``traits``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.kernels.experts import grouped, grouped_tma, route, streamed, streamed_four_bits
from models.kernels.experts.tiles import LongListTiles, long_list_tiles, without_lists
from models.kernels.matmul import four_bits, fragments
from models.kernels.matmul.four_bits import EXPERT_COLUMNS
from models.ops.rows_nvidia.dense import with_pdl
from models.ops.table import INVARIANT, Key, Row, Run
from parallel.layers.weight import Weight


class ExpertCall(NamedTuple):
    """``experts``: of this rank; ``all_experts``: of all ranks. ``up_rows``: of an expert's first matrix. ``loadable``:
    whether TMA takes the matrices. ``blocks``: of both matrices, where they are FP8 (WeightFormat). ``biased``: with
    biases and a clamped activation, which grouped_tma.py does not take. ``coded``: of both matrices, whether they have
    four bits; ``unfit``: why no kernel reads these; ``in_registers``: whether both ``fits`` of fragments.py."""

    tokens: int
    choices: int
    all_experts: int
    experts: int
    hidden: int
    up_rows: int
    inner: int
    loadable: bool
    blocks: tuple[tuple[int, int] | None, tuple[int, int] | None]
    biased: bool = False
    coded: tuple[bool, bool] = (False, False)
    unfit: str | None = None
    in_registers: bool = False


def _call(
    x_TN: Tensor, gate_up: Weight, down: Weight, weights_TC: Tensor, local_TC: Tensor, *, all_experts: int,
    limit: float | None = None,
) -> ExpertCall:  # fmt: skip
    tokens, choices = local_TC.shape
    blocks = gate_up.format.block, down.format.block
    loadable = blocks == (None, None) and grouped_tma.supports(gate_up.data, down.data)
    sizes = down.data.shape[0], down.outputs, gate_up.outputs, down.inner
    coded = gate_up.format.code is not None, down.format.code is not None
    unfit = next((why for matrix in (gate_up, down) if (why := _unfit(x_TN, matrix))), None)
    biased = gate_up.bias is not None
    fit = all(fragments.fits(one.format, one.outputs, one.inner) for one in (gate_up, down))
    return ExpertCall(tokens, choices, all_experts, *sizes, loadable, blocks, biased, coded, unfit, fit)


def _unfit(x_TN: Tensor, matrix: Weight) -> str | None:
    if matrix.format.code is None:
        return None
    if x_TN.dtype not in (torch.bfloat16, torch.float16) or matrix.format.ordered:
        return f"{matrix.format.name} with {x_TN.dtype} activations, or with columns in another order"
    if not four_bits.fits(matrix.format, matrix.inner, EXPERT_COLUMNS):
        return f"{matrix.format.name}: its groups are no powers of two from 16 on"
    return None


def _ragged(call: ExpertCall) -> str | None:
    """Tensor cores need multiples of 16."""
    if call.unfit:
        return call.unfit
    if call.hidden % 16 == 0 and call.inner % 16 == 0:
        return None
    return f"a hidden size of {call.hidden} is no multiple of 16"


def _streams(ops: Any, call: ExpertCall) -> str | None:
    if call.coded != (True, True) and call.blocks != (None, None) and ops.fp8_activations == "always":
        return "--fp8-activations always"
    if call.coded in ((True, False), (False, True)):
        return "one matrix of four bits"
    if all(call.coded) and not call.in_registers:
        return "four bits in rows of no multiple of 32 columns, or in no multiple of 16 rows"
    if without_lists(call.tokens, call.choices, call.all_experts):
        return _ragged(call)
    return "lists of tokens an expert are worth their making"


def _streamed(ops: Any, call: ExpertCall) -> Run:
    pdl, multiprocessors = ops.pdl, ops.traits.multiprocessors
    if call.coded == (True, True):
        return lambda x_TN, gate_up, down, weights_TC, local_TC, all_experts, limit=None: streamed_four_bits.expert_mlp(
            x_TN, gate_up, down, weights_TC, local_TC, pdl, limit=limit
        )
    return lambda x_TN, gate_up, down, weights_TC, local_TC, all_experts, limit=None: streamed.expert_mlp(
        x_TN, gate_up, down, weights_TC, local_TC, pdl, multiprocessors=multiprocessors, limit=limit
    )


def _tiles(ops: Any, call: ExpertCall) -> LongListTiles | None:
    if not ops.traits.hopper or not call.loadable or call.biased or _ragged(call):
        return None
    mean = call.tokens * call.choices / call.all_experts
    return long_list_tiles(mean, call.experts, call.hidden, call.inner, ops.traits, call.up_rows)


def _long_lists(ops: Any, call: ExpertCall) -> Run:
    pdl, tiles = ops.pdl, _tiles(ops, call)
    assert tiles is not None
    return lambda x_TN, gate_up, down, weights_TC, local_TC, all_experts: grouped_tma.expert_mlp(
        x_TN, gate_up, down, weights_TC, local_TC, pdl, tiles
    )


def _lists(ops: Any, call: ExpertCall) -> Run:
    given = {"shared_bytes": ops.traits.shared_bytes, "narrow": ops.fp8_activations != "never"}
    pdl = ops.pdl
    return lambda x_TN, gate_up, down, weights_TC, local_TC, all_experts, limit=None: grouped.expert_mlp(
        x_TN, gate_up, down, weights_TC, local_TC, pdl, all_experts=all_experts, limit=limit, **given
    )


_SAME_BITS = frozenset((INVARIANT,))
ROWS = (
    Row("route_top_k", with_pdl(route.route_top_k), _SAME_BITS),
    Row("route_sigmoid", with_pdl(route.route_sigmoid), _SAME_BITS),
    Row("expert_mlp", _streamed, refuses=_streams),
    Row("expert_mlp", _long_lists, refuses=lambda ops, call: None if _tiles(ops, call) else "short lists"),
    # A list of any length, in tiles of any size, takes each sum in the same order.
    Row("expert_mlp", _lists, _SAME_BITS, refuses=lambda ops, call: _ragged(call)),
)
KEYS = {"expert_mlp": Key(_call)}
