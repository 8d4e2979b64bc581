"""Stages of a round of speculation, separated by its kernels: a round is one captured graph, without a host within.

Knows: which kernels a window's verification begins and ends with (runtime/execute/step/window_io_triton.py), and that
all kernels of a graph's replay have one launch. Does not know: what else runs in a stage, where calls come from.

    propose    from the launch's first kernel: draft tokens, by a drafter's layers or a look-up
    verify     from the window's gather on: the model's layers, its head, the draw
    accept     the kernel that commits what is kept: last token, length, end and result, by slot
    observe    to the launch's last kernel: KV of a tree's path, recurrent state, what the proposer is shown
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean
from typing import Any

from launch.bench.kernel_tables import Call

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
            found.append(_stages(replayed, names.index(GATHER), names.index(COMMIT)))
    return sorted(found, key=lambda stages: stages[0].start)


def _stages(calls: Sequence[Call], gather: int, commit: int) -> list[Stage]:
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
