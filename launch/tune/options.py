"""The command line of `tune`.

Knows: its flags. Does not know: what is measured, or in which order (plan.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from launch.values import at_least_one, bounded, counts, number, whole_number
from runtime.config import DEVICE_DEFAULTS, DType, EngineConfig

PARTS = ("all-reduce", "products", "attention")
_CACHE = next(field.default for field in fields(EngineConfig) if field.name == "kernel_cache")


def _parts(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    for part in found:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(PARTS)}")
    return found


@dataclass(frozen=True, slots=True)
class TuneCommand:
    """``model``: a folder, or a shape that comes with Lockstride. ``tensor_parallel``: None is the number of ranks that
    were started. ``out``: a kernel cache folder. ``budget_minutes``, ``rows``, ``seconds``, ``compile_workers``: None
    is no limit, every bucket, what plan.py thinks enough for so many rows, and most of the machine's cores.
    """

    model: str
    tensor_parallel: int | None = None
    expert_parallel: bool = False
    dtype: str = "auto"
    max_num_seqs: int = DEVICE_DEFAULTS["max_num_seqs"]["cuda"]
    max_prefill_tokens: int = DEVICE_DEFAULTS["max_prefill_tokens"]["cuda"]
    rows: tuple[int, ...] | None = None
    parts: tuple[str, ...] = PARTS
    out: Path = Path(str(_CACHE))
    budget_minutes: float | None = None
    seconds: float | None = None
    compile_workers: int | None = None
    fresh: bool = False
    name: str = "tune"


def tune_command(given: dict[str, Any]) -> TuneCommand:
    """From what argparse found."""
    return TuneCommand(**given)


def add_tune_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure the kernels of a model's shapes on this GPU, for all later starts",
        description="Chooses the kernel of every matrix product of a model, at every batch size and token count that "
        "the engine captures, and the launch of decode attention: inside decoder layers and at the power that a step "
        "draws. Needs one GPU and config.json; no weights. With --tensor-parallel-size N, one rank's share of N. "
        "Started as N ranks on one node (torchrun --nproc-per-node N -m launch tune ...), it also measures the "
        "all-reduces between them. Choices are kept as they are made, in a table in the kernel cache folder that later "
        "starts find: after an interruption or at the end of --budget-minutes, the same command goes on. What is "
        "measured comes in order of what it is worth. Exit code: 0 done, or out of budget; 1 a candidate broke "
        "the GPU's context (the same command goes on without it); 2 it cannot be done here; 130 or 143 interrupted.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="FOLDER",
        help="model folder in the Hugging Face layout, or a shape that comes with Lockstride (required) [folder]",
    )
    _add_values(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="measure again what was measured before (default: off) [switch]"
    )


def _add_values(parser: argparse.ArgumentParser) -> None:
    """Options with a value each, and the switch among them."""
    defaults = {field.name: field.default for field in fields(TuneCommand)}

    def value(flag: str, text: str, unit: str, read: Callable[[str], Any], shown: str = "", dest: str = "") -> None:
        dest = dest or flag.removeprefix("--").replace("-", "_")
        text = f"{text} (default: {shown or defaults[dest]}) [{unit}]"
        parser.add_argument(flag, dest=dest, help=text, type=read, metavar=unit.upper())

    text = "ranks that share the model; one rank's shard is measured"
    shown = "the number of ranks started"
    value("--tensor-parallel-size", text, "ranks", at_least_one, shown, "tensor_parallel")
    text = "whole experts on each rank (default: off) [switch]"
    parser.add_argument("--expert-parallel", dest="expert_parallel", action="store_true", help=text)
    text = f"type of weights and activations; auto takes the checkpoint's (default: {defaults['dtype']}) [word]"
    parser.add_argument("--dtype", dest="dtype", help=text, type=str, choices=get_args(DType))
    value("--max-num-seqs", "rows of the largest decode step", "requests", at_least_one)
    text = "tokens of the largest step with prompts"
    value("--max-num-batched-tokens", text, "tokens", at_least_one, dest="max_prefill_tokens")
    value("--rows", "only these buckets, comma-separated", "rows", counts, "every one of the engine's")
    text = f"what to measure, comma-separated: {', '.join(PARTS)}; all-reduce where several ranks were started"
    value("--parts", text, "words", _parts, ",".join(PARTS))
    value("--out", "kernel cache folder for the table; start engines with --kernel-cache OUT", "folder", Path)
    text = "stop after this time; the same command continues"
    value("--budget-minutes", text, "minutes", bounded(number, 0.1), "no limit")
    text = "how long each of the fastest few is timed again, twice; a step of many rows reaches its power late"
    value("--seconds", text, "seconds", bounded(number, 0.01), "0.1 up to 56 rows, 0.3 up to 256, 0.15 beyond")
    text = "processes that compile candidates beforehand; 0: each when it is timed"
    value("--compile-workers", text, "processes", whole_number, "one fewer than the cores, at most 14")
