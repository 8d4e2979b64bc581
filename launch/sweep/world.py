"""`sweep plan --dry-run-world N`: which rank of a world holds what, and whether it fits, planned on one CPU.

Knows: degrees, jobs and memory of such a world, and the lines that are printed. Does not know: how shards are checked
(shards.py). No process, socket or parameter is made.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from launch.sweep.estimate import SHAPES
from launch.sweep.options import SweepOptions
from launch.sweep.point import SweepError
from launch.sweep.shards import Part, check_coverage, coordinates, plan_part
from models.config import DTYPES, ModelConfigError
from models.fp8_at_load import quantised_at_load
from models.group_size import legal_sizes
from models.kv_group import FP8
from models.registry import config_from_folder
from parallel.control.wire.frames import MAX_WORLD
from parallel.topology import ParallelDegrees
from runtime.config import state_slots

_GIB = 1 << 30


def plan_world(models: Sequence[str], world: int, options: SweepOptions) -> int:
    """Plan, check and print; returns the exit code, 1 when a check fails. Raises SweepError for an impossible world."""
    if not models:
        raise SweepError("name a model to plan: --model FOLDER, or a shape such as qwen3-8b")
    local = min(world, options.gpus_per_node)
    if world % local:
        raise SweepError(f"--dry-run-world {world} does not fill nodes of --gpus-per-node {local}")
    if world > MAX_WORLD:
        raise SweepError(f"--dry-run-world {world}: control records have room for {MAX_WORLD} ranks")
    print(f"world        {world} ranks on {world // local} node(s) of {local}")
    errors = [error for model in models for error in _plan_model(model, world, local, options)]
    for error in errors[:20]:
        print(f"wrong: {error}", file=sys.stderr)
    print(f"checks       {f'{len(errors)} FAILED' if errors else 'all passed'}")
    return 1 if errors else 0


def _plan_model(model: str, world: int, local: int, options: SweepOptions) -> tuple[str, ...]:
    """Print the plan of one model and return the errors found. Raises SweepError where it cannot be split as asked."""
    folder = Path(model) if Path(model).is_dir() else SHAPES / model
    try:
        config = quantised_at_load(config_from_folder(folder), options.quantization)
    except ModelConfigError as error:
        raise SweepError(f"--model {model}: {error}") from None
    if options.dtype not in ("auto", *DTYPES):
        raise SweepError(f"--dtype {options.dtype} is none of auto, {', '.join(DTYPES)}")
    dtype = config.dtype if options.dtype == "auto" else DTYPES[options.dtype]
    kv_dtype = {"auto": dtype, "bfloat16": torch.bfloat16}.get(options.kv_cache_dtype, FP8)
    if options.ep > 1 and config.experts is None:
        raise SweepError(f"--ep {options.ep}: {folder.name} has no experts")
    began = time.perf_counter()
    try:
        legal = [size for size in legal_sizes(config, options.ep > 1) if size <= local and world % size == 0]
        degrees = ParallelDegrees(world, options.tp or max(legal), options.ep)
        if 1 < degrees.expert < degrees.tensor:
            raise ValueError(f"--ep {degrees.expert} is less than --tp {degrees.tensor}: write 1, or a multiple of it")
        places = sorted(set(coordinates(degrees)))
        parts = {place: plan_part(config, dtype, degrees, place, kv_dtype) for place in places}
    except ValueError as error:
        raise SweepError(f"{folder.name} on {world} ranks: {error}") from None
    coverage = check_coverage(degrees, parts)
    checked = f"{len(coverage.errors)} errors" if coverage.errors else "each element where it belongs"
    experts = f", experts whole over {degrees.expert}" if degrees.expert > 1 else ""
    weights = sorted(part.weight_bytes / _GIB for part in parts.values())
    span = f"{weights[0]:.3f} GiB" if weights[0] == weights[-1] else f"{weights[0]:.3f} to {weights[-1]:.3f} GiB"
    print(
        f"model        {folder.resolve().name}, {str(dtype).removeprefix('torch.')}: {degrees.data} replica(s) x tp "
        f"{degrees.tensor}{experts}\n"
        f"jobs         {jobs_text(degrees)}\n"
        f"shards       {coverage.tensors} checkpoint tensors ({coverage.split} split, {coverage.copied} with copies), "
        f"{len(parts)} different parts over {world} ranks: {checked} ({time.perf_counter() - began:.1f} s)\n"
        f"memory       weights {span} a rank; {room_text(list(parts.values()), options)}"
    )
    return coverage.errors


def room_text(parts: Sequence[Part], options: SweepOptions) -> str:
    """Bytes of slot state, and the tokens whose KV fits on the fullest rank."""
    device = f"{options.memory_fraction:g} of {options.memory_gib:g} GiB"
    budget = int(options.memory_gib * options.memory_fraction * _GIB)
    slots = state_slots(options.max_num_seqs)
    held = [part.weight_bytes + part.table_bytes + part.cache_layout.state_bytes(slots) for part in parts]
    left, layout = budget - max(held), parts[held.index(max(held))].cache_layout
    state = ""
    if layout.has_slot_state:
        state = f"state of {slots} slots {layout.state_bytes(slots) / _GIB:.3f} GiB; "
    if left < max(1, layout.bytes_per_token):
        return f"{state}TOO LARGE for {device}"
    if not layout.bytes_per_token:
        return f"{state}no KV; fits in {device}, before activations"
    return (
        f"{state}KV {layout.bytes_per_token:,} bytes a token, room for {left // layout.bytes_per_token:,} tokens in "
        f"{device}, before activations"
    )


def jobs_text(degrees: ParallelDegrees) -> str:
    """The number of jobs and the flags of one. Replicas that share experts are one job, other replicas one each."""
    ranks = max(degrees.tensor, degrees.expert)
    flags = f"--tensor-parallel-size {degrees.tensor}"
    if degrees.expert > degrees.tensor:
        flags += f" --data-parallel-size {degrees.expert // degrees.tensor}"
    elif degrees.expert > 1:
        flags += " --expert-parallel"
    return f"{degrees.world // ranks} of {ranks} rank(s): {flags}"
