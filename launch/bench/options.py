"""The command line of `bench`: which subcommands there are, and what each of them needs besides the engine's options.

Knows: vLLM's flag names and the protocols' defaults. Does not know: what a subcommand does (bench/command.py), the
engine's own options (engine_options.py adds those), those of `serve` (serve_options.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.bench.serve_options import ServeOptions
from launch.engine_options import EngineCommand, add_engine_options
from launch.options import add_command, choice, option, switch
from launch.values import above_zero, at_least_one, counts, whole_number
from runtime.speculative_config import SpeculativeConfigError, merged_speculation

Subcommand = Literal["latency", "throughput", "serve", "flips"]

FIXED_BATCH_MODEL_LEN = 4096
PREFILL_FIRST = 1 << 20  # prefill steps in a row: all of a batch, before any of it decodes
PATIENCE_S = 120.0  # measuring between turns may take this long before a rank is given up

# What --help says of the model, and of the defaults that session.py gives the engine, by field.
_MODEL = "model folder in the Hugging Face layout, or a shape that comes with Lockstride, such as qwen3-8b"
_OF_ALL = {"load_format": "safetensors; dummy where the folder has no weights", "control_timeout_s": str(PATIENCE_S)}
_OF_FIXED_BATCHES = {
    **_OF_ALL,
    "max_num_seqs": "256 on cuda, 32 on cpu; more where --batch-size asks for more",
    "prefix_caching": "off",
    "mixed_steps": "off",
    "prefill_burst": str(PREFILL_FIRST),
    "max_model_len": f"the model's own limit, at most {FIXED_BATCH_MODEL_LEN}",
}
_OF_LOADS = {**_OF_ALL, "max_num_seqs": "256 on cuda, 32 on cpu; more where --max-concurrency asks for more"}

H200_BYTES_PER_S = 4.29e12  # read bandwidth as measured, not the data sheet's 4.8e12
H200_FLOP_PER_S = 790e12  # dense bfloat16, as measured


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each request."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output

    @property
    def average(self) -> int:
        """KV of a row in the middle of its answer."""
        return self.prompt + self.output // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Of runs whose step time has a floor. Rates are of one device, in bytes and floating-point operations a second."""

    num_iters: int = option("measured runs per point", "runs", at_least_one, 3)
    num_warmups: int = option("warm-up runs before them", "runs", whole_number, 1, aliases=("--num-iters-warmup",))
    result_dir: Path | None = option("folder to write results to", "folder", Path, None, "not written")
    roofline: bool = switch("print the roofline floor from bytes and FLOPs, and the share of it that was reached")
    bytes_per_s: float = option(
        "memory bandwidth of a device for the roofline",
        "bytes/s",
        above_zero,
        H200_BYTES_PER_S,
        f"{H200_BYTES_PER_S:g}",
    )
    flop_per_s: float = option(
        "compute rate of a device for the roofline", "FLOP/s", above_zero, H200_FLOP_PER_S, f"{H200_FLOP_PER_S:g}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions(RunOptions):
    """What `bench latency` needs."""

    protocol: Literal["fixed-batch", "generation"] = choice(
        "fixed-batch: TPOT from the times of a long and a one-token output; generation: whole outputs, as vLLM's "
        "bench latency",
        ("fixed-batch", "generation"),
        "fixed-batch",
    )
    input_len: int = option("prompt length of each request", "tokens", at_least_one, 512)
    output_len: int = option("output length of each request", "tokens", at_least_one, 257)
    batch_size: tuple[int, ...] = option("batch size; several comma-separated", "rows", counts, (1, 8, 32, 128, 256))
    profile: bool = switch("after all timed runs, profile the kernels of a prefill and a decode step of each batch")

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.input_len, self.output_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(RunOptions):
    """What `bench throughput` needs. ``output_len`` None: what the dataset says, 128 of random prompts."""

    dataset_name: Literal["random", "sharegpt", "jsonl"] = choice(
        "dataset of prompts", ("random", "sharegpt", "jsonl"), "random"
    )
    dataset_path: Path | None = option("file of the dataset; not for random", "file", Path, None)
    input_len: int = option("prompt length of each random request", "tokens", at_least_one, 1024)
    output_len: int | None = option(
        "output length of each request", "tokens", at_least_one, None, "the dataset's; random: 128"
    )
    num_prompts: int = option("requests in a run", "requests", at_least_one, 1000)
    max_concurrency: int | None = option("maximum number of concurrent requests", "requests", at_least_one, None, "all")

    @property
    def lengths(self) -> Lengths | None:
        """None where each request has its own."""
        return Lengths(self.input_len, self.output_len or 128) if self.dataset_name == "random" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipsOptions:
    """What `bench flips` needs."""

    results: tuple[Path, ...] = option(
        "answers of generate in the simple form", "file", Path, (), nargs=2, metavar="FILE"
    )


Options = LatencyOptions | ThroughputOptions | ServeOptions | FlipsOptions


@dataclass(frozen=True, slots=True)
class BenchCommand(EngineCommand[Options]):
    """A parsed `bench` command line."""

    subcommand: Subcommand

    name = "bench"


def bench_command(given: dict[str, Any], engine: Mapping[str, Any]) -> BenchCommand:
    """From what argparse found, the engine's options taken out."""
    subcommand: Subcommand = given.pop("subcommand")
    return BenchCommand(engine, _SUBCOMMANDS[subcommand][0](**given), subcommand)


def parse_bench(arguments: Sequence[str]) -> None:
    """Reads ``bench latency --model ...`` for its complaints alone, those about speculation included.

    Raises SystemExit(2), after an explanation on stderr, as the command would.
    """
    parser = argparse.ArgumentParser(prog="lockstride", allow_abbrev=False)
    add_bench_parser(parser.add_subparsers(required=True))
    given = vars(parser.parse_args(arguments))
    plain = {
        "method": given.get("speculative_method"),
        "model": given.get("speculative_model"),
        "num_speculative_tokens": given.get("num_speculative_tokens"),
    }
    try:
        merged_speculation(given.get("speculative_config"), plain)
    except SpeculativeConfigError as error:
        parser.error(str(error))


def add_bench_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The parser of `bench` and those of its subcommands."""
    bench = commands.add_parser(
        "bench",
        help="measure latency and throughput, or compare answers",
        description="Reproducible benchmarks, with vLLM's flags and metric names.",
        allow_abbrev=False,
    )
    subcommands = bench.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name, (owner, shown, summary, description) in _SUBCOMMANDS.items():
        parser = add_command(subcommands, name, summary, description, owner, positional=("results",))
        if shown:
            add_engine_options(parser, shown=shown, model=_MODEL)


# Of each its own options, the defaults that it has for the engine (none: it needs no engine), and two texts of --help.
_SUBCOMMANDS: dict[Subcommand, tuple[type[Any], dict[str, str], str, str]] = {
    "latency": (
        LatencyOptions,
        _OF_FIXED_BATCHES,
        "time per output token at fixed batch sizes",
        "A batch of random prompts, all admitted at once, greedy, to a fixed length. Exit code 1 when a point has no "
        "rate, because its batch was not full.",
    ),
    "throughput": (
        ThroughputOptions,
        _OF_LOADS,
        "tokens and requests per second over a dataset",
        "Runs a dataset at full load, with at most --max-concurrency requests at a time.",
    ),
    "serve": (
        ServeOptions,
        _OF_LOADS,
        "latency and throughput under real load",
        "Requests arrive at a rate (open loop), or as earlier ones end (closed loop), or both. Figures have the names "
        "of vLLM's bench serve, for the whole run and for its steady part. Several rates or concurrencies give the "
        "curve of latency against throughput. Exit code 1 when a request failed.",
    ),
    "flips": (
        FlipsOptions,
        {},
        "compare the answers of two configurations token by token",
        "Two output files of `generate` over the same input: first differences in 1,000 tokens, both tokens with their "
        'log-probabilities (ask for "logprobs": 20), and log-probabilities that differ in any bit. No model is loaded.',
    ),
}
