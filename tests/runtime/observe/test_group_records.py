"""What the records of a group tell of the steps that it shares with another one: two groups, each a thread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from parallel.control.errors import Cause, Verdict
from runtime.observe.observer import StepObserver
from runtime.observe.step_record import VOID, StepRecord
from runtime.observe.timeline import DEVICE_THREAD, LANDING_THREAD, Timeline
from runtime.schedule.plan import Admit
from runtime.watchdog.crash_report import STEP_RECORDS, Evidence, write_bundle
from tests.runtime.engine.group_rigs import MetExchange, accompanied_rig
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.test_experts import EXPERTS

SHAPE = EXPERTS | {"decoder_sparse_step": 1}
BUCKETS = (1, 2, 4, 8)
# The other group: a prompt that comes while the first has nothing left to run, and answers that outlast the first's.
ARRIVALS = {3: [Admit(request(90, range(40), max_tokens=20, stops=()))]}


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[MetExchange]:
    """Both groups' exchanges, which count the rows that really went through them."""
    made: list[MetExchange] = []
    make = MetExchange.__init__

    def noted(exchange: MetExchange, *arguments: Any) -> None:
        make(exchange, *arguments)
        made.append(exchange)

    monkeypatch.setattr(MetExchange, "__init__", noted)
    return made


@pytest.fixture(params=[pytest.param(0, marks=pytest.mark.long), 2])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def shared_life(
    depth: int, observe: StepObserver, exchanges: Sequence[MetExchange]
) -> tuple[list[StepRecord], list[int]]:
    """The first group's records, and the rows of its exchanges since it was warm."""
    with accompanied_rig(depth=depth, arrivals=ARRIVALS, observe=observe, shape=SHAPE, buckets=BUCKETS) as engine:
        mine = next(exchange for exchange in exchanges if exchange.index == 0)
        warm = len(mine.rows)
        for i in range(3):
            engine.add(request(i, range(3 + i, 20 + i), max_tokens=6, stops=()))
        for _ in range(40):
            engine.step()
        assert not engine.scheduler.unfinished
        assert engine.counters["graph_captures_after_warmup"] == 0
    return observe.recent(), mine.rows[warm:]


def test_records_tell_the_rows_that_went_through_the_exchanges(depth: int, exchanges: list[MetExchange]) -> None:
    records, rows = shared_life(depth, StepObserver(), exchanges)
    shared = [step for step in records if step.launched]
    layers, rest = divmod(len(rows), len(shared))
    assert (layers > 0, rest) == (True, 0)
    assert [step.exchange_rows for step in shared for _ in range(layers)] == rows
    assert all(step.exchange_rows is None for step in records if not step.launched)


def test_a_step_for_the_other_group_s_sake_is_told_apart(depth: int, exchanges: list[MetExchange]) -> None:
    records, _ = shared_life(depth, StepObserver(on_timing=lambda timing: None), exchanges)
    idle = [step for step in records if step.role == VOID and step.launched]
    assert idle
    for step in idle:
        assert (step.rows, step.bucket > 0, step.chained) == (0, True, False)
    assert all((step.device_ended_ms is not None) == step.launched for step in records)
    assert any(not step.launched for step in records), "both are idle in the end"
    decodes = [step for step in records if step.role == "decode"]
    assert {step.bucket for step in decodes} <= set(BUCKETS)
    assert any((step.exchange_rows or 0) > step.bucket for step in decodes), "the other group prefills meanwhile"


def test_the_timeline_and_a_bundle_have_it(depth: int, exchanges: list[MetExchange], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    observe = StepObserver(timeline=Timeline(path, 0, 1))
    records, _ = shared_life(depth, observe, exchanges)
    slices = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    told = {e["args"]["step"]: e["args"].get("exchange_rows") for e in slices if e["tid"] != LANDING_THREAD}
    assert told == {step.step: step.exchange_rows for step in records}
    launched = [event["args"]["step"] for event in slices if event["name"] == "launch"]
    assert launched == [step.step for step in records if step.launched]
    device = [event["args"]["step"] for event in slices if event["tid"] == DEVICE_THREAD]
    assert device == launched
    landing = [event["args"]["step"] for event in slices if event["tid"] == LANDING_THREAD]
    assert landing == [step for step in launched for _ in ("wait", "results")]
    folder = write_bundle(tmp_path, 0, Verdict(Cause.LOST, 1, 2, "why"), Evidence(observe.recent))
    assert folder is not None
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [line["exchange_rows"] for line in lines] == [step.exchange_rows for step in records][-STEP_RECORDS:]


def test_with_one_group_nothing_is_said_of_exchanges(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    observe = StepObserver(timeline=Timeline(path, 0, 1))
    with rig(observe=observe) as engine:
        run(engine, [request(0, (1, 2, 3))])
    assert {step.exchange_rows for step in observe.recent()} == {None}
    assert "exchange_rows" not in path.read_text()
