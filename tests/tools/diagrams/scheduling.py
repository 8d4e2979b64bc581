"""Draws the generated parts of docs/scheduling.md from the code they describe: the states, and a worked timeline.

    python -m tests.tools.diagrams.scheduling           rewrites them (make diagram)
    python -m tests.tools.diagrams.scheduling --check   exit code 1 when they are not current

Knows: the transition table, the scheduler's verbs, and the markers in the document.
Does not know: what the text around the markers says.
"""

from __future__ import annotations

import sys
from collections import deque

from runtime.schedule.config import SchedulerConfig, StepLimits
from runtime.schedule.plan import StepKind, StepOutput, StepPlan, StepResult
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.states import TRANSITIONS, State
from tests.tools.diagrams import drawn
from tests.tools.diagrams.drawn import DOCS
from tests.tools.diagrams.scripted_device import Part, ScriptedDevice

DOCUMENT = DOCS / "scheduling.md"


# ---- the states ----


def state_diagram() -> str:
    """The transition table as a Mermaid diagram. A trigger that leads from a state to itself does not exist."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {State.WAITING.value}"]
    for state, row in TRANSITIONS.items():
        lines += [f"    {state.value} --> {following.value} : {trigger.value}" for trigger, following in row.items()]
    lines += [f"    {state.value} --> [*]" for state, row in TRANSITIONS.items() if not row]
    return "\n".join([*lines, "```"])


# ---- a worked timeline ----

PARTS = (
    Part("A", prompt=3, max_tokens=3),
    Part("B", prompt=2, max_tokens=9, stops_after=3),
    Part("C", prompt=3, max_tokens=4, arrives=5),  # before step 5
)


def timeline(depth: int = 2) -> str:
    """Every step of three requests, as a table: what was planned, the two counts after it, and what then landed."""
    scheduler = Scheduler(SchedulerConfig(StepLimits(2, 4, block_size=4, max_model_len=32, depth=depth), blocks=16))
    device = ScriptedDevice(PARTS)
    in_flight: deque[StepResult | None] = deque()
    fences: dict[int, list[str]] = {}  # step: whose slot and blocks return when it lands
    rows = [
        "| step N | `plan()` | A | B | C | `land()` | what it meant |",
        "| ---: | --- | --- | --- | --- | --- | --- |",
    ]
    while scheduler.step == 0 or scheduler.unfinished or in_flight:
        for request_id, part in enumerate(PARTS):
            if part.arrives == scheduler.step:
                scheduler.submit(device.arrival(request_id))
        step = planned = landed = meant = ""
        if scheduler.unfinished:
            step, plan = f"{scheduler.step}", scheduler.plan()
            planned = _planned(plan, device)
            in_flight.append(None if plan is None else device.run(plan))
        counts = [_counts(scheduler, request_id) for request_id in range(len(PARTS))]
        if len(in_flight) > depth or not scheduler.unfinished:
            ghosts = scheduler.counters.ghost_rows
            last_steps = {id_: sequence.last_step for id_, sequence in scheduler.ledger.sequences.items()}
            result = in_flight.popleft()
            output = scheduler.land(scheduler.step - len(in_flight) - 1, result)
            landed = f"{output.step}"
            for ended in output.finished:
                fences.setdefault(last_steps[ended.request_id], []).append(PARTS[ended.request_id].name)
            meant = _meaning(output, scheduler.counters.ghost_rows - ghosts, fences.get(output.step, []))
        rows.append(f"| {step} | {planned} | {' | '.join(counts)} | {landed} | {meant} |")
    return "\n".join(rows)


def _planned(plan: StepPlan | None, device: ScriptedDevice) -> str:
    if plan is None:
        return "void"
    kind = "prefill" if plan.kind is StepKind.PREFILL else "decode"
    return f"{kind} {' '.join(name for name, _ in device.rows(plan))}"


def _counts(scheduler: Scheduler, request_id: int) -> str:
    sequence = scheduler.ledger.sequences.get(request_id)
    if sequence is None:
        return ""
    return f"{sequence.planned_tokens}/{sequence.landed_tokens} {sequence.state.value}"


def _meaning(output: StepOutput, ghosts: int, freed: list[str]) -> str:
    gained = [
        PARTS[row].name for row, count in zip(output.request_ids, output.counts, strict=True) if row >= 0 and count
    ]
    parts = [f"a token for {' and '.join(gained)}"] if gained else []
    parts += [f"**{PARTS[ended.request_id].name} ends: {ended.reason.label}**" for ended in output.finished]
    if ghosts:
        parts.append("the ghost row of B is dropped")
    parts += [f"slot and blocks of {name} are free" for name in freed]
    return "; ".join(parts)


# ---- the document ----

DRAWN = {"states": state_diagram, "timeline": timeline}


def redrawn(text: str) -> str:
    return drawn.redrawn(text, DRAWN)


if __name__ == "__main__":
    sys.exit(drawn.keep(DOCUMENT, redrawn, __doc__))
