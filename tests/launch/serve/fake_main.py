"""`python -m tests.launch.serve.fake_main serve ...`: the whole server around an engine without a model.

Knows: how the fake engine gets into the command. Does not know: what is asked of it. Rank 0, its API processes and HTTP
are what users run; only tokens cost nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from launch.cli import parse
from launch.ranks.rendezvous import Rendezvous
from launch.serve.command import run
from launch.serve.options import ServeCommand
from runtime.config import EngineConfig
from runtime.frontend.api_links import ServedEngine
from tests.launch.generate.fake_engine import FakeModel
from tests.launch.serve.rig import ServedFake


@contextmanager
def open_engine(config: EngineConfig, rendezvous: Rendezvous) -> Iterator[ServedEngine]:
    fake = ServedFake(model=FakeModel(vocab_size=4096, max_model_len=2048), rows=config.max_num_seqs, pause=0.001)
    fake.forgetful = True
    yield fake


def main(arguments: list[str]) -> int:
    command = parse(arguments)
    assert isinstance(command, ServeCommand)
    return run(command, os.environ, open_engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
