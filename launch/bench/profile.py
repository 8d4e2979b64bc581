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
Rounds of speculation come with their stages, as figures and as a trace; each round is one captured graph:
    propose    from the launch's first kernel: draft tokens, by a drafter's layers or a look-up
    verify     from the window's gather on: the model's layers, its head, the draw
    accept     the kernel that commits what is kept: last token, length, end and result, by slot
    observe    to the launch's last kernel: KV of a tree's path, recurrent state, what the proposer is shown
Without a GPU operators stand in for kernels, by their own time on the CPU, whichever thread ran them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import mean
from typing import TYPE_CHECKING, Any

from launch.bench.kernel_tables import Call, after_prefill, host_side, part, tables
from launch.bench.load.engine_backend import run_batch
from launch.bench.load.journal import DecodeStep
from launch.bench.load.steady import why_not_full
from launch.bench.point import Point
from launch.bench.results import ResultFiles
from runtime.engine import Engine
from runtime.frontend.client import PromptRequest

STAGES = ("propose", "verify", "accept", "observe")
GATHER, COMMIT = "_begin_window_kernel", "_commit_window_kernel"


@dataclass(frozen=True, slots=True)
class Stage:
    """``calls``: of its kernels. It ends where the next stage of its round begins; microseconds of the trace."""

    name: str
    start: float
    end: float
    calls: int


def rounds_of(calls: Sequence[Call]) -> list[list[Stage]]:
    """The stages of each round among ``calls``, which are in order of their start; without those that are empty.

    A launch is a round if it gathers one window and commits it. Other launches are left out: steps of one token, copies
    of results. ValueError if launches are not distinguished, so that a round's end cannot be.
    """
    found = []
    by_launch = sorted(enumerate(calls), key=lambda numbered: (numbered[1].launch, numbered[0]))
    for launch, numbered in groupby(by_launch, key=lambda numbered: numbered[1].launch):
        replayed = [call for _, call in numbered]
        names = [call.name for call in replayed]
        gathers, commits = names.count(GATHER), names.count(COMMIT)
        if gathers > 1 or commits > 1:
            raise ValueError(f"launch {launch} has {gathers} calls of {GATHER} and {commits} of {COMMIT}, not one")
        if gathers == commits == 1 and names.index(GATHER) < names.index(COMMIT):
            found.append(_stages_of(replayed, names.index(GATHER), names.index(COMMIT)))
    return sorted(found, key=lambda stages: stages[0].start)


def _stages_of(calls: Sequence[Call], gather: int, commit: int) -> list[Stage]:
    borders = (0, gather, commit, commit + 1, len(calls))
    ended = max(call.end for call in calls)
    stages = []
    for name, first, behind in zip(STAGES, borders, borders[1:], strict=False):
        if first < behind:
            end = calls[behind].start if behind < len(calls) else ended
            stages.append(Stage(name, calls[first].start, end, behind - first))
    return stages


def summary(rounds: Sequence[Sequence[Stage]]) -> dict[str, Any]:
    """Of each stage: mean microseconds and kernels a round, and its share of the rounds' time. An empty one has 0."""
    whole = sum(stage.end - stage.start for stages in rounds for stage in stages)
    found: dict[str, Any] = {"rounds": len(rounds)}
    for name in STAGES:
        of_it = [[stage for stage in stages if stage.name == name] for stages in rounds]
        times = [sum(stage.end - stage.start for stage in stages) for stages in of_it]
        found[name] = {
            "us": mean(times),
            "share": sum(times) / whole,
            "kernels": mean(sum(stage.calls for stage in stages) for stages in of_it),
        }
    return found


def text(batch: int, found: dict[str, Any]) -> str:
    """``summary`` in a line, for people."""
    parts = [
        f"{name} {found[name]['us']:.1f} ({found[name]['share']:.1%}, {found[name]['kernels']:.0f} kernels)"
        for name in STAGES
    ]
    return f"batch {batch}, stages of a round, us, {found['rounds']} rounds: {', '.join(parts)}"


def trace(calls: Iterable[Call], rounds: Iterable[Sequence[Stage]]) -> dict[str, Any]:
    """Stages over their kernels as a Chrome trace (JSON object form), for ui.perfetto.dev."""
    return {"displayTimeUnit": "ms", "traceEvents": [*_events(calls, rounds)]}


def _events(calls: Iterable[Call], rounds: Iterable[Sequence[Stage]]) -> Iterator[dict[str, Any]]:
    for thread, name in ((1, "stages"), (2, "kernels")):
        yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for number, stages in enumerate(rounds):
        for stage in stages:
            args = {"round": number, "kernels": stage.calls}
            yield _slice(1, stage.name, stage.start, stage.end, args)
    for call in calls:
        yield _slice(2, call.name, call.start, call.end, {"launch": call.launch})


def _slice(thread: int, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "pid": 0, "tid": thread, "name": name, "ts": start, "dur": end - start, "args": args}


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
        rounds = rounds_of(decode)
    except ValueError as error:
        return f"batch {batch}: no stages: {error}"
    if not rounds:
        return f"batch {batch}: no stages: no launch gathers a window and commits it"
    found = summary(rounds)
    files.record(f"b{batch}.stages", found)
    files.record(f"b{batch}.rounds.trace", trace(decode, rounds))
    return text(batch, found)


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
