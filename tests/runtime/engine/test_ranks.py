"""Several ranks run the same engine: the same tokens as one rank alone, and an error with a name when one differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.engine.rig import rig, run, tiny_folder
from tests.runtime.engine.test_depths import mixture, outcome

SEED = 21


def torchrun(
    world: int, folder: Path, output: Path, depth: int = 2, **options: object
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += [
        "-m",
        "tests.runtime.engine.ranks",
        str(folder),
        str(SEED),
        str(output),
        str(depth),
        json.dumps(options),
    ]
    environ = dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environ)


@pytest.mark.multiprocess
@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_draws_the_same_tokens(world: int, tmp_path: Path) -> None:
    """Greedy, random, filtered and penalised rows, with an odd vocabulary and fewer key/value heads than ranks."""
    with rig(depth=0) as engine:
        alone = outcome(run(engine, mixture(SEED)))
    ran = torchrun(world, tiny_folder(tmp_path / "model"), tmp_path / "found.json")
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows"] == {str(i): [list(tokens), int(reason)] for i, (tokens, reason) in sorted(alone.items())}
    assert found["counters"]["chain_breaks{start}"] == 1


@pytest.mark.multiprocess
def test_a_rank_that_decides_differently_is_named(tmp_path: Path) -> None:
    ran = torchrun(2, tiny_folder(tmp_path / "model"), tmp_path / "found.wrong")
    assert ran.returncode != 0
    assert not (tmp_path / "found.wrong").exists()
    assert "Disagreement" in ran.stderr, ran.stderr[-3000:]
    assert "rank 1" in ran.stderr
    assert "4711" in ran.stderr, "both decisions are told"
