"""A ledger of points as two H200 machines might leave them, without measuring anything: what tests of reports read.

python -m tests.launch.sweep.measured_sweep OUT        and then: python -m launch sweep report OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from launch.sweep.grid import Grid, grid_of
from launch.sweep.ledger import Ledger
from launch.sweep.point import Point

BILLIONS = {"qwen3-0.6b": 0.6, "qwen3-8b": 8.0}  # parameters


def example_grid(**more: Any) -> Grid:
    grid = {"model": list(BILLIONS), "tp": [1, 2, 4], "batch": [1, 8, 32, 128], "depth": [0, 2]}
    return grid_of({"options": {"input-len": 512}, "grid": grid, **more}, "example <of> a sweep")


def tpot_ms(point: Point) -> float:
    """Bytes, arithmetic, an all-reduce a layer, and the host where nothing is chained."""
    size, tp, batch = BILLIONS[str(point.settings["model"])], point.tp, int(point.settings["batch"])
    exchange = 0.5 if tp > 1 else 0.0
    return 0.3 + size * (0.48 + 0.0018 * batch) / tp + exchange + (0.35 if point.settings["depth"] == 0 else 0.0)


def write_ledger(out: Path, *, grid: Grid | None = None, slower: float = 1.0, **facts: Any) -> Ledger:
    """``slower``: factor of every TPOT. ``facts``: of the environment. 8B with tp 1 and batch 128 has failed."""
    grid, ledger = grid or example_grid(), Ledger(out)
    ledger.begin_sweep(grid, resume=True)
    for point in grid.points:
        attempt, settings = ledger.begin(point), point.settings
        if (settings["model"], point.tp, settings["batch"]) == ("qwen3-8b", 1, 128):
            ledger.file(attempt, "KvMemoryError: 65 blocks are needed, there are 12 & no more (exit code 2)", 2)
            continue
        _write_results(attempt.folder / "results", point, slower * tpot_ms(point), facts)
        ledger.file(attempt, "", 0)
    return ledger


def _write_results(results: Path, point: Point, tpot: float, facts: dict[str, Any]) -> None:
    settings, batch = point.settings, int(point.settings["batch"])
    chained = settings["depth"] != 0
    row = {
        "hw": "NVIDIA H200",
        "kind": "latency",
        "model": settings["model"],
        "precision": "bfloat16",
        "tp": point.tp,
        "ep": 1,
        "batch": batch,
        "input_len": 512,
        "output_len": 257,
        "chain_depth": settings["depth"],
        "runs": 3,
        "refused": None,
        "tpot_ms": tpot,
        "tpot_ms_min": 0.99 * tpot,
        "tpot_ms_max": 1.01 * tpot,
        "ttft_s": 0.01 * batch,
        "tok_s": 1e3 * batch / tpot,
        "tok_s_per_gpu": 1e3 * batch / tpot / point.tp,
        "tok_s_per_user": 1e3 / tpot,
        "roofline_fraction": None,
        "chained_ratio": 0.99 if chained else 0.0,
        "device_idle": 0.002 if chained else 0.12,
        "startup_s": 31.0,
    }
    stem = f"latency-{settings['model']}-tp{point.tp}-20261120T120000.000000Z"
    (results / f"{stem}.points.jsonl").write_text(json.dumps(row) + "\n")
    for run in range(3):
        figures = {f"p{percent}_tpot_ms": tpot * (1 + percent / 1000 + run / 100) for percent in (50, 90, 95, 99)}
        (results / f"{stem}.b{batch}-run{run}.json").write_text(json.dumps(figures))
    several = point.tp > 1
    environment = {
        "commit": "1111111",
        "code_digest": "aaaa",
        "device": "NVIDIA H200",
        "cpu": "AMD EPYC 9654",
        "launcher": "torchrun" if several else "plain",
        "nodes": 1,
        "versions": {"python": "3.12.3", "torch": "2.11.0+cu130", "lockstride": None},
        "variables": {"NCCL_NVLS_ENABLE": "0"} if several else {},
        "gpus": [{"driver_version": "580.95", "clocks.max.sm": "1980 MHz", "clocks.sm": "345 MHz"}] * point.tp,
        **facts,
    }
    (results / f"{stem}.environment.json").write_text(json.dumps(environment))


if __name__ == "__main__":
    write_ledger(Path(sys.argv[1]))
