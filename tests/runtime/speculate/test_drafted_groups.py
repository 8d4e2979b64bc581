"""Drafters in data-parallel groups: one group verifies while another decodes, prefills or has no work.

Groups share the experts of their target's layers, and step together for that. Guesses are each group's own affair: a
drafter's layers exchange nothing between groups. Equal tokens would not show a drafter that was told too little, so
every round's guesses are compared with an oracle's, as in test_drafted.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.execute.proposer import MakeProposer, ProposerParts
from runtime.schedule.request import Request
from runtime.schedule.speculation import Speculation
from tests.models.tiny_delta import FAMILIES
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import live
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.test_depths import outcome
from tests.runtime.engine.test_experts import EXPERTS
from tests.runtime.engine.test_groups import Lives
from tests.runtime.speculate.recorded import SHAPE, Drafter, OwnLayer, Recorder, check_rounds
from tests.runtime.speculate.test_drafted import prompt
from tests.runtime.speculate.test_probabilistic import DrawnDrafter

SPARSE: dict[str, Any] = {"shape": {**EXPERTS, "decoder_sparse_step": 1, **SHAPE}}


def everyones(made: list[Recorder], make: MakeProposer) -> MakeProposer:
    """``make``, which keeps what it made in every group."""

    def kept(parts: ProposerParts) -> Recorder:
        recorder = make(parts)
        assert isinstance(recorder, Recorder)
        made.append(recorder)
        return recorder

    return kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        pytest.param("mtp", 0, marks=pytest.mark.long),
        pytest.param("dflash", 2, marks=pytest.mark.long),
        ("qwen3.5-moe", 2),
    ],
    ids=str,
)
def test_every_group_guesses_what_the_oracle_does(kind: str, depth: int, tmp_path: Path) -> None:
    """Windows only with at most two rows: so widths differ between groups, and change while others prefill."""
    drafter: Drafter = OwnLayer(FAMILIES[kind], tmp_path) if kind in FAMILIES else Drafter(kind, tmp_path)
    limits: dict[str, Any] = {"folder": drafter.folder, "shape": None} if kind in FAMILIES else SPARSE
    few = [request(i, prompt(5 + 9 * i, i), max_tokens=20, stops=(), temperature=1.0 * i) for i in range(2)]
    many = [request(10 + i, prompt(9 + 8 * i, 10 + i), max_tokens=8 + 6 * i, stops=()) for i in range(4)]
    late = [request(30, prompt(33, 30), max_tokens=9, stops=())]
    every: list[Request] = [*few, *many, *late]
    rule, made = Speculation(4, most_rows=2), list[Recorder]()
    how: dict[str, Any] = {"speculation": rule, "prefix_caching": False, "max_prefill_tokens": 16, **limits}
    lives = Lives([{0: few, 40: late}, {3: many}], depth=depth, proposer=everyones(made, drafter), **how)
    with rig(depth=0, kernels=exact_kernels(), dtype=made[0].model.dtype, proposer=drafter, **how) as engine:
        found = outcome(run(engine, every))
    assert outcome(lives.finished) == found
    assert all(counters["spec_num_drafts"] > 0 for counters in lives.counters)
    assert lives.counters[1]["speculation_off{batch}"] > 0
    assert all(idle > 0 for idle in lives.idle_steps)
    assert lives.rows[0] == lives.rows[1], "the same exchanges on every group"
    rounds = {key: guesses for recorder in made for key, guesses in recorder.rounds.items()}
    drafter.rounds.clear()
    drafter.rounds.update(rounds)  # looked at over the model of the engine alone, which needs no other group
    texts = {one.request_id: (*one.prompt_token_ids, *lives.finished[one.request_id].token_ids) for one in every}
    assert check_rounds(drafter, texts, every=2) > 10


def test_drawn_guesses_beside_chunks_of_any_group_are_those_of_a_group_alone(tmp_path: Path) -> None:
    """Every step of rows that decode is a window, as in test_probabilistic.py: there tokens depend on nothing else."""
    drafter = DrawnDrafter("mtp", tmp_path)
    draws: dict[str, Any] = {"stops": (), "temperature": 0.7}
    how: dict[str, Any] = {"prefix_caching": False, "blocks": 400, **SPARSE}
    first = [request(i, prompt(5 + 9 * i, i), max_tokens=10, **draws) for i in range(2)]
    second = [request(10 + i, prompt(9 + 20 * i, 10 + i), max_tokens=6, **draws) for i in range(2)]
    late = request(30, prompt(33, 30), max_tokens=4, **draws)
    apart = live([*first, *second, late], depth=0, widths=(4,), proposer=drafter, **how)
    rule = Speculation(4, mixed_percent=100)
    how |= {"dtype": torch.float64, "max_prefill_tokens": 16, "prefill_buckets": (16, 40, 48)}
    lives = Lives([{0: first, 4: [late]}, {3: second}], depth=2, proposer=drafter, speculation=rule, **how)
    found = {i: (ended.token_ids, ended.reason) for i, ended in lives.finished.items()}
    assert found == apart.answers
    for counters in lives.counters:
        assert counters["mixed_steps"] > 0
        assert not [name for name in counters if name.startswith(("speculation_off", "fallbacks"))]
