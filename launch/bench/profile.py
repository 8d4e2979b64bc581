"""`bench latency --profile`: where the device's time goes in prefill and in decode steps, kernel by kernel.

Knows: which runs are recorded by torch.profiler, and which of its events belong to which of them.
Does not know: how calls become tables (kernel_tables.py), how a step is timed (latency.py).
Nothing here runs while anything is timed.

After every timed run, each batch runs twice more under the profiler: for one token, and for 1 + K.
    prefill   all that the device did in the first run
    decode    in the second run, the calls of each kernel that come after as many as the first run made of it; over the
              K decode steps, or with speculation over the fewer rounds that it took.
              Every prompt is prefilled before any row decodes, so a kernel's first calls are those of prefill
A decode step is one graph launch; CUPTI reports the kernels inside of it. All runs share one session of the profiler:
others have seen a second one in a process report no kernels.
Rounds of speculation come with their stages (round_stages.py), as figures and as a trace.
Without a GPU operators stand in for kernels, by their own time on the CPU, whichever thread ran them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from launch.bench import round_stages
from launch.bench.kernel_tables import Call, after_prefill, host_side, part, tables
from launch.bench.load.engine_backend import run_batch
from launch.bench.load.journal import DecodeStep
from launch.bench.load.steady import why_not_full
from launch.bench.point import Point
from launch.bench.results import ResultFiles
from runtime.engine import Engine
from runtime.frontend.client import PromptRequest

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

Batches = Sequence[tuple[Point, Sequence[PromptRequest]]]

PROFILED_STEPS = 16  # decode steps of a profiled run, at most: each is hundreds of kernels


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of a batch's two runs before their events are. ``refused``: why they would say nothing."""

    point: Point
    prefill_steps: int
    decode_steps: int
    refused: str | None


def profiles(engine: Engine, batches: Batches, files: ResultFiles) -> Iterator[str]:
    """The tables of each point's batch as text; its file is written before. The leader calls it when all is timed."""
    recorded, events = _record(engine, batches)
    on_cpu = engine.config.device == "cpu"
    windows = {event.name: event for event in events if event.is_user_annotation and _on_host(event)}
    for one in recorded:
        batch = one.point.batch
        short, long = (windows[_label(batch, kind)] for kind in ("prefill", "decode"))
        calls = host_calls if on_cpu else device_calls
        prefill = calls(events, short)
        decode, note = after_prefill(prefill, calls(events, long))
        missing = " and ".join(kind for kind, found in (("prefill", prefill), ("decode", decode)) if not found)
        refused = one.refused or (f"the profiler reported no kernels of {missing}" if missing else None)
        record: dict[str, Any] = {"batch": batch, "rank": 0, "unit": "us", "refused": refused}
        if refused is None:
            record["note"] = note
            ttft, tpot = one.point.ttft_s, one.point.round_ms or one.point.tpot_ms  # of a step
            record["prefill"] = asdict(
                part(prefill, one.prefill_steps, None if ttft is None else ttft * 1e6 / one.prefill_steps)
            )
            record["prefill_host"] = host_side(host_calls(events, short))
            record["decode"] = asdict(part(decode, one.decode_steps, None if tpot is None else tpot * 1e3))
        files.profile(batch, record)
        yield tables(record)
        if refused is None and one.point.accepted_length is not None and not on_cpu:
            yield _stages(batch, decode, files)


def _stages(batch: int, decode: Sequence[Call], files: ResultFiles) -> str:
    """What a round's stages take, for people; the files with them are written."""
    try:
        rounds = round_stages.rounds_of(decode)
    except ValueError as error:
        return f"batch {batch}: no stages: {error}"
    if not rounds:
        return f"batch {batch}: no stages: no launch gathers a window and commits it"
    found = round_stages.summary(rounds)
    files.record(f"b{batch}.stages", found)
    files.record(f"b{batch}.rounds.trace", round_stages.trace(decode, rounds))
    return round_stages.text(batch, found)


def _record(engine: Engine, batches: Batches) -> tuple[list[Recorded], Sequence[FunctionEvent]]:
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, record_function  # here: only when it is asked for

    on_cpu = engine.config.device == "cpu"
    activities = [ProfilerActivity.CPU] if on_cpu else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    recorded = []
    # On a CPU other threads stand in for the device; the kernels of a GPU are reported whichever thread launched them.
    threads = _ExperimentalConfig(profile_all_threads=on_cpu)
    # acc_events: there is one cycle, and torch 2.11 warns that events of others would be lost.
    with profile(activities=activities, experimental_config=threads, acc_events=True) as found:
        # The first launches under the profiler are slow on the host: not part of a window.
        run_batch(engine, batches[0][1], max_tokens=1)
        for point, prompts in batches:
            wanted = math.ceil(PROFILED_STEPS * (point.accepted_length or 1))  # tokens that so many steps gain a row
            more = min(wanted, prompts[0].sampling.max_tokens - 1)
            before = engine.counters["prefill_steps"]
            for kind, tokens in (("prefill", 1), ("decode", 1 + more)):
                launched = engine.counters["decode_steps"]
                with record_function(_label(point.batch, kind)):
                    steps_run = run_batch(engine, prompts, max_tokens=tokens).decode_steps
                    engine.executor.device.synchronize()
            prefills = int(engine.counters["prefill_steps"] - before) // 2  # both runs prefill the same prompts
            steps = int(engine.counters["decode_steps"] - launched)  # with those after the end, which bring nothing
            speculates = point.accepted_length is not None
            refused = (
                _why_ragged(steps_run, len(prompts)) if speculates else why_not_full(steps_run, len(prompts), more)
            )
            recorded.append(Recorded(point, prefills, steps, refused))
    return recorded, found.events() or ()


def _why_ragged(steps: Sequence[DecodeStep], rows: int) -> str | None:
    """With speculation rows end apart: a few steps of fewer rows are part of the average, more of them would be it."""
    full = sum(decode.rows == rows for decode in steps)
    if 4 * full >= 3 * len(steps) > 0:
        return None
    return f"only {full} of {len(steps)} decode steps ran all {rows} rows"


def _label(batch: int, kind: str) -> str:
    return f"bench latency: batch {batch}, {kind}"


# ---- events ----


def _on_host(event: FunctionEvent) -> bool:
    return bool(event.device_type.name == "CPU")


def _within(event: FunctionEvent, window: FunctionEvent) -> bool:
    return bool(window.time_range.start <= event.time_range.start < window.time_range.end)


def _us(event: FunctionEvent) -> float:
    return float(event.time_range.end - event.time_range.start)


def device_calls(events: Iterable[FunctionEvent], window: FunctionEvent) -> list[Call]:
    """Kernels, copies and fills that began within ``window``, in order of their start."""
    found = [
        Call(event.name, event.time_range.start, event.time_range.end, _us(event), event.id)
        for event in events
        if not _on_host(event) and not event.is_user_annotation and _within(event, window)
    ]
    return sorted(found, key=lambda call: call.start)


def host_calls(events: Iterable[FunctionEvent], window: FunctionEvent) -> list[Call]:
    """Operators and calls into the driver that began within ``window``, in order of their start."""
    found = [
        Call(event.name, event.time_range.start, event.time_range.end, event.self_cpu_time_total)
        for event in events
        if _on_host(event) and not event.is_async and not event.is_user_annotation and _within(event, window)
    ]
    return sorted(found, key=lambda call: call.start)
