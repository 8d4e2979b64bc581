"""Steps of an engine on GPUs, counted by torch's profiler and by the engine: launches, copies, waits, allocations.

Knows: how long an engine takes to be steady, and what a steady step may do. Does not know: which model, proposer or
kind of step it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from runtime.engine import Engine
from runtime.execute.launch_spec import LaunchSpec
from runtime.schedule.request import Request
from tests.gpu.test_device_gpu import no_synchronisation

STEPS_BEFORE, STEPS_WATCHED = 6, 5
MOST_SENDS = 2  # of these, at the ends of blocks of 64 tokens
KERNELS_OF_CHANGES = 8  # at most, of a step without chunks that changes a table
COUNTED = (
    "steps",
    "prefill_steps",
    "decode_steps",
    "mixed_steps",
    "host_to_device_copies",
    "graph_captures_after_warmup",
    "device_allocs_after_warmup",
)


@dataclass(slots=True)
class Seen:
    """What happened inside ``counting``. ``grown``: the engine's counters; ``names``: on a GPU, how often what.
    ``windows``: steps in which rows had windows beside chunks."""

    grown: dict[str, int] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)
    windows: int = 0


@contextmanager
def counting(engine: Engine, *, on_gpu: bool = True) -> Iterator[Seen]:
    """What it yields is filled when the block ends."""
    seen, before, launch = Seen(), dict(engine.counters), engine.executor.launch

    def launched(spec: LaunchSpec) -> None:
        seen.windows += spec.shape.proposing > 0
        launch(spec)

    engine.executor.launch = launched  # type: ignore[method-assign]
    if on_gpu:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            yield seen
        seen.names.update(event.name for event in profile.events())
    else:
        yield seen
    del vars(engine.executor)["launch"]
    counters = engine.counters
    seen.grown |= {name: int(counters[name] - before[name]) for name in COUNTED}


def check_steady(names: Counter[str], grown: dict[str, int]) -> None:
    """Of steps without chunks: one graph launch each, no copy home, no sync, no allocation; only what was staged is
    sent, and put into its tables by a few kernels. Raises AssertionError."""
    staged = grown["host_to_device_copies"]
    assert names["cudaGraphLaunch"] == grown["steps"], "a step is one launch"
    assert sum(count for name, count in names.items() if "LaunchKernel" in name) <= KERNELS_OF_CHANGES * staged
    assert names["Memcpy HtoD (Pinned -> Device)"] == sum_of(names, "Memcpy HtoD") == staged
    check_waits(names, grown)


def check_mixed(names: Counter[str], grown: dict[str, int], windows: int, *, plans_apart: bool = False) -> None:
    """Of captured steps, some with chunks: these are two graph launches, and one more where rows have ``windows``
    beside them. Nothing is sent but what was staged, and ``plans_apart`` plans of the chunks' attention: FlashInfer
    brings its own. Raises AssertionError."""
    chunked = grown["prefill_steps"] + grown["mixed_steps"]
    assert names["cudaGraphLaunch"] == grown["steps"] + chunked + windows, (
        "a step with chunks is two launches, or three"
    )
    sent, staged = sum_of(names, "Memcpy HtoD"), grown["host_to_device_copies"]
    assert names["Memcpy HtoD (Pinned -> Device)"] == sent, "only pinned memory is copied"
    most = staged + chunked if plans_apart else staged
    assert staged <= sent <= most, "one copy a step, and the plan of the chunks' attention where that goes apart"
    check_waits(names, grown)


def check_waits(names: Counter[str], grown: dict[str, int]) -> None:
    """Of all steps without log-probabilities."""
    assert grown["host_to_device_copies"] <= grown["steps"]
    assert not sum_of(names, "Memcpy DtoH"), "kernels store results in the host's memory"
    assert not names["cudaStreamSynchronize"]
    assert names["cudaDeviceSynchronize"] <= 2, "the profiler waits for the device when it stops, steps never do"
    assert not sum_of(names, "cudaMalloc")
    assert not sum_of(names, "cudaStreamBeginCapture")
    assert grown.get("graph_captures_after_warmup", 0) == grown.get("device_allocs_after_warmup", 0) == 0


def sum_of(names: Counter[str], prefix: str) -> int:
    return sum(count for name, count in names.items() if name.startswith(prefix))


def shown(names: Counter[str]) -> dict[str, int]:
    """What a failed test's output should hold."""
    return {name: count for name, count in names.items() if name.startswith("cuda") or "Memcpy" in name}


def count_steady_steps(engine: Engine, requests: Iterable[Request]) -> None:
    """Runs ``requests`` to their ends; some steps in the middle, rounds or not, must be steady in every count."""
    for one in requests:
        engine.add(one)
    for _ in range(STEPS_BEFORE):
        engine.step()
    with counting(engine) as seen, no_synchronisation():
        ended = [engine.step().finished for _ in range(STEPS_WATCHED)]
    print(shown(seen.names))
    assert not any(ended), "somebody ended before all steps were counted"
    assert seen.grown["decode_steps"] == seen.grown["steps"] == STEPS_WATCHED, "the steps were not steady"
    assert seen.grown["host_to_device_copies"] <= MOST_SENDS, "only the ends of blocks send anything"
    check_steady(seen.names, seen.grown)
    while engine.has_work:
        engine.step()
    eager = [name for name in engine.counters if name.startswith("fallbacks{eager_prefill")]
    assert not eager, "steps with chunks are captured; others may allocate"
    assert engine.counters["graph_captures_after_warmup"] == 0
    assert engine.counters["device_allocs_after_warmup"] == 0
