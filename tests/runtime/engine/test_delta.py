"""Gated delta nets through an engine: families with them give at every depth the tokens of the serial engine.

What every model goes through (test_lives.py, test_depths.py, test_poison.py, test_mixed.py), these go through there
behind the marker ``long``; what state in slots must keep is here, of each family.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.engine import Engine
from runtime.model_checks import missing_invariance
from tests.models.tiny_delta import FAMILIES
from tests.plant import Op, invariant_kernels, kernels_with
from tests.runtime.engine.conftest import long, over_model
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import ending, live, people, prompt
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.serial_answers import serial_answers
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_depths import Logprobs, mixture, outcome
from tests.runtime.engine.test_hybrid import on_banks, whole
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks
from tests.runtime.engine.test_windows import windows

FAMILY = pytest.mark.parametrize("family", FAMILIES)


@FAMILY
def test_token_by_token_equals_all_at_once(family: str) -> None:
    """Chunks of 8 tokens, then steps of one, against one forward pass over everything."""
    one = request(0, prompt(50), max_tokens=12, stops=())
    with rig(shape=FAMILIES[family], max_prefill_tokens=8, kernels=exact_kernels(), dtype=torch.float64) as engine:
        answer = run(engine, [one])[0].token_ids
        likely = whole(engine.executor._model, tuple(one.prompt_token_ids) + answer).argmax(1)
    assert likely[49:-1].tolist() == list(answer)


@pytest.mark.parametrize("family", [*map(long, FAMILIES)])
def test_a_mixture_at_every_depth(family: str) -> None:
    """In float32, with log-probabilities; chunks shorter than the convolution's window come up."""
    requests = mixture(4, count=10)
    asked = {r.request_id for r in requests if r.sampling.logprobs is not None}
    serial = Logprobs(asked)
    with rig(shape=FAMILIES[family], depth=0, max_prefill_tokens=11) as engine:
        expected = outcome(run(engine, requests, watch=serial))
    for depth in (1, 4):
        deep = Logprobs(asked)
        with rig(shape=FAMILIES[family], depth=depth, max_prefill_tokens=11) as engine:
            assert outcome(run(engine, requests, watch=deep)) == expected
            assert engine.counters["chain_breaks{start}"] == 1
            assert engine.counters["ghost_rows"] > 0
        assert deep.by_request.keys() == serial.by_request.keys()


@pytest.mark.parametrize(
    ("family", "depth"),
    [long(family, depth) for family in FAMILIES for depth in (0, 2)],
)
def test_what_belongs_to_nobody_reaches_nobody(family: str, depth: int) -> None:
    """NaN in the null slot, in free slots, in idle blocks, before every turn; rows are evicted meanwhile."""
    requests = mixture(11) + [request(20 + i, range(i, i + 40), max_tokens=50, stops=()) for i in range(4)]
    clean = serial_answers(requests, shape=FAMILIES[family])

    def poison(engine: Engine, turn: int) -> None:
        on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))
        fill_with_nan(engine, idle_blocks(engine))

    with rig(shape=FAMILIES[family], depth=depth, blocks=24, buckets=(3, 8)) as engine:
        assert outcome(run(engine, requests, poison)) == clean
        assert engine.counters["evictions"] > 0


@pytest.mark.parametrize("depth", [long(1), 2, long(4)])
def test_ghost_and_padding_rows_leave_every_state_alone(depth: int) -> None:
    """What a slot holds in the end is what its last real token left there, whatever was in flight behind it."""
    shape = FAMILIES["qwen3-next"]
    one = people(1, length=9, max_tokens=20)[0]
    tokens = live([one], depth=0, shape=shape).finished[0].token_ids
    stopped = replace(one, stop_token_ids=(tokens[7],))

    def life(depth: int) -> list[Tensor]:
        with rig(shape=shape, depth=depth, kernels=exact_kernels(), dtype=torch.float64, rows=4) as engine:
            on_banks(engine, list(range(2, 9)), 7.0)  # of slots in which nobody is seated
            run(engine, [stopped])
            engine.stop()
            assert engine.counters["ghost_rows"] == depth
            engine.executor.device.compute.synchronize()
            assert all(bool((bank[:, 2:] == 7.0).all()) for bank in engine.executor.pool.banks)
            return [bank[:, 1].clone() for bank in engine.executor.pool.banks]

    serial = life(0)
    assert all(bool(state.any()) for state in serial)
    assert all(torch.equal(mine, oracle) for mine, oracle in zip(life(depth), serial, strict=True))


@pytest.mark.parametrize("family", ["qwen3-next", long("qwen3.5"), long("qwen3.5-moe")])
def test_two_ranks_hold_a_half_of_each_state(family: str) -> None:
    requests = mixture(3, count=8)
    shape = FAMILIES[family]
    with rig(depth=0, shape=shape, kernels=exact_kernels(), dtype=torch.float64) as engine:
        alone = outcome(run(engine, requests))
        full = engine.executor.sizing.shape.layout.bytes_per_slot
    with tensor_rig(2, depth=2, shape=shape, kernels=exact_kernels(), dtype=torch.float64) as engine:
        assert outcome(run(engine, requests)) == alone
        assert engine.executor.sizing.shape.layout.bytes_per_slot == full // 2


def test_the_deterministic_mode_serves_them() -> None:
    """Any depth, batch and cut of prompts gives the same bits: log-probabilities are compared as they are."""
    requests = mixture(5, count=5)
    asked, found = {r.request_id for r in requests}, []
    requests = [replace(r, sampling=replace(r.sampling, logprobs=3)) for r in requests]
    for depth, most, rows in ((0, 64, 1), (2, 7, 8)):
        seen = Logprobs(asked)
        kernels = invariant_kernels()
        with rig(shape=FAMILIES["qwen3.5"], depth=depth, max_prefill_tokens=most, rows=rows, kernels=kernels) as engine:
            assert missing_invariance(engine.executor._model) == []
            found.append((outcome(run(engine, requests, watch=seen)), seen.by_request))
    assert found[0] == found[1]


def multiplies_by_zero(gated_delta: Op, *given: Any) -> Any:
    """Masks by a product: what the poison tests must find."""
    out_TV = gated_delta(*given)
    state_SHVK = given[-2]
    state_SHVK += state_SHVK.sum(0, keepdim=True) * 0.0
    return out_TV


def test_the_poison_is_found_where_a_mask_is_a_product() -> None:
    requests = mixture(11, count=6)

    def poison(engine: Engine, turn: int) -> None:
        on_banks(engine, [0], float("nan"))

    answers = []
    for act in (None, poison):
        kernels = kernels_with(exact_kernels(), gated_delta=multiplies_by_zero)
        with rig(shape=FAMILIES["qwen3.5"], kernels=kernels, dtype=torch.float64) as engine:
            answers.append(outcome(run(engine, requests, act)))
    assert answers[0] != answers[1]


# -- windows: state takes in the tokens that are kept ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "how"),
    [
        long("qwen3.5", ((2, 8), 2)),
        *(long(family, ((33, 32, 1), 4)) for family in FAMILIES),
        long("qwen3-next", ((16, 1), 4)),
    ],
    ids=str,
)
def test_windows_give_the_tokens_of_single_steps(
    family: str, how: tuple[tuple[int, ...], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``how``: widths, and the depth. Some proposals are right and some wrong; ends by length, by stop id in the middle
    of a window, penalties."""
    over_model(family, monkeypatch)
    widths, depth = how
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=1 + 7 * i)) for i, r in enumerate(people(6))]
    life = windows(requests, widths, depth=depth)
    assert life.counters["spec_num_accepted_tokens"] > 0
    assert life.counters["spec_num_draft_tokens"] > life.counters["spec_num_accepted_tokens"]
    windows(ending(4, people(6)), widths, depth=depth, right=10)
