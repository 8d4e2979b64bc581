"""How long a layer of experts takes, alone or in turns with others, and whether two of them compute the same.

Knows: how to time layers fairly: weights of several rotate through more memory than the L2 holds, and what drifts in a
run, the GPU's clock above all, hits all that are compared alike. Does not know: what the layers run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from models.kernels.matmul import autotune
from models.kernels.matmul.autotune import captured, replay_for

DEVICE = torch.device("cuda", 0)
LAYERS = 6
ROUNDS, SECONDS = 6, 0.1  # of each layer in a round
TOLERANCE = 0.02  # relative, of bfloat16 sums in another order

Run = Callable[[int], Tensor]  # the experts of the layer with a number
Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class InTurns:
    """``us``: of one layer, the median of ``rounds``. ``ratio``: of that to the first's; ``least`` and ``most``: what
    single rounds say of the ratio.
    """

    us: float
    ratio: float
    least: float
    most: float
    rounds: list[float]


def microseconds(run: Run, replays: int = 30) -> float:
    """Of one layer: the median of graph replays over LAYERS layers."""
    return autotune.median_graph_us(partial(every_layer, run), DEVICE, replays) / LAYERS


def every_layer(run: Run) -> None:
    for layer in range(LAYERS):
        run(layer)


def in_turns(runs: Mapping[Name, Run]) -> dict[Name, InTurns]:
    """Each captured once, then replayed in ROUNDS rounds, there and back, against the first of them."""
    graphs = {name: captured(partial(every_layer, run)) for name, run in runs.items()}
    times: dict[Name, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS):
        for name in list(graphs)[:: -1 if turn % 2 else 1]:
            times[name].append(replay_for(graphs[name], SECONDS) / LAYERS)
    first = next(iter(times.values()))
    return {name: _against(first, took) for name, took in times.items()}


def _against(first: list[float], took: list[float]) -> InTurns:
    us, ratios = statistics.median(took), [one / other for one, other in zip(took, first, strict=True)]
    return InTurns(us, us / statistics.median(first), min(ratios), max(ratios), took)


def agree(what: str, run: Run, reference: Run) -> None:
    """Raises SystemExit, with ``what`` in front, where layer 0 of ``run`` is not that of ``reference``."""
    found, expected = run(0).float(), reference(0).float()
    error = float((found - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        raise SystemExit(f"{what} by {error:.3f} of its norm")
