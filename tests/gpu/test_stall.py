"""The host sleeps for three step times: with depth 4 the GPU goes on without a gap, and no token changes.

Steps take a millisecond or two: many small layers, so that sleeping is precise enough and weights are quickly there.
Device times are those of recorded events (StepTiming), which tell how long the GPU waited between two steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import pytest

from runtime.execute.result_reader import StepTiming
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.observe.observer import StepObserver
from tests.gpu.test_engine_gpu import SHAPE, gpu_rig
from tests.runtime.engine.rig import request

pytestmark = pytest.mark.gpu

MANY_LAYERS: dict[str, object] = SHAPE | {"num_hidden_layers": 64}
STALL = 3  # step times
WARM, BETWEEN, STALLS = 40, 12, 6


@dataclass
class Measured:
    """``step_ms``: a steady step. ``gap_ms``: the longest wait of the device between two steps, once warm."""

    step_ms: float
    gap_ms: float
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)


def measure(depth: int, stalls: int) -> Measured:
    """Decode, and sleep ``stalls`` times for STALL of the steps' own measured time."""
    times: list[StepTiming] = []
    measured = Measured(0.0, 0.0)
    requests = [
        request(i, range(1, 9 + i), max_tokens=WARM + BETWEEN * (STALLS + 2), temperature=1.0, stops=())
        for i in range(4)
    ]
    with gpu_rig(
        depth=depth,
        shape=MANY_LAYERS,
        max_model_len=256,
        block_size=64,
        variants=(SamplingVariant(random=True),),
        observe=StepObserver(on_timing=times.append),
        frozen=True,  # a full collection of this process takes more than three steps
    ) as engine:
        for one in requests:
            engine.add(one)
        for turn in range(WARM + BETWEEN * (STALLS + 1)):
            engine.step()
            if turn < WARM:
                continue
            if not measured.step_ms:
                measured.step_ms = median(t.ended_ms - t.started_ms for t in times[WARM // 2 :])
            if (turn - WARM) % BETWEEN == BETWEEN - 1 and (turn - WARM) // BETWEEN < stalls:
                time.sleep(STALL * measured.step_ms / 1e3)
        while engine.has_work:
            for ended in engine.step().finished:
                measured.tokens[ended.request_id] = ended.token_ids
    until = WARM + BETWEEN * (STALLS + 1) - depth  # before the first request ends
    warm = times[WARM - depth : until]
    measured.gap_ms = max(b.started_ms - a.ended_ms for a, b in pairwise(warm))
    return measured


def test_a_stall_of_three_step_times_leaves_no_gap() -> None:
    steady, stalled, shallow = measure(4, 0), measure(4, STALLS), measure(1, STALLS)
    print(
        f"step {steady.step_ms:.3f} ms; longest gap without a stall {steady.gap_ms:.4f} ms, with stalls of "
        f"{STALL} steps at depth 4 {stalled.gap_ms:.4f} ms, at depth 1 {shallow.gap_ms:.4f} ms"
    )
    assert stalled.gap_ms < 0.1 * stalled.step_ms
    assert shallow.gap_ms > 1.0 * shallow.step_ms, "a gap would have been seen"
    assert stalled.tokens == steady.tokens == shallow.tokens
