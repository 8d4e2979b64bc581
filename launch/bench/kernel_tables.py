"""Calls of kernels and operators, as a profiler saw them, as tables.

Knows: which calls are a decode step's, what is summed up, and how it is shown. Does not know: torch, where calls come
from (profile.py).

Kernels overlap where one is launched before another has ended. So `sum` adds their times up, `busy` counts each moment
once, `span` goes from the first one's start to the last one's end, and `measured` is from runs without a profiler. What
a kernel `adds` is the part of its time in which none that began before it still ran: all of those make `busy`. Its
`gap` is the median time from the end of all kernels before it to its start, negative where one still runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

SHOWN_KERNELS = 25
SHOWN_OPERATORS = 10
_NAME_WIDTH = 60
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel or an operator. Microseconds of the trace; ``us``: its own time, without what it called.
    ``launch``: number of the launch that a kernel came with, its own or that of a whole graph; 0 of operators."""

    name: str
    start: float
    end: float
    us: float
    launch: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """All steps of one kind; microseconds. ``span``: from the first call's start to the last one's end, of a step;
    ``measured``: of a step in the timed runs, None where those gave no rate. The others are of a step, too."""

    steps: int
    sum: float
    busy: float
    span: float
    measured: float | None
    kernels: list[dict[str, Any]]


def after_prefill(short: Sequence[Call], long: Sequence[Call]) -> tuple[list[Call], str | None]:
    """The calls of ``long`` beyond as many of each name as ``short`` has, both in order of their start; and a note if
    ``long`` has fewer of one than ``short``, whose prefill was not quite the same then."""
    prefills = Counter(call.name for call in short)
    seen: Counter[str] = Counter()
    rest = []
    for call in long:
        seen[call.name] += 1
        if seen[call.name] > prefills[call.name]:
            rest.append(call)
    missing = sorted(name for name, count in prefills.items() if seen[name] < count)
    if not missing:
        return rest, None
    name = missing[0]
    return rest, f"the run of one token made {prefills[name]} calls of {name}, the longer one only {seen[name]}"


def part(calls: Sequence[Call], steps: int, measured: float | None) -> Part:
    """``calls`` of ``steps`` steps, in order of their start, by name; the longest first. ``measured``: us a step."""
    counts: Counter[str] = Counter()
    times: dict[str, float] = {}
    adds: dict[str, float] = {}
    gaps: dict[str, list[float]] = {}
    covered = calls[0].start
    for call in calls:
        gaps.setdefault(call.name, []).append(call.start - covered)
        counts[call.name] += 1
        times[call.name] = times.get(call.name, 0.0) + call.us
        adds[call.name] = adds.get(call.name, 0.0) + max(0.0, call.end - max(covered, call.start))
        covered = max(covered, call.end)
    whole, busy = sum(times.values()), sum(adds.values())
    kernels = [
        {
            "name": name,
            "calls_per_step": counts[name] / steps,
            "us_per_call": us / counts[name],
            "us_per_step": us / steps,
            "adds_per_step": adds[name] / steps,
            "gap_us": median(gaps[name]),
            "share": us / whole if whole else 0.0,
        }
        for name, us in sorted(times.items(), key=lambda item: (-item[1], item[0]))
    ]
    return Part(steps, whole / steps, busy / steps, (covered - calls[0].start) / steps, measured, kernels)


def host_side(calls: Sequence[Call]) -> dict[str, Any]:
    """What the host did for a whole prefill: kernel launches and operators, microseconds of all steps together."""
    launches = [call for call in calls if call.name.startswith(_LAUNCHES)]
    counts = Counter(call.name for call in calls)
    times: dict[str, float] = {}
    for call in calls:
        times[call.name] = times.get(call.name, 0.0) + call.us
    longest = sorted(times.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_OPERATORS]
    return {
        "launches": len(launches),
        "launch_us": sum(call.us for call in launches),
        "first_to_last_launch_us": launches[-1].end - launches[0].start if launches else None,
        "operators": [{"name": name, "calls": counts[name], "us": us} for name, us in longest],
    }


def tables(record: Mapping[str, Any]) -> str:
    """What a batch's file says, for people."""
    batch = record["batch"]
    if record["refused"] is not None:
        return f"batch {batch}: no profile: {record['refused']}"
    lines = [] if record["note"] is None else ["", f"batch {batch}: {record['note']}"]
    for kind in ("decode", "prefill"):
        found = record[kind]
        measured = "n/a" if found["measured"] is None else f"{found['measured']:.1f}"
        lines += [
            "",
            f"batch {batch}, {kind}: us a step, {found['steps']} steps: sum {found['sum']:.1f}, busy "
            f"{found['busy']:.1f}, first start to last end {found['span']:.1f}, measured {measured}",
            f"{'calls/step':>10}  {'us/call':>10}  {'us/step':>10}  {'share':>6}  {'adds/step':>10}  {'gap us':>7}"
            "  name",
        ]
        for row in found["kernels"][:SHOWN_KERNELS]:
            times = f"{row['calls_per_step']:10.2f}  {row['us_per_call']:10.2f}  {row['us_per_step']:10.2f}"
            rest = f"{row['share']:6.1%}  {row['adds_per_step']:10.2f}  {row['gap_us']:7.2f}"
            lines.append(f"{times}  {rest}  {short_name(row['name'])}")
        if others := found["kernels"][SHOWN_KERNELS:]:
            us, share, added = (sum(row[key] for row in others) for key in ("us_per_step", "share", "adds_per_step"))
            lines.append(f"{'':10}  {'':10}  {us:10.2f}  {share:6.1%}  {added:10.2f}  {'':7}  {len(others)} others")
    host = record["prefill_host"]
    if host["launches"]:
        lines.append(
            f"host in prefill, all steps: {host['launches']} launches take {host['launch_us']:.0f} us; from the first "
            f"to the last {host['first_to_last_launch_us']:.0f} us"
        )
    lines.append("host in prefill, all steps: operators by their own time")
    for row in host["operators"]:
        lines.append(f"{row['calls']:10}  {row['us']:10.1f} us  {short_name(row['name'])}")
    return "\n".join(lines)


def short_name(name: str) -> str:
    """``name`` in 60 characters: its beginning and its end, since templates differ in both."""
    return name if len(name) <= _NAME_WIDTH else f"{name[:37]}..{name[-21:]}"
