"""Whose state a round looks at: the slots of its own rows, in every pass, whoever had these rows the round before.

Recurrent layers have no block ids that somebody would have to refresh between propose and verify: each pass finds its
slots on the device. Here every pass writes down which ones it got, and they are compared with the plan of that very
step, in lives in which rows end, wait and come back, others are seated, and rows change places.

Knows: rounds of their own and rounds beside chunks. Does not know: what is computed of the state (test_delta.py,
test_lives.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from models.inputs import StateRows
from runtime.engine import Engine
from runtime.execute.proposer import Proposed, ProposerParts
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.slot_state import SlotColumns
from runtime.schedule.plan import PADDING_SLOT, StepKind
from runtime.schedule.request import Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.ngram import NgramProposer
from tests.plant import Op
from tests.runtime.engine.conftest import over_model
from tests.runtime.engine.lives import Life, live, oracle, same
from tests.runtime.engine.test_recurrent_rounds import recurrences
from tests.runtime.engine.test_speculation import repeating
from tests.selection import covering

WIDTH = 3
HYBRIDS = ("qwen3.5", "nemotron-h")


@dataclass
class Round:
    """``proposed``: slots for which tokens were guessed; ``ghosts``: those of them whose requests had ended. The slots
    whose state was read to verify, and into which kept tokens were taken, layer by layer."""

    proposed: list[int]
    ghosts: set[int]
    verified: list[list[int]]
    taken_in: list[list[int]]


class Passes:
    """Writes down every round."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.layers = 0

    def begin(self, engine: Engine) -> None:
        """What went before was to warm up."""
        engine.executor.device.compute.synchronize()
        self.rounds.clear()
        self.layers = len(engine.executor._model.slot_mixers)

    def propose(self, rows_B: Tensor, columns: SlotColumns) -> None:
        self.rounds.append(Round(rows_B.tolist(), set(rows_B[columns.finished != 0].tolist()), [], []))

    def advance(self, recurrence: Op, *given: Any) -> Any:
        rows: StateRows = given[-2]
        if rows.kept_B is not None:
            self.rounds[-1].taken_in.append(rows.slots_B.tolist())
        elif rows.frozen or rows.writes_B is not None:
            self.rounds[-1].verified.append(rows.slots_B.tolist())
        return recurrence(*given)


class Noted(NgramProposer):
    def __init__(self, parts: ProposerParts, passes: Passes) -> None:
        super().__init__(parts, 1, 2)
        self._passes = passes

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        self._passes.propose(rows_B, columns)
        return super().propose(rows_B, columns, count)


def restless() -> tuple[list[Request], dict[int, list[Request]]]:
    """Who is there from the beginning, and who comes at which turn: more than rows, of answers of many lengths."""
    asked = [replace(r, sampling=replace(r.sampling, max_tokens=6 + 5 * (r.request_id % 4))) for r in repeating(9)]
    return asked[:5], {6: asked[5:7], 9: asked[7:]}


def played(passes: Passes, depth: int) -> Life:
    first, later = restless()

    def act(engine: Engine, turn: int) -> None:
        if turn == 0:
            passes.begin(engine)
        if turn == 5:
            engine.pause(1)
        if turn == 8:
            engine.resume(1)

    return live(
        first,
        act,
        later=later,
        depth=depth,
        rows=4,
        kernels=recurrences(passes.advance),
        proposer=lambda parts: Noted(parts, passes),
        speculation=Speculation(WIDTH, mixed_percent=100),
        variants=(SamplingVariant(random=True, edits=True),),  # a late capture would be a round of nobody
    )


def serial() -> Life:
    first, later = restless()
    return oracle([*first, *(one for arriving in later.values() for one in arriving)])


def check_slots(life: Life, passes: Passes) -> None:
    """Of every round: what each pass of each layer got is what the plan says, but for ghosts, which have none."""
    specs = [spec for spec in life.specs if spec.shape.width > 1]
    assert len(specs) == len(passes.rounds)
    for spec, seen in zip(specs, passes.rounds, strict=True):
        plan = spec.plan
        decoding, chunks = plan.slots[: plan.decode_rows], [chunk.slot for chunk in plan.chunks]
        live_rows = [PADDING_SLOT if slot in seen.ghosts else slot for slot in decoding]
        assert seen.proposed == _padded(decoding, len(seen.proposed)), f"step {spec.plan.step}"
        assert len(seen.verified) == len(seen.taken_in) == passes.layers
        for slots in seen.verified:
            assert slots == _padded([*live_rows, *chunks], len(slots)), f"step {spec.plan.step}: verify"
        for slots in seen.taken_in:
            assert slots == _padded(live_rows, len(slots)), f"step {spec.plan.step}: take in"


def _padded(slots: Sequence[int], rows: int) -> list[int]:
    return [*slots, *[PADDING_SLOT] * (rows - len(slots))]


@pytest.mark.parametrize(("family", "depth"), covering(HYBRIDS, (0, 2), at_once=1))
def test_every_pass_of_a_round_looks_at_the_slots_of_its_step(
    family: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_model(family, monkeypatch)
    passes = Passes()
    life = played(passes, depth)
    check_slots(life, passes)
    same(life, serial())
    plans = [spec.plan for spec in life.specs if spec.shape.width > 1]
    assert {plan.kind for plan in plans} == {StepKind.DECODE, StepKind.MIXED}
    rows = [dict(enumerate(plan.slots[: plan.decode_rows])) for plan in plans]
    taken = [(a[row], b[row]) for a, b in pairwise(rows) for row in a.keys() & b.keys() if a[row] != b[row]]
    assert len(taken) > 5, "a row is another slot's than the round before"
    moved = [slot for a, b in pairwise(rows) for row, slot in b.items() if slot in a.values() and a.get(row) != slot]
    assert len(moved) > 3, "a slot is in another row than the round before"
    assert any(seen.ghosts - {PADDING_SLOT} for seen in passes.rounds) is bool(depth)


class SlotsOfTheRoundBefore(Passes):
    """In the pass that verifies."""

    def __init__(self, kind: StepKind) -> None:
        super().__init__()
        self._frozen = kind is StepKind.DECODE
        self._before: dict[int, Tensor] = {}

    def begin(self, engine: Engine) -> None:
        super().begin(engine)
        self._before.clear()

    def advance(self, recurrence: Op, *given: Any) -> Any:
        *before, rows, positions = given
        if rows.frozen or rows.writes_B is not None:
            layer, own_B = before[2].data_ptr(), rows.slots_B
            before_B = self._before.get(layer, own_B)
            self._before[layer] = own_B.clone()
            if rows.frozen is self._frozen:
                stale_B = pad(before_B, (0, len(own_B)))[: len(own_B)]
                decided_B = torch.zeros_like(own_B) if rows.frozen else rows.written_B
                rows = replace(rows, slots_B=torch.where(decided_B == PADDING_SLOT, stale_B, own_B))
        return super().advance(recurrence, *before, rows, positions)


@pytest.mark.parametrize(("family", "kind"), covering(HYBRIDS, (StepKind.DECODE, StepKind.MIXED), at_once=1))
def test_slots_of_the_round_before_show(family: str, kind: StepKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what passes got, and in the text."""
    over_model(family, monkeypatch)
    passes = SlotsOfTheRoundBefore(kind)
    life = played(passes, 2)
    with pytest.raises(AssertionError, match="verify"):
        check_slots(life, passes)
    with pytest.raises(AssertionError, match="request"):
        same(life, serial())
