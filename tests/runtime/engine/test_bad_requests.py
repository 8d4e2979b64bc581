"""5,000 bad and border requests through each door of an engine of one rank and of two: nobody else notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.engine.bad_requests import CONTEXT, ROWS, check, model_folder
from tests.runtime.engine.rig import rig

COUNT = 5000


def enough(found: dict[str, int]) -> None:
    """Most were refused, and a good part was not: the generator is about borders, too."""
    for door in ("complete", "add"):
        assert COUNT // 2 < found[door] < COUNT * 9 // 10, found
    assert found["steps"] > 100


def test_one_rank(tmp_path: Path) -> None:
    with rig(rows=ROWS, max_model_len=CONTEXT, max_prefill_tokens=128) as engine:
        enough(check(engine, model_folder(tmp_path), COUNT))


@pytest.mark.multiprocess
def test_two_ranks(tmp_path: Path) -> None:
    folder, output = model_folder(tmp_path / "model"), tmp_path / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.runtime.engine.bad_requests", str(folder), str(COUNT), str(output)]
    environ = dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert ran.returncode == 0, ran.stderr[-3000:]
    enough(json.loads(output.read_text()))
