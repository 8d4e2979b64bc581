"""Several engines on one GPU, each with a share of its memory: one after the other, at once, and one too many.

Each is a process of its own, with a small dummy model. Wants a GPU to itself.

Run: python3 -m pytest -m gpu tests/gpu/test_memory_share_gpu.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from tests.runtime.engine.rig import request, run, tiny_folder

ENGINES, SHARE = 4, 0.2
BESIDE = 0.04  # of the device, an engine: its context, libraries and graphs may lie beside its share


def serve(folder: str, share: str) -> None:
    """An engine that says how it was sized, and answers one request when it is asked to."""
    config = EngineConfig(
        model=folder, load_format="dummy", device="cuda", max_num_seqs=2, max_model_len=64, memory_fraction=float(share)
    )
    one: dict[str, Any] = {"control": SingleRankControl(), "collectives": SingleRank(), "agree_min": int}
    with build_engine(config, **one, device="cuda:0") as engine:
        print(json.dumps(engine.executor.sizing.num_blocks), flush=True)
        sys.stdin.readline()
        finished = run(engine, [request(0, (3, 4, 5))])
        print(json.dumps([list(one.token_ids) for one in finished.values()]), flush=True)
        sys.stdin.readline()


class Running:
    def __init__(self, folder: Path, share: float) -> None:
        command = [sys.executable, "-m", "tests.gpu.test_memory_share_gpu", str(folder), str(share)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def says(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else pytest.fail(self.process.communicate()[1][-3000:])

    def ask(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)


@contextmanager
def engine(folder: Path, share: float = SHARE) -> Iterator[Running]:
    running = Running(folder, share)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


def used() -> float:
    free, total = torch.cuda.mem_get_info()
    return 1 - free / total


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [False, True], ids=["one-after-the-other", "at-once"])
def test_four_engines_share_a_gpu(at_once: bool, tmp_path: Path) -> None:
    folder, before = tiny_folder(tmp_path), used()
    with ExitStack() as stack:
        engines, blocks = [], []
        for _ in range(ENGINES):
            engines.append(stack.enter_context(engine(folder)))
            if not at_once:
                blocks.append(engines[-1].says())
        if at_once:
            blocks = [one.says() for one in engines]
        print(f"blocks: {blocks}, of the device used: {used() - before:.3f}")
        assert min(blocks) > 0.85 * max(blocks), "the last one has as much as the first"
        assert ENGINES * SHARE - 0.1 < used() - before < ENGINES * (SHARE + BESIDE)
        for one in engines:
            one.ask()
        answers = [one.says() for one in engines]
        assert all(answer == answers[0] for answer in answers)
        with engine(folder, 0.5) as more:
            _, told = more.process.communicate(timeout=240)
        assert more.process.returncode != 0
        assert "CacheMemoryError: --memory-fraction 0.5 of" in told, told[-3000:]
        assert "other processes use the rest" in told


if __name__ == "__main__":
    serve(*sys.argv[1:])
