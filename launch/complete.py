"""`complete`: prompts in, answers out, from a Python program; the same call on every rank.

Knows: how one call becomes a short life of an engine. Does not know: files, command lines, how an engine works.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch.api.sampling_defaults import sampling_defaults
from launch.ranks.process_group import joined
from launch.ranks.rendezvous import check_degrees, discover
from launch.ranks.start_engine import open_engine
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.frontend.output_processor import OutputProcessor, drawn_seed
from runtime.frontend.outputs import RequestOutput
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.validation import check_prompt, check_sampling
from runtime.schedule.request import FinishReason, SamplingParams
from runtime.watchdog.parent_death import die_with_parent

Prompt = str | Sequence[int]


def complete(
    config: EngineConfig,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
) -> list[RequestOutput]:
    """Answers in the order of ``prompts`` (texts, or token ids), each with the parameters given for it, or for all.
    Without any, those of the model's generation_config.json.

    Alone in plain Python; under torchrun or srun every rank makes this call and rank 0 gets the answers, the others an
    empty list; such a process ends with its launcher from then on. Raises ConfigError, ModelConfigError,
    RendezvousError, or RequestError for a prompt that cannot be served.
    """
    rendezvous = discover(os.environ)
    if rendezvous.launcher != "plain":
        die_with_parent()
    if sampling is None:
        sampling = sampling_defaults(Path(config.model), "auto", {})
    config = replace(config, tensor_parallel=check_degrees(None, config.data_parallel, rendezvous))
    with joined(rendezvous, config.device), open_engine(config, rendezvous) as engine:
        if not rendezvous.topology.is_leader:
            engine.follow()
            return []
        return _lead(engine, prompts, sampling)


def _lead(
    engine: Engine, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    folder, model = Path(engine.config.model), engine.model_config
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    assembler = OutputProcessor(tokenizer)
    shared = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    for key, (prompt, params) in enumerate(zip(prompts, shared, strict=True)):
        text = prompt if isinstance(prompt, str) else None
        token_ids = tuple(_encode(tokenizer, prompt) if isinstance(prompt, str) else prompt)
        check_prompt(token_ids, model.vocab_size, model.max_model_len)
        check_sampling(params, model.vocab_size)
        seed = drawn_seed(engine.config.seed, str(key)) if params.seed is None else params.seed
        for request in assembler.open(
            key, token_ids, replace(params, seed=seed), prompt=text, eos_token_ids=model.eos_token_ids
        ):
            engine.add(request)
    answers: dict[object, RequestOutput] = {}
    while assembler.live:
        routed = assembler.route(engine.step())
        for request_id in routed.stop:
            engine.cancel(request_id, FinishReason.STOP)
        answers |= {output.key: output for output in routed.finished}
    engine.stop()
    return [answers[key] for key in range(len(prompts))]


def _encode(tokenizer: Tokenizer | None, text: str) -> list[int]:
    if tokenizer is None:
        raise ValueError("a prompt is text, but the model folder has no tokenizer.json: give token ids")
    return tokenizer.encode(text)
