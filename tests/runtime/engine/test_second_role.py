"""A second model in the same engine: a role of its own, added without a change to any other role.

The toy role's program has two stages in one graph: a model of another depth and width runs over the same rows and KV
blocks, with a cache of its own, and then the target decodes. Odd steps are its, even ones the plain decode role's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from models.cache_layout import CacheLayout
from models.kv_group import keys_and_values
from models.ops.select import select_kernels
from models.registry import config_from_dict
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from runtime.execute.launch_spec import GREEDY, LaunchSpec
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.logprobs import StepPromptLogprobs
from runtime.execute.step.gather import gather_decode
from runtime.execute.step.memory import StepParts, Trial
from runtime.schedule.plan import StepKind, StepPlan
from runtime.schedule.request import Request
from tests.plant import make_decode_step, make_row_graphs
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import Life, live, oracle, prompt, same, unbroken
from tests.runtime.engine.rig import TINY, request, rig

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
BUCKETS = (1, 2, 4, 8)


class DraftedDecode:
    """``toy`` first, then the target's decode step; ``steps`` counts its launches. ``toy``: what differs from TINY."""

    name = "drafted decode"

    def __init__(self, parts: StepParts, toy: Mapping[str, object] = SMALL) -> None:
        self.steps = 0
        self._parts = parts
        device = parts.device.torch_device
        config = config_from_dict({**TINY, **toy})
        kernels = select_kernels(device, torch.float32, config.head_dim)
        self._toy = load_model(
            config,
            None,
            load_format="dummy",
            dtype=torch.float32,
            device=device,
            collectives=SingleRank(),
            kernels=kernels,
        )
        self._toy_caches = parts.pool.allocate(self._toy.cache_layout)
        self.guesses_N = parts.device.zeros(BUCKETS[-1], dtype=torch.int64)
        self._target = make_decode_step(parts, name=self.name)
        maps = {bucket: parts.staging.row_map(self.name, bucket) for bucket in parts.config.decode_buckets}
        self.graphs = make_row_graphs(self.name, parts.device, self._both, parts.ring, maps)

    def serves(self, plan: StepPlan, kind: StepKind) -> bool:
        return kind is StepKind.DECODE and plan.step % 2 == 1

    def rehearse(self) -> None:
        rows_B = torch.zeros(BUCKETS[-1], dtype=torch.int64, device=self._parts.device.torch_device)
        self._both(rows_B, GREEDY, 0)
        self._parts.ring.undo()

    def warm_up(self) -> None:
        self.graphs.warm_up(self._parts.config.warm_variants)

    def trials(self, bucket: int, variant: SamplingVariant) -> list[Trial]:
        return [partial(self.graphs.run_over_padding, bucket, variant)]

    def launch(self, spec: LaunchSpec, scores: StepPromptLogprobs | None) -> None:
        self.steps += 1
        self.graphs[spec.shape.rows, spec.shape.variant, spec.shape.exchange].replay()

    def _both(self, rows_B: Tensor, variant: SamplingVariant, exchange_rows: int) -> None:
        self._guess(rows_B)
        self._target.decode(rows_B, variant, exchange_rows)

    def _guess(self, rows_B: Tensor) -> None:
        """One step of the toy model over the rows, as it would draft their next tokens."""
        size = self._parts.limits.block_size
        inputs = gather_decode(self._parts.tables, rows_B, size).inputs(size)
        logits_BV = self._toy.logits(self._toy.forward(inputs, self._toy_caches))
        self.guesses_N[: len(rows_B)].copy_(logits_BV.argmax(1))


LIMITS: dict[str, Any] = {"buckets": BUCKETS, "variants": (GREEDY, SamplingVariant(random=True))}


def arrivals() -> tuple[list[Request], dict[int, list[Request]]]:
    """At once, and by turn: rows come and go, blocks fill up and buckets change over 200 steps."""
    requests = [request(i, prompt(5 + i, i), max_tokens=20 + 9 * i, temperature=i % 2, stops=()) for i in range(10)]
    later = {turn: [request(100 + turn, prompt(7, turn), max_tokens=30, stops=())] for turn in range(20, 200, 25)}
    return requests, later


@pytest.mark.parametrize("depth", [long(0), 2, long(4)])
def test_two_models_take_turns_without_a_capture_or_an_allocation(depth: int) -> None:
    made: list[DraftedDecode] = []

    def make(parts: StepParts) -> DraftedDecode:
        made.append(DraftedDecode(parts))
        return made[-1]

    requests, later = arrivals()
    life = live(requests, depth=depth, later=later, further_roles=(make,), **LIMITS)
    same(life, oracle([*requests, *(one for arriving in later.values() for one in arriving)]))
    take_turns(life, made[-1], depth)  # the first one was measured, and is gone


def take_turns(life: Life, role: DraftedDecode, depth: int) -> None:
    assert life.counters["decode_steps"] >= 200
    assert abs(role.steps - life.counters["decode_steps"] / 2) <= life.counters["prefill_steps"]
    assert len({spec.shape.rows for spec in life.specs if spec.plan.kind is StepKind.DECODE}) == len(BUCKETS)
    assert life.counters["graph_captures_after_warmup"] == 0
    assert life.counters["device_allocs_after_warmup"] == 0
    assert role.guesses_N.any(), "the toy model ran"
    if depth:
        unbroken(life)


def test_memory_is_divided_for_both_models() -> None:
    with rig(further_roles=(DraftedDecode,), buckets=BUCKETS) as engine:
        executor = engine.executor
        target, toy = keys_and_values(2, 16, torch.float32), keys_and_values(1, 8, torch.float32)
        assert executor.pool.layout == executor.sizing.shape.layout == CacheLayout((target,) * 2 + (toy,) * 3)
        assert "3 layers x 2 x 8 tokens x 1 heads x 8 x 4 B" in str(executor.sizing)
