"""The command line of `bench serve`: which load is generated, and what is kept of it.

Knows: the names of vLLM's `bench serve`, defaults, which values make sense alone. Does not know: how load is made or
measured (launch/bench/load), the engine's own options.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from launch.bench.option_adder import OptionAdder
from launch.values import at_least_one, bounded, counts, integer, number, whole_number

DatasetName = Literal["mixed", "random", "prefix", "long", "burst", "trace", "sharegpt", "jsonl"]
OF_A_FILE = ("trace", "sharegpt", "jsonl")
CLOSED_LOOP_REQUESTS = 2048  # fewer are mostly ramp and drain at 256
OPEN_LOOP_REQUESTS = 1000  # vLLM's
LONG_REQUESTS = 64
MOST_WARMUPS = 64
SLO_NAMES = ("ttft", "tpot", "e2el")

Slo = tuple[str, float]  # a name of SLO_NAMES, milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What is asked of `bench serve`. Lengths are in tokens, rates in requests a second, goals in milliseconds.

    ``num_prompts`` None: ``requests_of``. ``input_len``, ``output_len`` None: the dataset's own. ``num_warmups`` None:
    as many as run at once, at most 64. ``ramp_requests``, ``drain_requests`` None: load/steady.py.
    """

    dataset_name: DatasetName = "mixed"
    dataset_path: Path | None = None
    num_prompts: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    random_range_ratio: float = 0.0
    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    burst_size: int = 64
    request_rate: tuple[float, ...] = (math.inf,)
    burstiness: float = 1.0
    max_concurrency: tuple[int, ...] = ()
    num_iters: int = 1
    num_warmups: int | None = None
    ramp_requests: int | None = None
    drain_requests: int | None = None
    goodput: tuple[Slo, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    save_detailed: bool = False
    result_dir: Path | None = None
    base_url: str | None = None
    endpoint: str = "/v1/completions"
    served_model_name: str | None = None
    ready_check_timeout_sec: float = 600.0
    label: str | None = None
    client_processes: int = 0

    @property
    def points(self) -> list[tuple[float, int | None]]:
        """(request rate, maximum concurrency) of each point, in the order measured."""
        concurrency: tuple[int | None, ...] = self.max_concurrency or (None,)
        return [(rate, most) for rate in self.request_rate for most in concurrency]

    def requests_of(self, concurrency: int | None) -> int:
        """Requests of a point where --num-prompts does not say; a trace file is read to its end instead."""
        if self.num_prompts is not None:
            return self.num_prompts
        if self.dataset_name == "long":
            return LONG_REQUESTS
        return OPEN_LOOP_REQUESTS if concurrency is None else max(CLOSED_LOOP_REQUESTS, 8 * concurrency)

    def warmups_of(self, rows: int) -> int:
        """``rows``: requests that run at once."""
        return min(rows, MOST_WARMUPS) if self.num_warmups is None else self.num_warmups


def serve_options(given: dict[str, Any]) -> ServeOptions:
    """From what argparse found."""
    if "goodput" in given:
        given["goodput"] = tuple(slo for part in given["goodput"] for slo in part)
    return ServeOptions(**given)


def rates(text: str) -> tuple[float, ...]:
    """``4``, ``1,2,inf``: each above 0, none twice. Raises ArgumentTypeError."""
    found = tuple(map(number, text.split(",")))
    for rate in found:
        if not rate > 0:
            raise ArgumentTypeError(f"{rate:g} is not a rate above 0")
    if len(set(found)) != len(found):
        raise ArgumentTypeError(f"{text} names a rate twice")
    return found


def above_zero(text: str) -> float:
    """``inf`` as well. Raises ArgumentTypeError."""
    value = number(text)
    if not value > 0:
        raise ArgumentTypeError(f"{text} is not above 0")
    return value


def slos(text: str) -> tuple[Slo, ...]:
    """``ttft:200``, or several with a space or a comma between. Raises ArgumentTypeError."""
    found: list[Slo] = []
    for word in text.replace(",", " ").split():
        name, colon, value = word.partition(":")
        if name not in SLO_NAMES or not colon:
            raise ArgumentTypeError(f"{word!r} is no goal such as ttft:200; names are {', '.join(SLO_NAMES)}")
        limit = number(value)
        if not 0 <= limit < math.inf:
            raise ArgumentTypeError(f"{word!r}: {value} is not a time in milliseconds")
        found.append((name, limit))
    if not found:
        raise ArgumentTypeError("it names no goal such as ttft:200")
    return tuple(found)


def one_name_each(found: Iterable[Slo]) -> dict[str, float]:
    """Goals by name; of a name given twice the last counts, as in vLLM."""
    return dict(found)


def add_serve_options(add: OptionAdder) -> None:
    """Datasets, arrivals, the measured window, results, and a server in place of an engine."""
    text = (
        "mixed: chat-like lengths; random: lengths around --input-len and --output-len; prefix: prompts that share one "
        "of --num-prefixes beginnings; long: ragged prompts up to 100,000 tokens with short answers; burst: mixed, "
        "arriving in bursts; trace, sharegpt, jsonl: --dataset-path"
    )
    add.value("--dataset-name", text, "word", str, choices=get_args(DatasetName))
    add.value("--dataset-path", "file of the dataset; for trace, sharegpt, jsonl", "file", Path, "none")
    shown = f"closed loop: {CLOSED_LOOP_REQUESTS}, or 8 times the concurrency; else {OPEN_LOOP_REQUESTS}; long: "
    shown += f"{LONG_REQUESTS}; trace: the whole file"
    add.value("--num-prompts", "requests of each run", "requests", at_least_one, shown)
    text = "prompt length; of mixed, burst and long the longest"
    add.value(
        *("--input-len", text, "tokens", at_least_one, "mixed 2000, random 1024, long 100000"), "--random-input-len"
    )
    text = "output length; of mixed, burst and long the longest; of sharegpt and jsonl in place of the file's"
    add.value(
        *("--output-len", text, "tokens", at_least_one, "mixed 1000, others 128, a file's own"), "--random-output-len"
    )
    text = "random: lengths are uniform within this share below and above"
    add.value("--random-range-ratio", text, "fraction", bounded(number, 0.0, 1.0))
    add.value(*("--prefix-len", "prefix: tokens shared", "tokens", at_least_one, ""), "--prefix-repetition-prefix-len")
    text = "prefix: further tokens of each prompt"
    add.value(*("--suffix-len", text, "tokens", at_least_one, ""), "--prefix-repetition-suffix-len")
    text = "prefix: different beginnings"
    add.value(*("--num-prefixes", text, "prefixes", at_least_one, ""), "--prefix-repetition-num-prefixes")
    add.value("--burst-size", "burst: requests that arrive at the same moment", "requests", at_least_one)
    text = "mean arrival rate; inf sends all at once; several comma-separated; a trace with times is stretched to it"
    add.value("--request-rate", text, "requests/s", rates, "inf, or the trace's own")
    text = "shape of the gamma distribution between arrivals: 1 is Poisson, below 1 burstier, inf evenly spaced"
    add.value("--burstiness", text, "number", above_zero)
    text = "requests that may be unanswered at a time (closed loop); with a rate, arrivals wait; several "
    add.value("--max-concurrency", text + "comma-separated", "requests", counts, "no limit")
    add.value("--num-iters", "measured runs of each point, on prompts of the same lengths", "runs", at_least_one)
    text = "requests before each point that are not measured: lengths of the first ones, other token ids"
    add.value("--num-warmups", text, "requests", whole_number, f"as many as run at once, at most {MOST_WARMUPS}")
    text = "requests that have ended before the steady window begins"
    add.value("--ramp-requests", text, "requests", whole_number, "as many as run at once; with a rate, a tenth")
    text = "requests that have not ended when the steady window ends"
    add.value(
        "--drain-requests",
        text,
        "requests",
        whole_number,
        "as many as run at once; with a rate, until the last one begins",
    )
    _add_results(add)


def _add_results(add: OptionAdder) -> None:
    """What is kept of each request, and a server in place of an engine."""
    text = f"goals of a good request, such as ttft:200 tpot:20; names: {', '.join(SLO_NAMES)}"
    add.value("--goodput", text, "name:ms", slos, "none", nargs="+")
    add.value("--temperature", "sampling temperature; 0 is greedy", "number", bounded(number, 0.0))
    add.value("--top-k", "sample from this many tokens; 0 is off", "tokens", whole_number)
    add.value("--top-p", "sample from the tokens of this probability mass", "fraction", bounded(number, 0.0, 1.0))
    add.value("--min-p", "least probability, as a fraction of the highest one", "fraction", bounded(number, 0.0, 1.0))
    add.switch("--save-detailed", "also write each request's times, and every gap between its tokens")
    add.value("--result-dir", "folder to write results, timelines and pictures to", "folder", Path, "not written")
    text = "measure an OpenAI-compatible server instead of an engine of this process, such as http://localhost:8000; "
    text += "its key is OPENAI_API_KEY or LOCKSTRIDE_API_KEY of the environment"
    add.value("--base-url", text, "url", str, "an engine of this process", "--url")
    add.value("--endpoint", "--base-url: path of the completions endpoint", "path", str)
    text = "--base-url: the model's name in requests"
    add.value("--served-model-name", text, "name", str, "the server's first")
    text = "--base-url: time that the server may take until it answers GET /v1/models; 0: one try"
    add.value("--ready-check-timeout-sec", text, "seconds", bounded(number, 0.0))
    text = "--base-url: processes that ask the server and take times; one spends some 30 us on an event"
    add.value("--client-processes", text, "processes", bounded(integer, 0, 64), "0: a thread of this one")
    add.value("--label", "--base-url: what results call the server", "name", str, "openai")
