"""Steady steps of hybrids, their rounds, and steps with prompt chunks on a GPU, counted by torch's profiler.

Rounds of drafters and trees: test_drafters_gpu.py, test_trees_gpu.py, test_hybrid_trees_gpu.py. The same counts on the
CPU twin, byte for byte: tests/runtime/engine/test_steady_steps.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.kernels.interface import PrefillWanted
from runtime.engine import Engine
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.config import MixedSteps
from runtime.schedule.request import Request
from tests.gpu.steady_steps import check_mixed, count_steady_steps, counting, shown
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.test_engine_gpu import gpu_rig
from tests.gpu.test_speculation_gpu import LIMITS, SHAPES, ngram
from tests.runtime.engine.rig import request, run

pytestmark = pytest.mark.gpu
HYBRIDS = ("gated delta", "mamba")
BUCKETS = (16, 32, 48, 64, 80)
CAPTURED: dict[str, Any] = {"prefill_buckets": BUCKETS, "mixed": MixedSteps(BUCKETS)}  # all steps with chunks


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("layers", HYBRIDS)
def test_a_steady_step_of_a_hybrid_is_one_launch(layers: str, width: int) -> None:
    """A token a row, and rounds of n-gram guesses."""
    requests = [request(i, range(3 + i, 20 + i), max_tokens=80, stops=()) for i in range(8)]
    how: dict[str, Any] = LIMITS | CAPTURED | {"block_size": 64, "shape": SHAPES[layers]}
    how |= ngram(width) if width > 1 else {}
    with gpu_rig(depth=2, **how) as engine:
        count_steady_steps(engine, requests)
        assert (engine.counters["spec_num_drafts"] > 0) is (width > 1)


def arriving(first: int) -> tuple[list[Request], dict[int, Request]]:
    """Requests that decode for long, and by turn those whose prompts come meanwhile; ids from ``first`` on."""
    few: dict[str, Any] = {"max_tokens": 90, "allowed_token_ids": (5, 6, 7), "temperature": 0.5}
    requests = [request(first + i, (9 + i, 5, 6, 7, 5, 6, 7), seed=i, stops=(), **few) for i in range(3)]
    later = {2 + 2 * i: request(first + 10 + i, range(i, 50 + 9 * i), max_tokens=6, stops=()) for i in range(6)}
    return requests, later


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(
    ("layers", "prefill"), [*((layers, "triton") for layers in SHAPES), ("attention", "flashinfer")]
)
def test_steps_with_chunks_are_two_launches_or_three(layers: str, width: int, prefill: PrefillWanted) -> None:
    """Beside windows three. The second time nothing is captured or compiled any more. FlashInfer has no float32."""
    requests, later = arriving(0)
    kinds = SamplingVariant(), SamplingVariant.covering([one.sampling for one in (*requests, *later.values())])
    how: dict[str, Any] = LIMITS | CAPTURED | {"variants": kinds, "prefix_caching": False}
    how |= {"shape": SHAPES[layers]} if SHAPES[layers] else {}
    how |= ngram(width, 100) if width > 1 else {}
    how |= {"prefill": prefill, "dtype": torch.float32 if prefill == "triton" else torch.bfloat16}
    with gpu_rig(depth=2, **how) as engine:

        def live(requests: list[Request], later: dict[int, Request]) -> None:
            def arrive(engine: Engine, turn: int) -> None:
                if turn in later:
                    engine.add(later[turn])

            assert len(run(engine, requests, arrive)) == len(requests) + len(later)

        live(requests, later)
        with counting(engine) as seen, no_synchronisation():
            live(*arriving(100))
        assert not [name for name in engine.counters if name.startswith("fallbacks{eager_prefill")]
    print(shown(seen.names), seen.grown, seen.windows)
    assert seen.grown["mixed_steps"] > 5
    assert (seen.windows > 5) is (width > 1)
    check_mixed(seen.names, seen.grown, seen.windows, plans_apart=prefill == "flashinfer")
