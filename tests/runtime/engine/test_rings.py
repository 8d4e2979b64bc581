"""Every ring of an engine has room for its chain depth: D + 1 steps are launched while the device stands still."""

from __future__ import annotations

import pytest

from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.staging import Staging, _Entry
from runtime.observe.observer import InFlight
from runtime.schedule.plan import Admit
from tests.runtime.engine.rig import request, rig

DEPTHS = (0, 1, 4, 16, 64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("scored", [None, 1], ids=["", "scored"])
def test_as_many_steps_are_launched_as_may_be_in_flight(
    depth: int, scored: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them admits somebody, so each stages changes. The host waits for none, and each finds its own results."""

    def never_wait(staging: Staging, entry: _Entry) -> None:
        assert entry.copied.query(), "the host waits for the oldest step in flight"

    device = TwinDevice()
    with rig(depth=depth, device=device, rows=40, blocks=90, mixed=None) as engine:
        monkeypatch.setattr(Staging, "_await_copied", never_wait)
        executor, scheduler = engine.executor, engine.scheduler
        device.stream("stage").pause()
        device.compute.pause()
        specs: list[LaunchSpec] = []
        for step in range(depth + 1):
            scheduler.submit(Admit(request(step, range(5, 9 + step % 7), max_tokens=1, prompt_logprobs=scored)))
            plan = scheduler.plan()
            assert plan is not None
            specs.append(executor.resolve(plan))
            executor.launch(specs[-1])
        assert executor.staging.counters.copies == depth + 1
        device.stream("stage").resume()
        device.compute.resume()
        landed = {}
        for step, spec in enumerate(specs):
            if step:
                assert scheduler.plan() is None
            result = executor.take(spec)
            scores = result.prompt_logprobs
            landed[step] = tuple(result.tokens), None if scores is None else str(scores)
            scheduler.land(step, result)
        engine.control.turns = scheduler.step  # the engine was passed by, and goes on from here
        engine._in_flight |= {step: InFlight(step, 0) for step in range(scheduler.step - depth, scheduler.step)}
    for step, found in landed.items():  # prompts of equal length are equal, in a place of their own each
        assert found == landed[step % 7], f"step {step}"
