"""When requests arrive: a renewal process of gamma-distributed gaps, as vLLM's `bench serve` has it.

Knows: rates, burstiness, seeds. Does not know: requests, clocks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def arrival_offsets(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each of ``count`` requests arrives, ascending; the same for the same seed.

    ``rate``: requests a second; inf: all at 0. ``burstiness``: shape k of the gamma distribution of gaps, whose
    coefficient of variation is 1 / sqrt(k): 1 is a Poisson process, inf gives equal gaps. As in vLLM, offsets are
    scaled so that the last one is count / rate: the rate is exact, whatever the seed.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(number + 1) / rate for number in range(count)]
    draw = random.Random(f"{seed} arrivals")
    offsets, at = [], 0.0
    for _ in range(count):
        at += draw.gammavariate(burstiness, 1.0)
        offsets.append(at)
    return stretched(offsets, count / rate)


def burst_offsets(count: int, rate: float, burstiness: float, seed: int, size: int) -> list[float]:
    """As ``arrival_offsets``, but ``size`` requests arrive at each moment; ``rate`` is still of requests, also where
    the last burst has fewer."""
    bursts = arrival_offsets(-(-count // size), rate / size, burstiness, seed)
    bursts = stretched(bursts, count / rate)
    return [bursts[number // size] for number in range(count)]


def stretched(offsets: Sequence[float], last: float) -> list[float]:
    """``offsets`` scaled so that the last one is ``last``. Offsets that are all 0 stay there."""
    factor = last / offsets[-1] if offsets and offsets[-1] > 0 else 0.0
    return [offset * factor for offset in offsets]
