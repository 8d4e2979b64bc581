"""The figures of a run: vLLM's names for what vLLM has, and what the engine counted.

Knows: definitions; the rows of a run over time, one for each 100 ms. Does not know: how a run came about, files, plots.

ttft, tpot, e2el are of requests, itl is of gaps between portions of tokens; tpot is (last - first token) / (tokens - 1)
and leaves out answers of one token. A failed request counts as such and in nothing else. In a steady window tokens,
ends and gaps are those that fall into it, and requests those that began in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from launch.bench.load.journal import Journal, Served
from launch.bench.load.steady import Window, counted

INTERVAL_S = 0.1


def timeline(journal: Journal, interval: float = INTERVAL_S) -> list[dict[str, Any]]:
    """A row an interval, from the start of the run; ``t_s`` is the interval's beginning.

    ``arrived``, ``completed``, ``failed``, ``output_tokens`` count what fell into it; ``output_throughput`` is tokens a
    second. At its end ``running`` requests had a token and had not ended, and ``waiting`` ones had begun and had none.
    Of an engine of this process also its steps by kind and ``chained`` ones.
    """
    bins = max(1, math.ceil(journal.seconds / interval))
    edges = journal.started + interval * np.arange(bins + 1)
    edges[-1] = np.inf  # the last end is on it, or beyond it by rounding

    def binned(moments: list[float], weights: list[int] | None = None) -> np.ndarray[Any, Any]:
        places = np.clip(np.searchsorted(edges, np.asarray(moments), side="right") - 1, 0, bins - 1)
        return np.bincount(places, weights, minlength=bins).astype(np.int64)

    requests = journal.requests
    arrived, ended = binned([one.began for one in requests]), binned([one.ended for one in requests])
    failed = binned([one.ended for one in requests if one.failed])
    first = binned([one.moments[0] for one in requests if one.moments])
    unbegun = binned([one.ended for one in requests if not one.moments])
    tokens = binned(
        [moment for one in requests for moment in one.moments], [count for one in requests for count in one.counts]
    )
    running = np.cumsum(first) - np.cumsum(ended - unbegun)
    waiting = np.cumsum(arrived) - np.cumsum(first) - np.cumsum(unbegun)
    columns = {
        "arrived": arrived,
        "completed": ended - failed,
        "failed": failed,
        "output_tokens": tokens,
        "running": running,
        "waiting": waiting,
        **_steps(journal, edges),
    }
    return [
        {
            "t_s": round(number * interval, 6),
            "output_throughput": float(tokens[number] / interval),
            **{name: int(column[number]) for name, column in columns.items()},
        }
        for number in range(bins)
    ]


def _steps(journal: Journal, edges: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Steps in each interval, by the latest samples before its ends."""
    samples = journal.samples
    if len(samples) < 2:
        return {}
    latest = np.clip(np.searchsorted([sample.at for sample in samples], edges, side="right") - 1, 0, None)
    names = [kind for kind in STEP_KINDS if kind in samples[0].counts]
    counts = {name: np.asarray([sample.counts[name] for sample in samples]) for name in (*names, "chained_steps")}
    return {name: np.diff(column[latest]) for name, column in counts.items()}


STEP_KINDS = ("prefill_steps", "decode_steps", "mixed_steps")
METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 95, 99)


def load_figures(journal: Journal, slos: Mapping[str, float], window: Window | None = None) -> dict[str, Any]:
    """Of a whole run, or of a ``window`` of it. ``slos``: milliseconds by name; see ``is_good``."""
    inside = journal.good if window is None else [one for one in journal.good if window.holds(one.began)]
    seconds = journal.seconds if window is None else window.seconds
    ended = [one for one in journal.good if window is None or window.holds(one.ended)]
    prompt_tokens = sum(one.prompt_tokens for one in ended)
    output_tokens = sum(count for _, count in portions(journal.good, window))
    good = sum(is_good(one, slos) for one in ended)
    gaps = [
        gap
        for one in journal.good
        for gap, moment in zip(one.gaps, one.moments[1:], strict=True)
        if window is None or window.holds(moment)
    ]
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(ended),
        "failed": len(journal.requests) - len(journal.good),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(ended) / seconds,
        "request_goodput": good / seconds if slos else None,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / seconds,
    }
    figures |= spread("ttft", [one.ttft for one in inside])
    figures |= spread("tpot", [one.tpot for one in inside if one.tpot is not None])
    figures |= spread("itl", gaps)
    figures |= spread("e2el", [one.e2el for one in inside])
    return figures


def spread(name: str, seconds: list[float]) -> dict[str, Any]:
    """mean, median, std and percentiles, the latter both as vLLM's files and as its metrics object have them.

    None of each where there are no values.
    """
    if not seconds:
        words = ("mean", "median", "std", "percentiles", *(f"p{percent}" for percent in PERCENTILES))
        return {f"{word}_{name}_ms": None for word in words}
    values = np.asarray(seconds) * 1e3
    percentiles = {percent: float(np.percentile(values, percent)) for percent in PERCENTILES}
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"percentiles_{name}_ms": list(percentiles.items()),
        **{f"p{percent}_{name}_ms": value for percent, value in percentiles.items()},
    }


def batch_figures(journal: Journal, model_id: str, most: int | None) -> dict[str, Any]:
    """Of a run of requests that were all due at once, of which ``most`` ran together."""
    figures = run_header(model_id, len(journal.requests), math.inf, 1.0, most) | load_figures(journal, {})
    return figures | {"total_input": figures["total_input_tokens"], "total_output": figures["total_output_tokens"]}


def portions(requests: Iterable[Served], window: Window | None) -> Iterable[tuple[float, int]]:
    """(when, tokens) of each, in ``window`` if there is one."""
    for one in requests:
        for moment, count in zip(one.moments, one.counts, strict=True):
            if window is None or window.holds(moment):
                yield moment, count


def is_good(one: Served, slos: Mapping[str, float]) -> bool:
    """Whether a request that did not fail met every goal, in milliseconds. As in vLLM, a goal is met when it is reached
    exactly, and the tpot of an answer of one token is 0."""
    found = {"ttft": one.ttft, "tpot": one.tpot or 0.0, "e2el": one.e2el}
    return all(found[name] * 1e3 <= limit for name, limit in slos.items())


def peaks(journal: Journal) -> dict[str, float | int]:
    """vLLM's peaks: most tokens in one second after the first request began, and most requests alive in one second."""
    good = journal.good
    if not good:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    first = min(one.began for one in good)
    seconds = math.ceil(max(one.moments[-1] for one in good) - first) + 1
    tokens, alive = np.zeros(seconds), np.zeros(seconds + 1, dtype=np.int64)
    for one in good:
        np.add.at(tokens, (np.asarray(one.moments) - first).astype(np.int64), one.counts)
        alive[int(one.began - first)] += 1
        alive[int(one.moments[-1] - first) + 1] -= 1
    return {"max_output_tokens_per_s": float(tokens.max()), "max_concurrent_requests": int(np.cumsum(alive).max())}


def engine_figures(journal: Journal, idle: float | None = None, window: Window | None = None) -> dict[str, Any]:
    """What the engine counted: ours, for vLLM's file has no such keys. Empty of a server over a socket.

    ``chained``: steps planned while an earlier one was in flight, as a share. ``device_idle``: share of the time in
    which the device ran no step. ``prefix_hit_share``: tokens found in the prefix cache, of those looked up.
    ``late_ms``: how long after it was due, or had a place, a request was handed over. With several groups the
    counts are those of rank 0's.
    """
    counts = counted(journal, window)
    if not counts:
        return {}
    steps = sum(counts.get(kind, 0) for kind in STEP_KINDS)
    figures: dict[str, Any] = {
        "steps": steps,
        **{kind: counts[kind] for kind in STEP_KINDS if kind in counts},
        "chained": counts["chained_steps"] / steps if steps else None,
        "device_idle": idle,
        **{name: count for name, count in counts.items() if name not in (*STEP_KINDS, "chained_steps")},
    }
    if window is None:
        figures["chain_breaks"] = chain_breaks(journal)
        asked = counts["prefix_query_tokens"]
        figures["prefix_hit_share"] = counts["prefix_hit_tokens"] / asked if asked else None
    return figures


def chain_breaks(journal: Journal) -> dict[str, int]:
    """Steps of a run that were not chained, by reason."""
    found = {}
    for name, count in journal.after.items():
        if name.startswith("chain_breaks{") and (more := int(count - journal.before.get(name, 0))):
            found[name.removeprefix("chain_breaks{").removesuffix("}")] = more
    return found


def lateness(requests: Sequence[Served]) -> dict[str, float]:
    """Milliseconds between the moment from which a request's latencies count and its being handed over."""
    late = np.asarray([one.sent - one.began for one in requests]) * 1e3
    return {"median": float(np.median(late)), "p99": float(np.percentile(late, 99)), "max": float(late.max())}


def detail_lists(journal: Journal) -> dict[str, list[Any]]:
    """The lists that vLLM writes with --save-detailed, one entry a request; times in seconds."""
    return {
        "input_lens": [one.prompt_tokens for one in journal.requests],
        "output_lens": [one.tokens for one in journal.requests],
        "start_times": [one.began - journal.started for one in journal.requests],
        "ttfts": [0.0 if one.failed else one.ttft for one in journal.requests],
        "itls": [one.gaps for one in journal.requests],
        "errors": [one.error for one in journal.requests],
    }


def request_rows(journal: Journal) -> list[dict[str, Any]]:
    """A flat row a request; times in milliseconds, moments after the run's start."""
    return [
        {
            "request": number,
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.tokens,
            "finish_reason": one.reason,
            "error": one.error,
            "due_ms": _ms(one.due - journal.started),
            "began_ms": _ms(one.began - journal.started),
            "sent_ms": _ms(one.sent - journal.started),
            "ended_ms": _ms(one.ended - journal.started),
            "ttft_ms": None if one.failed else _ms(one.ttft),
            "tpot_ms": None if one.failed or one.tpot is None else _ms(one.tpot),
            "e2el_ms": None if one.failed else _ms(one.e2el),
            "itl_ms": [_ms(gap) for gap in one.gaps],
        }
        for number, one in enumerate(journal.requests)
    ]


def run_header(model_id: str, count: int, rate: float, burstiness: float, concurrency: int | None) -> dict[str, Any]:
    """What vLLM's file says of the load, first of all."""
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "lockstride",
        "backend": "lockstride",
        "label": None,
        "model_id": model_id,
        "tokenizer_id": model_id,
        "num_prompts": count,
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": burstiness if math.isfinite(burstiness) else "inf",
        "max_concurrency": concurrency,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)
