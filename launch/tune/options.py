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
    defaults = {field.name: field.default for field in fields(TuneCommand)}

    def value(
        dest: str, flag: str, text: str, unit: str, read: Callable[[str], Any], shown: str = "", **more: Any
    ) -> None:
        text = f"{text} (default: {shown or defaults[dest]}) [{unit}]"
        metavar = None if "choices" in more else unit.upper()
        parser.add_argument(flag, dest=dest, help=text, type=read, metavar=metavar, **more)

    parser.add_argument(
        "--model",
        required=True,
        metavar="FOLDER",
        help="model folder in the Hugging Face layout, or a shape that comes with Lockstride (required) [folder]",
    )
    value(
        "tensor_parallel",
        "--tensor-parallel-size",
        "ranks that share the model; one rank's shard is measured",
        "ranks",
        at_least_one,
        "the number of ranks started",
    )
    parser.add_argument(
        "--expert-parallel",
        dest="expert_parallel",
        action="store_true",
        help="whole experts on each rank (default: off) [switch]",
    )
    value("dtype", "--dtype", "type of weights and activations; auto takes the checkpoint's", "word", str, "",
          choices=get_args(DType))  # fmt: skip
    value("max_num_seqs", "--max-num-seqs", "rows of the largest decode step", "requests", at_least_one)
    value(
        "max_prefill_tokens",
        "--max-num-batched-tokens",
        "tokens of the largest step with prompts",
        "tokens",
        at_least_one,
    )
    value("rows", "--rows", "only these buckets, comma-separated", "rows", counts, "every one of the engine's")
    value(
        "parts",
        "--parts",
        f"what to measure, comma-separated: {', '.join(PARTS)}; all-reduce where several ranks were started",
        "words",
        _parts,
        ",".join(PARTS),
    )
    value("out", "--out", "kernel cache folder for the table; start engines with --kernel-cache OUT", "folder", Path)
    value(
        "budget_minutes",
        "--budget-minutes",
        "stop after this time; the same command continues",
        "minutes",
        bounded(number, 0.1),
        "no limit",
    )
    value(
        "seconds",
        "--seconds",
        "how long each of the fastest few is timed again, twice; a step of many rows reaches its power late",
        "seconds",
        bounded(number, 0.01),
        "0.1 up to 56 rows, 0.3 up to 256, 0.15 beyond",
    )
    value(
        "compile_workers",
        "--compile-workers",
        "processes that compile candidates beforehand; 0: each when it is timed",
        "processes",
        whole_number,
        "one fewer than the cores, at most 14",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="measure again what was measured before (default: off) [switch]",
    )
