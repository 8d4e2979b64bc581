"""`generate` as a program of its own, with the fake engine: what the tests start, signal and kill.

FAKE_STEP_SECONDS makes its steps slow enough to be caught in the middle.
"""

from __future__ import annotations

import os
import sys
import time

from launch.generate.command import run
from launch.generate.options import Command
from launch.ranks.rendezvous import Rendezvous
from runtime.config import EngineConfig
from tests.launch.api.parsed import parsed
from tests.launch.generate.fake_engine import FakeEngine


def open_engine(config: EngineConfig, rendezvous: Rendezvous) -> FakeEngine:
    pause = float(os.environ.get("FAKE_STEP_SECONDS", "0"))
    engine = FakeEngine(config, on_step=lambda step: time.sleep(pause))
    engine.is_leader = rendezvous.topology.is_leader
    return engine


if __name__ == "__main__":
    sys.exit(run(parsed(Command, sys.argv[1:]), os.environ, open_engine))
