"""`complete` and `open_engine`: answers to prompts, or this rank's engine, for a Python program, alone or under
torchrun and srun; the same call on every rank.

Knows: where ranks meet, and how a program's own end becomes the job's.
Does not know: files, command lines, how an engine works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from launch.api.sampling_defaults import sampling_defaults, warmed_for
from launch.ranks import start_engine
from launch.ranks.process_group import joined
from launch.ranks.rendezvous import check_degrees, discover
from runtime.config import EngineConfig, require_real_texts
from runtime.engine import Engine
from runtime.frontend.client import EngineClient, PreparedPrompt, PromptRequest
from runtime.frontend.outputs import RequestOutput
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.validation import RequestError, checked_sampling
from runtime.schedule.request import SamplingParams
from runtime.watchdog.parent_death import die_with_parent


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """The engine of this rank, for the time of a ``with`` block; blocks until all ranks have loaded.

    Alone in plain Python; under torchrun or srun every rank opens it with the same ``config``, whose tensor_parallel is
    set to what fits the number of ranks. Rank 0 (``engine.is_leader``) has the client, the others call
    ``engine.follow()``. A process of a launcher ends with it from then on.

    When rank 0 leaves the block, all ranks take the same last turn, also after a RequestError: one request that cannot
    be served is no fault of the job. Any other error on any rank ends all ranks at once, with exit code 70 and a report
    of each. Raises ConfigError, ModelConfigError or RendezvousError.
    """
    rendezvous = discover(os.environ)
    if rendezvous.launcher != "plain":
        die_with_parent()
    require_real_texts(config, "a program")
    config = replace(config, tensor_parallel=check_degrees(None, config.data_parallel, rendezvous))
    refused: RequestError | None = None
    with joined(rendezvous, config.device), start_engine.open_engine(config, rendezvous) as engine:
        try:
            yield engine
        except RequestError as error:
            refused = error
        if engine.is_leader and not engine.control.stopped:
            engine.stop()
    if refused is not None:
        raise refused


Prompt = str | Sequence[int]

_KEEPALIVE_SECONDS = 0.25
_ANY_VOCABULARY = 2**31  # which token ids exist is asked later, when the model is known


def complete(
    config: EngineConfig, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
) -> list[RequestOutput]:
    """Answers in the order of ``prompts`` (texts, or token ids), each with the parameters given for it, or for all.
    Without any, those of the model's generation_config.json.

    Alone in plain Python; under torchrun or srun every rank makes this call and rank 0 gets the answers, the others an
    empty list; such a process ends with its launcher from then on. ``max_tokens`` is cut to what fits after a prompt.

    Raises ConfigError, ModelConfigError, RendezvousError or TokenizerError, and on rank 0 RequestError when any of the
    prompts cannot be served as it stands: then none is, and the other ranks return as ever.
    """
    if sampling is None:
        sampling = sampling_defaults(Path(config.model), "auto", {})
    for params in sampling if isinstance(sampling, Sequence) else [sampling]:
        with suppress(RequestError):  # it is refused below, by name
            config = warmed_for(config, checked_sampling(params, _ANY_VOCABULARY))
    tokenizer = Tokenizer.if_any(config.model)  # every rank, so that a broken one is every rank's error
    with open_engine(config) as engine:
        if not engine.is_leader:
            engine.follow()
            return []
        client = EngineClient(engine, tokenizer)
        asked = _requests(prompts, sampling)
        requests = _prepared(client, asked)
        answers = {output.key: output for turn in client.run(requests) for output in turn.finished}
        return [answers[key] for key in range(len(requests))]


def _prepared(
    client: EngineClient, requests: Sequence[PromptRequest], clock: Callable[[], float] = time.monotonic
) -> list[PreparedPrompt]:
    """All of them, before the engine has any. May take minutes: the other ranks are told meanwhile that all is well."""
    prepared, heard_at = [], clock()
    for request in requests:
        prepared.append(client.prepare(request))
        if clock() - heard_at >= _KEEPALIVE_SECONDS:
            client.wait(lambda seconds: False, 0.0)
            heard_at = clock()
    return prepared


def _requests(prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]) -> list[PromptRequest]:
    """One a prompt, whose key is its place. Raises RequestError when there are not as many of both."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise RequestError(f"prompts is a {type(prompts).__name__}, but must be a list of texts or of token ids")
    if isinstance(sampling, SamplingParams):
        each: Sequence[SamplingParams] = [sampling] * len(prompts)
    elif isinstance(sampling, Sequence) and len(sampling) == len(prompts):
        each = sampling
    else:
        have = f"{len(sampling)} of them" if isinstance(sampling, Sequence) else f"a {type(sampling).__name__}"
        raise RequestError(f"sampling is {have}, but must be SamplingParams, or one for each of {len(prompts)} prompts")
    return [PromptRequest(prompt, params, key) for key, (prompt, params) in enumerate(zip(prompts, each, strict=True))]
