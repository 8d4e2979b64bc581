"""Nemotron-H through an engine: blocks of one mixer, Mamba-2 state in slots, experts behind a sigmoid router.

The toy of test_hybrid.py has the same contract; here it is a real recurrence with a window of its latest inputs. What
every model goes through (test_lives.py, test_depths.py, test_poison.py), this one goes through there, too, behind
the mark ``long``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.layers.mamba2 import Mamba2
from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from runtime.engine import Engine
from tests.models.tiny_nemotron import NEMOTRON
from tests.runtime.engine.conftest import long, over_model
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import ending, live, oracle, people, prompt, same
from tests.runtime.engine.rig import TINY, request, rig, run
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.engine.test_hybrid import on_banks, whole
from tests.runtime.engine.test_windows import windows


def sharpen(engine: Engine) -> None:
    """Dummy filters and time steps remember little; these do, so that a token that is missed shows."""
    for layer in engine.executor._model.layers:
        if isinstance(mamba := layer.mixer, Mamba2):
            mamba.conv.weight.mul_(3.0)
            mamba.ssm.A_log.sub_(1.5)


def test_token_by_token_equals_all_at_once() -> None:
    """Prompt chunks of 8 tokens, of which the window of 4 taps spans two; then decode."""
    one = request(0, prompt(50), max_tokens=30, stops=())
    with rig(shape=NEMOTRON, max_prefill_tokens=8, kernels=exact_kernels(), dtype=torch.float64) as engine:
        sharpen(engine)
        answer = run(engine, [one])[0].token_ids
        likely = whole(engine.executor._model, tuple(one.prompt_token_ids) + answer).argmax(1)
    assert len(set(answer)) > 5
    assert likely[49:-1].tolist() == list(answer)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_chunks_of_any_length_give_the_same_logprobs(chunk: int) -> None:
    """Chunks shorter than the window's taps, among rows that decode."""
    requests = people(4, length=13, max_tokens=6)
    life = live(requests, depth=2, shape=NEMOTRON, max_prefill_tokens=chunk + 4, rows=4, prefill_burst=1)
    same(life, oracle(requests, shape=_Frozen.of(NEMOTRON)))


@pytest.mark.parametrize("depth", [long(0), long(2), long(4)])  # of all families: test_lives.py
def test_state_of_free_slots_and_of_the_null_slot_reaches_nobody(depth: int) -> None:
    requests = mixture(11)
    with rig(shape=NEMOTRON, depth=depth) as engine:
        sharpen(engine)
        clean = run(engine, requests)

    def poison(engine: Engine, turn: int) -> None:
        on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))

    with rig(shape=NEMOTRON, depth=depth, blocks=60, buckets=(3, 8)) as engine:
        sharpen(engine)
        assert outcome(run(engine, requests, poison)) == outcome(clean)


@pytest.mark.parametrize("depth", [long(1), 2, long(4)])
def test_ghost_and_padding_rows_leave_every_state_alone(depth: int) -> None:
    """What a slot holds in the end is what its last real token left there, whatever was in flight behind it."""
    one = people(1, length=9, max_tokens=20)[0]
    tokens = live([one], depth=0, shape=NEMOTRON).finished[0].token_ids
    stopped = replace(one, stop_token_ids=(tokens[7],))
    end = tokens.index(tokens[7])

    def life(depth: int) -> list[Tensor]:
        with rig(shape=NEMOTRON, depth=depth, kernels=exact_kernels(), dtype=torch.float64, rows=4) as engine:
            on_banks(engine, list(range(2, 9)), 7.0)  # of slots in which nobody is seated
            assert len(run(engine, [stopped])[0].token_ids) == end + 1
            engine.stop()
            assert engine.counters["ghost_rows"] == depth
            engine.executor.device.compute.synchronize()
            assert all(bool((bank[:, 2:] == 7.0).all()) for bank in engine.executor.pool.banks)
            return [bank[:, 1].clone() for bank in engine.executor.pool.banks]

    serial = life(0)
    assert all(bool(state.any()) for state in serial)
    for mine, expected in zip(life(depth), serial, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("depth", [long(1), long(2), 4])
def test_a_slot_is_cleared_for_whom_it_is_given_next(depth: int) -> None:
    """Evicted under memory pressure and recomputed, cancelled, paused: the slot's next owner starts from zeros."""
    requests = mixture(7)
    with rig(shape=NEMOTRON, depth=0) as engine:
        sharpen(engine)
        serial = outcome(run(engine, requests))

    def act(engine: Engine, turn: int) -> None:
        if turn == 3:
            engine.cancel(0)
            engine.pause(1)
        if turn == 15:
            engine.resume(1)

    with rig(shape=NEMOTRON, depth=depth, blocks=26) as engine:
        sharpen(engine)
        found = outcome(run(engine, requests, act))
        assert engine.counters["evictions"] > 0
    del found[0], serial[0]
    assert found == serial


@pytest.mark.parametrize("ranks", [2, long(4)])
def test_ranks_share_heads_and_replicate_groups(ranks: int) -> None:
    """Four ranks over two groups: each group's B and C twice, and a norm over two ranks' channels."""
    requests = mixture(3, count=8)
    with rig(shape=NEMOTRON, depth=0, kernels=exact_kernels(), dtype=torch.float64) as engine:
        alone = outcome(run(engine, requests))
        full = engine.executor.sizing.shape.layout.bytes_per_slot
    with tensor_rig(ranks, shape=NEMOTRON, depth=2, kernels=exact_kernels(), dtype=torch.float64) as engine:
        assert outcome(run(engine, requests)) == alone
        held = engine.executor.sizing.shape.layout.bytes_per_slot
    assert (held == full // 2) if ranks == 2 else (full // 4 < held < full // 2)


@pytest.mark.parametrize(("widths", "depth"), [long((2, 8), 2), long((33, 32, 1), 4)], ids=str)
def test_windows_give_the_tokens_of_single_steps(
    widths: tuple[int, ...], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some proposals are right and some wrong: state takes in the tokens that are kept, and no others."""
    over_model("nemotron-h", monkeypatch)
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=1 + 7 * i)) for i, r in enumerate(people(6))]
    life = windows(requests, widths, depth=depth)
    assert life.counters["spec_num_accepted_tokens"] > 0
    assert life.counters["spec_num_draft_tokens"] > life.counters["spec_num_accepted_tokens"]
    windows(ending(4, people(6)), widths, depth=depth, right=10)


def test_a_start_takes_a_speculative_config(tmp_path: Path) -> None:
    """Beside prefix caching; the second of two equal prompts goes on from a snapshot."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **NEMOTRON, "max_position_embeddings": 512}))
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        device="cpu",
        max_num_seqs=2,
        block_size=16,
        chain_depth=2,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    control = SingleRankControl()
    with build_engine(config, control=control, collectives=SingleRank(), agree_min=int, device="cpu") as engine:
        asked = [request(i, [*prompt(280), *[7, 8, 9] * 4], max_tokens=16, stops=()) for i in range(2)]
        first, second = (run(engine, [one])[one.request_id].token_ids for one in asked)
        assert first == second
        assert engine.counters["snapshot_restores"] == 1
        assert engine.counters["prefix_hit_tokens"] == 288
        assert engine.counters["spec_num_drafts"] > 0


class _Frozen(dict[str, object]):
    """A shape that a cache may have as its key."""

    @classmethod
    def of(cls, shape: dict[str, object]) -> _Frozen:
        return cls(shape)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items())))
