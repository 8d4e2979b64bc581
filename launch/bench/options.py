"""The command line of `bench`: which subcommands there are, and what each of them needs beside the engine's options.

Knows: vLLM's flag names and the protocols' defaults. Does not know: what a subcommand does (bench/command.py), the
engine's own options (engine_options.py adds those).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.bench.option_adder import OptionAdder
from launch.bench.serve_options import ServeOptions, add_serve_options, serve_options
from launch.engine_options import add_engine_options
from launch.values import above_zero, at_least_one, counts, whole_number
from runtime.config import EngineConfig
from runtime.speculative_config import SpeculativeConfigError, merged_speculation

Subcommand = Literal["latency", "throughput", "serve", "flips"]

FIXED_BATCH_MODEL_LEN = 4096
PREFILL_FIRST = 1 << 20  # prefill steps in a row: all of a batch, before any of it decodes
PATIENCE_S = 120.0  # measuring between turns may take this long before a rank is given up

# What --help says of the model, and of the defaults that session.py gives the engine, by field.
_MODEL = "model folder in the Hugging Face layout, or a shape that comes with Lockstride, such as qwen3-8b"
_OF_ALL = {
    "load_format": "safetensors; dummy where the folder has no weights",
    "control_timeout_s": str(PATIENCE_S),
}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What the subcommands need; each reads its own fields and leaves the others at their defaults.

    Lengths of None are the subcommand's own: 512 and 257 for fixed batches; for throughput what the dataset says, and
    1024 and 128 for random prompts. Rates are of one device, in bytes and floating-point operations a second.
    ``serve``: those of that subcommand, which has no other here but ``result_dir``.
    """

    input_len: int | None = None
    output_len: int | None = None
    batch_size: tuple[int, ...] = (1, 8, 32, 128, 256)
    protocol: Literal["fixed-batch", "generation"] = "fixed-batch"
    num_iters: int = 3
    num_warmups: int = 1
    num_prompts: int = 1000
    max_concurrency: int | None = None
    dataset_name: Literal["random", "sharegpt", "jsonl"] = "random"
    dataset_path: Path | None = None
    result_dir: Path | None = None
    roofline: bool = False
    bytes_per_s: float = H200_BYTES_PER_S
    flop_per_s: float = H200_FLOP_PER_S
    profile: bool = False
    results: tuple[Path, ...] = ()
    serve: ServeOptions | None = None


@dataclass(frozen=True, slots=True)
class BenchCommand:
    """A parsed `bench` command line. ``engine`` holds the EngineConfig fields that were given, and only those."""

    subcommand: Subcommand
    engine: Mapping[str, Any]
    options: BenchOptions
    name: str = "bench"

    def engine_config(self, tensor_parallel: int, defaults: Mapping[str, Any]) -> EngineConfig:
        """``defaults`` are the protocol's, for what was not given. Raises ConfigError."""
        return EngineConfig(**{**defaults, **self.engine, "tensor_parallel": tensor_parallel})


def bench_command(given: dict[str, Any], engine: Mapping[str, Any]) -> BenchCommand:
    """From what argparse found, the engine's options taken out."""
    subcommand = given.pop("subcommand")
    if subcommand == "serve":
        serve = serve_options(given)
        return BenchCommand(subcommand, engine, BenchOptions(result_dir=serve.result_dir, serve=serve))
    return BenchCommand(subcommand, engine, BenchOptions(**given))


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
    for name, add_options, summary, description in _SUBCOMMANDS:
        parser = subcommands.add_parser(
            name, help=summary, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
        add_options(OptionAdder(parser, ServeOptions if name == "serve" else BenchOptions))
        if name != "flips":
            shown = _OF_FIXED_BATCHES if name == "latency" else _OF_LOADS
            add_engine_options(parser.add_argument_group("engine"), shown=shown, model=_MODEL)


def _latency_options(add: OptionAdder) -> None:
    add.value(
        "--protocol",
        "fixed-batch: TPOT from the times of a long and a one-token output; generation: whole outputs, as vLLM's "
        "bench latency",
        "word",
        str,
        choices=("fixed-batch", "generation"),
    )
    add.value("--input-len", "prompt length of each request", "tokens", at_least_one, "512")
    add.value("--output-len", "output length of each request", "tokens", at_least_one, "257")
    add.value("--batch-size", "batch size; several comma-separated", "rows", counts, "1,8,32,128,256")
    _run_options(add)
    _roofline_options(add)
    add.switch("--profile", "after all timed runs, profile the kernels of a prefill and a decode step of each batch")


def _throughput_options(add: OptionAdder) -> None:
    add.value("--dataset-name", "dataset of prompts", "word", str, "", choices=("random", "sharegpt", "jsonl"))
    add.value("--dataset-path", "file of the dataset; not for random", "file", Path, "none")
    add.value("--input-len", "prompt length of each random request", "tokens", at_least_one, "1024")
    add.value("--output-len", "output length of each request", "tokens", at_least_one, "the dataset's; random: 128")
    add.value("--num-prompts", "requests in a run", "requests", at_least_one)
    add.value("--max-concurrency", "maximum number of concurrent requests", "requests", at_least_one, "all")
    _run_options(add)
    _roofline_options(add)


def _run_options(add: OptionAdder) -> None:
    add.value("--num-iters", "measured runs per point", "runs", at_least_one)
    add.value("--num-warmups", "warm-up runs before them", "runs", whole_number, "", "--num-iters-warmup")
    add.value("--result-dir", "folder to write results to", "folder", Path, "not written")


def _roofline_options(add: OptionAdder) -> None:
    add.switch("--roofline", "print the roofline floor from bytes and FLOPs, and the share of it that was reached")
    add.value(
        "--bytes-per-s", "memory bandwidth of a device for the roofline", "bytes/s", above_zero, f"{H200_BYTES_PER_S:g}"
    )
    add.value("--flop-per-s", "compute rate of a device for the roofline", "FLOP/s", above_zero, f"{H200_FLOP_PER_S:g}")


def _flips_options(add: OptionAdder) -> None:
    add.parser.add_argument(
        "results", nargs=2, type=Path, metavar="FILE", help="answers of generate in the simple form (required) [file]"
    )


_SUBCOMMANDS: tuple[tuple[Subcommand, Callable[[OptionAdder], None], str, str], ...] = (
    (
        "latency",
        _latency_options,
        "time per output token at fixed batch sizes",
        "A batch of random prompts, all admitted at once, greedy, to a fixed length. Exit code 1 when a point has no "
        "rate, because its batch was not full.",
    ),
    (
        "throughput",
        _throughput_options,
        "tokens and requests per second over a dataset",
        "Runs a dataset at full load, with at most --max-concurrency requests at a time.",
    ),
    (
        "serve",
        add_serve_options,
        "latency and throughput under real load",
        "Requests arrive at a rate (open loop), or as earlier ones end (closed loop), or both. Figures have the names "
        "of vLLM's bench serve, for the whole run and for its steady part. Several rates or concurrencies give the "
        "curve of latency against throughput. Exit code 1 when a request failed.",
    ),
    (
        "flips",
        _flips_options,
        "compare the answers of two configurations token by token",
        "Two output files of `generate` over the same input: first differences in 1,000 tokens, both tokens with their "
        'log-probabilities (ask for "logprobs": 20), and log-probabilities that differ in any bit. No model is loaded.',
    ),
)
