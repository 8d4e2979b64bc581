"""`sweep plan --dry-run-world N`: which rank of a world holds what, and whether it fits, planned on one CPU.

Knows: degrees, jobs and memory of such a world, the lines that are printed, the shards that models declare and how
ranks share a model (ParallelDegrees). Does not know: any layer's arithmetic, so that an error there cannot hide here.
No process, socket or parameter is made.

Two checks. Every element of every parameter is filled exactly once; every element of a checkpoint tensor lies on
equally many ranks of a group.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.sweep.estimate import SHAPES
from launch.sweep.options import SweepOptions
from launch.sweep.point import SweepError
from models.cache_layout import CacheLayout
from models.config import DTYPES, ModelConfig, ModelConfigError
from models.fp8_load import quantised_at_load
from models.group_size import legal_sizes
from models.kv_group import FP8
from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from models.ops.select import reference_ops
from models.registry import config_from_folder, model_class
from models.weights import without_memory
from parallel.comm.collectives import Collectives
from parallel.comm.symmetric_exchange import TokenExchange
from parallel.control.wire.frames import MAX_WORLD
from parallel.layers.experts import ExpertSplit
from parallel.layers.shard import Shard
from parallel.layers.weight import Weight
from parallel.topology import ParallelDegrees
from runtime.config import state_slots

Ranges = tuple[tuple[int, int], ...]  # [start, stop) in each dim of a checkpoint tensor
_EXPERTS = ".experts."  # in the checkpoint names of all families


def _runs_nothing(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("a planned rank runs nothing")


@dataclass(slots=True)
class _PlannedCollectives(Collectives):
    rank: int
    size: int
    all_reduce = all_gather = _runs_nothing


@dataclass(slots=True)
class _PlannedExchange(TokenExchange):
    index: int
    groups: int
    all_gather = reduce_scatter = _runs_nothing


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds. ``table_bytes``: of the rotary table. ``pieces``, ``full_shapes``: by checkpoint tensor.
    ``errors`` name parameters that are not filled exactly once."""

    weight_bytes: int
    table_bytes: int
    cache_layout: CacheLayout
    pieces: dict[str, tuple[Ranges, ...]]
    full_shapes: dict[str, tuple[int, ...]]
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Counts of checkpoint tensors. ``split``: each element lies on one rank of a group; ``copied``: on several."""

    tensors: int
    split: int
    copied: int
    errors: tuple[str, ...]


def coordinates(degrees: ParallelDegrees) -> list[tuple[int, int]]:
    """For every rank: its index in its tensor-parallel group, and that group's index among those that share experts."""
    groups = max(1, degrees.expert // degrees.tensor)
    return [(rank % degrees.tensor, rank // degrees.tensor % groups) for rank in range(degrees.world)]


def plan_part(
    config: ModelConfig,
    dtype: torch.dtype,
    degrees: ParallelDegrees,
    place: tuple[int, int],
    kv_dtype: torch.dtype | None = None,
) -> Part:
    """The part of the rank at ``place`` (see coordinates). Raises ValueError where the model cannot be split so."""
    rank, group = place
    groups = max(1, degrees.expert // degrees.tensor)
    split = ExpertSplit(degrees.expert > 1, exchange=_PlannedExchange(group, groups) if groups > 1 else None)
    collectives, build = _PlannedCollectives(rank, degrees.tensor), model_class(config.architecture)
    model = without_memory(
        lambda plan: build(config, ModelContext(collectives, reference_ops(), dtype, split, kv_dtype, plan=plan)),
        config.quantization,
    )
    shards = model.checkpoint_shards(config.quantization or ())
    return Part(
        weight_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *_others(model))),
        table_bytes=model.cos_sin_LR.nbytes,
        cache_layout=model.cache_layout,
        pieces={
            name: tuple(tuple((part.start, part.stop) for part in piece.ranges) for piece in shard.pieces)
            for name, shard in shards.items()
        },
        full_shapes={name: shard.full_shape for name, shard in shards.items()},
        errors=tuple(_unfilled(model, [piece for shard in shards.values() for piece in shard.pieces])),
    )


def _weights(model: Decoder) -> Iterable[Weight]:
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Weight)]
    return [part for weight in held for part in weight.parts or (weight,)]


def _others(model: Decoder) -> Iterable[Tensor]:
    """Of quantised matrices, what is no parameter."""
    known = {id(parameter) for parameter in model.parameters()}
    parts = [(one.data, one.scale, one.zero, one.factor, one.order) for one in _weights(model) if one.format.block]
    found = {id(tensor): tensor for part in parts for tensor in part if tensor is not None}
    return [tensor for number, tensor in found.items() if number not in known]


def check_coverage(degrees: ParallelDegrees, parts: dict[tuple[int, int], Part]) -> Coverage:
    """``parts``: one for each coordinate. A tensor-parallel group has every dense tensor; groups may share experts."""
    errors = [f"rank part {place}: {error}" for place, part in parts.items() for error in part.errors]
    errors += _missing_members(degrees)
    groups = sorted({group for _, group in parts})
    first = parts[next(iter(parts))]
    split = 0
    for name, shape in first.full_shapes.items():
        together = [groups] if _EXPERTS in name else [[group] for group in groups]
        held = [
            [parts[rank, group].pieces.get(name, ()) for group in members for rank in range(degrees.tensor)]
            for members in together
        ]
        found = {_copies(shape, pieces) for pieces in held}
        errors += [f"tensor {name} {list(shape)}: {copies}" for copies in found if isinstance(copies, str)]
        split += found == {1}
    return Coverage(len(first.full_shapes), split, len(first.full_shapes) - split, tuple(errors))


def _missing_members(degrees: ParallelDegrees) -> Iterator[str]:
    """Errors of groups that lack a coordinate or have one twice, asked of every rank."""
    places = coordinates(degrees)
    for rank in range(degrees.world):
        tensor = [places[member][0] for member in degrees.tensor_group(rank)]
        if tensor != list(range(degrees.tensor)) or rank not in degrees.tensor_group(rank):
            yield f"rank {rank}: its tensor-parallel group has the shards {tensor}"
        if degrees.expert > degrees.tensor:
            experts = Counter(places[member] for member in degrees.expert_group(rank))
            if set(experts.values()) != {1} or len(experts) != degrees.expert:
                yield f"rank {rank}: its expert-parallel group has some part twice, and another not at all"


def _unfilled(model: Decoder, pieces: Sequence[Shard]) -> Iterator[str]:
    """Errors of parameters that have an element filled twice or never. Padding of the vocabulary stays unfilled."""
    intervals: dict[int, list[tuple[int, int]]] = {}
    for piece in pieces:
        target = piece.target
        if target.numel():
            start = int(target.storage_offset())
            intervals.setdefault(target.untyped_storage()._cdata, []).append((start, start + target.numel()))
        if not target.is_contiguous():
            yield f"a piece of {list(piece.full_shape)} fills a parameter with gaps"
    padded = {id(model.embedding.weight.data), id(model.lm_head.weight.data)}
    cells = {id(weight.data): weight.cells for weight in _weights(model)}
    for name, held in model.named_parameters():
        parameter = cells.get(id(held), held)
        wanted = model.vocab_shard.rows * parameter.shape[1] if id(parameter) in padded else parameter.numel()
        end = 0
        for start, stop in sorted(intervals.get(parameter.untyped_storage()._cdata, [])):
            if start != end:
                how = "twice" if start < end else "never"
                yield f"parameter {name}: elements {min(start, end)} to {max(start, end)} are filled {how}"
            end = max(end, stop)
        if end != wanted:
            yield f"parameter {name}: filled up to element {end} of {wanted}"


def _copies(shape: tuple[int, ...], held: Sequence[tuple[Ranges, ...]]) -> int | str:
    """The largest number of ranks that hold an element of a checkpoint tensor, or an error. ``held``: pieces by rank.

    The n-th pieces of all ranks lie on equally many ranks. Other pieces may differ: the key heads of a fused tensor are
    copied where its value heads are split."""
    count = Counter(ranges for rank in held for ranges in rank if _volume(ranges))
    if not count:
        return "no rank has any of it"
    outside = [ranges for ranges in count if any(not 0 <= a < b <= n for (a, b), n in zip(ranges, shape, strict=True))]
    if outside:
        return f"{outside[0]} lies outside of it"
    if sum(map(_volume, count)) != math.prod(shape) or _overlap(count):
        return f"its pieces have {sum(map(_volume, count))} elements, overlaps {_overlap(count)}"
    for pieces in zip_longest(*held, fillvalue=()):
        copies = {count[ranges] for ranges in pieces if ranges in count}
        if len(copies) > 1:
            return f"some of it is held by {min(copies)} ranks, some by {max(copies)}"
    return max(count.values())


def _overlap(pieces: Iterable[Ranges]) -> bool:
    """Whether two pieces have an element in common."""
    return any(
        all(a[0] < b[1] and b[0] < a[1] for a, b in zip(one, other, strict=True))
        for one, other in combinations(pieces, 2)
    )


def _volume(ranges: Ranges) -> int:
    return math.prod(stop - start for start, stop in ranges)


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
