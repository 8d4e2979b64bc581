"""A model that keeps a part of each sequence in its slot's row: whose state a step reads, writes and clears.

What every model goes through (test_lives.py, test_depths.py, test_poison.py), this one goes through there too.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import PrefillAttention, StateRows, StepInputs
from models.layers.decoder import Decoder
from models.registry import ARCHITECTURES
from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import ConfigError, EngineConfig
from runtime.engine import Engine
from tests.models.kv_layers import caches_of
from tests.models.toy_hybrid import ARCHITECTURE, HYBRID, ToyHybrid
from tests.runtime.engine.conftest import long
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import live, people, prompt
from tests.runtime.engine.replay_proposer import window_roles
from tests.runtime.engine.rig import TINY, request, rig, run
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_depths import mixture, outcome


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)


def on_banks(engine: Engine, slots: list[int], value: float) -> None:
    """On the compute stream, behind every step launched so far."""
    banks = engine.executor.pool.banks

    def fill() -> None:
        for bank in banks:
            bank[:, slots] = value

    engine.executor.device.compute.submit(fill)


def whole(model: Decoder, tokens: tuple[int, ...]) -> Tensor:
    """Log-probabilities [T, V] of what follows each token, from one forward over all of them and state of its own."""
    length = len(tokens)
    caches = caches_of(model.cache_layout, 2, length)
    positions = torch.arange(length)
    inputs = StepInputs(
        torch.tensor(tokens),
        positions,
        length + positions,
        PrefillAttention(torch.ones(1, 1, dtype=torch.int32), (length,), (length,)),
        state=StateRows(torch.tensor([1]), torch.tensor([length])),
    )
    with torch.inference_mode():
        return torch.log_softmax(model.logits(model(inputs, caches)), 1)


def test_token_by_token_equals_all_at_once() -> None:
    one = request(0, prompt(50), max_tokens=30, stops=())
    with rig(shape=HYBRID, max_prefill_tokens=8, kernels=exact_kernels(), dtype=torch.float64) as engine:
        answer = run(engine, [one])[0].token_ids
        likely = whole(engine.executor._model, tuple(one.prompt_token_ids) + answer).argmax(1)
    assert likely[49:-1].tolist() == list(answer)


@pytest.mark.parametrize("depth", [long(0), 2, long(4)])
def test_state_of_free_slots_and_of_the_null_slot_reaches_nobody(depth: int) -> None:
    """The null slot serves ghosts and padding; a free slot is cleared when somebody is seated in it."""
    requests = mixture(11)
    with rig(shape=HYBRID, depth=depth) as engine:
        clean = run(engine, requests)

    def poison(engine: Engine, turn: int) -> None:
        on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))

    with rig(shape=HYBRID, depth=depth, blocks=60, buckets=(3, 8)) as engine:
        assert outcome(run(engine, requests, poison)) == outcome(clean)


@pytest.mark.parametrize("depth", [long(1), 2, long(4)])
def test_ghost_and_padding_rows_leave_every_state_alone(depth: int) -> None:
    """What a slot holds in the end is what its last real token left there, whatever was in flight behind it."""
    one = people(1, length=9, max_tokens=20)[0]
    tokens = live([one], depth=0, shape=HYBRID).finished[0].token_ids
    stopped = replace(one, stop_token_ids=(tokens[7],))
    end = tokens.index(tokens[7])

    def life(depth: int) -> list[Tensor]:
        with rig(shape=HYBRID, depth=depth, kernels=exact_kernels(), dtype=torch.float64, rows=4) as engine:
            on_banks(engine, list(range(2, 9)), 7.0)  # of slots in which nobody is seated
            assert len(run(engine, [stopped])[0].token_ids) == end + 1
            engine.stop()
            assert engine.counters["ghost_rows"] == depth
            engine.executor.device.compute.synchronize()
            assert all(bool((bank[:, 2:] == 7.0).all()) for bank in engine.executor.pool.banks)
            return [bank[:, 1].clone() for bank in engine.executor.pool.banks]

    serial = life(0)
    assert all(bool(state.any()) for state in serial)
    assert all(torch.equal(mine, oracle) for mine, oracle in zip(life(depth), serial, strict=True))


def test_windows_are_refused(tmp_path: Path) -> None:
    """A row that keeps fewer tokens than its window took in would need the state before them."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | HYBRID))
    guesses = {"method": "ngram", "num_speculative_tokens": 2}
    config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", speculative_config=guesses)
    with pytest.raises(ConfigError, match="cannot be taken back where a proposal is refused"):
        build_engine(config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu")
    roles = window_roles((2,), {0: (1, 2, 3)})
    with pytest.raises(ValueError, match="windows of 2: rows may append"), rig(shape=HYBRID, further_roles=roles):
        pass


def test_two_ranks_hold_a_half_of_each_state() -> None:
    requests = mixture(3)
    with rig(shape=HYBRID, depth=0, kernels=exact_kernels(), dtype=torch.float64) as engine:
        alone = outcome(run(engine, requests))
        full = engine.executor.sizing.shape.layout.bytes_per_slot
    with tensor_rig(2, shape=HYBRID, depth=2, kernels=exact_kernels(), dtype=torch.float64) as engine:
        assert outcome(run(engine, requests)) == alone
        assert engine.executor.sizing.shape.layout.bytes_per_slot == full // 2


@pytest.mark.parametrize("given", [{}, {"num_snapshots": 3}, {"num_snapshots": 0}, {"prefix_caching": False}], ids=str)
def test_prefixes_are_continued_where_there_are_snapshots(
    given: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A prefix's keys and values are of no use where the state behind it is not there."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | HYBRID | {"max_position_embeddings": 512}))
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        device="cpu",
        max_num_seqs=2,
        num_blocks=60,
        max_model_len=320,
        max_prefill_tokens=64,
        **given,
    )
    control = SingleRankControl()
    with (
        caplog.at_level(logging.INFO),
        build_engine(config, control=control, collectives=SingleRank(), agree_min=int, device="cpu") as engine,
    ):
        asked = [request(i, [*range(200), *range(91)], max_tokens=4, stops=()) for i in range(2)]
        first, second = (run(engine, [one])[one.request_id].token_ids for one in asked)
        assert first == second
        count = given.get("num_snapshots", 8) if given.get("prefix_caching", True) else 0
        assert engine.counters["prefix_hit_tokens"] == (288 if count else 0)
        assert engine.scheduler.config.prefix_caching == bool(count)
        assert engine.executor.pool.banks[0].shape[1] == 5 + count
    assert ("prefix caching is off" in caplog.text) == ("num_snapshots" in given and not count)
    assert (f"{count} x 768 B, for prefixes" in caplog.text) == bool(count)
    assert "2 layers x 5 slots x (sum 48 x 4 B + latest 48 x 4 B), the null slot included" in caplog.text
