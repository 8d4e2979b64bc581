"""The command line of `bench serve`: which load is generated, and what is kept of it.

Knows: the names of vLLM's `bench serve`, defaults, which values make sense alone. Does not know: how load is made or
measured (launch/bench/load), the engine's own options.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from launch.options import choice, option, switch
from launch.values import at_least_one, bounded, counts, integer, number, whole_number

DatasetName = Literal["mixed", "random", "prefix", "long", "burst", "trace", "sharegpt", "jsonl"]
OF_A_FILE = ("trace", "sharegpt", "jsonl")
CLOSED_LOOP_REQUESTS = 2048  # fewer are mostly ramp and drain at 256
OPEN_LOOP_REQUESTS = 1000  # vLLM's
LONG_REQUESTS = 64
MOST_WARMUPS = 64
SLO_NAMES = ("ttft", "tpot", "e2el")

Slo = tuple[str, float]  # a name of SLO_NAMES, milliseconds


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What is asked of `bench serve`. Lengths are in tokens, rates in requests a second, goals in milliseconds.

    ``num_prompts`` None: ``requests_of``. ``input_len``, ``output_len`` None: the dataset's own. ``num_warmups`` None:
    as many as run at once, at most 64. ``ramp_requests``, ``drain_requests`` None: load/steady.py.
    """

    dataset_name: DatasetName = choice(
        "mixed: chat-like lengths; random: lengths around --input-len and --output-len; prefix: prompts that share one "
        "of --num-prefixes beginnings; long: ragged prompts up to 100,000 tokens with short answers; burst: mixed, "
        "arriving in bursts; trace, sharegpt, jsonl: --dataset-path",
        get_args(DatasetName),
        "mixed",
    )
    dataset_path: Path | None = option("file of the dataset; for trace, sharegpt, jsonl", "file", Path, None)
    num_prompts: int | None = option(
        "requests of each run",
        "requests",
        at_least_one,
        None,
        f"closed loop: {CLOSED_LOOP_REQUESTS}, or 8 times the concurrency; else {OPEN_LOOP_REQUESTS}; long: "
        f"{LONG_REQUESTS}; trace: the whole file",
    )
    input_len: int | None = option(
        "prompt length; of mixed, burst and long the longest",
        "tokens",
        at_least_one,
        None,
        "mixed 2000, random 1024, long 100000",
        aliases=("--random-input-len",),
    )
    output_len: int | None = option(
        "output length; of mixed, burst and long the longest; of sharegpt and jsonl in place of the file's",
        "tokens",
        at_least_one,
        None,
        "mixed 1000, others 128, a file's own",
        aliases=("--random-output-len",),
    )
    random_range_ratio: float = option(
        "random: lengths are uniform within this share below and above", "fraction", bounded(number, 0.0, 1.0), 0.0
    )
    prefix_len: int = option(
        "prefix: tokens shared", "tokens", at_least_one, 256, aliases=("--prefix-repetition-prefix-len",)
    )
    suffix_len: int = option(
        "prefix: further tokens of each prompt",
        "tokens",
        at_least_one,
        256,
        aliases=("--prefix-repetition-suffix-len",),
    )
    num_prefixes: int = option(
        "prefix: different beginnings", "prefixes", at_least_one, 10, aliases=("--prefix-repetition-num-prefixes",)
    )
    burst_size: int = option("burst: requests that arrive at the same moment", "requests", at_least_one, 64)
    request_rate: tuple[float, ...] = option(
        "mean arrival rate; inf sends all at once; several comma-separated; a trace with times is stretched to it",
        "requests/s",
        rates,
        (math.inf,),
        "inf, or the trace's own",
    )
    burstiness: float = option(
        "shape of the gamma distribution between arrivals: 1 is Poisson, below 1 burstier, inf evenly spaced",
        "number",
        above_zero,
        1.0,
    )
    max_concurrency: tuple[int, ...] = option(
        "requests that may be unanswered at a time (closed loop); with a rate, arrivals wait; several comma-separated",
        "requests",
        counts,
        (),
        "no limit",
    )
    num_iters: int = option("measured runs of each point, on prompts of the same lengths", "runs", at_least_one, 1)
    num_warmups: int | None = option(
        "requests before each point that are not measured: lengths of the first ones, other token ids",
        "requests",
        whole_number,
        None,
        f"as many as run at once, at most {MOST_WARMUPS}",
    )
    ramp_requests: int | None = option(
        "requests that have ended before the steady window begins",
        "requests",
        whole_number,
        None,
        "as many as run at once; with a rate, a tenth",
    )
    drain_requests: int | None = option(
        "requests that have not ended when the steady window ends",
        "requests",
        whole_number,
        None,
        "as many as run at once; with a rate, until the last one begins",
    )
    goodput: tuple[tuple[Slo, ...], ...] = option(
        f"goals of a good request, such as ttft:200 tpot:20; names: {', '.join(SLO_NAMES)}",
        "name:ms",
        slos,
        (),
        "none",
        nargs="+",
    )
    temperature: float = option("sampling temperature; 0 is greedy", "number", bounded(number, 0.0), 0.0)
    top_k: int = option("sample from this many tokens; 0 is off", "tokens", whole_number, 0)
    top_p: float = option("sample from the tokens of this probability mass", "fraction", bounded(number, 0.0, 1.0), 1.0)
    min_p: float = option(
        "least probability, as a fraction of the highest one", "fraction", bounded(number, 0.0, 1.0), 0.0
    )
    save_detailed: bool = switch("also write each request's times, and every gap between its tokens")
    result_dir: Path | None = option(
        "folder to write results, timelines and pictures to", "folder", Path, None, "not written"
    )
    base_url: str | None = option(
        "measure an OpenAI-compatible server instead of an engine of this process, such as http://localhost:8000; "
        "its key is OPENAI_API_KEY or LOCKSTRIDE_API_KEY of the environment",
        "url",
        str,
        None,
        "an engine of this process",
        aliases=("--url",),
    )
    endpoint: str = option("--base-url: path of the completions endpoint", "path", str, "/v1/completions")
    served_model_name: str | None = option(
        "--base-url: the model's name in requests", "name", str, None, "the server's first"
    )
    ready_check_timeout_sec: float = option(
        "--base-url: time that the server may take until it answers GET /v1/models; 0: one try",
        "seconds",
        bounded(number, 0.0),
        600.0,
    )
    client_processes: int = option(
        "--base-url: processes that ask the server and take times; one spends some 30 us on an event",
        "processes",
        bounded(integer, 0, 64),
        0,
        "0: a thread of this one",
    )
    label: str | None = option("--base-url: what results call the server", "name", str, None, "openai")

    @property
    def goals(self) -> dict[str, float]:
        """``goodput`` by name; of a name given twice the last counts, as in vLLM."""
        return dict(goal for word in self.goodput for goal in word)

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
