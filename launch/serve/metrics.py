"""What a server counts, and /metrics: under vLLM's names, which tools of the field hard-code, and under lockstride:.

Knows: names, labels and buckets; how the counts of several API processes become one. Does not know: when anything
happens (app.py, generation.py report it), what an engine's counters mean (runtime/counters.py).

Each API process keeps its counts and leaves them in memory that all of them share once a second; whichever is asked
adds up its own and those of the others. A process that is started again begins with the counts of the one before it.
"""

from __future__ import annotations

import os
import re
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final
from zlib import crc32

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from launch.api.body_rules import FORMS
from runtime.frontend.serve_messages import ITERATION_BUCKETS, Ready, Stats
from runtime.observe.step_record import AGREEMENT_BOUNDS

_TTFT: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAPS: Final = (  # vLLM's begin at 0.01: useless for a fast engine
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.012, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY: Final = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS: Final = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_CHOICES: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
_HTTP: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# Name -> buckets and help text, of histograms that requests fill.
HISTOGRAMS: Final[dict[str, tuple[tuple[float, ...], str]]] = {
    "vllm:time_to_first_token_seconds": (_TTFT, "From the request's arrival to its first token."),
    "vllm:inter_token_latency_seconds": (_GAPS, "Between two tokens of an answer, as they reach the API process."),
    "vllm:request_time_per_output_token_seconds": (_GAPS, "Mean time between the tokens of an answer."),
    "vllm:e2e_request_latency_seconds": (_LATENCY, "From the request's arrival to its last token."),
    "vllm:request_queue_time_seconds": (_LATENCY, "From the request's arrival until the engine got it."),
    "vllm:request_inference_time_seconds": (_LATENCY, "From when the engine got the request to its last token."),
    "vllm:request_prefill_time_seconds": (_LATENCY, "From when the engine got the request to its first token."),
    "vllm:request_decode_time_seconds": (_LATENCY, "From the first token of the request to its last."),
    "vllm:request_prompt_tokens": (_TOKENS, "Tokens of a prompt."),
    "vllm:request_generation_tokens": (_TOKENS, "Tokens of all answers of a request."),
    "vllm:request_max_num_generation_tokens": (_TOKENS, "Tokens of the longest answer of a request."),
    "vllm:request_params_n": (_CHOICES, "n of a request."),
    "vllm:request_params_max_tokens": (_TOKENS, "max_tokens of a request."),
}
COUNTERS: Final[dict[str, str]] = {
    "vllm:prompt_tokens": "Tokens of prompts.",
    "vllm:generation_tokens": "Tokens generated.",
}
_REASONS: Final = ("stop", "length", "abort", "error", "repetition")
_REJECTIONS: Final = ("queue_full", "shutting_down", "loading", "engine_lost", "too_many_connections", "invalid")
_LABELLED: Final = {  # engine counters by label: the label's name
    "chain_breaks": "reason",
    "evicted_for": "kv_group",
    "finished": "reason",
    "late_captures": "variant",
    "fallbacks": "what",
    "speculation_off": "reason",
    "speculation_narrowed": "num_speculative_tokens",
    "group_requests": "group",
    "group_idle_steps": "group",
}
_NOW: Final = {"fenced_blocks": "Blocks that will be free once the steps in flight have landed."}  # and fall again
_WINDOWS: Final = {  # the same of each group of layers with a sliding window
    "window_blocks": "KV blocks of layers that see a window of tokens.",
    "window_blocks_used": "Those of them that requests hold.",
}
_BY_POSITION: Final = (  # of a window: engine counter, metric, help text; the first under vLLM's name
    (
        "spec_accepted_per_position",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Proposals kept, by place in the window.",
    ),
    (
        "spec_compared_per_position",
        "lockstride:spec_decode_num_compared_tokens_per_pos",
        "Proposals behind none but kept ones; of them those that were kept are the recall@1 of the place.",
    ),
)
_ASK_FOR_FORMS: Final = {*FORMS, "tools", "tool_choice", "text"}  # "text": of /v1/responses
_HEAD: Final = struct.Struct("<QII")  # of what is saved: its number, its length, its CRC
_ROOM: Final = 1 << 20  # bytes
_LABEL: Final = re.compile(r"(\w+)\{(.*)\}")


class Histogram(msgspec.Struct):
    """Counts by bucket, the last one beyond all bounds."""

    counts: list[int]
    sum: float = 0.0

    def add(self, other: Histogram) -> None:
        if len(other.counts) == len(self.counts):
            self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
            self.sum += other.sum


class Counts(msgspec.Struct):
    """Everything that an API process counted. HTTP keys: method, handler and status in one text."""

    counters: dict[str, int] = msgspec.field(default_factory=dict)
    finished: dict[str, int] = msgspec.field(default_factory=dict)
    rejected: dict[str, int] = msgspec.field(default_factory=dict)
    histograms: dict[str, Histogram] = msgspec.field(default_factory=dict)
    http: dict[str, int] = msgspec.field(default_factory=dict)
    http_seconds: dict[str, Histogram] = msgspec.field(default_factory=dict)
    constrained: dict[str, int] = msgspec.field(default_factory=dict)
    unconstrained: dict[str, int] = msgspec.field(default_factory=dict)

    def add(self, other: Counts) -> None:
        for mine, theirs in (
            (self.counters, other.counters),
            (self.finished, other.finished),
            (self.rejected, other.rejected),
            (self.constrained, other.constrained),
            (self.unconstrained, other.unconstrained),
            (self.http, other.http),
        ):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0) + value
        for kept, more in ((self.histograms, other.histograms), (self.http_seconds, other.http_seconds)):
            for name, histogram in more.items():
                kept.setdefault(name, Histogram([0] * len(histogram.counts))).add(histogram)


def _fresh() -> Counts:
    histograms = {name: Histogram([0] * (len(bounds) + 1)) for name, (bounds, _) in HISTOGRAMS.items()}
    finished, rejected = dict.fromkeys(_REASONS, 0), dict.fromkeys(_REJECTIONS, 0)
    return Counts(dict.fromkeys(COUNTERS, 0), finished, rejected, histograms)


class Metrics:
    """The counts of this process, number ``index`` of those that share ``files``: memory (memfd), one for each."""

    def __init__(self, files: Sequence[int], index: int) -> None:
        self._files = files
        self._index = index
        self.own = _fresh()
        self._saved, before = _read(files[index]) if files else (0, Counts())
        self.own.add(before)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        histogram = self.own.histograms[name]
        histogram.counts[bisect_left(HISTOGRAMS[name][0], value)] += times
        histogram.sum += value * times

    def count(self, name: str, by: int) -> None:
        self.own.counters[name] += by

    def finished(self, reason: str) -> None:
        self.own.finished[reason] = self.own.finished.get(reason, 0) + 1

    def rejected(self, code: str | None) -> None:
        """A request to generate that was refused as a whole; ``code``: of its error, None where it could never run."""
        reason = code or "invalid"
        self.own.rejected[reason] = self.own.rejected.get(reason, 0) + 1

    def constrained(self, kind: str) -> None:
        """A request for an answer of a form: body_rules.form_of."""
        self.own.constrained[kind] = self.own.constrained.get(kind, 0) + 1

    def refused(self, param: str | None) -> None:
        """A request, because of its field ``param``: counted where that one asks for a form."""
        if param in _ASK_FOR_FORMS:
            self.own.unconstrained[param] = self.own.unconstrained.get(param, 0) + 1

    def http(self, method: str, handler: str, status: int, seconds: float) -> None:
        key = f"{method} {handler} {status // 100}xx"
        self.own.http[key] = self.own.http.get(key, 0) + 1
        timed = self.own.http_seconds.setdefault(f"{method} {handler}", Histogram([0] * (len(_HTTP) + 1)))
        timed.counts[bisect_left(_HTTP, seconds)] += 1
        timed.sum += seconds

    def save(self) -> None:
        """For the other processes and the next one in this one's place: at two places in turn, so that one is whole."""
        data = msgspec.msgpack.encode(self.own)
        if self._files and len(data) <= _ROOM - _HEAD.size:
            self._saved += 1
            head = _HEAD.pack(self._saved, len(data), crc32(data))
            os.pwrite(self._files[self._index], head + data, self._saved % 2 * _ROOM)

    def all(self) -> Counts:
        """Of all processes."""
        total = _fresh()
        total.add(self.own)
        for index, file in enumerate(self._files):
            if index != self._index:
                total.add(_read(file)[1])
        return total

    def text(self, model: str, ready: Ready | None, stats: Stats | None) -> bytes:
        """The page that Prometheus reads."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page(self.all(), model, ready, stats))
        return generate_latest(registry)


def _read(file: int) -> tuple[int, Counts]:
    """What was saved last, and how often something was."""
    newest = 0, Counts()
    for place in (0, _ROOM):
        head = os.pread(file, _HEAD.size, place).ljust(_HEAD.size, b"\0")
        number, length, sum_of = _HEAD.unpack(head)
        data = os.pread(file, length, place + _HEAD.size)
        if number > newest[0] and crc32(data) == sum_of:
            newest = number, msgspec.msgpack.decode(data, type=Counts)
    return newest


class _Page(Collector):
    """One look at everything."""

    def __init__(self, counts: Counts, model: str, ready: Ready | None, stats: Stats | None) -> None:
        self._counts = counts
        self._labels = {"model_name": model, "engine": "0"}
        self._ready = ready
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from self._of_requests()
        yield from self._of_http()
        if self._ready is not None:
            info = InfoMetricFamily("vllm:cache_config", "How the KV cache was set up.")
            info.add_metric([], {**self._labels, **self._ready.cache})
            yield info
        if self._stats is not None:
            yield from self._of_engine(self._stats)

    def _gauge(self, name: str, text: str, value: float, **labels: str) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._labels, *labels])
        family.add_metric([*self._labels.values(), *labels.values()], value)
        return family

    def _counter(self, name: str, text: str, values: Iterable[tuple[str, float]], label: str | None = None) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, *([label] if label else [])])
        for at, value in values:
            family.add_metric([*self._labels.values(), *([at] if label else [])], value)
        return family

    def _of_requests(self) -> Iterator[Metric]:
        counts = self._counts
        for name, text in COUNTERS.items():
            yield self._counter(name, text, [("", counts.counters[name])])
        reasons = list(counts.finished.items())
        yield self._counter(
            "vllm:request_success", "Answers by how they ended for the client.", reasons, "finished_reason"
        )
        rejected = list(counts.rejected.items())
        yield self._counter(
            "lockstride:request_rejections", "Requests refused before they began, by reason.", rejected, "reason"
        )
        yield self._counter(
            "lockstride:structured_output_requests",
            "Requests for answers of a form, by kind.",
            sorted(counts.constrained.items()),
            "kind",
        )
        yield self._counter(
            "lockstride:structured_output_refusals",
            "Requests refused because of the form that they ask for, by field.",
            sorted(counts.unconstrained.items()),
            "field",
        )
        for name, (bounds, text) in HISTOGRAMS.items():
            family = HistogramMetricFamily(name, text, labels=list(self._labels))
            histogram = counts.histograms[name]
            family.add_metric(list(self._labels.values()), _cumulated(bounds, histogram.counts), histogram.sum)
            yield family

    def _of_http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("http_requests", "HTTP requests.", labels=["method", "handler", "status"])
        for key, value in sorted(self._counts.http.items()):
            requests.add_metric(key.split(" "), value)
        yield requests
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "Until the last byte of the answer.", labels=["method", "handler"]
        )
        for key, histogram in sorted(self._counts.http_seconds.items()):
            seconds.add_metric(key.split(" "), _cumulated(_HTTP, histogram.counts), histogram.sum)
        yield seconds

    def _of_engine(self, stats: Stats) -> Iterator[Metric]:
        counters = stats.counters
        yield self._gauge("vllm:num_requests_running", "Sequences that have begun.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that no step has begun.", stats.queued)
        yield self._gauge(
            "vllm:num_requests_waiting_by_reason", "The same, by what they wait for.", stats.queued, reason="capacity"
        )
        usage = stats.used_blocks / stats.blocks if stats.blocks else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1.", usage)
        preempted = [("", counters.get("evictions", 0.0))]
        yield self._counter("vllm:num_preemptions", "Requests that lost slot and blocks for a while.", preempted)
        # As the scheduler counts its hits: a request that lost its memory is looked up again.
        looked_up = [("", counters.get("prefix_query_tokens", 0.0))]
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", looked_up)
        hits = [("", counters.get("prefix_hit_tokens", 0.0))]
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found there.", hits)
        yield self._counter("vllm:prompt_tokens_cached", "The same.", hits)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            count = [("", counters.get(f"spec_{name}", 0.0))]
            yield self._counter(f"vllm:spec_decode_{name}", "Speculation; 0 without a proposer.", count)
        for name, shown, text in _BY_POSITION:
            values = [
                (found.group(2), value)
                for counter, value in counters.items()
                if (found := _LABEL.fullmatch(counter)) and found.group(1) == name
            ]
            yield self._counter(shown, text, values, "position")
        iterations = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens that a step generated.", labels=list(self._labels)
        )
        cumulated = _cumulated(tuple(map(float, ITERATION_BUCKETS)), stats.iterations)
        iterations.add_metric(list(self._labels.values()), cumulated, stats.iteration_tokens)
        yield iterations
        yield from self._of_chain(stats)

    def _of_chain(self, stats: Stats) -> Iterator[Metric]:
        seconds = HistogramMetricFamily(
            "lockstride:agreement_seconds",
            "Until the ranks had agreed on a turn's events and submitted them.",
            labels=list(self._labels),
        )
        buckets = _cumulated(AGREEMENT_BOUNDS, stats.agreements)
        seconds.add_metric(list(self._labels.values()), buckets, stats.agreement_seconds)
        yield seconds
        labelled: dict[str, list[tuple[str, float]]] = {name: [] for name in (*_LABELLED, *_WINDOWS)}
        for name, value in stats.counters.items():
            found = _LABEL.fullmatch(name)
            if name.startswith("spec_"):  # under vLLM's names
                continue
            if name in _NOW:
                yield self._gauge(f"lockstride:{name}", _NOW[name], value)
            elif found is None:
                yield self._counter(f"lockstride:{name}", "See runtime/counters.py.", [("", value)])
            elif found.group(1) in labelled:
                labelled[found.group(1)].append((found.group(2), value))
        for name, values in labelled.items():
            if name in _LABELLED:
                yield self._counter(f"lockstride:{name}", "See runtime/counters.py.", values, _LABELLED[name])
            elif values:
                windows = GaugeMetricFamily(f"lockstride:{name}", _WINDOWS[name], labels=[*self._labels, "window"])
                for window, value in values:
                    windows.add_metric([*self._labels.values(), window], value)
                yield windows
        restarts = [("", float(stats.restarts))]
        yield self._counter("lockstride:api_process_restarts", "API processes that had to be started again.", restarts)
        gone = [("", float(stats.disconnected))]
        yield self._counter("lockstride:disconnected", "Sequences cancelled, for nobody waited any more.", gone)


def _cumulated(bounds: tuple[float, ...], counts: Iterable[int]) -> list[tuple[str, float]]:
    """As Prometheus has it: each bucket with all below it."""
    total, buckets = 0, []
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
