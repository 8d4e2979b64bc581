"""Requests to generate load with: lengths, token ids and, for some, arrival times; the same for the same seed.

Knows: how each dataset draws; arrivals as a renewal process of gamma-distributed gaps, as vLLM's `bench serve` has it.
Does not know: engines, when a request is sent (generator.py).

``mixed`` is the workload of docs/peers.json: chat-like lengths, prompts log-normal around 220 tokens and answers around
180. Its draws are fixed: other engines are measured with files of the same requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.bench.load.trace_file import read_trace
from launch.bench.options import ThroughputOptions
from launch.bench.serve_options import OF_A_FILE, ServeOptions
from launch.bench.workload import (
    IDS,
    check_file_is_read,
    greedy,
    id_range,
    jsonl_prompts,
    no_file,
    random_prompts,
    sharegpt_prompts,
)
from launch.errors import UsageError
from launch.generate.command import load_texts
from runtime.frontend.client import PromptRequest
from runtime.frontend.engine_protocol import ModelFacts
from runtime.frontend.validation import RequestError, checked_sampling
from runtime.schedule.request import SamplingParams


def arrival_offsets(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each of ``count`` requests arrives, ascending; the same for the same seed.

    ``rate``: requests a second; inf: all at 0. ``burstiness``: shape k of the gamma distribution of gaps, whose
    coefficient of variation is 1 / sqrt(k): 1 is a Poisson process, inf gives equal gaps. As in vLLM, offsets are
    scaled so that the last one is count / rate: the rate is exact, whatever the seed.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(number + 1) / rate for number in range(count)]
    draw = random.Random(f"{seed} arrivals")
    offsets, at = [], 0.0
    for _ in range(count):
        at += draw.gammavariate(burstiness, 1.0)
        offsets.append(at)
    return stretched(offsets, count / rate)


def burst_offsets(count: int, rate: float, burstiness: float, seed: int, size: int) -> list[float]:
    """As ``arrival_offsets``, but ``size`` requests arrive at each moment; ``rate`` is still of requests, also where
    the last burst has fewer."""
    bursts = arrival_offsets(-(-count // size), rate / size, burstiness, seed)
    bursts = stretched(bursts, count / rate)
    return [bursts[number // size] for number in range(count)]


def stretched(offsets: Sequence[float], last: float) -> list[float]:
    """``offsets`` scaled so that the last one is ``last``. Offsets that are all 0 stay there."""
    factor = last / offsets[-1] if offsets and offsets[-1] > 0 else 0.0
    return [offset * factor for offset in offsets]


MIXED_LONGEST = (2000, 1000)  # tokens of a prompt and of an answer
LONG_LONGEST = 100_000
_GOLDEN = 0.381966  # of the ids: how far those of one turn lie from those of the next


@dataclass(frozen=True, slots=True)
class LoadSet:
    """``offsets``: seconds after the start at which requests arrive, ascending; None: as the command line says.

    ``ids``: the range that token ids are drawn from. ``drawn``: all prompts are drawn, so that others would do as well.
    """

    requests: Sequence[PromptRequest]
    ids: range
    offsets: Sequence[float] | None = None
    drawn: bool = True

    def with_other_ids(self, turn: int) -> Sequence[PromptRequest]:
        """The requests with other token ids for each ``turn``, their own for 0: lengths and shared beginnings stay as
        they are, and a prefix cache finds nothing of another turn."""
        low, size = self.ids.start, len(self.ids)
        if not turn or size < 2:
            return self.requests
        shift = turn * max(1, round(size * _GOLDEN)) % size - low
        return [replace(one, prompt=tuple((each + shift) % size + low for each in _ids(one))) for one in self.requests]


def _ids(request: PromptRequest) -> Sequence[int]:
    assert not isinstance(request.prompt, str)  # datasets hold token ids
    return request.prompt


def load_set(
    options: ServeOptions, count: int, model: ModelFacts, folder: Path, seed: int, rate: float = math.inf
) -> LoadSet:
    """``count`` requests of the dataset that ``options`` name. ``rate``: requests a second, for bursts.

    Raises UsageError, TokenizerError or BenchError for a dataset that cannot be had, and UsageError for a request that
    is too long for the model, or is to be sampled as no engine can.
    """
    check_file_is_read(options.dataset_name, options.dataset_path, OF_A_FILE)
    found = _drawn(options, count, model, folder, seed, rate)
    longest = model.max_model_len
    for number, request in enumerate(found.requests):
        prompt, answer = len(_ids(request)), request.sampling.max_tokens
        if prompt + answer > longest:
            raise UsageError(
                f"request {number} of --dataset-name {options.dataset_name} has {prompt} prompt and {answer} output "
                f"tokens, but a request may have {longest}: {_to_shorten(options, longest)}, or raise --max-model-len"
            )
    try:
        sampled = [_sampled(one, options, model.vocab_size) for one in found.requests]
    except RequestError as error:
        raise UsageError(str(error)) from error
    return replace(found, requests=sampled)


def batch_set(options: ThroughputOptions, model: ModelFacts, folder: Path, seed: int) -> LoadSet:
    """The requests of `bench throughput`. Raises UsageError, TokenizerError or BenchError."""
    check_file_is_read(options.dataset_name, options.dataset_path, ("sharegpt", "jsonl"))
    ids, lengths, longest = id_range(model.vocab_size), options.lengths, model.max_model_len
    if lengths is None:
        return _of_a_file(options, options.num_prompts, model, folder, seed, ids)
    if lengths.total > longest:
        raise UsageError(
            f"--input-len {lengths.prompt} and --output-len {lengths.output} make {lengths.total} tokens, but "
            f"a request may have {longest}: lower one, or raise --max-model-len"
        )
    return LoadSet(random_prompts(options.num_prompts, lengths.prompt, lengths.output, model.vocab_size, seed), ids)


def _to_shorten(options: ServeOptions, longest: int) -> str:
    name = options.dataset_name
    if name in OF_A_FILE:
        return f"take it out of {options.dataset_path}"
    which = "--prefix-len, --suffix-len" if name == "prefix" else "--input-len"
    at_most = " at their longest (--random-range-ratio)" if name == "random" and options.random_range_ratio else ""
    return f"type {which} and --output-len of {longest} or less together{at_most}"


def _drawn(options: ServeOptions, count: int, model: ModelFacts, folder: Path, seed: int, rate: float) -> LoadSet:
    name, ids = options.dataset_name, id_range(model.vocab_size)
    if name in ("mixed", "burst"):
        longest = (options.input_len or MIXED_LONGEST[0], options.output_len or MIXED_LONGEST[1])
        requests = mixed_requests(count, seed, model.vocab_size, *longest)
        if name == "mixed":
            return LoadSet(requests, ids)
        if math.isinf(rate):
            raise UsageError("--dataset-name burst arrives at --request-rate, which is inf: type one, such as 8")
        return LoadSet(requests, ids, burst_offsets(count, rate, options.burstiness, seed, options.burst_size))
    if name == "random":
        sizes = (options.input_len or 1024, options.output_len or 128)
        return LoadSet(random_requests(count, seed, ids, *sizes, options.random_range_ratio), ids)
    if name == "prefix":
        parts = (options.prefix_len, options.suffix_len, options.output_len or 128)
        return LoadSet(prefix_requests(count, seed, ids, *parts, options.num_prefixes), ids)
    if name == "long":
        answer = options.output_len or 128
        longest_prompt = options.input_len or max(1, min(LONG_LONGEST, model.max_model_len - answer))
        return LoadSet(long_requests(count, seed, ids, longest_prompt, answer), ids)
    return _of_a_file(options, count, model, folder, seed, ids)


def _of_a_file(
    options: ServeOptions | ThroughputOptions, count: int, model: ModelFacts, folder: Path, seed: int, ids: range
) -> LoadSet:
    path, name = options.dataset_path, options.dataset_name
    if path is None or not path.is_file():
        raise UsageError(no_file(name, path))
    tokenizer, chat = load_texts(folder)
    if name == "jsonl":
        found = jsonl_prompts(path, tokenizer, chat, count, options.output_len, model, seed)
        return LoadSet(found, ids, drawn=False)
    if name == "trace":
        trace = read_trace(path, options.num_prompts, tokenizer, chat, options.output_len, model, seed, ids)
        return LoadSet(trace.requests, ids, trace.offsets, trace.drawn)
    if tokenizer is None:
        raise UsageError(f"--dataset-name sharegpt needs a tokenizer, but {folder} has no tokenizer.json")
    found = sharegpt_prompts(path, tokenizer, count, options.output_len, model.max_model_len, seed)
    return LoadSet(found, ids, drawn=False)


def _sampled(request: PromptRequest, options: ServeOptions, vocab_size: int) -> PromptRequest:
    """Drawn as the command line says; without a word of it as the dataset says, which is greedily for most.

    Raises RequestError for what no engine takes."""
    if options.temperature == 0.0:
        return request
    sampling: SamplingParams = replace(
        request.sampling,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=None,
    )
    return replace(request, sampling=checked_sampling(sampling, vocab_size))


def mixed_requests(
    count: int,
    seed: int,
    vocab_size: int,
    longest_prompt: int = MIXED_LONGEST[0],
    longest_answer: int = MIXED_LONGEST[1],
) -> list[PromptRequest]:
    """Chat-like lengths and uniform token ids, one stream of draws for all of them."""
    draw = random.Random(seed)
    ids = id_range(vocab_size)
    requests = []
    for _ in range(count):
        prompt = _clipped(draw.lognormvariate(math.log(220), 1.0), longest_prompt)
        answer = _clipped(draw.lognormvariate(math.log(180), 0.9), longest_answer)
        token_ids = [draw.randrange(*IDS) for _ in range(prompt)]
        if vocab_size < IDS[1]:
            token_ids = [ids.start + (each - IDS[0]) % len(ids) for each in token_ids]
        requests.append(PromptRequest(tuple(token_ids), greedy(answer)))
    return requests


def _clipped(length: float, longest: int) -> int:
    return max(min(8, longest), min(longest, int(length)))


def random_requests(
    count: int, seed: int, ids: range, input_len: int, output_len: int, range_ratio: float
) -> list[PromptRequest]:
    """Lengths uniform in [len * (1 - ratio), len * (1 + ratio)], from 1."""
    draw = random.Random(seed)

    def around(length: int) -> int:
        return draw.randint(max(1, math.floor(length * (1 - range_ratio))), math.ceil(length * (1 + range_ratio)))

    return [_random_request(draw, ids, around(input_len), around(output_len)) for _ in range(count)]


def prefix_requests(
    count: int, seed: int, ids: range, prefix_len: int, suffix_len: int, output_len: int, prefixes: int
) -> list[PromptRequest]:
    """Each begins with one of ``prefixes`` beginnings, equally often, in an order that ``seed`` draws."""
    draw = random.Random(seed)
    beginnings = [tuple(draw.choices(ids, k=prefix_len)) for _ in range(prefixes)]
    order = [number % prefixes for number in range(count)]
    draw.shuffle(order)
    answer = greedy(output_len)
    return [PromptRequest(beginnings[which] + tuple(draw.choices(ids, k=suffix_len)), answer) for which in order]


def long_requests(count: int, seed: int, ids: range, longest: int, output_len: int) -> list[PromptRequest]:
    """Prompts log-uniform from a hundredth of ``longest`` to it, answers uniform from a quarter of ``output_len``."""
    draw = random.Random(seed)
    shortest = max(1, longest // 100)
    requests = []
    for _ in range(count):
        prompt = min(longest, round(math.exp(draw.uniform(math.log(shortest), math.log(longest)))))
        answer = draw.randint(max(1, output_len // 4), output_len)
        requests.append(_random_request(draw, ids, prompt, answer))
    return requests


def _random_request(draw: random.Random, ids: range, prompt: int, answer: int) -> PromptRequest:
    return PromptRequest(tuple(draw.choices(ids, k=prompt)), greedy(answer))
