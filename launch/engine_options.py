"""The engine's options on a command line: one flag a field of EngineConfig, with its help text and unit.

Knows: flags, their order in --help, how texts become values. Does not know: legal ranges (EngineConfig checks those),
which commands take them (launch/cli.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_args

from launch.values import integer, number, whole_numbers
from runtime.config import DEVICE_DEFAULTS, WARM_KINDS, DType, EngineConfig, LoadFormat, PrefillWanted, flag_of


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
        "ranks that share each layer; with --data-parallel-size, those of one group", "ranks", alias="-tp"
    ),
    "data_parallel": _Option(
        "groups of ranks with requests of their own, which share the experts", "groups", alias="--data-parallel"
    ),
    "expert_parallel": _Option(
        "give each rank whole experts instead of a share of each", "switch", alias="--enable-expert-parallel"
    ),
    "expert_load": _Option("write how many tokens each expert of each layer got, at the end", "file", str),
    "expert_map": _Option("place experts evenly by what an earlier run wrote with --expert-load", "file", str),
    "max_model_len": _Option("longest prompt and answer together", "tokens"),
    "max_num_seqs": _Option("requests that run at once, in each group", "requests"),
    "block_size": _Option("size of a KV block", "tokens"),
    "num_blocks": _Option("KV blocks; leave out to size the pool from free memory", "blocks"),
    "memory_fraction": _Option(
        "share of the device's memory that the engine may use", "fraction", number, alias="--gpu-memory-utilization"
    ),
    "max_prefill_tokens": _Option("budget of one prefill step", "tokens"),
    "prefill_burst": _Option("prefill steps in a row while other requests decode", "steps"),
    "chain_depth": _Option("steps in flight beyond the one that lands; 0 is the serial engine", "steps"),
    "width": _Option("tokens that a row may gain in a step", "tokens"),
    "decode_buckets": _Option("row counts of decode steps, ascending, with commas", "rows", whole_numbers),
    "prefill_graphs": _Option(
        "launch a prefill step as one graph, on GPUs; off: kernel by kernel, which costs the host tens of ms", "switch"
    ),
    "prefill_attention": _Option(
        "kernel of prefill attention on GPUs; flashinfer is the faster one, but a start waits for it where it is not "
        "built, more than a minute once a machine; triton is ours; auto takes flashinfer where it is built, else "
        "triton, and builds flashinfer beside the run for the next start",
        "word",
        str,
        get_args(PrefillWanted),
    ),
    "prefix_caching": _Option("reuse the KV of prompts that begin alike", "switch", alias="--enable-prefix-caching"),
    "max_waiting": _Option("requests that may queue in the engine", "requests"),
    "horizon": _Option(
        "steps by which rank 0 announces events to the others ahead; one rank alone needs none", "steps"
    ),
    "control_timeout_s": _Option("silence after which a rank is given up", "seconds", number),
    "seed": _Option("base of the seeds of requests that have none, and of dummy weights", "number"),
    "warm": _Option(
        f"kinds of sampling to capture graphs for before the first request, with commas: {', '.join(WARM_KINDS)}",
        "kinds",
        _words,
    ),
    "symmetric_all_reduce": _Option(
        "small sums and exchanges between a node's GPUs in one kernel each over shared memory; off: all through NCCL",
        "switch",
    ),
    "kernel_cache": _Option("folder for choices of kernels that were measured at start-up", "folder", str),
    "bundles": _Option("folder where each rank of a job that fails leaves what it knew", "folder", str),
    "timeline": _Option("write every rank's steps as one trace for ui.perfetto.dev; .gz compresses it", "file", str),
    "nvtx": _Option("name the phases of each step for Nsight Systems", "switch"),
}

_DERIVED_DEFAULTS = {
    "tensor_parallel": "the number of ranks started, divided by --data-parallel-size",
    "expert_parallel": "off; on with --data-parallel-size",
    "max_model_len": "the model's own limit",
    "num_blocks": "sized from --memory-fraction of the memory",
    "timeline": "not written",
    "expert_load": "not written",
    "expert_map": "in order",
    "decode_buckets": "1,2,4,8, then ever wider steps up to --max-num-seqs",
}


def engine_options(given: dict[str, Any]) -> dict[str, Any]:
    """Takes out of what argparse found what EngineConfig has a field for."""
    return {name: given.pop(name) for name in _ENGINE if name in given}


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    """One flag a field of EngineConfig. Without a default of argparse's own: EngineConfig has them."""
    defaults = {f.name: f.default for f in fields(EngineConfig)}
    for name, option in _ENGINE.items():
        default = "required" if defaults[name] is MISSING else f"default: {_shown_default(name, defaults[name])}"
        flags = [flag_of(name)] + ([option.alias] if option.alias else [])
        common: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": f"{option.help} ({default}) [{option.unit}]",
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
    return str(default)
