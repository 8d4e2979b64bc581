"""The tasks of `launch tune` over NVIDIA's kernels on a machine without a GPU: candidates are launched, none is run.

Run as a process by test_gpu_runner.py: python -m tests.launch.tune.runner_without_gpu MODEL RANKS PART ROWS...
Prints one line a task: its key, how many candidates went through, and how many of our kernels they launched.

Knows: how an H200 is played (tests/models/kernels/rank_without_gpu.py). Does not know: times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.tune import gpu_runner
from launch.tune.plan import plan
from launch.tune.shapes import RankShare, asked_attention, asked_products
from models.kernels.matmul import autotune
from models.registry import config_from_folder
from tests.models.kernels.compiling_driver import CompilingDriver
from tests.models.kernels.nvidia_kernels import nvidia_kernels
from tests.models.kernels.rank_without_gpu import META, SHAPES, play_an_h200

EVERY = 4  # candidates: each is launched in every layer, which takes the interpreter a while


def replayed(run: Callable[[], Tensor], *_: object) -> float:
    run()
    return 1.0


def main() -> None:
    model, ranks, part, *rows = sys.argv[1:]
    play_an_h200()
    driver = CompilingDriver(compile=False).activate()
    cuda: Any = torch.cuda
    cuda.synchronize = lambda device=None: None
    runner: Any = gpu_runner
    runner.captured = lambda run: run
    runner.median_graph_us = runner.replay_for = replayed
    runner._check = lambda found, expected, most: None
    runner._COLD_WEIGHTS = 1
    module: Any = autotune
    module.median_graph_us = replayed
    share = RankShare.of(config_from_folder(Path(SHAPES) / model), int(ranks))
    tasks = plan(asked_products(share, tuple(map(int, rows)), 256), asked_attention(share, 1), 256, (part,))
    made = gpu_runner.GpuRunner(share, nvidia_kernels(META, prefill="triton"))
    for task in tasks:
        known = len(driver.asked)
        bench, choices = made.bench(task), made.candidates(task, [])[::EVERY]
        for choice in choices:
            bench.brief_us(choice, 4)
            if task.in_layers:
                bench.lasting_us(choice, 0.1)
        print(f"{task.key}\t{len(choices)}\t{len(driver.asked) - known}", flush=True)


if __name__ == "__main__":
    main()
