"""The engine's options on a command line: one flag a field of EngineConfig, with its help text and unit.

Knows: flags, their order in --help, how texts become values. Does not know: legal ranges (EngineConfig checks those),
which commands take them (launch/cli.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar, get_args

from launch.options import Option, add_option, choice, one_of, option
from launch.values import at_least_one, bounded, integer, number, whole_numbers
from runtime.config import (
    DEVICE_DEFAULTS,
    WARM_KINDS,
    DType,
    EngineConfig,
    Fp8Activations,
    KvCacheDtype,
    LoadFormat,
    PrefillWanted,
    flag_of,
)
from runtime.schedule.config import SessionPolicy
from runtime.speculative_config import METHODS

Own = TypeVar("Own")


@dataclass(frozen=True, slots=True)
class EngineCommand(Generic[Own]):
    """A parsed command line of a command with an engine. ``engine``: the EngineConfig fields that were given, and only
    those; ``defaults``: the command's own for the others."""

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}
    engine: Mapping[str, Any]
    options: Own

    def engine_config(self, tensor_parallel: int) -> EngineConfig:
        """``tensor_parallel``: as check_degrees found it. Raises ConfigError."""
        return EngineConfig(**{**self.defaults, **self.engine, "tensor_parallel": tensor_parallel})


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderDefaults:
    """Of a command whose requests may leave sampling parameters out."""

    generation_config: Literal["auto", "none"] = choice(
        "sampling parameters that neither request nor option gives; auto takes temperature, top_k, top_p, min_p and "
        "repetition_penalty from the model's generation_config.json, none the API's defaults",
        ("auto", "none"),
        "auto",
    )

    @property
    def sampling(self) -> dict[str, float | int | None]:
        """What the command line says for requests without it; None where it does not."""
        return {}


_ELSE = "default for requests without one: "


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults(FolderDefaults):
    """The same, where the command line may give them. ``max_tokens`` None: the API's default."""

    max_tokens: int | None = option(
        _ELSE + "maximum number of output tokens", "tokens", at_least_one, None, "16; chats: what fits"
    )
    temperature: float | None = option(
        _ELSE + "sampling temperature, 0 is greedy", "number", bounded(number, 0), None, "1.0"
    )
    top_p: float | None = option(
        _ELSE + "top-p, the probability mass to sample from", "share", bounded(number, 1e-9, 1), None, "1.0"
    )
    top_k: int | None = option(_ELSE + "top-k, 0 is all tokens", "tokens", bounded(integer, 0, 2**31 - 1), None, "0")
    drain_seconds: float = option(
        "after SIGTERM or SIGINT, time for running requests to finish", "seconds", bounded(number, 0), 20.0
    )

    @property
    def sampling(self) -> dict[str, float | int | None]:
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


_ENGINE: dict[str, Option] = {
    "model": Option("model folder in the Hugging Face layout", "folder", str),
    "load_format": one_of(
        "safetensors reads the weights; dummy makes random ones and reads config.json only", get_args(LoadFormat)
    ),
    "dtype": one_of("type of weights and activations; auto takes the checkpoint's", get_args(DType)),
    "device": one_of("where to run; auto takes cuda where there is a GPU", ("auto", "cpu", "cuda")),
    "tensor_parallel": Option(
        "tensor-parallel ranks; with --data-parallel-size, those of one group",
        "ranks",
        aliases=("-tp",),
        shown="the number of ranks started, divided by --data-parallel-size",
    ),
    "data_parallel": Option(
        "data-parallel groups, each with its own requests and KV; the experts are shared",
        "groups",
        aliases=("--data-parallel",),
    ),
    "expert_parallel": Option(
        "expert parallelism: whole experts on each rank instead of a shard of each",
        "switch",
        aliases=("--enable-expert-parallel",),
        shown="off; on with --data-parallel-size",
    ),
    "expert_load": Option(
        "at the end, write how many tokens each expert of each layer received", "file", str, shown="not written"
    ),
    "expert_map": Option(
        "balance experts over ranks by the --expert-load file of an earlier run", "file", str, shown="in order"
    ),
    "max_model_len": Option("maximum length of prompt and output together", "tokens", shown="the model's own limit"),
    "max_num_seqs": Option("maximum number of running requests, in each group", "requests"),
    "block_size": Option("tokens in a KV block", "tokens"),
    "num_blocks": Option(
        "number of KV blocks; omit to size the pool from free memory",
        "blocks",
        shown="sized from --memory-fraction of the memory",
    ),
    "memory_fraction": Option(
        "this engine's share of the whole device's memory; at start so much must be free",
        "fraction",
        number,
        aliases=("--gpu-memory-utilization",),
    ),
    "max_prefill_tokens": Option("token budget of one prefill step", "tokens"),
    "mixed_steps": Option(
        "prefill chunks share steps with decode requests; off: prefill has separate steps, for which these wait",
        "switch",
    ),
    "itl_target_ms": Option(
        "longest step that prefills while requests decode, so the inter-token latency; less delays first tokens",
        "ms",
        number,
        shown="7 times a step's fixed cost, or twice the decode step",
    ),
    "prefill_burst": Option(
        "most consecutive prefill steps while other requests decode; without mixed steps only", "steps"
    ),
    "chain_depth": Option(
        "steps in flight besides the one whose results are read next: more hide pauses of the host, but a new request "
        "waits for them; 0: the serial engine",
        "steps",
        shown="the least that keeps the GPU busy, measured at start-up; 2 on cpu",
    ),
    "speculative_config": Option(
        "speculative decoding, a JSON object with vLLM's keys, such as "
        '{"method": "ngram", "num_speculative_tokens": 4}; draft tokens change no output, '
        "probabilistic ones keep its distribution",
        "json",
        str,
        shown="off",
    ),
    "speculative_method": Option(
        f"its key method: {', '.join(METHODS)}", "word", str, aliases=("--spec-method",), shown="off"
    ),
    "speculative_model": Option(
        "its key model: folder of the draft model; mtp without it: the MTP layer of the checkpoint",
        "folder",
        str,
        aliases=("--spec-model",),
        shown="none",
    ),
    "num_speculative_tokens": Option(
        "its key num_speculative_tokens: draft tokens a step",
        "tokens",
        aliases=("--spec-tokens",),
        shown="what --speculative-config says",
    ),
    "decode_buckets": Option(
        "batch sizes of decode graphs, ascending, comma-separated",
        "rows",
        whole_numbers,
        shown="1,2,4,8, then at growing distances up to --max-num-seqs",
    ),
    "prefill_graphs": Option(
        "launch a prefill step as one CUDA graph; off: kernel by kernel, which costs tens of ms of host time", "switch"
    ),
    "quantization": one_of(
        "fp8: quantise a bfloat16 checkpoint's matrices while they are loaded, with a scale for each row; embeddings, "
        "head and routers stay; FP8 checkpoints need no option",
        ("fp8",),
        shown="none",
    ),
    "kv_cache_dtype": one_of(
        "type of the KV cache; auto takes that of activations; fp8 (fp8_e4m3) has the checkpoint's scales, or 1",
        get_args(KvCacheDtype),
    ),
    "fp8_activations": one_of(
        "whether activations are quantised where weights are FP8; auto: where that is faster, by the number of rows",
        get_args(Fp8Activations),
    ),
    "prefill_attention": one_of(
        "prefill attention on GPUs; flashinfer is faster, but its first build takes more than a minute; triton needs "
        "none; auto: flashinfer if built, else triton, while flashinfer is built in the background for the next start",
        get_args(PrefillWanted),
    ),
    "prefix_caching": Option("reuse the KV of common prompt prefixes", "switch", aliases=("--enable-prefix-caching",)),
    "num_snapshots": Option(
        "snapshots of recurrent state, for prefix caching of hybrid models; 0: no prefix caching for them",
        "snapshots",
        shown="a quarter of the cache memory, at most 4 a row",
    ),
    "snapshot_interval": Option(
        "KV blocks between a prompt's snapshots, besides that at its last full block; each may cost a step; 0: none",
        "blocks",
        shown="as many as --max-num-batched-tokens holds",
    ),
    "deterministic": Option(
        "a request's tokens and log-probabilities are the same, bit for bit, for any batch, order, chunks, prefix "
        "hits, evictions and chain depth; slower",
        "switch",
    ),
    "max_waiting": Option("maximum number of requests in the engine's queue", "requests"),
    "max_sessions": Option("maximum number of open sessions of `daemon`, each with its own slot", "sessions"),
    "session_policy": one_of(
        "parked sessions when memory is short: evict recomputes them later, close ends the one idle for longest, "
        "refuse rejects new work that would need it",
        get_args(SessionPolicy),
    ),
    "horizon": Option(
        "steps between rank 0's announcement of an event and its effect, in which records reach all ranks without a "
        "wait; it delays new requests; a single rank needs none",
        "steps",
        shown="the least at which no rank waits for records, measured at start-up",
    ),
    "plan_late": Option(
        "serving: plan the next step shortly before the one in flight ends, so that new requests can join it; off: at "
        "once",
        "switch",
        shown="on with cuda, off on cpu",
    ),
    "control_timeout_s": Option("silence after which a rank counts as lost and the job ends", "seconds", number),
    "seed": Option("base seed for requests without one, and for dummy weights", "number"),
    "warm": Option(
        f"sampling features whose graphs are captured at start-up, comma-separated: {', '.join(WARM_KINDS)}",
        "kinds",
        _words,
    ),
    "symmetric_all_reduce": Option(
        "custom all-reduce, dispatch and combine over symmetric memory for small messages; off: NCCL for all", "switch"
    ),
    "kernel_cache": Option("folder for kernel choices measured at start-up", "folder", str),
    "bundles": Option("folder for the crash reports of each rank of a failed job", "folder", str),
    "timeline": Option(
        "write the steps of all ranks as one trace for ui.perfetto.dev; .gz compresses it",
        "file",
        str,
        shown="not written",
    ),
    "nvtx": Option("mark the phases of each step as NVTX ranges for Nsight Systems", "switch"),
}

# Of commands that take requests without sampling parameters (launch/api/sampling_defaults.py).
WARMED: Final = {"warm": "greedy, and what requests without sampling parameters need"}


def engine_options(given: dict[str, Any]) -> dict[str, Any]:
    """Takes out of what argparse found what EngineConfig has a field for."""
    return {name: given.pop(name) for name in _ENGINE if name in given}


def add_engine_options(
    parser: argparse.ArgumentParser, *, shown: Mapping[str, str] | None = None, model: str = _ENGINE["model"].help
) -> None:
    """One flag a field of EngineConfig, in a separate group.

    ``shown``: in --help, the defaults by field that the command has instead. ``model``: what it takes for a model.
    """
    group = parser.add_argument_group("engine")
    defaults = {f.name: f.default for f in fields(EngineConfig)}
    for name, declared in {**_ENGINE, "model": replace(_ENGINE["model"], help=model)}.items():
        default = defaults[name]
        if name in DEVICE_DEFAULTS:
            default = ", ".join(f"{value} on {device}" for device, value in DEVICE_DEFAULTS[name].items())
        if name in (shown or {}):
            declared = replace(declared, shown=(shown or {})[name])
        if declared.unit == "switch":
            declared = replace(declared, more={"action": argparse.BooleanOptionalAction})
        add_option(group, flag_of(name), name, declared, default)
