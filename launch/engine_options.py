"""The engine's options on a command line: one flag a field of EngineConfig, with its help text and unit.

Knows: flags, their order in --help, how texts become values. Does not know: legal ranges (EngineConfig checks those),
which commands take them (launch/cli.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, get_args

from launch.values import integer, number, whole_numbers
from runtime.config import (
    DEVICE_DEFAULTS,
    WARM_KINDS,
    DType,
    EngineConfig,
    Fp8Activations,
    LoadFormat,
    PrefillWanted,
    flag_of,
)
from runtime.schedule.config import SessionPolicy
from runtime.speculative_config import METHODS


@dataclass(frozen=True, slots=True)
class _Option:
    """One option: its help text and the unit of its value."""

    help: str
    unit: str
    parse: Callable[[str], Any] = integer
    choices: tuple[str, ...] | None = None
    alias: str | None = None


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


_ENGINE: dict[str, _Option] = {
    "model": _Option("model folder in the Hugging Face layout", "folder", str),
    "load_format": _Option(
        "safetensors reads the weights; dummy makes random ones and reads config.json only",
        "word",
        str,
        get_args(LoadFormat),
    ),
    "dtype": _Option("type of weights and activations; auto takes the checkpoint's", "word", str, get_args(DType)),
    "device": _Option("where to run; auto takes cuda where there is a GPU", "word", str, ("auto", "cpu", "cuda")),
    "tensor_parallel": _Option(
        "tensor-parallel ranks; with --data-parallel-size, those of one group", "ranks", alias="-tp"
    ),
    "data_parallel": _Option(
        "data-parallel groups, each with its own requests and KV; the experts are shared",
        "groups",
        alias="--data-parallel",
    ),
    "expert_parallel": _Option(
        "expert parallelism: whole experts on each rank instead of a shard of each",
        "switch",
        alias="--enable-expert-parallel",
    ),
    "expert_load": _Option("at the end, write how many tokens each expert of each layer received", "file", str),
    "expert_map": _Option("balance experts over ranks by the --expert-load file of an earlier run", "file", str),
    "max_model_len": _Option("maximum length of prompt and output together", "tokens"),
    "max_num_seqs": _Option("maximum number of running requests, in each group", "requests"),
    "block_size": _Option("tokens in a KV block", "tokens"),
    "num_blocks": _Option("number of KV blocks; omit to size the pool from free memory", "blocks"),
    "memory_fraction": _Option(
        "this engine's share of the whole device's memory; at start so much must be free",
        "fraction",
        number,
        alias="--gpu-memory-utilization",
    ),
    "max_prefill_tokens": _Option("token budget of one prefill step", "tokens"),
    "mixed_steps": _Option(
        "prefill chunks share steps with decode requests; off: prefill has separate steps, for which these wait",
        "switch",
    ),
    "itl_target_ms": _Option(
        "longest step that prefills while requests decode, so the inter-token latency; less delays first tokens",
        "ms",
        number,
    ),
    "prefill_burst": _Option(
        "most consecutive prefill steps while other requests decode; without mixed steps only", "steps"
    ),
    "chain_depth": _Option(
        "steps in flight besides the one whose results are read next: more hide pauses of the host, but a new request "
        "waits for them; 0: the serial engine",
        "steps",
    ),
    "speculative_config": _Option(
        "speculative decoding, a JSON object with vLLM's keys, such as "
        '{"method": "ngram", "num_speculative_tokens": 4}; draft tokens change no output, '
        "probabilistic ones keep its distribution",
        "json",
        str,
    ),
    "speculative_method": _Option(f"its key method: {', '.join(METHODS)}", "word", str, alias="--spec-method"),
    "speculative_model": _Option(
        "its key model: folder of the draft model; mtp without it: the MTP layer of the checkpoint",
        "folder",
        str,
        alias="--spec-model",
    ),
    "num_speculative_tokens": _Option(
        "its key num_speculative_tokens: draft tokens a step", "tokens", alias="--spec-tokens"
    ),
    "decode_buckets": _Option("batch sizes of decode graphs, ascending, comma-separated", "rows", whole_numbers),
    "prefill_graphs": _Option(
        "launch a prefill step as one CUDA graph; off: kernel by kernel, which costs tens of ms of host time", "switch"
    ),
    "fp8_activations": _Option(
        "whether activations are quantised where weights are FP8; auto: where that is faster, by the number of rows",
        "word",
        str,
        get_args(Fp8Activations),
    ),
    "prefill_attention": _Option(
        "prefill attention on GPUs; flashinfer is faster, but its first build takes more than a minute; triton needs "
        "none; auto: flashinfer if built, else triton, while flashinfer is built in the background for the next start",
        "word",
        str,
        get_args(PrefillWanted),
    ),
    "prefix_caching": _Option("reuse the KV of common prompt prefixes", "switch", alias="--enable-prefix-caching"),
    "num_snapshots": _Option(
        "snapshots of recurrent state, for prefix caching of hybrid models; 0: no prefix caching for them",
        "snapshots",
    ),
    "snapshot_interval": _Option(
        "KV blocks between a prompt's snapshots, besides that at its last full block; each may cost a step; 0: none",
        "blocks",
    ),
    "deterministic": _Option(
        "a request's tokens and log-probabilities are the same, bit for bit, for any batch, order, chunks, prefix "
        "hits, evictions and chain depth; slower",
        "switch",
    ),
    "max_waiting": _Option("maximum number of requests in the engine's queue", "requests"),
    "max_sessions": _Option("maximum number of open sessions of `daemon`, each with its own slot", "sessions"),
    "session_policy": _Option(
        "parked sessions when memory is short: evict recomputes them later, close ends the one idle for longest, "
        "refuse rejects new work that would need it",
        "word",
        str,
        get_args(SessionPolicy),
    ),
    "horizon": _Option(
        "steps between rank 0's announcement of an event and its effect, in which records reach all ranks without a "
        "wait; it delays new requests; a single rank needs none",
        "steps",
    ),
    "plan_late": _Option(
        "serving: plan the next step shortly before the one in flight ends, so that new requests can join it; off: at "
        "once",
        "switch",
    ),
    "control_timeout_s": _Option("silence after which a rank counts as lost and the job ends", "seconds", number),
    "seed": _Option("base seed for requests without one, and for dummy weights", "number"),
    "warm": _Option(
        f"sampling features whose graphs are captured at start-up, comma-separated: {', '.join(WARM_KINDS)}",
        "kinds",
        _words,
    ),
    "symmetric_all_reduce": _Option(
        "custom all-reduce, dispatch and combine over symmetric memory for small messages; off: NCCL for all",
        "switch",
    ),
    "kernel_cache": _Option("folder for kernel choices measured at start-up", "folder", str),
    "bundles": _Option("folder for the crash reports of each rank of a failed job", "folder", str),
    "timeline": _Option(
        "write the steps of all ranks as one trace for ui.perfetto.dev; .gz compresses it", "file", str
    ),
    "nvtx": _Option("mark the phases of each step as NVTX ranges for Nsight Systems", "switch"),
}

_DERIVED_DEFAULTS = {
    "tensor_parallel": "the number of ranks started, divided by --data-parallel-size",
    "expert_parallel": "off; on with --data-parallel-size",
    "max_model_len": "the model's own limit",
    "chain_depth": "the least that keeps the GPU busy, measured at start-up; 2 on cpu",
    "plan_late": "on with cuda, off on cpu",
    "horizon": "the least at which no rank waits for records, measured at start-up",
    "num_blocks": "sized from --memory-fraction of the memory",
    "num_snapshots": "a quarter of the cache memory, at most 4 a row",
    "snapshot_interval": "as many as --max-num-batched-tokens holds",
    "itl_target_ms": "7 times a step's fixed cost, or twice the decode step",
    "timeline": "not written",
    "speculative_config": "off",
    "speculative_method": "off",
    "speculative_model": "none",
    "num_speculative_tokens": "what --speculative-config says",
    "expert_load": "not written",
    "expert_map": "in order",
    "decode_buckets": "1,2,4,8, then at growing distances up to --max-num-seqs",
}


# Of commands that take requests without sampling parameters (launch/api/sampling_defaults.py).
WARMED: Final = {"warm": "greedy, and what requests without sampling parameters need"}


def engine_options(given: dict[str, Any]) -> dict[str, Any]:
    """Takes out of what argparse found what EngineConfig has a field for."""
    return {name: given.pop(name) for name in _ENGINE if name in given}


def add_engine_options(
    group: argparse._ArgumentGroup, *, shown: Mapping[str, str] | None = None, model: str = _ENGINE["model"].help
) -> None:
    """One flag a field of EngineConfig. Without a default of argparse's own: EngineConfig has them.

    ``shown``: in --help, the defaults by field that the command has instead. ``model``: what it takes for a model.
    """
    defaults = {f.name: f.default for f in fields(EngineConfig)}
    for name, option in _ENGINE.items():
        default = "required"
        if defaults[name] is not MISSING:
            default = f"default: {(shown or {}).get(name) or _shown_default(name, defaults[name])}"
        flags = [flag_of(name)] + ([option.alias] if option.alias else [])
        common: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": f"{model if name == 'model' else option.help} ({default}) [{option.unit}]",
        }
        if option.unit == "switch":
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        else:
            metavar = None if option.choices else option.unit.upper()
            group.add_argument(
                *flags,
                type=option.parse,
                choices=option.choices,
                metavar=metavar,
                required=defaults[name] is MISSING,
                **common,
            )


def _shown_default(name: str, default: object) -> str:
    if name in DEVICE_DEFAULTS:
        return ", ".join(f"{value} on {device}" for device, value in DEVICE_DEFAULTS[name].items())
    if name in _DERIVED_DEFAULTS:
        return _DERIVED_DEFAULTS[name]
    if isinstance(default, bool):
        return "on" if default else "off"
    return ",".join(default) if isinstance(default, tuple) else str(default)
