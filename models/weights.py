"""From a checkpoint folder, or from nothing, to a model with every parameter filled exactly once.

Knows: the order of work: check every header against the model, allocate, stream piece by piece.
Does not know: model structure or shard arithmetic (a model says which tensors it wants: ``checkpoint_shards``), nor how
files are found and checked (checkpoint.py).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from models.checkpoint import FLOAT_DTYPES, WeightsError, check_tensors, locate_tensors, open_file
from models.config import ModelConfig
from models.dummy import DummyTensor
from models.four_bit_load import (
    FourBitCodes,
    FourBitTensor,
    fill_dummy_codes,
    four_bit_codes,
    four_bit_tensors,
    headers_of,
    split_off_four_bits,
)
from models.fp8_load import (
    CODES,
    Codes,
    codes_by_config,
    load_as_codes,
    place_all_scales,
    refuse_nan_codes,
    split_off_codes,
)
from models.kv_group import FP8
from models.layers.attention import Attention
from models.layers.checkpoint_parts import CheckpointParts
from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from models.ops.contract import Ops
from models.planned_weights import FINEST_GROUP, planned
from models.quantization import Quantization
from models.registry import model_class
from models.weights_header import ITEM_BYTES, quoted
from parallel.comm.collectives import Collectives
from parallel.layers.experts import ExpertSplit
from parallel.layers.shard import ScatteredShard, Shard
from parallel.layers.weight import WeightFormat, WeightPlan


def place_kv_scales(model: CheckpointParts, found: Mapping[str, Tensor]) -> None:
    """Gives each layer of attention whose cache is float8 its scales. ``found``: float32 by checkpoint tensor, one for
    all heads or one a head of the whole model.

    Raises WeightsError, which names tensor and both sizes, for another number of scales.
    """
    for path, layer in model.named_modules():
        if isinstance(layer, Attention) and layer.kv_dtype == FP8:
            bases = [name.rsplit(".", 2)[0] for name in model.checkpoint_names_of(f"{path}.qkv.k.weight")]
            layer.hold_scales(*(_of_heads(layer, bases, plane, found) for plane in "kv"))


def _of_heads(layer: Attention, bases: list[str], plane: str, found: Mapping[str, Tensor]) -> Tensor:
    """[K] of this rank; ``bases``: names that the checkpoint may give the layer, ``plane``: k or v."""
    ends = (f"{plane}_scale", f"{plane}_proj.{plane}_scale", f"{plane}_proj.output_scale", "kv_scale")
    name = next((name for base in bases for end in ends if (name := f"{base}.{end}") in found), None)
    heads = layer.qkv.heads
    if name is None:
        return torch.ones(heads.local_kv_heads)
    scales = found[name].flatten()
    if len(scales) == 1:
        return scales.expand(heads.local_kv_heads)
    if len(scales) != heads.kv_heads:
        raise WeightsError(
            f"tensor {quoted(name)} holds {len(scales)} scales, but there are {heads.kv_heads} key/value heads: one "
            "for all or one a head is needed"
        )
    return scales[heads.first_kv_head :][: heads.local_kv_heads]


log = logging.getLogger(__name__)

LOAD_FORMATS = ("safetensors", "dummy")
MAPPED_BYTES = 256 << 20

Progress = Callable[[int, int], None]
Parts = TypeVar("Parts", bound=CheckpointParts)


def load_model(
    config: ModelConfig,
    folder: str | Path | None,
    *,
    load_format: str = "safetensors",
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    collectives: Collectives,
    kernels: Ops,
    experts: ExpertSplit | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Decoder:
    """Build this rank's share of the model on ``device`` and fill it.

    ``load_format`` "safetensors" reads ``folder``; "dummy" makes values from ``seed`` and needs no folder. ``dtype`` is
    that of parameters and activations (default: the checkpoint's); float tensors of another dtype are converted.
    ``kv_dtype``: that of the KV cache (default: ``dtype``).
    ``experts`` says how experts lie on the group (default: a share of each on every rank).
    ``progress(done, total)`` is called after each tensor. Raises WeightsError for a checkpoint that does not fit, and
    ValueError for an unknown architecture, a tensor-parallel size that does not divide it, or an unknown load format.
    """
    architecture = model_class(config.architecture)
    if config.architecture.endswith("ForConditionalGeneration") and collectives.rank == 0:
        log.info("%s: the part that reads and writes text is loaded; images are refused", config.architecture)
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load format {load_format!r} is unknown; use one of {', '.join(LOAD_FORMATS)}")

    def make(plan: WeightPlan) -> Decoder:
        split = experts or ExpertSplit()
        return architecture(
            config, ModelContext(collectives, kernels, dtype or config.dtype, split, kv_dtype, plan=plan)
        )

    return fill(
        make,
        folder,
        load_format=load_format,
        quantization=config.quantization,
        device=device,
        seed=seed,
        progress=progress,
    )


def fill(
    make: Callable[[WeightPlan], Parts],
    folder: str | Path | None,
    *,
    load_format: str = "safetensors",
    quantization: Quantization | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    prefix: str = "",
    but: Container[str] = (),
    progress: Progress | None = None,
) -> Parts:
    """Build a model with ``make``, on ``device``, and fill it; everything else as in ``load_model``.

    Of the checkpoint only tensors whose names begin with ``prefix`` and are not in ``but`` are looked at: the others
    are another model's. ``quantization``: what the model's config says of matrices that are stored as codes.
    """
    sketch = WeightPlan(edge=_edge(quantization))
    with torch.device("meta"):
        skeleton = make(sketch)
    if load_format == "dummy":
        shards = skeleton.checkpoint_shards(quantization or ())
        found = codes_by_config(sketch.made, shards, quantization) if quantization else {}
        model, plan = _allocate(make, device, sketch.edge, planned(sketch.made, shards, found))
        shards = model.checkpoint_shards(quantization or ())
        codes, four_bits = _by_bits(found)
        _fill_with_dummies(
            {name: one for name, one in shards.items() if name not in four_bits}, codes, seed, device, progress
        )
        place_all_scales(plan.made, shards, codes)
        fill_dummy_codes(plan.made, shards, four_bits, seed)
        _put_in_order(_row_orders(model))
        return model
    if folder is None:
        raise ValueError("load format 'safetensors' needs a model folder; without one use 'dummy'")
    located = locate_tensors(Path(folder))
    located = {name: file for name, file in located.items() if name.startswith(prefix) and name not in but}
    at_load = quantization if quantization is not None and quantization.at_load else None
    headers = headers_of(located if quantization is not None and at_load is None else {})
    stored, matrices = split_off_four_bits(located, headers, quantization)
    stored, codes, scales = split_off_codes(stored, headers, quantization)
    shards, copies = skeleton.checkpoint_shards(stored), skeleton.checkpoint_copies()
    shapes = {name: shard.full_shape for name, shard in {**shards, **copies}.items()}
    stored = {name: file for name, file in stored.items() if not skeleton.leaves_unread(name)}
    tensors = check_tensors(stored, shapes, copies, codes, matrices)
    four_bits = four_bit_codes(matrices, shapes, located, headers)
    if at_load is not None:
        codes, _ = _by_bits(codes_by_config(sketch.made, shards, at_load))
    model, plan = _allocate(make, device, sketch.edge, planned(sketch.made, shards, {**codes, **four_bits}))
    orders, shards = _row_orders(model), model.checkpoint_shards(tensors)
    packed = four_bit_tensors(plan.made, shards, four_bits)
    loaded = {**{name: shard for name, shard in shards.items() if name not in four_bits}, **packed}
    _stream({**tensors, **{name: located[name] for name in packed}}, loaded, model, progress, codes if at_load else {})
    held = {name: code for name, code in codes.items() if name in shards}
    place_all_scales(plan.made, shards, held)
    _put_in_order(orders)
    place_kv_scales(model, scales)
    refuse_nan_codes(shards, {name: tensors[name] for name in held})
    return model


def without_memory(make: Callable[[WeightPlan], Parts], quantization: Quantization | None) -> Parts:
    """What ``make`` builds, on the meta device, with the formats of matrices that a config asks for."""
    sketch = WeightPlan(edge=_edge(quantization))
    with torch.device("meta"):
        skeleton = make(sketch)
    if quantization is None:
        return skeleton
    shards = skeleton.checkpoint_shards(quantization)
    return _allocate(
        make, "meta", sketch.edge, planned(sketch.made, shards, codes_by_config(sketch.made, shards, quantization))
    )[0]


def _row_orders(model: CheckpointParts) -> list[tuple[Tensor, Tensor]]:
    """(tensor, order of its rows) of what the checkpoint has in another one. Raises ValueError."""
    return [one for layer in model.modules() if isinstance(layer, Attention) for one in layer.row_orders()]


def _put_in_order(rows: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, order in rows:
        tensor.copy_(tensor[order.to(tensor.device)])


def _edge(quantization: Quantization | None) -> int:
    """Of shards of features; see WeightPlan."""
    return FINEST_GROUP if quantization is not None and quantization.four_bits else 1


def _by_bits(codes: Mapping[str, Codes | FourBitCodes]) -> tuple[dict[str, Codes], dict[str, FourBitCodes]]:
    """(eight bits, four bits)"""
    eight = {name: one for name, one in codes.items() if isinstance(one, Codes)}
    return eight, {name: one for name, one in codes.items() if isinstance(one, FourBitCodes)}


def _allocate(
    make: Callable[[WeightPlan], Parts],
    device: torch.device | str,
    edge: int,
    formats: Sequence[tuple[WeightFormat | None, ...]],
) -> tuple[Parts, WeightPlan]:
    plan = WeightPlan(formats, edge)
    with torch.device(device):
        return make(plan), plan


def _fill_with_dummies(
    shards: Mapping[str, Shard | ScatteredShard],
    codes: Mapping[str, Codes],
    seed: int,
    device: torch.device | str,
    progress: Progress | None,
) -> None:
    for done, (name, shard) in enumerate(shards.items(), start=1):
        scale = float(codes[name].scales.flatten()[0]) if name in codes else 1.0
        for piece in shard.pieces:
            DummyTensor(seed, name, piece.full_shape, piece.centre, device).fill(piece.target, piece.ranges, scale)
            piece.finish()
        if progress:
            progress(done, len(shards))


def _stream(
    tensors: Mapping[str, Path],
    shards: Mapping[str, Shard | ScatteredShard | FourBitTensor],
    model: CheckpointParts,
    progress: Progress | None,
    at_load: Mapping[str, Codes],
) -> None:
    """File after file, in the order of their bytes; of each tensor only this rank's piece is read, one at a time.
    ``at_load``: of numbers that become codes the whole rows."""
    copies, done, converted = model.checkpoint_copies(), 0, 0
    for file in sorted(set(tensors.values())):
        for name, piece in _pieces(file, [name for name in shards if tensors[name] == file]):
            shard = shards[name]
            if isinstance(shard, FourBitTensor):
                _try(file, name, shard, piece)
            elif name not in at_load:
                converted += FLOAT_DTYPES.get(piece.get_dtype(), model.dtype) != model.dtype
                _load(file, name, piece, shard)
            elif not load_as_codes(piece, shard, at_load[name]):
                raise WeightsError(f"{file}: tensor {quoted(name)} holds numbers that are not finite")
            done += 1
            if progress:
                progress(done, len(shards))
    for name in copies.keys() & tensors.keys():
        _compare(tensors[name], name, copies[name])
    if converted:
        log.info("%d of %d tensors were converted to %s while loading", converted, done, model.dtype)


def _pieces(file: Path, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(name, safetensors slice) of each named tensor of a file, in the order of their bytes.

    A slice reads from a mapping of the file whose pages stay resident until the file is closed, so the file is opened
    anew after every ``MAPPED_BYTES``: host memory then does not grow with the size of the file.
    """
    wanted = set(names)
    with open_file(file) as reader:
        pending = deque(name for name in reader.offset_keys() if name in wanted)
    while pending:
        with open_file(file) as reader:
            mapped = 0
            while pending and mapped < MAPPED_BYTES:
                piece = reader.get_slice(pending[0])
                width = ITEM_BYTES.get(piece.get_dtype(), 1)
                mapped += math.prod(piece.get_shape()) * width
                yield pending.popleft(), piece
                del piece  # it would keep the mapping


def _load(file: Path, name: str, stored: Any, shard: Shard | ScatteredShard) -> None:
    held = any(piece.target.numel() for piece in shard.pieces)
    if held and (stored.get_dtype() == CODES) != (shard.pieces[0].target.dtype == torch.float8_e4m3fn):
        raise WeightsError(f"{file}: tensor {quoted(name)} is {stored.get_dtype()}, which its matrix does not hold")
    shard.load(stored)
    # Of the dtypes that may be asked for, only half precision cannot hold the range of the others.
    narrowed = shard.pieces[0].target.dtype == torch.float16 and stored.get_dtype() != "F16"
    if narrowed and not all(bool(torch.isfinite(piece.target).all()) for piece in shard.pieces):
        raise WeightsError(f"{file}: tensor {name!r} does not fit into float16; use --dtype bfloat16 or float32")


def _try(file: Path, name: str, shard: FourBitTensor, stored: Any) -> None:
    try:
        shard.load(stored)
    except ValueError as error:
        raise WeightsError(f"{file}: tensor {quoted(name)}: {error}") from error


def _compare(file: Path, name: str, shard: Shard) -> None:
    """A tied checkpoint may store the shared tensor twice; then both must be the same."""
    with open_file(file) as reader:
        found: Tensor = reader.get_slice(name)[shard.ranges]
    if not torch.equal(found.to(shard.target), shard.target):
        raise WeightsError(
            f"{file}: tensor {name!r} differs from the embedding, but config.json says 'tie_word_embeddings': true"
        )
