"""The start of a machine that has compiled nothing: who compiles which kernel, and the answers of both starts.

Knows: Triton's listener to compilations, and the names of the threads that compile ahead. Does not know: which kernels
a step has. Each start is a process of its own, with a fresh folder for what Triton keeps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_generate_gpu import DEMO, agrees_with_golden

MOST_LATE = 3  # kernels: the copies of blocks and states, whose tensors are there last
DRAFTER = json.dumps({"method": "mtp", "model": str(DEMO / "mtp"), "num_speculative_tokens": 3})


def listen(arguments: list[str]) -> None:
    """Run the command and print which kernels were compiled, and by which thread, as the last line."""
    import runpy
    import threading

    from triton import knobs

    compiled: list[tuple[str, str]] = []

    def note(*, src: Any, metadata: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            compiled.append((threading.current_thread().name, src.fn.__name__))

    knobs.compilation.listener = note
    sys.argv = ["launch", *arguments]
    try:
        runpy.run_module("launch", run_name="__main__", alter_sys=True)
    finally:
        print(json.dumps(compiled), flush=True)


def started(cache: Path, output: Path, *options: str) -> list[tuple[str, str]]:
    """(thread, kernel) of each compilation. Answers must be the golden ones, but for what bfloat16 may decide."""
    command = ["generate", "--model", str(DEMO), "--input", str(DEMO / "prompts.jsonl"), "--output", str(output)]
    command += ["--num-blocks", "2048", "--prefill-attention", "triton", *options]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_cold_start_gpu", *command],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    agrees_with_golden({row["id"]: row["token_ids"] for row in rows})
    return [(thread, kernel) for thread, kernel in json.loads(ran.stdout.splitlines()[-1])]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("--speculative-config", DRAFTER)], ids=["plain", "mtp"])
def test_kernels_are_compiled_ahead_of_their_launches(options: tuple[str, ...], tmp_path: Path) -> None:
    cold = started(tmp_path / "triton", tmp_path / "cold.jsonl", *options)
    late = [kernel for thread, kernel in cold if not thread.startswith("compile")]
    assert len(cold) - len(late) >= 20
    assert len(late) <= MOST_LATE, late
    assert started(tmp_path / "triton", tmp_path / "warm.jsonl", *options) == []


if __name__ == "__main__":
    listen(sys.argv[1:])
