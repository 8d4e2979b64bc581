"""engine.counters names everything that the scheduler counts."""

from __future__ import annotations

from dataclasses import fields

from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.request import FinishReason
from tests.runtime.engine.lives import prompt
from tests.runtime.engine.rig import request, rig, run


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
