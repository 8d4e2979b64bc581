"""The command line: every option with its default and unit, and what it makes of them.

Knows: flags, their order in --help, how texts become values. Does not know: legal ranges (EngineConfig checks those),
what a command does. Options that are not known are refused, and none may be abbreviated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from launch.bench.options import BenchCommand, add_bench_parser, bench_command
from launch.doctor.options import DoctorCommand, add_doctor_parser, doctor_command
from launch.sweep.options import SweepCommand, add_sweep_parser, sweep_command
from runtime.config import DEVICE_DEFAULTS, WARM_KINDS, DType, EngineConfig, LoadFormat, PrefillWanted, flag_of


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What `generate` needs beside the engine's own options."""

    input: Path
    output: Path
    overwrite: bool
    retry_errors: bool
    summary: Path | None
    show: int
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    generation_config: Literal["auto", "none"]
    look_ahead: int
    drain_seconds: float
    max_line_bytes: int


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed command line. ``engine`` holds the EngineConfig fields that were given, and only those."""

    name: str
    engine: Mapping[str, Any]
    generate: GenerateOptions

    def engine_config(self, tensor_parallel: int) -> EngineConfig:
        """``tensor_parallel``: as check_degrees found it. Raises ConfigError."""
        return EngineConfig(**{**self.engine, "tensor_parallel": tensor_parallel})


@dataclass(frozen=True, slots=True)
class _Option:
    """One option: its help text and the unit of its value."""

    help: str
    unit: str
    parse: Callable[[str], Any] = int
    choices: tuple[str, ...] | None = None
    alias: str | None = None


def _number(kind: Callable[[str], Any], low: float, high: float = sys.float_info.max) -> Callable[[str], Any]:
    """Reads a number from ``low`` to ``high``; argparse puts the option's name before the complaint."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high:
            limit = f"at least {low:g}" if high == sys.float_info.max else f"{low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {limit}")
        return value

    return read


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,4,8") from None


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
        "share of the device's memory that the engine may use", "fraction", float, alias="--gpu-memory-utilization"
    ),
    "max_prefill_tokens": _Option("budget of one prefill step", "tokens"),
    "prefill_burst": _Option("prefill steps in a row while other requests decode", "steps"),
    "chain_depth": _Option("steps in flight beyond the one that lands; 0 is the serial engine", "steps"),
    "width": _Option("tokens that a row may gain in a step", "tokens"),
    "decode_buckets": _Option("row counts of decode steps, ascending, with commas", "rows", _numbers),
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
    "control_timeout_s": _Option("silence after which a rank is given up", "seconds", float),
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


def parse(arguments: Sequence[str]) -> Command | BenchCommand | DoctorCommand | SweepCommand:
    """Raises SystemExit(2), after an explanation on stderr, for a command line that is wrong."""
    parser = build_parser()
    given = vars(parser.parse_args(arguments))
    name = given.pop("command")
    if name == "doctor":
        return doctor_command(given)
    if name == "sweep":
        return sweep_command(given)
    engine = {key: given.pop(key) for key in _ENGINE if key in given}
    return bench_command(given, engine) if name == "bench" else Command(name, engine, GenerateOptions(**given))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstride",
        description="Multi-GPU LLM inference where every rank runs the same engine.",
        epilog="Start one rank a GPU: torchrun --nproc-per-node N -m launch COMMAND ..., srun python -m launch COMMAND "
        "..., or for one rank python -m launch COMMAND ...",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="complete a JSONL file of prompts",
        description="Complete every line of a JSONL file and write one line each, in the order in which they finish. "
        "Run the same command again to go on after an interruption. Exit code: 0 all lines have an answer, 1 some "
        "failed (their rows say why), 2 the command line is wrong, 130 or 143 interrupted.",
        allow_abbrev=False,
    )
    _add_generate_options(generate)
    _add_engine_options(generate.add_argument_group("engine"))
    add_bench_parser(commands, _add_engine_options)
    add_doctor_parser(commands)
    add_sweep_parser(commands)
    return parser


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    def option(flag: str, help_text: str, unit: str, read: Callable[[str], Any], default: Any, shown: str = "") -> None:
        help_text = f"{help_text} (default: {shown or default}) [{unit}]"
        parser.add_argument(flag, help=help_text, type=read, default=default, metavar=unit.upper())

    for name, text in (("input", "one JSON object a line"), ("output", "where answers are appended")):
        flags = (f"--{name}", f"-{name[0]}")
        parser.add_argument(*flags, type=Path, required=True, metavar="FILE", help=f"{text} (required) [file]")
    for flag, text in (
        ("--overwrite", "empty the output first instead of going on where it ends"),
        ("--retry-errors", "take the error rows out of the output and try their lines again"),
    ):
        parser.add_argument(flag, action="store_true", help=f"{text} (default: off) [switch]")
    option("--summary", "write the summary as JSON", "file", Path, None, "not written")
    option("--show", "print the first answers readably at the end", "answers", _number(int, 0), 0)
    silent = "for lines that do not say: "
    option("--max-tokens", silent + "longest answer", "tokens", _number(int, 1), None, "16; chats: what fits")
    option("--temperature", silent + "randomness, 0 is greedy", "number", _number(float, 0), None, "1.0")
    option(
        "--top-p", silent + "likeliest tokens of this total probability", "share", _number(float, 1e-9, 1), None, "1.0"
    )
    option("--top-k", silent + "likeliest tokens, 0 is all", "tokens", _number(int, 0, 2**31 - 1), None, "0")
    parser.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help=silent + "what neither they nor these options say; auto takes temperature, top_k, top_p, min_p and "
        "repetition_penalty from the model's generation_config.json, none the values above (default: auto) [word]",
    )
    option("--look-ahead", "requests read before there is room for them", "requests", _number(int, 1), 256)
    option(
        "--drain-seconds",
        "after SIGTERM or SIGINT, time for what has begun to finish",
        "seconds",
        _number(float, 0),
        20.0,
    )
    option("--max-line-bytes", "longest line of input", "bytes", _number(int, 1, 1 << 30), 1 << 24)


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
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
