"""Where the steps between a request's arrival and its plan go, on every rank.

    torchrun --nproc-per-node 2 -m tests.runtime.engine.arrival_ranks FOLDER OUTPUT [OPTIONS]

FOLDER: a model's. OPTIONS: fields of the EngineConfig, as JSON. Knows: the engine's own marks of a turn, in step
numbers. Does not know: clocks.

A request arrives while the engine waits for a step to land, as it does most of the time. OUTPUT gets a row of step
numbers for each: ``running``, the step that the device is busy with; ``turn``, the turn that waits for it; ``record``,
the turn that announces the request; ``effect``, the turn in which all ranks have it; ``planned``, the step with its
first chunk; ``landed``, the turn that brings its first token. The last rank's ``effect`` and ``planned`` are told, too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from launch.ranks.process_group import joined
from launch.ranks.rendezvous import discover
from launch.ranks.start_engine import open_engine
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.execute.launch_spec import LaunchSpec
from runtime.schedule.plan import Admit, Event, Finished, StepPlan, StepResult
from tests.runtime.engine.rig import request

ARRIVALS = 12
EVERY = 7  # turns from one arrival to the next, no multiple of any depth or horizon
_BACKGROUND = 90  # tokens of the request that decodes all the while


class Marks:
    """Puts itself between an engine and its parts, and notes step numbers by request id."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rows: dict[int, dict[str, int]] = {}
        self._by_token: dict[int, int] = {}
        self._submit, self._plan = engine.scheduler.submit, engine.scheduler.plan
        self._take, self._exchange = engine.executor.take, engine.control.exchange
        engine.scheduler.submit, engine.scheduler.plan = self.submit, self.plan  # type: ignore[method-assign]
        engine.executor.take = self.take  # type: ignore[method-assign]
        engine.control.exchange = self.exchange  # type: ignore[method-assign]
        self._arriving: list[int] = []

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        if payload:
            for request_id in self._arriving:
                self.rows[request_id]["record"] = step
            self._arriving = []
        return self._exchange(step, digest, payload)

    def submit(self, event: Event) -> tuple[Finished, ...]:
        if isinstance(event, Admit):
            asked = event.request
            self.rows.setdefault(asked.request_id, {})["effect"] = self.engine.scheduler.step
            self._by_token[asked.prompt_token_ids[0]] = asked.request_id
        return self._submit(event)

    def plan(self) -> StepPlan | None:
        plan = self._plan()
        for chunk in () if plan is None else plan.chunks:
            request_id = self._by_token.get(chunk.token_ids[0])
            if request_id is not None and plan is not None:
                self.rows[request_id].setdefault("planned", plan.step)
        return plan

    def take(self, spec: LaunchSpec) -> StepResult:
        """The engine waits here, and here requests arrive."""
        step = self.engine.scheduler.step
        if self.engine.is_leader and step % EVERY == 0 and len(self.rows) <= ARRIVALS:
            request_id = len(self.rows)
            self.rows[request_id] = {"running": spec.plan.step, "turn": step - 1}
            self._arriving.append(request_id)
            self.engine.add(request(request_id, (20 + request_id, 3, 4), max_tokens=3))
        return self._take(spec)


def lead(engine: Engine, marks: Marks) -> dict[str, Any]:
    """Runs until everything has ended."""
    engine.add(request(0, (20, 5, 6), max_tokens=_BACKGROUND, ignore_eos=True))
    while engine.has_work:
        output = engine.step()
        for request_id in output.request_ids:
            if request_id in marks.rows:
                marks.rows[request_id].setdefault("landed", engine.scheduler.step - 1)
    engine.stop()
    config = engine.config
    facts = {"chain_depth": config.chain_depth, "horizon": engine.control.horizon}
    return {"rows": list(marks.rows.values())[1:], "counters": dict(engine.counters), **facts}


def main(folder: str, output: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rendezvous = discover(os.environ)
    topology = rendezvous.topology
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        device="cpu",
        tensor_parallel=topology.world,
        max_num_seqs=8,
        block_size=8,
        max_model_len=128,
        num_blocks=200,
        max_prefill_tokens=64,
        control_timeout_s=300.0,
        bundles=str(output.parent / "bundles"),
        **options,
    )
    with joined(rendezvous, "cpu"), open_engine(config, rendezvous) as engine:
        marks = Marks(engine)
        if topology.is_leader:
            output.write_text(json.dumps(lead(engine, marks)))
            return
        engine.follow()
        if topology.rank == topology.world - 1:
            output.with_suffix(".last").write_text(json.dumps(list(marks.rows.values())[1:]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
