"""Times the candidate kernels of a matrix product with cold weights: graph replays over more weights than the L2 holds.

Knows: how to time candidates fairly. Does not know: what they are (candidates.py) or how choices are stored
(choice_table.py). Nothing here may run during a graph capture.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from models.kernels.matmul.choice_table import Choice, LinearShape

_COLD_BYTES = 256 << 20  # several times the 50-60 MB of L2

Run = Callable[[Tensor, Tensor, Choice], Tensor]


def fastest(shape: LinearShape, choices: Iterable[Choice], run: Run, device: torch.device) -> tuple[Choice, float]:
    """The choice with the least median time, and that time in microseconds. Raises RuntimeError if none runs."""
    timed = measure(shape, choices, run, device)
    us, index = min((us, index) for index, (_, us) in enumerate(timed))
    if us == float("inf"):
        raise RuntimeError(f"none of {len(timed)} kernels ran a product of shape {shape.key}")
    return timed[index][0], us


def measure(
    shape: LinearShape, choices: Iterable[Choice], run: Run, device: torch.device
) -> list[tuple[Choice, float]]:
    """Every choice with its median microseconds for one product with cold weights; infinity if it does not run.

    ``run(x, weight, choice)`` must be capturable once warm.
    """
    x = torch.randn(shape.rows, shape.inner, dtype=shape.dtype, device=device)
    copies = max(2, min(64, -(-_COLD_BYTES // (shape.outputs * shape.inner * shape.dtype.itemsize))))
    weights = torch.randn(copies, shape.outputs, shape.inner, dtype=shape.dtype, device=device).mul_(shape.inner**-0.5)
    timed: list[tuple[Choice, float]] = []
    for choice in choices:
        try:
            run(x, weights[0], choice)
            torch.cuda.synchronize(device)
        except Exception:  # any error of a compiler or a launch means: not this candidate
            timed.append((choice, float("inf")))
            continue
        launch = functools.partial(_each, run, x, weights, choice)
        timed.append((choice, median_graph_us(launch, device) / copies))
    return timed


def _each(run: Run, x: Tensor, weights: Tensor, choice: Choice) -> None:
    for weight in weights:
        run(x, weight, choice)


def median_graph_us(launch: Callable[[], Any], device: torch.device, replays: int = 12) -> float:
    """Median microseconds of one replay of a graph captured from ``launch``."""
    event: Any = torch.cuda.Event  # untyped in some versions of torch
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # other threads may use the device
        launch()
    graph.replay()
    pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(replays)]
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return float(statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs))


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """One stream for all measurements: cuBLAS keeps a 32 MiB workspace for every stream it has seen."""
    stream: Any = torch.cuda.Stream  # untyped in some versions of torch
    return stream(device)
