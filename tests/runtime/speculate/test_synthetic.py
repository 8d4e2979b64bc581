"""Acceptance by a script: its shares are the rates, and nothing but (seed, position) decides a round."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from runtime.execute.proposer import ProposerParts
from runtime.execute.sampling.acceptance import accept
from runtime.execute.sampling.sampler import Draw, Verdict
from runtime.execute.slot_state import SlotColumns, record_dtype
from runtime.schedule.request import FinishReason
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculate.synthetic import AnyTokens, scripted
from runtime.speculative_config import speculative_config
from tests.runtime.engine.lives import Life, live
from tests.runtime.engine.rig import request
from tests.runtime.engine.tensor_ranks import tensor_rig

VOCABULARY = 97


def columns_of(rows: int) -> SlotColumns:
    columns = SlotColumns(torch.zeros(rows, record_dtype(2).itemsize // 4, dtype=torch.int32), 2)
    columns.seed.copy_(torch.arange(rows) % 50)
    columns.length.copy_(torch.arange(rows) // 50 + 5)
    columns.last_token.copy_(torch.arange(rows) % VOCABULARY)
    return columns


def test_the_shares_of_rounds_are_the_rates() -> None:
    rates = (0.8, 0.5, 0.5, 0.1)
    of_it = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY)),
        device=SimpleNamespace(torch_device=torch.device("cpu")),
    )
    proposer = scripted(AnyTokens, rates)(cast(ProposerParts, of_it))
    rows = 20_000
    proposed = proposer.propose(torch.zeros(rows, dtype=torch.int64), columns_of(rows), 4)
    assert proposed.scripted_B is not None
    shares = [float((proposed.scripted_B > place).float().mean()) for place in range(4)]
    assert shares == pytest.approx(rates, abs=0.015)
    assert int(proposed.tokens_BQ.min()) >= 0
    assert int(proposed.tokens_BQ.max()) < VOCABULARY


def test_what_the_script_keeps_takes_the_place_of_draws() -> None:
    """Row 0 keeps two proposals and a draw, row 1 none, row 2 ends by length, row 3 passes a stop id by."""
    none, stop, length = int(FinishReason.NONE), int(FinishReason.STOP), int(FinishReason.LENGTH)
    finish_BW = torch.tensor([[none] * 4, [none] * 4, [none, length, none, none], [stop, none, none, stop]])
    draws_BW = torch.arange(16).view(4, 4)
    proposals_BQ = 50 + torch.arange(12).view(4, 3)
    draw = Draw(draws_BW.reshape(-1), torch.ones(16, dtype=torch.bool))
    verdict = Verdict(torch.ones(16, dtype=torch.int32), finish_BW.reshape(-1).to(torch.int32))
    found = accept(draw, verdict, proposals_BQ, scripted_B=torch.tensor([2, 0, 3, 3]))
    assert found.count_B.tolist() == [3, 1, 2, 4]
    assert found.finish_B.tolist() == [none, none, length, stop]
    gained = [row[:count] for row, count in zip(found.tokens_BW.tolist(), found.count_B.tolist(), strict=True)]
    assert gained == [[50, 51, 2], [4], [56, 57], [59, 60, 61, 15]]


def scripted_life(depth: int, **limits: Any) -> Life:
    keys = {"method": "synthetic", "num_speculative_tokens": 4, "synthetic_acceptance_rates": [0.8, 0.6, 0.3, 0.3]}
    requests = [request(i, range(3 + i, 12), max_tokens=60, stops=()) for i in range(4)]
    how: dict[str, Any] = {"proposer": proposer_for(speculative_config(keys)), "speculation": Speculation(5)}
    return live(requests, depth=depth, **how, **limits)


def test_rounds_are_the_same_at_any_depth_and_on_any_ranks() -> None:
    serial = scripted_life(0)
    assert {count for counts in serial.rounds.values() for count in counts} >= {1, 2, 3, 5}
    assert len({tuple(counts) for counts in serial.rounds.values()}) == 4, "each request has rounds of its own"
    for depth in (2, 4):
        life = scripted_life(depth)
        assert (life.rounds, life.answers) == (serial.rounds, serial.answers)
    for ranks in (2, 4):
        life = scripted_life(2, over=partial(tensor_rig, ranks))
        assert (life.rounds, life.answers) == (serial.rounds, serial.answers)
    assert {len(tokens) for tokens, _ in serial.answers.values()} == {60}
