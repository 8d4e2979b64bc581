"""The files of a checkpoint folder: which file holds which tensor, and whether they are exactly what a model wants.

Knows: model.safetensors, its index, and where a file may lie; headers are read by safetensors' own parser only.
Does not know: models, beyond the names and shapes it is given; how pieces are loaded (weights.py).
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from models.weights_header import header_fault, quoted, refuse_repeated_names

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
log = logging.getLogger(__name__)
# Buffers that old checkpoints saved although they follow from the config.
RECOMPUTED = (".rotary_emb.inv_freq",)


class WeightsError(ValueError):
    """A checkpoint that is not exactly the model's weights; the message names file and tensor."""


def open_file(file: Path) -> Any:
    """A safetensors reader as a context manager; WeightsError where the file is truncated or not safetensors."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{file} is not a readable safetensors file ({header_fault(file) or error}); it is damaged or incomplete: "
            f"fetch it again"
        ) from error


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, of all tensors in the checkpoint's files. Raises WeightsError.

    The files are those of the index, or the single file. The index decides which file's tensor counts where several
    have one of a name; else index and files must agree exactly.
    """
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not index.is_file():
        if not single.is_file():
            found = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))) or "none"
            raise WeightsError(
                f"{folder} holds neither {INDEX_NAME} nor {SINGLE_NAME} (safetensors files found: {found}); "
                f"to run without weights use --load-format dummy"
            )
        return _tensors_of(_file_inside(folder, SINGLE_NAME))
    weight_map = _read_index(index)
    if single.is_file() and SINGLE_NAME not in weight_map.values():
        raise WeightsError(
            f"{folder} holds {SINGLE_NAME} and an index of other files; remove the one that is out of date"
        )
    located: dict[str, Path] = {}
    for name in sorted(set(weight_map.values())):
        held = _tensors_of(_file_inside(folder, name))
        listed = {tensor for tensor, home in weight_map.items() if home == name}
        if missing := sorted(listed - held.keys()):
            raise WeightsError(f"{index} says that {folder / name} holds tensor {quoted(missing[0])}, but it does not")
        if unlisted := sorted(held.keys() - weight_map.keys()):
            raise WeightsError(f"{folder / name} holds tensors that {index} does not list: {_some(unlisted)}")
        located |= {tensor: home for tensor, home in held.items() if tensor in listed}
        if stale := sorted(held.keys() - listed):
            log.info("%s: not read, since the index names another file: %s", folder / name, _some(stale))
    return located


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Of most elements of the folder's float tensors; None where it holds no readable weights."""
    elements: Counter[str] = Counter()
    try:
        located = locate_tensors(folder)
        for file in sorted(set(located.values())):
            with open_file(file) as reader:
                for name in (name for name, home in located.items() if home == file):
                    header = reader.get_slice(name)
                    elements[header.get_dtype()] += math.prod(header.get_shape())
    except WeightsError:
        return None
    floats = [(count, name) for name, count in elements.items() if name in FLOAT_DTYPES]
    return FLOAT_DTYPES[max(floats)[1]] if floats else None


def check_tensors(
    tensors: Mapping[str, Path],
    wanted: Mapping[str, tuple[int, ...]],
    optional: Iterable[str] = (),
    codes: Container[str] = (),
    packed: Container[str] = (),
) -> dict[str, Path]:
    """The located tensors that fill a model that wants ``wanted`` (name -> full shape), all present and well shaped.

    ``optional`` names (of ``wanted``) may be absent; ``codes`` are no floats; ``packed`` stand for several tensors each
    (four_bit_load.py). Raises WeightsError naming tensor and file for a missing, unexpected or wrongly shaped tensor,
    and for another dtype that is no float. Reads headers only.
    """
    tensors = {name: file for name, file in tensors.items() if not name.endswith(RECOMPUTED)}
    files = ", ".join(sorted({file.name for file in tensors.values()}))
    missing = sorted(wanted.keys() - tensors.keys() - set(optional))
    if missing:
        raise WeightsError(f"tensors of the model that no file holds ({files}): {_some(missing)}")
    unexpected = sorted(tensors.keys() - wanted.keys())
    if unexpected:
        raise WeightsError(f"{tensors[unexpected[0]]} holds tensors that the model does not have: {_some(unexpected)}")
    for file in sorted(set(tensors.values())):
        with open_file(file) as reader:
            for name in sorted(name for name, home in tensors.items() if home == file and name not in packed):
                _check_header(file, name, reader.get_slice(name), wanted[name], name in codes)
    return tensors


def _check_header(file: Path, name: str, header: Any, shape: tuple[int, ...], codes: bool) -> None:
    found = tuple(header.get_shape())
    if found != shape:
        raise WeightsError(
            f"{file}: tensor {quoted(name)} has shape {list(found)}, but config.json asks for {list(shape)}"
        )
    if header.get_dtype() not in FLOAT_DTYPES and not codes:
        legal = ", ".join(FLOAT_DTYPES)
        raise WeightsError(
            f"{file}: tensor {quoted(name)} has dtype {header.get_dtype()}; weights must be one of {legal}"
        )


def _tensors_of(file: Path) -> dict[str, Path]:
    with open_file(file) as reader:
        _check_names(file)
        return dict.fromkeys(reader.keys(), file)


def _check_names(file: Path) -> None:
    try:
        refuse_repeated_names(file)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: {error}; it is damaged: fetch it again") from error


def _read_index(path: Path) -> dict[str, str]:
    """The weight_map of an index file: tensor name -> file name."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path} holds no 'weight_map' object")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise WeightsError(f"{path}: 'weight_map' gives {quoted(name)} as the file of tensor {quoted(tensor)}")
    return weight_map


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {quoted(key)} appears twice")
        found[key] = value
    return found


def _file_inside(folder: Path, name: str) -> Path:
    """``folder / name``, which must be a file that really lies inside the folder, whatever links say.

    A folder of the Hugging Face cache (models--X/snapshots/REVISION) links to models--X/blobs: that counts as inside.
    """
    path = folder / name
    try:
        real = path.resolve()
        is_file = real.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, links in a circle
        cause = error.strerror if isinstance(error, OSError) else error  # without the path a second time
        raise WeightsError(f"{folder}: {quoted(name)} cannot be the name of a file of weights: {cause}") from error
    homes = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        homes.append(folder.resolve().parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise WeightsError(
            f"{quoted(name)} leads out of the model folder {folder}, to {real}; copy that file into the folder"
        )
    if real.is_dir():
        raise WeightsError(f"{folder}: {quoted(name)} is a folder, where a file of weights should be")
    if not is_file:
        raise WeightsError(f"{folder}: {quoted(name)} is missing; the checkpoint is incomplete: fetch it again")
    return path


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(quoted(name) for name in names[:limit]) + more
