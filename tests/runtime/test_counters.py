"""engine.counters names everything that the scheduler counts, and docs/observability.md explains each name."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.request import FinishReason
from tests.runtime.engine.lives import prompt
from tests.runtime.engine.rig import request, rig, run

OBSERVABILITY = Path(__file__).resolve().parents[2] / "docs/observability.md"


def test_every_counter_of_the_scheduler_is_one_of_the_engine() -> None:
    with rig(depth=1) as engine:
        requests = [request(request_id, prompt(5 + request_id), max_tokens=3) for request_id in range(3)]
        finished = run(engine, requests)
        assert [finished[request_id].reason for request_id in range(3)] == [FinishReason.LENGTH] * 3
        scheduler, counted = engine.scheduler.counters, engine.counters
        for field in fields(ScheduleCounters):
            if field.type == "int":
                assert counted[field.name] == getattr(scheduler, field.name), field.name
        labelled = {name: n for name, n in counted.items() if name.startswith("finished{")}
        assert labelled == {
            "finished{stop}": 0,
            "finished{length}": 3,
            "finished{error}": 0,
            "finished{cancelled}": 0,
            "finished{rejected}": 0,
        }
        assert counted["admissions"] == 3


def test_every_counter_of_the_engine_is_explained() -> None:
    """In a row of a table, with or without a label; which labels there are, other tests say."""
    rows = [line for line in OBSERVABILITY.read_text().splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)(?:{\w+})?`", row.split("|")[1])}
    with rig(depth=1) as engine:
        run(engine, [request(0, prompt(5), max_tokens=3)])
        counted = {name.partition("{")[0] for name in engine.counters}
    assert len(counted) > 50
    assert counted - explained == set()
