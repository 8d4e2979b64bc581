"""A sweep of `bench: serve` over a server that runs already: each point is asked of it, and its figures are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.bench.load.test_openai_backend import Handler, serving

ROOT = Path(__file__).resolve().parents[3]
GRID = """
bench: serve
options:
  model: {model}
  base-url: {url}
  device: cpu
  dataset-name: random
  input-len: 8
  output-len: 4
  num-prompts: 6
  num-warmups: 0
grid:
  concurrency: [1, 3]
"""


@pytest.mark.long  # three processes that import torch; a point by itself: tests/launch/bench/test_serve.py
def test_points_of_one_server_are_measured_one_after_the_other(tmp_path: Path) -> None:
    with serving() as url:
        (tmp_path / "grid.yaml").write_text(GRID.format(model=ROOT / "models/demo", url=url))
        words = [sys.executable, "-m", "launch", "sweep", "run", "grid.yaml", "--out", "out"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=900, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert len(Handler.asked) == 12
        assert {len(one["prompt"]) for one in Handler.asked} == {8}
    rows = sorted(tmp_path.glob("out/points/*/results/*.points.jsonl"))
    assert len(rows) == 2
    assert all(f'"hw":"{url}"' in row.read_text() for row in rows)
