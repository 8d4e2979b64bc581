"""What start-up makes of measured step times, and that all ranks use those of rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor

from models.layers.decoder import Decoder
from parallel.layers.experts import ExpertSplit
from runtime.config import EngineConfig
from runtime.execute.executor import Executor
from runtime.schedule.budget import budget_table, calm_table
from runtime.schedule.config import MixedSteps
from runtime.schedule.plan import PADDING_SLOT
from runtime.step_budget import attention_wave, costly_prefix, mixed_steps
from tests.plant import Op, kernels_with
from tests.runtime.engine.conftest import HYBRIDS
from tests.runtime.engine.group_rigs import Meeting, MetAgreement, MetExchange
from tests.runtime.engine.rig import rig, run
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.engine.test_experts import EXPERTS

LONGEST = 48
COSTS = {16: 4.0, 64: 4.4, 256: 7.7, 1024: 25.0}
CONFIG = EngineConfig(model="m", device="cpu", decode_buckets=(1, 2, 8), block_size=16, max_num_seqs=8)


def measured(costs: dict[int, float], *, mixes: bool = True, captured: bool = True) -> Executor:
    """As much of an executor as is asked here."""
    return cast(
        Executor,
        SimpleNamespace(
            mixes=mixes,
            captured_tokens=tuple(costs) if captured else (),
            step_costs=lambda: costs,
            kv_read_ms=lambda: 0.0001,
            sizing=SimpleNamespace(num_blocks=3000),
        ),
    )


@pytest.fixture
def model() -> Decoder:
    with rig() as engine:
        return engine.executor.decode._parts.model


def test_tables_are_made_of_the_measured_times(model: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        mixed = mixed_steps(CONFIG, model, measured(COSTS), None)
    assert mixed is not None
    assert mixed.buckets == (16, 64, 256, 1024)
    kv_cells = [1 << 14, 1 << 15, 1 << 16]  # the pool has 48,000 tokens
    assert mixed.budgets == budget_table(list(COSTS.items()), 0.0001, (1, 2, 8), kv_cells)
    assert mixed.calm == calm_table(list(COSTS.items()), (1, 2, 8))
    assert mixed.costly_prefix == costly_prefix(model)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "runtime.step_budget"]
    assert f"{dict(mixed.calm)[8]} beside 8 rows" in told
    assert told.endswith(", ".join(f"{tokens} {ms:.2f}" for tokens, ms in COSTS.items()))


def test_a_target_bounds_the_budgets(model: Decoder) -> None:
    config = EngineConfig(
        model="m", device="cpu", decode_buckets=(1, 2, 8), block_size=16, max_num_seqs=8, itl_target_ms=9.0
    )
    mixed, default = (
        mixed_steps(config, model, measured(COSTS), None),
        mixed_steps(CONFIG, model, measured(COSTS), None),
    )
    assert mixed is not None
    assert default is not None
    assert max(total for _, _, total in mixed.budgets) < 300 < max(total for _, _, total in default.budgets)


def test_all_ranks_have_the_tables_of_rank_0(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def leader(make: Callable[[], str]) -> str:
        said.append(make())
        return said[0]

    def follower(make: Callable[[], str]) -> str:
        assert make() != said[0], "it has measured something else"
        return said[0]

    slower = {tokens: 1.3 * ms + 0.01 * tokens for tokens, ms in COSTS.items()}
    monkeypatch.setattr(model.kernels, "prefill_wave", lambda heads, head_dim: (128, 132 // heads))
    of_rank_0 = attention_wave(model)
    first = mixed_steps(CONFIG, model, measured(COSTS), leader)
    monkeypatch.setattr(model.kernels, "prefill_wave", lambda heads, head_dim: (128, 78 // heads))
    second = mixed_steps(CONFIG, model, measured(slower), follower)
    assert first is not None
    assert first == second
    assert (first.tile, first.wave) == of_rank_0 != attention_wave(model)


def test_groups_have_their_chunks_in_the_same_steps(model: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="runtime.step_budget")
    groups = replace(CONFIG, data_parallel=2, expert_parallel=True)
    alone, grouped = (mixed_steps(config, model, measured(COSTS), None) for config in (CONFIG, groups))
    assert alone is not None
    assert grouped is not None
    assert (alone.stride, grouped) == (1, replace(alone, stride=2))
    told = [record.getMessage() for record in caplog.records]
    assert ["; 2 times as many in one of 2 steps, the same for all groups;" in line for line in told] == [False, True]


def test_without_captured_steps_nothing_is_measured_or_rounded(model: Decoder) -> None:
    assert mixed_steps(CONFIG, model, measured(COSTS, mixes=False), None) is None
    unmeasured = mixed_steps(CONFIG, model, measured(COSTS, captured=False), None)
    assert unmeasured == MixedSteps(costly_prefix=costly_prefix(model))


def test_a_prefix_is_costly_where_its_attention_multiplies_as_often_as_the_products(model: Decoder) -> None:
    layer = model.layers[0]
    products = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() == 2)
    a_key = 2 * layer.mixer.heads * layer.mixer.head_dim  # type: ignore[union-attr,operator]
    assert costly_prefix(model) == pytest.approx(products / a_key, rel=0.05), "its norms are hardly anything"


def test_steps_are_timed_with_tokens_that_experts_compute() -> None:
    """Padding goes to no expert: timed so, a step of a sparse model would lack most of its work."""
    routed: list[int] = []

    def noted(expert_mlp: Op, *tensors: Any, **given: Any) -> Any:
        local_TC: Tensor = tensors[-1]
        routed.append(int((local_TC >= 0).sum()))
        chosen.update(local_TC[local_TC >= 0].tolist())
        return expert_mlp(*tensors, **given)

    chosen: set[int] = set()
    requests, sparse = mixture(4), EXPERTS | {"decoder_sparse_step": 1}
    with rig(shape=sparse, prefill_buckets=(16, 32)) as engine:
        expected = outcome(run(engine, requests))
    with rig(shape=sparse, prefill_buckets=(16, 32), kernels=kernels_with(expert_mlp=noted)) as engine:
        executor = engine.executor
        routed.clear()
        assert set(executor.step_costs()) == {16, 32}
        assert max(routed) == 32 * EXPERTS["num_experts_per_tok"], "every token of the largest step"
        assert len(chosen) > EXPERTS["num_experts_per_tok"], "tokens differ, and so do their experts"
        executor.device.compute.synchronize()
        assert not executor.staging.padded_chunks(32).token_ids_T.any()
        assert not executor.tables.block_table_SP[PADDING_SLOT].any()
        assert outcome(run(engine, requests)) == expected


def test_groups_time_steps_with_other_tokens() -> None:
    """Equal ones would choose equal experts: a step of two groups would read as few as one of one."""
    device, host = Meeting(2), Meeting(2)

    def group(index: int) -> set[int]:
        split = ExpertSplit(whole=True, exchange=MetExchange(device, index))
        agreed = MetAgreement(host, index)
        sparse = EXPERTS | {"decoder_sparse_step": 1}
        embedded: set[int] = set()
        with rig(shape=sparse, prefill_buckets=(16,), experts=split, groups=agreed) as engine:
            embedding = engine.executor.decode._parts.model.embedding
            embedding.register_forward_pre_hook(lambda _, given: embedded.update(given[0].tolist()))
            engine.executor.step_costs()
            engine.executor.device.compute.synchronize()
            return embedded

    with ThreadPoolExecutor(2) as threads:
        mine, theirs = threads.map(group, range(2))
    assert len(mine) == len(theirs) == 16
    assert not mine & theirs


@pytest.mark.parametrize(("buckets", "timed"), [((16, 96, 120, 200), {16, 96}), ((16, 100, 200), {16, 100})])
def test_steps_of_more_tokens_than_all_rows_can_have_are_not_timed(buckets: tuple[int, ...], timed: set[int]) -> None:
    with rig(rows=2, prefill_buckets=buckets, max_model_len=LONGEST, max_prefill_tokens=200) as engine:
        assert set(engine.executor.step_costs()) == timed


@pytest.mark.parametrize("kind", sorted(HYBRIDS))
def test_steps_are_timed_with_tokens_that_recurrent_layers_compute(kind: str) -> None:
    """Of a token in no row such a layer may return anything, and not-a-number chooses the same experts for all."""
    took_in: list[tuple[list[int], list[int], list[int]]] = []

    def noted(causal_conv: Op, x_TC: Tensor, *given: Any) -> Any:
        rows, positions_T = given[-2:]
        if rows.ends_B is not None:
            took_in.append((rows.ends_B.tolist(), rows.slots_B.tolist(), positions_T.tolist()))
            window_SJC = given[-3]
            assert not window_SJC[rows.slots_B[rows.slots_B > 0]].any(), "who is seated anew has no state"
        return causal_conv(x_TC, *given)

    buckets, kernels = (16, LONGEST + 12), kernels_with(causal_conv=noted)
    with rig(shape=HYBRIDS[kind], prefill_buckets=buckets, max_model_len=LONGEST, kernels=kernels) as engine:
        executor = engine.executor
        took_in.clear()
        assert set(executor.step_costs()) == set(buckets), "the largest, too"
        executor.device.compute.synchronize()
        rows = len(executor.staging.padded_chunks(LONGEST + 12).slots_R)
        one, two = [16] * rows, [LONGEST] + [LONGEST + 12] * (rows - 1)
        assert took_in
        for ends, slots, positions in took_in:
            assert positions == [at % LONGEST for at in range(ends[-1])]
            assert ends == (one if ends[-1] == 16 else two)
            assert slots == ([1] if ends[-1] == 16 else [1, 2]) + [PADDING_SLOT] * (rows - 1 - (ends[-1] > 16))
        chunks = executor.staging.padded_chunks(LONGEST + 12)
        for left in (chunks.token_ids_T, chunks.positions_T, chunks.slots_T, chunks.slots_R, chunks.logit_rows_R):
            assert not left.any()
        assert not executor.tables.block_table_SP.any()
