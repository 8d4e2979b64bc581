"""Times the candidate kernels of a matrix product with cold weights: graph replays over more weights than the L2 holds.

Knows: how to time candidates fairly, for milliseconds and at the power that lasts. Does not know: what they are
(candidates.py) or how choices are stored (choice_table.py). Nothing here may run during a graph capture.

Products of many rows draw more power than a GPU may for longer than milliseconds, so what one takes depends on what ran
before it. For those the GPU is warmed up first, and the fastest few are timed again, forward and backward.
"""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from models.kernels.matmul.choice_table import Choice, LinearShape
from parallel.layers.weight import Weight

log = logging.getLogger(__name__)

_COLD_BYTES = 256 << 20  # several times the 50-60 MB of L2
_FEW_ROWS = 256  # up to so many a product is bound by memory, and the clock matters little
_WARM_UP_S = 0.1
_CLOSE, _FINALISTS = 1.1, 3  # timed again: so many, of those within so many times the fastest
_FINALIST_S = 0.06  # of each, twice

Run = Callable[[Tensor, Weight, Choice], Tensor]
T = TypeVar("T")


class ColdProduct:
    """One product over and over, with weights that no cache holds. ``run(x, weight, choice)`` must be capturable once
    warm.
    """

    def __init__(self, shape: LinearShape, run: Run, device: torch.device) -> None:
        self._run, self._device = run, device
        self.x = torch.randn(shape.rows, shape.inner, dtype=shape.dtype, device=device)
        copies = max(2, min(64, -(-_COLD_BYTES // shape.format.nbytes(shape.outputs, shape.inner))))
        weights = torch.randn(copies, shape.outputs, shape.inner, dtype=shape.dtype, device=device)
        self.weights = [stored(weight, shape) for weight in weights.mul_(shape.inner**-0.5)]

    def one(self, choice: Choice) -> Tensor:
        """What ``choice`` makes of the first weight. Raises what a compiler or a launch does."""
        result = self._run(self.x, self.weights[0], choice)
        torch.cuda.synchronize(self._device)
        return result

    def each(self, choice: Choice) -> None:
        for weight in self.weights:
            self._run(self.x, weight, choice)

    def brief_us(self, choice: Choice, replays: int = 12) -> float:
        """Median microseconds of one product, over milliseconds."""
        return median_graph_us(functools.partial(self.each, choice), self._device, replays) / len(self.weights)

    def warm_up(self, choice: Choice) -> None:
        """Runs until the clock is about the one that the GPU's power allows."""
        self.brief_us(choice, self.replays(self.brief_us(choice), _WARM_UP_S))

    def replays(self, us: float, seconds: float) -> int:
        """So many replays of all weights last about ``seconds``, where a product takes ``us``."""
        return max(12, int(seconds * 1e6 / (us * len(self.weights))))

    def lasting_us(self, choice: Choice, seconds: float) -> float:
        """Mean microseconds of one product at the power that lasts; see ``replay_for``."""
        return replay_for(captured(functools.partial(self.each, choice)), seconds) / len(self.weights)


def stored(numbers: Tensor, shape: LinearShape) -> Weight:
    """In the format of ``shape``; four-bit ones are other numbers of about that size."""
    if shape.block is None:
        return Weight.of(numbers)
    if shape.four_bits:
        return _four_bits(shape, numbers.device)
    codes = (numbers * (100 * shape.inner**0.5)).clamp(-448, 448).to(shape.format.dtype)
    scale = torch.full(shape.format.grid(shape.outputs, shape.inner), 0.01 * shape.inner**-0.5, device=numbers.device)
    return Weight(codes, shape.format, None, scale)


def _four_bits(shape: LinearShape, device: torch.device) -> Weight:
    form, size = shape.format, shape.inner**-0.5 / 4
    grid = form.grid(shape.outputs, shape.inner)
    data = torch.randint(0, 256, (shape.outputs, shape.inner // 2), dtype=torch.uint8, device=device)
    scale = torch.full(grid, 1.0 if form.factors else size, device=device)
    exponents = scale.log2().round().add(127)
    return Weight(
        data,
        form,
        scale=(exponents if form.scale_dtype == torch.uint8 else scale).to(form.scale_dtype),
        zero=torch.full(grid, 7, dtype=torch.uint8, device=device) if form.zeros else None,
        factor=torch.full(grid[:1], size, device=device) if form.factors else None,
    )


def fastest(shape: LinearShape, choices: Iterable[Choice], run: Run, device: torch.device) -> tuple[Choice, float]:
    """The choice with the least time, and that time in microseconds. Raises RuntimeError if none runs."""
    product = ColdProduct(shape, run, device)
    many = shape.rows > _FEW_ROWS
    timed = measure(shape, choices, product, warm_up=many)
    if not timed:
        raise RuntimeError(f"none of the kernels tried ran a product of shape {shape.key}")
    ranked = sorted(timed, key=lambda one: one[1])
    close = [one for one in ranked[:_FINALISTS] if one[1] <= _CLOSE * ranked[0][1]]
    if not many or len(close) == 1:
        return ranked[0]
    # Not by lasting_us: its capture fails where another thread of a starting engine uses the device meanwhile.
    again = forward_and_backward(
        lambda one: product.brief_us(one[0], product.replays(one[1], _FINALIST_S)),
        close,
    )
    us, number = min((us, number) for number, us in enumerate(again))
    return close[number][0], us


def forward_and_backward(us: Callable[[T], float], candidates: Sequence[T]) -> list[float]:
    """The mean of two times of each, the second in reverse order, so that what drifts hits all of them alike."""
    forward = [us(one) for one in candidates]
    backward = [us(one) for one in reversed(candidates)]
    return [statistics.fmean(both) for both in zip(forward, reversed(backward), strict=True)]


def measure(
    shape: LinearShape, choices: Iterable[Choice], product: ColdProduct, *, warm_up: bool = False
) -> list[tuple[Choice, float]]:
    """Every choice that runs, with its median microseconds for one product with cold weights. For the others the log
    has the reason. ``warm_up``: the first runs for a while beforehand.
    """
    timed: list[tuple[Choice, float]] = []
    for choice in choices:
        try:
            product.one(choice)
        except Exception as error:  # any error of a compiler or a launch means: not this candidate
            log.info("%s: %s is left out: %s", shape.key, choice, reason_of(error))
            continue
        if warm_up and not timed:
            product.warm_up(choice)
        timed.append((choice, product.brief_us(choice)))
    return timed


def reason_of(error: Exception) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


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


def captured(launch: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of ``launch``, which ran once before; on the current device."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def replay_for(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Mean microseconds of a replay, over the second half of ``seconds`` of them: by then the clock is the one that the
    GPU can hold at the power that these kernels draw (docs/lab/measurements/power.md).
    """
    event: Any = torch.cuda.Event  # untyped in some versions of torch
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    half = max(5, int(seconds / 2 / (start.elapsed_time(end) / 5e3)))
    for _ in range(half):
        graph.replay()
    start.record()
    for _ in range(half):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / half


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """One stream for all measurements: cuBLAS keeps a 32 MiB workspace for every stream it has seen."""
    stream: Any = torch.cuda.Stream  # untyped in some versions of torch
    return stream(device)
