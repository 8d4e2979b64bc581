"""`python -m tests.launch.serve.fast_main serve ...`: a server whose engine costs next to nothing, to see what the rest
costs.

Knows: how to give every row one token a step. Does not know: prompts, stops, seeds. EVENTS_PAUSE is a step's time in
seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from launch.cli import parse
from launch.ranks.rendezvous import Rendezvous
from launch.serve.command import run
from launch.serve.options import ServeCommand
from runtime.config import EngineConfig
from runtime.frontend.api_links import ServedEngine
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, Request
from tests.launch.generate.fake_engine import FakeModel
from tests.launch.serve.rig import ServedFake


class FastEngine(ServedFake):
    """Token 5 + position mod 4000 for everybody, up to max_tokens."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(model=FakeModel(vocab_size=4096, max_model_len=8192), rows=config.max_num_seqs)
        self.pause = float(os.environ.get("EVENTS_PAUSE", "0.008"))
        self._live: dict[int, list[int]] = {}  # id -> tokens so far, and how many it may have
        self._dropped: list[tuple[int, FinishReason]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, request: Request) -> None:
        self._live[request.request_id] = [0, request.sampling.max_tokens]

    def cancel(self, request_id: int, reason: FinishReason) -> None:
        self._dropped.append((request_id, reason))

    def step(self) -> StepOutput:
        time.sleep(self.pause)
        self._now = next(self._steps)
        ended = [
            Finished(request_id, reason, ()) for request_id, reason in self._dropped if self._live.pop(request_id, None)
        ]
        self._dropped.clear()
        ids = list(self._live)
        tokens = [5 + have[0] % 4000 for have in self._live.values()]
        for request_id in ids:
            have = self._live[request_id]
            have[0] += 1
            if have[0] == have[1]:
                del self._live[request_id]
                ended.append(Finished(request_id, FinishReason.LENGTH, tuple(5 + i % 4000 for i in range(have[0]))))
        return StepOutput(self._now, ids, tokens, [1] * len(ids), 1, tuple(ended))


@contextmanager
def open_engine(config: EngineConfig, rendezvous: Rendezvous) -> Iterator[ServedEngine]:
    yield FastEngine(config)


def main(arguments: list[str]) -> int:
    command = parse(arguments)
    assert isinstance(command, ServeCommand)
    return run(command, os.environ, open_engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
