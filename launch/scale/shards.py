"""Who holds what of a model in a world of any size, worked out on tensors without memory, and checked.

Knows: models on the meta device, the shards they declare, how ranks share a model (parallel/topology.py's Sharing).
Does not know: any layer's arithmetic: what is checked here is only that declared pieces fit together.

Two questions, each asked of every part of a group of ranks. Is every element of every parameter filled exactly once?
Does every element of every checkpoint tensor lie on one rank of the group, or on as many as every other element of it?
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from models.cache_layout import CacheLayout
from models.config import ModelConfig
from models.kernels.reference import ReferenceKernels
from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from models.registry import model_class
from parallel.comm.collectives import Collectives
from parallel.comm.ep_exchange import TokenExchange
from parallel.layers.experts import ExpertSplit
from parallel.layers.shard import Shard
from parallel.topology import ParallelDegrees

Ranges = tuple[tuple[int, int], ...]  # [start, stop) in each dim of a checkpoint tensor
_EXPERTS = ".experts."  # in the checkpoint names of all families


@dataclass(slots=True)
class PlannedCollectives(Collectives):
    """A rank's place in a tensor-parallel group of which no other rank exists."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        raise RuntimeError("a planned rank runs nothing")

    def all_gather(self, x: Tensor) -> Tensor:
        raise RuntimeError("a planned rank runs nothing")


@dataclass(slots=True)
class PlannedExchange(TokenExchange):
    """A group's place among those that share experts."""

    index: int
    groups: int

    def all_gather(self, x_XN: Tensor) -> Tensor:
        raise RuntimeError("a planned rank runs nothing")

    def reduce_scatter(self, x_YN: Tensor) -> Tensor:
        raise RuntimeError("a planned rank runs nothing")


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share: bytes, and the pieces of checkpoint tensors it holds. ``errors`` name parameters that are not
    filled exactly once. ``table_bytes``: the rotary table."""

    weight_bytes: int
    table_bytes: int
    cache_layout: CacheLayout
    pieces: dict[str, tuple[Ranges, ...]]
    full_shapes: dict[str, tuple[int, ...]]
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of one model in one world. ``split``: checkpoint tensors of which each element lies on one rank of a group;
    ``copied``: those that several ranks of it hold. ``parts``: how many different parts there are."""

    tensors: int
    split: int
    copied: int
    parts: int
    errors: tuple[str, ...]


def coordinates(sharing: ParallelDegrees) -> list[tuple[int, int]]:
    """Of every rank: its place in its tensor-parallel group, and that group's place among those that share experts."""
    groups = max(1, sharing.expert // sharing.tensor)
    return [(rank % sharing.tensor, rank // sharing.tensor % groups) for rank in range(sharing.world)]


def plan_part(config: ModelConfig, dtype: torch.dtype, sharing: ParallelDegrees, place: tuple[int, int]) -> Part:
    """Raises ValueError where the model cannot be split like this."""
    model = _model(config, dtype, sharing, place)
    declared = model.checkpoint_shards()
    shards = {name: shard.pieces for name, shard in declared.items()}
    return Part(
        weight_bytes=_bytes(model.parameters()) + _bytes(model.buffers()),
        table_bytes=_bytes([model.cos_sin_LR]),
        cache_layout=model.cache_layout,
        pieces={name: tuple(_ranges(piece) for piece in pieces) for name, pieces in shards.items()},
        full_shapes={name: shard.full_shape for name, shard in declared.items()},
        errors=tuple(_unfilled(model, [piece for pieces in shards.values() for piece in pieces])),
    )


def check_coverage(sharing: ParallelDegrees, parts: dict[tuple[int, int], Part]) -> Coverage:
    """``parts``: of every coordinate. Each tensor-parallel group has every dense tensor; the experts may be spread over
    several groups."""
    errors = [f"rank part {place}: {error}" for place, part in parts.items() for error in part.errors]
    errors += _missing_members(sharing)
    groups = sorted({group for _, group in parts})
    first = parts[next(iter(parts))]
    split = copied = 0
    for name, shape in first.full_shapes.items():
        together = [groups] if _EXPERTS in name and len(groups) > 1 else [[group] for group in groups]
        copies = 1
        for members in together:
            held = [parts[rank, group].pieces.get(name, ()) for group in members for rank in range(sharing.tensor)]
            found = _copies(shape, held)
            if isinstance(found, str):
                errors.append(f"tensor {name} {list(shape)}: {found}")
            else:
                copies = max(copies, found)
        split, copied = split + (copies == 1), copied + (copies > 1)
    return Coverage(len(first.full_shapes), split, copied, len(parts), tuple(errors))


def _model(config: ModelConfig, dtype: torch.dtype, sharing: ParallelDegrees, place: tuple[int, int]) -> Decoder:
    rank, group = place
    groups = max(1, sharing.expert // sharing.tensor)
    exchange = PlannedExchange(group, groups) if groups > 1 else None
    split = ExpertSplit(whole=sharing.expert > 1, exchange=exchange)
    collectives = PlannedCollectives(rank, sharing.tensor)
    with torch.device("meta"):
        return model_class(config.architecture)(config, ModelContext(collectives, ReferenceKernels(), dtype, split))


def _missing_members(sharing: ParallelDegrees) -> Iterator[str]:
    """Every group must have each coordinate once, whichever of its ranks is asked."""
    places = coordinates(sharing)
    for rank in range(sharing.world):
        tensor = [places[member][0] for member in sharing.tensor_group(rank)]
        if tensor != list(range(sharing.tensor)) or rank not in sharing.tensor_group(rank):
            yield f"rank {rank}: its tensor-parallel group has the shards {tensor}"
        if sharing.expert > sharing.tensor:
            experts = Counter(places[member] for member in sharing.expert_group(rank))
            if set(experts.values()) != {1} or len(experts) != sharing.expert:
                yield f"rank {rank}: its expert-parallel group has some part twice, and another not at all"


# ---- one rank: its parameters ----


def _unfilled(model: Decoder, pieces: Sequence[Shard]) -> Iterator[str]:
    """Parameters of which an element is filled twice or never. Padding of the vocabulary need not be filled."""
    intervals: dict[int, list[tuple[int, int]]] = {}
    for piece in pieces:
        target = piece.target
        if target.numel():
            start = int(target.storage_offset())
            intervals.setdefault(target.untyped_storage()._cdata, []).append((start, start + target.numel()))
        if not target.is_contiguous():
            yield f"a piece of {list(piece.full_shape)} fills a parameter with gaps"
    vocab = model.vocab_shard
    padding = {id(model.embedding.weight), id(model.lm_head.weight)}
    for name, parameter in model.named_parameters():
        end, filled = 0, sorted(intervals.get(parameter.untyped_storage()._cdata, []))
        wanted = parameter.numel()
        if id(parameter) in padding:
            wanted = vocab.rows * parameter.shape[1]
        for start, stop in filled:
            if start != end:
                yield f"parameter {name}: elements {min(start, end)} to {max(start, end)} are filled {_how(start, end)}"
            end = max(end, stop)
        if end != wanted:
            yield f"parameter {name}: filled up to element {end} of {wanted}"


def _how(start: int, end: int) -> str:
    return "twice" if start < end else "never"


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


# ---- one checkpoint tensor over a group ----


def _ranges(piece: Shard) -> Ranges:
    return tuple((part.start, part.stop) for part in piece.ranges)


def _copies(shape: tuple[int, ...], held: Sequence[tuple[Ranges, ...]]) -> int | str:
    """How many ranks hold each element, or what is wrong. ``held``: the pieces of each rank."""
    count = Counter(ranges for rank in held for ranges in rank if _volume(ranges))
    if not count:
        return "no rank has any of it"
    outside = [ranges for ranges in count if any(not 0 <= a < b <= n for (a, b), n in zip(ranges, shape, strict=True))]
    if outside:
        return f"{outside[0]} lies outside of it"
    if sum(map(_volume, count)) != math.prod(shape) or _overlap(list(count)):
        return f"its pieces have {sum(map(_volume, count))} elements, overlaps {_overlap(list(count))}"
    if len(set(count.values())) > 1:
        return f"some of it is held by {min(count.values())} ranks, some by {max(count.values())}"
    return next(iter(count.values()))


def _overlap(pieces: list[Ranges]) -> bool:
    """Whether two pieces have an element in common."""
    along = [dim for dim in range(len(pieces[0])) if len({ranges[dim] for ranges in pieces}) > 1]
    if len(along) <= 1:  # cut along one dim, as nearly everything is: neighbours are enough
        ordered = sorted(ranges[along[0]] for ranges in pieces) if along else []
        return any(before[1] > after[0] for before, after in pairwise(ordered))
    return any(
        all(a[0] < b[1] and b[0] < a[1] for a, b in zip(one, other, strict=True))
        for number, one in enumerate(pieces)
        for other in pieces[:number]
    )


def _volume(ranges: Ranges) -> int:
    return math.prod(stop - start for start, stop in ranges)
