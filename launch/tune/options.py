"""The command line of `tune`.

Knows: its flags. Does not know: what is measured, or in which order (plan.py).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

from launch.options import add_command, choice, option, switch
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
    """``tensor_parallel``: None is the number of ranks that were started. ``budget_minutes``, ``rows``, ``seconds``,
    ``compile_workers``: None is no limit, every bucket, what plan.py thinks enough for so many rows, and most of the
    machine's cores."""

    model: str = option("model folder in the Hugging Face layout, or a shape that comes with Lockstride", "folder", str)
    tensor_parallel: int | None = option(
        "ranks that share the model; one rank's shard is measured",
        "ranks",
        at_least_one,
        None,
        "the number of ranks started",
        flag="--tensor-parallel-size",
    )
    expert_parallel: bool = switch("whole experts on each rank")
    dtype: str = choice("type of weights and activations; auto takes the checkpoint's", get_args(DType), "auto")
    quantization: str | None = choice(
        "fp8: that of an engine which quantises a bfloat16 checkpoint at load", ("fp8",), None, "none"
    )
    max_num_seqs: int = option(
        "rows of the largest decode step", "requests", at_least_one, DEVICE_DEFAULTS["max_num_seqs"]["cuda"]
    )
    max_prefill_tokens: int = option(
        "tokens of the largest step with prompts",
        "tokens",
        at_least_one,
        DEVICE_DEFAULTS["max_prefill_tokens"]["cuda"],
        flag="--max-num-batched-tokens",
    )
    rows: tuple[int, ...] | None = option(
        "only these buckets, comma-separated", "rows", counts, None, "every one of the engine's"
    )
    parts: tuple[str, ...] = option(
        f"what to measure, comma-separated: {', '.join(PARTS)}; all-reduce where several ranks were started",
        "words",
        _parts,
        PARTS,
    )
    out: Path = option(
        "kernel cache folder for the table; start engines with --kernel-cache OUT", "folder", Path, Path(str(_CACHE))
    )
    budget_minutes: float | None = option(
        "stop after this time; the same command continues", "minutes", bounded(number, 0.1), None, "no limit"
    )
    seconds: float | None = option(
        "how long each of the fastest few is timed again, twice; a step of many rows reaches its power late",
        "seconds",
        bounded(number, 0.01),
        None,
        "0.1 up to 56 rows, 0.3 up to 256, 0.15 beyond",
    )
    compile_workers: int | None = option(
        "processes that compile candidates beforehand; 0: each when it is timed",
        "processes",
        whole_number,
        None,
        "one fewer than the cores, at most 14",
    )
    fresh: bool = switch("measure again what was measured before")
    name: str = "tune"


def add_tune_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_command(
        commands,
        "tune",
        "measure the kernels of a model's shapes on this GPU, for all later starts",
        "Chooses the kernel of every matrix product of a model, at every batch size and token count that "
        "the engine captures, and the launch of decode attention: inside decoder layers and at the power that a step "
        "draws. Needs one GPU and config.json; no weights. With --tensor-parallel-size N, one rank's share of N. "
        "Started as N ranks on one node (torchrun --nproc-per-node N -m launch tune ...), it also measures the "
        "all-reduces between them. Choices are kept as they are made, in a table in the kernel cache folder that later "
        "starts find: after an interruption or at the end of --budget-minutes, the same command goes on. What is "
        "measured comes in order of what it is worth. Exit code: 0 done, or out of budget; 1 a candidate broke "
        "the GPU's context (the same command goes on without it); 2 it cannot be done here; 130 or 143 interrupted.",
        TuneCommand,
    )
