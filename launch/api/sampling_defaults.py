"""How a request that does not say is drawn: the command line first, then the model folder, then the API's defaults.

Knows: who wins, how what was taken is logged, keys and types of generation_config.json.
Does not know: what a request says itself (schema.py).

The folder has a say because users of vLLM expect it (there: --generation-config auto): a model that was tuned for
temperature 0.6 and top-p 0.95 rambles at 1.0. Benchmarks name every parameter themselves and never come here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from launch.engine_options import EngineCommand
from launch.errors import UsageError
from launch.ranks.rendezvous import Rendezvous, check_degrees, discover
from models.config import ModelConfigError, read_json_object
from runtime.config import WARM_KINDS, EngineConfig, require_real_texts
from runtime.frontend.validation import RequestError, checked_sampling
from runtime.schedule.request import SamplingParams

FILE_NAME = "generation_config.json"
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


def read_sampling_parameters(folder: str | Path) -> dict[str, float | int]:
    """What the file says of temperature, top_k, top_p, min_p and repetition_penalty; empty where there is no file.

    A null is the same as an absent key, and so is a top_k of -1, which older files write for "all". ``do_sample`` and
    ``max_new_tokens`` are not looked at. Raises ModelConfigError for what is no number.
    """
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        return {}
    content = read_json_object(path)
    found: dict[str, float | int] = {}
    for key in _NUMBERS:
        if (value := content.get(key)) is not None:
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ModelConfigError(f"{path}: {key!r} must be a number, not {value!r}")
            found[key] = float(value)
    if (top_k := content.get("top_k")) not in (None, -1):
        if not isinstance(top_k, int) or isinstance(top_k, bool):
            raise ModelConfigError(f"{path}: 'top_k' must be a whole number, not {top_k!r}")
        found["top_k"] = top_k
    return found


GenerationConfig = Literal["auto", "none"]

log = logging.getLogger("lockstride")


def settled(command: EngineCommand[Any], environ: Mapping[str, str]) -> tuple[Rendezvous, EngineConfig, SamplingParams]:
    """What a command that answers requests begins with on each rank: the ranks, its engine, and how a request that does
    not say is drawn; ``command.options`` are FolderDefaults.

    Raises UsageError, ConfigError, ModelConfigError or RendezvousError for a command line that cannot work.
    """
    rendezvous, given, options = discover(environ), command.engine, command.options
    config = command.engine_config(check_degrees(given.get("tensor_parallel"), given.get("data_parallel"), rendezvous))
    require_real_texts(config, command.name)
    defaults = sampling_defaults(Path(config.model), options.generation_config, options.sampling)
    return rendezvous, warmed_for(config, defaults), defaults


def sampling_defaults(
    folder: Path, generation_config: GenerationConfig, given: Mapping[str, float | int | None]
) -> SamplingParams:
    """``given`` are fields that the command line names, None where it does not; they win over the folder's.

    "none" leaves the folder's out. One log line says what was taken from there. Raises UsageError or ModelConfigError
    for values that no request may have: each request that does not say would be refused for what it did not send.
    """
    named = {name: value for name, value in given.items() if value is not None}
    try:
        checked_sampling(SamplingParams(**named), vocab_size=1)  # type: ignore[arg-type]
    except RequestError as error:
        raise UsageError(f"--{(error.field or '').replace('_', '-')}: {error}") from error
    if generation_config == "none":
        return SamplingParams(**named)  # type: ignore[arg-type]
    of_folder = {k: v for k, v in read_sampling_parameters(folder).items() if k not in named}
    taken = SamplingParams(**of_folder)  # type: ignore[arg-type]
    try:
        taken = checked_sampling(taken, vocab_size=1)
    except RequestError as error:
        raise ModelConfigError(f"{folder / FILE_NAME}: {error}; or type --generation-config none") from error
    if of_folder:
        listed = ", ".join(f"{name} {value:g}" for name, value in of_folder.items())
        log.info(
            "sampling defaults of %s, where a request does not say: %s (--generation-config none turns them off)",
            folder / FILE_NAME,
            listed,
        )
    return replace(taken, **named)  # type: ignore[arg-type]


def warmed_for(config: EngineConfig, defaults: SamplingParams) -> EngineConfig:
    """``config`` that also captures, before the first request, what a request with ``defaults`` needs."""
    wanted = {*config.warm, "greedy"}
    if not defaults.greedy:
        wanted.add("random")
        if defaults.filtered:
            wanted.add("filtered")
    if defaults.penalised:
        wanted.add("penalised")
    return replace(config, warm=tuple(kind for kind in WARM_KINDS if kind in wanted))
