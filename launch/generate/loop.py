"""The leader's loop of `generate`: requests from the reader to the client, answers to the file, and a good end.

Knows: in what order things stop. Does not know: the command line, what a line may say (parser.py), how rows are kept
(output_file.py), how many requests the engine should have (runtime/frontend/client.py).
"""

from __future__ import annotations

import time
from collections.abc import Hashable

from launch.api.parser import BadLine, LineId, PreparedRequest
from launch.api.response import answer_row, error_row
from launch.generate.output_file import ResultsFile, name_of
from launch.generate.read_ahead import ReadAhead
from launch.generate.summary import Progress, Summary
from launch.ranks.signals import Interrupts
from runtime.frontend.client import EngineClient, PromptRequest
from runtime.frontend.outputs import RequestOutput
from runtime.schedule.request import FinishReason

Arrival = tuple[float, PreparedRequest | BadLine]  # time.perf_counter() when it was read, and what it was

_HURRIED_SECONDS = 2.0  # for cancelled requests to come back
_IDLE_SECONDS = 0.05  # longest wait for the reader before the engine is asked again


class BatchRun:
    """``run`` once. Afterwards ``summary`` says what happened, and ``shown`` holds the first ``show`` requests.

    After a signal nothing more is admitted: what has no token yet is handed back, what has begun may take
    ``drain_seconds`` to finish. What is not finished then has no row, and a later run does it.
    """

    def __init__(
        self,
        client: EngineClient,
        source: ReadAhead[Arrival],
        results: ResultsFile,
        interrupts: Interrupts,
        *,
        drain_seconds: float = 20.0,
        show: int = 0,
    ) -> None:
        self.summary = Summary()
        self.shown: dict[LineId, list[RequestOutput]] = {}
        self._client = client
        self._source: ReadAhead[Arrival] | None = source  # None: all lines are read
        self._results = results
        self._interrupts = interrupts
        self._drain_seconds = drain_seconds
        self._show = show
        self._running: dict[
            Hashable, tuple[PreparedRequest, dict[Hashable, RequestOutput]]
        ] = {}  # by key, a prompt each
        self._held: Arrival | None = None  # read, but there is no room for it yet
        self._progress: Progress | None = None

    def run(self, progress: Progress | None = None) -> None:
        """Until every line has its row or, after a signal, what had begun does."""
        self._progress = progress
        while self._more():
            self._feed()
            self._advance()
        if self._interrupts.signal is not None:
            self._drain()
        self.summary.stop_clock()
        self._client.close()

    def _advance(self) -> None:
        """One turn of the engine, and what follows from it."""
        finished = self._client.turn().finished
        for output in finished:
            self._finish(output)
        if finished and self._progress is not None:
            self._progress.show(self.summary)

    def _more(self) -> bool:
        if self._interrupts.signal is not None:
            return False
        if not self._running and self._held is None:
            self._client.wait(self._arrived, _IDLE_SECONDS)
        return bool(self._running) or self._held is not None or self._source is not None

    def _arrived(self, timeout: float) -> bool:
        self._held = self._take(timeout)
        return self._held is not None or self._source is None

    def _take(self, timeout: float = 0.0) -> Arrival | None:
        """The next line, if one is read within ``timeout`` seconds."""
        if self._source is None:
            return None
        arrival = self._source.take(timeout)
        if self._source.exhausted:
            self._source = None
        return arrival

    def _feed(self) -> None:
        """Hand requests over while there is room; bad lines on the way get their rows."""
        while (arrival := self._held or self._take()) is not None:
            self._held = None
            read_at, item = arrival
            if isinstance(item, BadLine):
                self._fail(item)
            elif not self._client.has_room(item.answers):  # it waits here, where stopping costs less
                self._held = arrival
                return
            else:
                self._add(item, read_at)

    def _add(self, prepared: PreparedRequest, read_at: float) -> None:
        outputs: dict[Hashable, RequestOutput] = {}
        for at, prompt in enumerate(prepared.prompts):
            key = (prepared.id, at)
            self._client.submit(
                PromptRequest(
                    prompt.token_ids,
                    prepared.sampling,
                    key=key,
                    priority=prepared.priority,
                    text=prompt.text,
                    arrived_at=read_at,
                )
            )
            self._running[key] = prepared, outputs
        if len(self.shown) < self._show:
            self.shown[prepared.id] = []

    def _finish(self, output: RequestOutput) -> None:
        prepared, outputs = self._running.pop(output.key)
        outputs[output.key] = output
        if len(outputs) < len(prepared.prompts):
            return
        ordered = [outputs[prepared.id, at] for at in range(len(outputs))]
        if any(c.finish_reason is FinishReason.CANCELLED for output in ordered for c in output.completions):
            self.summary.unfinished += 1  # only we cancel, to end soon: no row, so that a later run does it
            return
        self._results.write(answer_row(prepared, ordered, self._client.tokenizer, int(time.time())), prepared.id)
        if all(output.failed is None for output in ordered):
            self.summary.add(*ordered)
        else:
            self.summary.failed += 1
        if prepared.id in self.shown:
            self.shown[prepared.id] = ordered

    def _fail(self, bad: BadLine) -> None:
        self._results.write(error_row(bad), name_of(bad.id, bad.line))
        self.summary.failed += 1

    def _drain(self) -> None:
        """Let what has begun finish, for a while; then end it and wait for it to be back, for a shorter while."""
        self._client.cancel_all(unbegun=True)
        began = self._interrupts.at or time.monotonic()
        self._step_until(began + self._drain_seconds)
        self._client.cancel_all()
        self._step_until(time.monotonic() + _HURRIED_SECONDS, even_in_a_hurry=True)
        self.summary.unfinished += len({prepared.id for prepared, _ in self._running.values()})

    def _step_until(self, deadline: float, *, even_in_a_hurry: bool = False) -> None:
        while self._running and time.monotonic() < deadline:
            if self._interrupts.hurry and not even_in_a_hurry:
                return
            self._advance()
