"""Token budgets of mixed steps, from step times measured at start-up on this machine.

Knows: which measurements the table of runtime/schedule/budget.py needs, and that all ranks use rank 0's.
Does not know: how a step is measured (runtime/execute/executor.py), how the table is used (runtime/schedule).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import cast

from torch import nn

from models.layers.attention import Attention
from models.layers.decoder import Decoder, DecoderLayer
from models.layers.moe import SparseMLP
from runtime.config import EngineConfig
from runtime.execute.executor import Executor
from runtime.schedule.budget import budget_table, calm_table
from runtime.schedule.config import MixedSteps

log = logging.getLogger(__name__)

_STRIDE_OF_GROUPS = 2  # steps, of which one has chunks (docs/lab/measurements/dp-attention.md#mixed-load)
_FIRST_KV_CELL = 1 << 14  # tokens of KV; cells of the table double from here to what the pool holds


def mixed_steps(
    config: EngineConfig, model: Decoder, executor: Executor, share: Callable[[Callable[[], str]], str] | None
) -> MixedSteps | None:
    """The budgets of steps in which rows decode with chunks; None where none are run.

    With several ranks a collective call. ``share(make)`` returns on every rank what ``make()`` returned on rank 0.
    """
    if not executor.mixes:
        return None
    buckets = executor.captured_tokens
    if not buckets:  # a CPU: no step is padded, and none is measured
        return MixedSteps(costly_prefix=costly_prefix(model))
    costs, kv_ms = list(executor.step_costs().items()), executor.kv_read_ms()
    rows, kv_tokens = config.decode_buckets, _kv_cells(executor.sizing.num_blocks * config.block_size)

    def make() -> str:
        tables = budget_table(costs, kv_ms, rows, kv_tokens, config.itl_target_ms), calm_table(costs, rows)
        return json.dumps([*tables, attention_wave(model)])

    budgets, calm, (tile, wave) = json.loads(make() if share is None else share(make))
    mixed = MixedSteps(
        buckets,
        tuple((row, kv, total) for row, kv, total in budgets),
        tuple((row, chunk) for row, chunk in calm),
        costly_prefix=costly_prefix(model),
        tile=tile,
        wave=wave,
        stride=_STRIDE_OF_GROUPS if config.data_parallel > 1 else 1,
    )
    log.info("%s", _told(mixed, costs, config.itl_target_ms))
    return mixed


def costly_prefix(model: Decoder) -> int:
    """Tokens of a prefix after which a token's attention costs as many multiplications as its matrix products."""
    layers = [cast(DecoderLayer, layer) for layer in model.layers]
    products = sum(_multiplications(layer) for layer in layers)
    attending = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    a_key = sum(2 * mixer.heads * mixer.head_dim for mixer in attending)  # scores, and the sum of values
    return products // a_key if a_key else 0


def attention_wave(model: Decoder) -> tuple[int, int]:
    """MixedSteps.tile and .wave of the model's prefill attention; (0, 0) where they are not known."""
    mixers = [cast(DecoderLayer, layer).mixer for layer in model.layers]
    attending = next((mixer for mixer in mixers if isinstance(mixer, Attention)), None)
    return (0, 0) if attending is None else attending.kernels.prefill_wave(attending.heads, attending.head_dim)


def _multiplications(layer: DecoderLayer) -> int:
    """Of one token, in the matrix products of a layer on this rank."""
    if isinstance(layer.mlp, SparseMLP):
        mlp = layer.mlp
        held, everyones = mlp.experts.experts + mlp.experts.shared, mlp.experts.shared
        others = _parameters(mlp) - _parameters(mlp.experts)
        return _parameters(layer.mixer) + others + _parameters(mlp.experts) * (mlp.choices + everyones) // held
    return _parameters(layer.mixer) + _parameters(layer.mlp)


def _parameters(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def _kv_cells(pool_tokens: int) -> list[int]:
    cells = [_FIRST_KV_CELL]
    while cells[-1] < pool_tokens:
        cells.append(cells[-1] * 2)
    return cells


def _told(mixed: MixedSteps, costs: list[tuple[int, float]], target_ms: float | None) -> str:
    """For the log: the first KV cell of a few row counts."""
    most = {rows: total for rows, kv, total in reversed(mixed.budgets) if kv == _FIRST_KV_CELL}
    few = [(rows, chunk, most[rows]) for rows, chunk in mixed.calm if rows & (rows - 1) == 0]
    told = ", ".join(f"{chunk} beside {rows} rows (step of {total} tokens at most)" for rows, chunk, total in few)
    aim = "as long as is worth it" if target_ms is None else f"{target_ms:g} ms at most"
    powers = [(tokens, ms) for tokens, ms in costs if tokens & (tokens - 1) == 0 or tokens == costs[-1][0]]
    took = ", ".join(f"{tokens} {ms:.{1 if ms >= 100 else 2}f}" for tokens, ms in powers)
    if mixed.stride > 1:
        told += f"; {mixed.stride} times as many in one of {mixed.stride} steps, the same for all groups"
    return (
        f"mixed steps: prompt tokens while few wait: {told}; a step takes {aim} (--itl-target-ms); steps took, by "
        f"tokens, ms: {took}"
    )
