"""The Triton kernels without a GPU: through Triton's interpreter, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "module",
    [
        *(f"models.kernels.interpreted_{part}" for part in ("decode", "experts", "kernels", "prefill", "push")),
        *(f"parallel.comm.interpreted_{part}" for part in ("all_reduce", "exchange")),
    ],
)
def test_the_interpreter_finds_what_the_formulas_say(module: str) -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    child = subprocess.run(
        [sys.executable, "-m", f"tests.{module}"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert child.returncode == 0, child.stderr[-3000:]
