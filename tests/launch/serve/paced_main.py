"""`python -m tests.launch.serve.paced_main serve ...`: a server whose device only takes its time (paced.py).

Knows: how the paced engine gets into the command, and when each request passes rank 0's stations. Does not know: what
is asked of it. PACED is the milliseconds of a step and of each prompt token in it; PACED_MARKS a file that gets a JSON
line for each request that had a first token: its first token ids, and moments in time.perf_counter's seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from launch.cli import parse
from launch.ranks.rendezvous import Rendezvous
from launch.serve.command import run
from launch.serve.options import ServeCommand
from runtime.config import EngineConfig
from runtime.frontend.api_links import ApiLink, ServedEngine
from runtime.frontend.engine_server import EngineServer
from runtime.frontend.framing import unpack_ids
from runtime.frontend.serve_messages import Columns, Submit
from runtime.schedule.plan import StepPlan, StepResult
from runtime.schedule.request import Request
from tests.runtime.engine.paced import PacedEngine, paced_engine

KEY_IDS = 8  # of a prompt, by which marks and clients' requests are matched


class Marks:
    """Between an engine and its parts: when a request was read and planned, and its first token landed and was told."""

    def __init__(self, engine: PacedEngine) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self._engine = engine
        self._open: dict[int, int] = {}  # request id by slot, until its first token has landed
        self._untold: list[int] = []
        self._read: dict[tuple[int, ...], dict[str, float]] = {}
        self._add, self._plan, self._take = engine.add, engine.scheduler.plan, engine.executor.take
        engine.add = self.add  # type: ignore[method-assign]
        engine.scheduler.plan = self.plan  # type: ignore[method-assign]
        engine.executor.take = self.take  # type: ignore[method-assign]
        send, told = EngineServer._send, self.told

        def send_noted(self: EngineServer, columns: Columns | None) -> None:
            send(self, columns)
            told()

        EngineServer._send = send_noted  # type: ignore[method-assign]
        submit, read = EngineServer._submit, self._read

        def submit_noted(self: EngineServer, link: ApiLink, order: Submit) -> None:
            key = tuple(unpack_ids(order.prompt)[:KEY_IDS])
            read[key] = {"arrived": order.arrived_at, "read": time.perf_counter()}
            submit(self, link, order)

        EngineServer._submit = submit_noted  # type: ignore[method-assign]

    def add(self, request: Request) -> None:
        key = list(request.prompt_token_ids[:KEY_IDS])
        self.rows[request.request_id] = {"key": key, **self._read.pop(tuple(key)), "added": time.perf_counter()}
        self._add(request)

    def plan(self) -> StepPlan | None:
        plan = self._plan()
        for write in () if plan is None else plan.slot_writes:
            row = self.rows[write.request_id]
            row["planned"] = time.perf_counter()
            self._open[write.slot] = write.request_id
        return plan

    def take(self, spec: Any) -> StepResult:
        result = self._take(spec)
        for slot, count in zip(spec.plan.slots, result.counts, strict=True):
            if count and slot in self._open:
                request_id = self._open.pop(slot)
                self.rows[request_id]["landed"] = self._engine.executor.landed_at
                self._untold.append(request_id)
        return result

    def told(self) -> None:
        now = time.perf_counter()
        for request_id in self._untold:
            self.rows[request_id]["told"] = now
        self._untold.clear()

    def write(self, file: Path) -> None:
        rows = [row for row in self.rows.values() if "told" in row]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def open_engine(config: EngineConfig, rendezvous: Rendezvous) -> Iterator[ServedEngine]:
    decode_ms, token_ms = map(float, os.environ.get("PACED", "5 0.012").split())
    engine = paced_engine(config, decode_ms=decode_ms, token_ms=token_ms)
    file = os.environ.get("PACED_MARKS")
    marks = None if file is None else Marks(engine)
    yield cast(ServedEngine, engine)
    if marks is not None and file is not None:
        marks.write(Path(file))
        Path(file).with_suffix(".counters").write_text(json.dumps(dict(engine.counters)))


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    command = parse(arguments)
    assert isinstance(command, ServeCommand)
    return run(command, environ, open_engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
