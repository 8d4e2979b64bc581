"""What speculation gained, from a real engine's counters and the decode steps of a full batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.bench.load.engine_backend import run_batch
from launch.bench.load.journal import DecodeStep
from launch.bench.speculation import full_steps, rounds_between
from launch.bench.workload import random_prompts
from runtime.config import EngineConfig
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.runtime.engine.rig import VOCABULARY, rig

KEYS = {"method": "synthetic", "num_speculative_tokens": 3, "synthetic_acceptance_rates": [1, 0.5, 0]}


def test_scripted_rounds_gain_what_the_script_says() -> None:
    prompts = random_prompts(4, 10, 60, VOCABULARY, seed=1)
    prompts = [replace(one, sampling=replace(one.sampling, seed=i)) for i, one in enumerate(prompts)]
    config = EngineConfig(model="tiny", device="cpu", speculative_config=KEYS)
    proposer = proposer_for(speculative_config(KEYS))
    with rig(rows=4, proposer=proposer, speculation=Speculation(4)) as engine:
        journal = run_batch(engine, prompts)
    rounds = rounds_between(config, journal.before, journal.after)
    assert rounds is not None
    assert rounds.label == "synthetic"
    assert rounds.accepted_length == pytest.approx(2.5, abs=0.25)
    figures = rounds.figures()
    first, second, third = figures["spec_decode_per_position_acceptance_rates"]
    assert first > 0.95, "but for a round that its length ends"
    assert second == pytest.approx(0.5, abs=0.2)
    assert third == 0
    assert f"{rounds.accepted_length:.2f} tokens a round" in rounds.text()
    recall = figures["spec_decode_per_position_recall"]
    assert recall[0] == 1, "but for rounds that their length ends, where nothing is compared"
    assert recall[1] == pytest.approx(second / first, abs=0.03)
    assert recall[2] == 0
    assert "recall@1 1.00 " in rounds.text()
    full = full_steps(journal.decode_steps, 4)
    assert full.refused is None
    assert full.tokens == pytest.approx(2.5, abs=0.4)
    assert full.step_s > 0
    assert sum(step.tokens for step in journal.decode_steps) == 4 * 59


def test_a_full_batch_is_all_that_counts() -> None:
    steps = [DecodeStep(n, n * 0.5, rows, tokens) for n, (rows, tokens) in enumerate([(2, 4)] * 5 + [(1, 2)] * 9)]
    assert full_steps(steps, 2).step_s == 0.5
    assert full_steps(steps, 2).tokens == 2
    refused = full_steps(steps[2:], 2).refused
    assert refused is not None
    assert "3 decode steps ran all 2 rows" in refused


def test_an_engine_without_has_no_rounds() -> None:
    assert rounds_between(EngineConfig(model="tiny", device="cpu"), {}, {}) is None
