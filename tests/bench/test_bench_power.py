"""What power.py makes of nvidia-smi's words, without a GPU: a script of that name tells it what to read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")

from tests.bench.power import Sample, sampled, steady_means

TOLD = """#!/bin/sh
echo "$@" > {asked}
while true; do echo "691.50, 1545"; sleep 0.01; done
"""


def test_what_was_told_while_a_kernel_ran_is_what_counts() -> None:
    samples: list[Sample] = [(1.0, 90.0, 345.0), (2.0, 600.0, 1500.0), (3.0, 700.0, 1600.0), (4.0, 100.0, 1980.0)]
    assert steady_means(samples, 1.5, 3.5) == (650.0, 1550.0)
    with pytest.raises(RuntimeError, match="give more --seconds"):
        steady_means(samples, 5.0, 6.0)


def test_samples_come_while_something_runs_and_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    script.write_text(TOLD.format(asked=asked))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    since = time.monotonic()
    with sampled("3") as samples:
        while len(samples) < 5:
            time.sleep(0.001)
    assert asked.read_text().startswith("-i 3 --query-gpu=power.draw.instant,clocks.sm")
    assert steady_means(samples, since, time.monotonic()) == (691.5, 1545.0)
    count = len(samples)
    time.sleep(0.05)
    assert len(samples) == count
