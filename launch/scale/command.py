"""`sweep plan --dry-run-world N`: a world of N ranks planned in one process on a CPU, and checked.

Knows: what makes such a plan, and how it is told. Does not know: how pieces are checked (shards.py), how ranks
agree (scale/control.py). No process, socket or parameter is made. docs/lab/scaling.md explains the figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from launch.scale.control import HORIZON, ControlTree, HopCosts, Rehearsal, control_tree, rehearse
from launch.scale.shards import Coverage, Part, check_coverage, coordinates, plan_part
from launch.sweep.estimate import SHAPES
from launch.sweep.options import SweepOptions
from launch.sweep.point import SweepError
from models.config import DTYPES, ModelConfig, ModelConfigError
from models.group_size import legal_sizes
from parallel.control.wire.frames import MAX_WORLD
from parallel.topology import ParallelDegrees, Topology
from runtime.config import state_slots

WRONG = 1
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model on the world."""

    name: str
    dtype: torch.dtype
    sharing: ParallelDegrees
    parts: dict[tuple[int, int], Part]
    coverage: Coverage
    seconds: float


def dry_run(models: Sequence[str], options: SweepOptions, say: Callable[[str], None] = print) -> int:
    """Plan, check and tell; returns 1 when something does not fit together. Raises SweepError for what cannot be."""
    world = options.dry_run_world
    assert world is not None
    if not models:
        raise SweepError("name a model to plan: --model FOLDER, or a shape such as qwen3-8b")
    topologies = plan_topologies(world, options.gpus_per_node)
    local = topologies[0].local_world
    say(f"world        {world} ranks on {topologies[0].nodes} node(s) of {local}")
    errors: list[str] = []
    sharings: list[ParallelDegrees] = []
    for model in models:
        plan = plan_model(model, world, local, options)
        errors += plan.coverage.errors
        sharings += [plan.sharing] if plan.sharing not in sharings else []
        say(model_text(plan, options))
    tree = control_tree(topologies)
    errors += tree.errors
    say(tree_text(tree, local))
    for sharing in sharings:
        rehearsal = rehearse(sharing, options.steps)
        errors += rehearsal.errors
        say(rehearsal_text(rehearsal, sharing))
    for error in errors[:20]:
        print(f"wrong: {error}", file=sys.stderr)
    say(f"checks       {f'{len(errors)} FAILED' if errors else 'all passed'}")
    return WRONG if errors else 0


def plan_topologies(world: int, gpus_per_node: int) -> list[Topology]:
    """Every rank's place. Raises SweepError where nodes are not full."""
    local = min(world, gpus_per_node)
    if world % local:
        raise SweepError(f"--dry-run-world {world} does not fill nodes of --gpus-per-node {gpus_per_node}")
    if world > MAX_WORLD:
        raise SweepError(f"--dry-run-world {world}: control records have room for {MAX_WORLD} ranks")
    nodes = world // local
    return [Topology(rank, world, rank % local, local, rank // local, nodes) for rank in range(world)]


def plan_model(model: str, world: int, local: int, options: SweepOptions) -> ModelPlan:
    """Every part of one model. Raises SweepError where it cannot be split as asked."""
    folder = Path(model) if Path(model).is_dir() else SHAPES / model
    try:
        config = ModelConfig.from_folder(folder)
    except ModelConfigError as error:
        raise SweepError(f"--model {model}: {error}") from None
    if options.dtype not in ("auto", *DTYPES):
        raise SweepError(f"--dtype {options.dtype} is none of auto, {', '.join(DTYPES)}")
    dtype = config.dtype if options.dtype == "auto" else DTYPES[options.dtype]
    if options.ep > 1 and config.experts is None:
        raise SweepError(f"--ep {options.ep}: {folder.name} has no experts")
    began = time.perf_counter()
    try:
        sharing = ParallelDegrees(world, options.tp or _most_ranks(config, world, local, options.ep > 1), options.ep)
        if 1 < sharing.expert < sharing.tensor:
            raise ValueError(f"--ep {sharing.expert} is less than --tp {sharing.tensor}: write 1, or a multiple of it")
        parts = {place: plan_part(config, dtype, sharing, place) for place in sorted(set(coordinates(sharing)))}
    except ValueError as error:
        raise SweepError(f"{folder.name} on {world} ranks: {error}") from None
    coverage = check_coverage(sharing, parts)
    return ModelPlan(folder.resolve().name, dtype, sharing, parts, coverage, time.perf_counter() - began)


def _most_ranks(config: ModelConfig, world: int, local: int, whole_experts: bool) -> int:
    """The most ranks of a node that can share a layer."""
    return max(size for size in legal_sizes(config, whole_experts) if size <= local and world % size == 0)


def model_text(plan: ModelPlan, options: SweepOptions) -> str:
    """What a rank holds, and what it has room for."""
    sharing, coverage = plan.sharing, plan.coverage
    parts = list(plan.parts.values())
    weights = [part.weight_bytes for part in parts]
    experts = f", experts whole over {sharing.expert}" if sharing.expert > 1 else ""
    checked = "each element where it belongs" if not coverage.errors else f"{len(coverage.errors)} errors"
    return "\n".join(
        [
            f"model        {plan.name}, {str(plan.dtype).removeprefix('torch.')}: {sharing.data} replica(s) x tp "
            f"{sharing.tensor}{experts}",
            f"jobs         {jobs_text(sharing)}",
            f"shards       {coverage.tensors} checkpoint tensors ({coverage.split} split, {coverage.copied} with "
            f"copies), {coverage.parts} different parts over {sharing.world} ranks: {checked} ({plan.seconds:.1f} s)",
            f"memory       weights {_span(weights)} a rank; {room_text(parts, options)}",
        ]
    )


def room_text(parts: Sequence[Part], options: SweepOptions) -> str:
    """What state of slots takes, and the tokens whose KV fits beside it on the fullest rank."""
    device = f"{options.memory_fraction:g} of {options.memory_gib:g} GiB"
    budget = int(options.memory_gib * options.memory_fraction * _GIB)
    slots = state_slots(options.max_num_seqs)
    left, part = min(((budget - held_bytes(part, slots), part) for part in parts), key=lambda pair: pair[0])
    layout = part.cache_layout
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


def held_bytes(part: Part, slots: int) -> int:
    """Bytes of a rank that no KV can have: weights, the rotary table, state of ``slots`` sequences."""
    return part.weight_bytes + part.table_bytes + part.cache_layout.state_bytes(slots)


def jobs_text(sharing: ParallelDegrees) -> str:
    """How many jobs that is, and how one of them is started: replicas are one job where they share experts."""
    ranks = max(sharing.tensor, sharing.expert)
    flags = f"--tensor-parallel-size {sharing.tensor}"
    if sharing.expert > sharing.tensor:
        flags += f" --data-parallel-size {sharing.expert // sharing.tensor}"
    elif sharing.expert > 1:
        flags += " --expert-parallel"
    return f"{sharing.world // ranks} of {ranks} rank(s): {flags}"


def _span(sizes: Sequence[int]) -> str:
    low, high = min(sizes) / _GIB, max(sizes) / _GIB
    return f"{low:.3f} GiB" if min(sizes) == max(sizes) else f"{low:.3f} to {high:.3f} GiB"


def tree_text(tree: ControlTree, local_world: int, costs: HopCosts | None = None) -> str:
    """The tree and the time of one record down it."""
    costs = costs or HopCosts()
    arrivals = tree.arrivals(costs, local_world)
    last = max(arrivals, key=lambda rank: arrivals[rank])
    widest = max((len(children) for children in tree.children.values()), default=0)
    below = tree.children.get(0, ())
    busy = sum(costs.near_busy if child < local_world else costs.far_busy for child in below)
    return "\n".join(
        [
            f"control      rank 0 hands records to {len(below)} ranks ({tree.nodes - 1} nodes, "
            f"{local_world - 1} of its own), {widest} at most, {tree.depth} hop(s) deep",
            f"fan-out      {arrivals[last]:,.0f} us until the last rank (rank {last}) has a record, hidden while "
            f"{HORIZON} steps (the horizon) take longer; rank 0 sends for {busy:,.0f} us of them",
        ]
    )


def rehearsal_text(rehearsal: Rehearsal, sharing: ParallelDegrees) -> str:
    """What running everybody's turns showed."""
    return (
        f"schedules    {rehearsal.turns} turns of {sharing.world} ranks, {rehearsal.finished} requests ended in "
        f"{rehearsal.groups} group(s); largest record {rehearsal.record_bytes:,} bytes; rank 0's machine takes "
        f"{rehearsal.leader_us:,.0f} us a turn here, most of it for {sharing.world - 1} acknowledgements"
    )
