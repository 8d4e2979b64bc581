"""What a run of generate amounts to: counts, rates, percentiles, and how well the chain held.

Knows: how figures are gathered and shown, for people and as JSON; the progress bar.
Does not know: where outputs come from.
"""

from __future__ import annotations

import math
import re
import sys
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec
from tqdm import tqdm

from runtime.frontend.outputs import RequestOutput

_PERCENTILES = (50, 90, 99)
_LABELLED = re.compile(r"(\w+)\{(.*)\}")
_LIFECYCLE = ("admissions", "deferred_admissions", "evictions", "pauses", "resumes", "cancels")
_BY_POSITION = ("accepted", "compared")
_ORDINARY = ("admissions", "cancels")  # a stop string that the host finds is a cancel, too
_ORDINARY_ENDS = ("stop", "length")


def percentile(values: array[float], percent: float) -> float | None:
    """The value below which ``percent`` % of ``values`` lie, interpolated as numpy does; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


class Summary:
    """Figures of one run; eight bytes a request and figure, so that a million requests are no burden."""

    def __init__(self) -> None:
        self.finished = 0
        self.failed = 0
        self.skipped = 0  # done by an earlier run
        self.unfinished = 0  # given up because the run was interrupted
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._started = time.perf_counter()
        self._seconds: float | None = None
        self._ttft = array("d")
        self._tpot = array("d")

    def add(self, *outputs: RequestOutput) -> None:
        """Count a request that ended with an answer, of one output a prompt."""
        self.finished += 1
        for output in outputs:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.generated_tokens += output.generated_tokens
            if output.timing.ttft is not None:
                self._ttft.append(output.timing.ttft)
            if output.timing.tpot is not None:
                self._tpot.append(output.timing.tpot)

    def stop_clock(self) -> None:
        self._seconds = time.perf_counter() - self._started

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started if self._seconds is None else self._seconds

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def figures(self, counters: Mapping[str, int | float]) -> dict[str, Any]:
        """Everything as plain values; times in seconds unless the name says ms."""
        steps = counters.get("steps", 0)
        breaks = _labelled("chain_breaks", counters)
        requests, idle = _labelled("group_requests", counters), _labelled("group_idle_steps", counters)
        return (
            {
                "finished": self.finished,
                "failed": self.failed,
                "skipped": self.skipped,
                "unfinished": self.unfinished,
                "seconds": self.seconds,
                "prompt_tokens": self.prompt_tokens,
                "generated_tokens": self.generated_tokens,
                "tokens_per_s": self.tokens_per_s,
                "requests_per_s": self.finished / self.seconds if self.seconds else 0.0,
                "ttft_ms": _percentiles_ms(self._ttft),
                "tpot_ms": _percentiles_ms(self._tpot),
                "steps": steps,
                "chained_step_ratio": counters.get("chained_steps", 0) / steps if steps else None,
                "chain_breaks": breaks,
                "ghost_rows": counters.get("ghost_rows", 0),
                "wasted_tokens": counters.get("wasted_tokens", 0),
            }
            | {name: counters.get(name, 0) for name in _LIFECYCLE}
            | {
                "finish_reasons": _labelled("finished", counters),
                "late_captures": _labelled("late_captures", counters),
                "fallbacks": _labelled("fallbacks", counters),
            }
            | _speculation(counters)
            | ({"group_requests": list(requests.values()), "group_idle_steps": list(idle.values())} if requests else {})
        )

    def write_json(self, path: Path, counters: Mapping[str, int | float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self.figures(counters)), indent=2) + b"\n")

    def text(self, counters: Mapping[str, int | float]) -> str:
        """Some lines for a person to read."""
        f = self.figures(counters)
        others = [f"{f[name]} {name}" for name in ("failed", "skipped", "unfinished") if f[name]]
        ratio = "n/a" if f["chained_step_ratio"] is None else f"{f['chained_step_ratio']:.1%}"
        breaks = _counts(f["chain_breaks"]) or "none"
        lines = [
            f"requests      {', '.join([f'{self.finished} finished', *others])} in {self.seconds:.2f} s",
            f"tokens        {self.generated_tokens} generated, {self.prompt_tokens} in prompts",
            f"throughput    {self.tokens_per_s:.1f} tokens/s, {f['requests_per_s']:.2f} requests/s",
            f"TTFT          {_shown_ms(f['ttft_ms'])}",
            f"TPOT          {_shown_ms(f['tpot_ms'])}",
            f"steps         {f['steps']}, chained {ratio}; chain breaks: {breaks}",
            f"ghost rows    {f['ghost_rows']}, wasted tokens {f['wasted_tokens']}",
        ]
        if "speculation" in f:
            s = f["speculation"]
            length = "no round" if s["accepted_length"] is None else f"{s['accepted_length']:.2f} tokens a round"
            kept = f"{s['num_accepted_tokens']} of {s['num_draft_tokens']} proposals kept"
            recall = " ".join("n/a" if share is None else f"{share:.2f}" for share in s["recall_per_position"])
            lines.append(f"speculation   {length}, {kept}" + (f"; recall@1 {recall}" if recall else ""))
        lines += _out_of_the_ordinary(f)
        if groups := groups_text(counters):
            lines.append(f"groups        {groups}; from the steps on, figures are group 0's")
        return "\n".join(lines)


def _out_of_the_ordinary(figures: Mapping[str, Any]) -> list[str]:
    """Lines of a summary that a run has where requests were put off or ended otherwise than by their own limits, and
    where something took longer than it need have."""
    lines = []
    ends = {reason: count for reason, count in figures["finish_reasons"].items() if count}
    if any(reason not in _ORDINARY_ENDS for reason in ends):
        lines.append(f"ends          {_counts(ends)}")
    lives = {name: figures[name] for name in _LIFECYCLE if figures[name]}
    if any(name not in _ORDINARY for name in lives):
        lines.append(f"lifecycle     {_counts({name.replace('_', ' '): count for name, count in lives.items()})}")
    if figures["late_captures"]:
        each = "; ".join(f"{variant}: {count}" for variant, count in figures["late_captures"].items())
        lines.append(f"late graphs   {each} (--warm captures them at the start)")
    if figures["fallbacks"]:
        lines.append(f"fallbacks     {_counts(figures['fallbacks'])}")
    return lines


def _counts(values: Mapping[str, int | float]) -> str:
    return ", ".join(f"{name} {count}" for name, count in values.items())


def _speculation(counters: Mapping[str, int | float]) -> dict[str, Any]:
    """What windows gained; nothing where there were none."""
    rounds, kept = counters.get("spec_num_drafts", 0), counters.get("spec_num_accepted_tokens", 0)
    off = _labelled("speculation_off", counters)
    if not rounds and not off:
        return {}
    accepted, compared = (list(_labelled(f"spec_{name}_per_position", counters).values()) for name in _BY_POSITION)
    figures = {
        "num_drafts": rounds,
        "num_draft_tokens": counters.get("spec_num_draft_tokens", 0),
        "num_accepted_tokens": kept,
        "accepted_length": 1 + kept / rounds if rounds else None,
        "accepted_per_position": accepted,
        "compared_per_position": compared,
        "recall_per_position": [right / all_ if all_ else None for right, all_ in zip(accepted, compared, strict=True)],
        "off": off,
        "narrowed": _labelled("speculation_narrowed", counters),
    }
    return {"speculation": figures}


def groups_text(counters: Mapping[str, int | float]) -> str:
    """What each of several groups had to do; empty where there is one."""
    requests, idle = _labelled("group_requests", counters), _labelled("group_idle_steps", counters)
    if not requests:
        return ""
    each = (", ".join(map(str, values.values())) for values in (requests, idle))
    return "requests {}; steps for the others' sake {}".format(*each)


def _labelled(name: str, counters: Mapping[str, int | float]) -> dict[str, int | float]:
    """The counters called ``name{label}``, by label."""
    found = ((_LABELLED.fullmatch(counter), value) for counter, value in counters.items())
    return {match[2]: value for match, value in found if match is not None and match[1] == name}


def _percentiles_ms(values: array[float]) -> dict[str, float | None]:
    found = {f"p{percent}": percentile(values, percent) for percent in _PERCENTILES}
    return {name: None if value is None else value * 1e3 for name, value in found.items()}


def _shown_ms(values: Mapping[str, float | None]) -> str:
    shown = (f"{name} {'n/a' if value is None else f'{value:.2f}'}" for name, value in values.items())
    return ", ".join(shown) + " ms"


class Progress:
    """Finished of total and tokens a second, on a terminal; silent everywhere else."""

    def __init__(self, total: int, done_before: int, file: TextIO = sys.stderr) -> None:
        silent = not file.isatty()
        self._bar = tqdm(
            total=total, initial=done_before, unit="req", file=file, disable=silent, leave=False, mininterval=0
        )
        self._initial = done_before
        self._next_at = 0.0

    def show(self, summary: Summary) -> None:
        """Redraw, at most twice a second."""
        if self._bar.disable or (now := time.monotonic()) < self._next_at:
            return
        self._next_at = now + 0.5
        self._bar.set_postfix_str(f"{summary.tokens_per_s:.0f} tokens/s", refresh=False)
        self._bar.update(self._initial + summary.finished + summary.failed - self._bar.n)

    def close(self) -> None:
        self._bar.close()
