"""Reduced draft vocabularies: the ids of the target's vocabulary that a drafter drafts from (FR-Spec, arXiv
2502.14856; EAGLE-3, arXiv 2503.01840).

Knows: where such ids come from: a count, a file, or the tensors ``d2t`` and ``t2d`` of a drafter's checkpoint, and what
is wrong with some. Does not know: heads (draft_head.py), who asks it.

A draft id is an index into the list of ids. ``d2t`` int64 [draft ids]: target id less draft id. ``t2d`` bool
[vocabulary]: which target ids have a draft id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint import WeightsError, open_file

MAPS = ("d2t", "t2d")  # tensors of integers and of bools in a drafter's checkpoint, besides its weights
_PICKLED = (".pt", ".pth", ".bin", ".pkl", ".pickle")

TargetIds = tuple[int, ...]  # by draft id


def chosen_ids(token_map: str | int, vocab_size: int) -> TargetIds:
    """The ids that ``token_map`` of --speculative-config names, ascending: the first so many, or those in a file.

    A file holds a JSON list, or ids with white space or commas between them. Raises ValueError, with both values and
    what to type, for a file that cannot be read, without ids, or with one that is repeated or not in the vocabulary.
    """
    if isinstance(token_map, int):
        if token_map > vocab_size:
            raise ValueError(
                f"token_map asks for the first {token_map} ids, but the target's vocabulary has {vocab_size}: type "
                f'"token_map": {vocab_size} or less, or leave it out for all'
            )
        return tuple(range(token_map))
    ids = _read_ids(Path(token_map))
    if not ids:
        raise ValueError(f"token_map {token_map} holds no ids: name a file with at least one, or leave token_map out")
    ids = sorted(ids)
    repeated = next((a for a, b in pairwise(ids) if a == b), None)
    if repeated is not None:
        raise ValueError(
            f"token_map {token_map} holds {len(ids)} ids, but {len(set(ids))} different ones: {repeated} is repeated; "
            "leave each but once"
        )
    foreign = next((id_ for id_ in (ids[0], ids[-1]) if not 0 <= id_ < vocab_size), None)
    if foreign is not None:
        raise ValueError(
            f"token_map {token_map} holds id {foreign}, but the target's vocabulary has {vocab_size} ids, 0 to "
            f"{vocab_size - 1}: use the file made for this target's tokenizer"
        )
    return tuple(ids)


def _read_ids(file: Path) -> list[int]:
    if file.suffix in _PICKLED:
        raise ValueError(
            f"token_map {file} is a pickle, which is not read, for it may run code: write its ids into a JSON list, "
            f"with python -c \"import json, torch; print(json.dumps(list(map(int, torch.load('{file}', "
            'weights_only=True)))))" > ids.json'
        )
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if text.lstrip().startswith(("[", "{", '"')) else text.replace(",", " ").split()
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"token_map {file} cannot be read ({error}): name a file that holds a list of ids") from error
    if not isinstance(found, list):
        raise ValueError(f"token_map {file} must hold a list of ids, not a {type(found).__name__}")
    return [_id(file, one) for one in found]


def _id(file: Path, one: object) -> int:
    if isinstance(one, int) and not isinstance(one, bool):
        return one
    if isinstance(one, str) and one.isascii() and one.removeprefix("-").isdigit() and len(one) < 20:
        return int(one)
    raise ValueError(f"token_map {file} holds {one!r}, which is not a token id: leave ids only, whole numbers")


def mapped_ids(tensors: Mapping[str, Path], vocab_size: int, said: int | None) -> TargetIds | None:
    """The ids that a drafter's checkpoint maps its own to, by draft id; None where it has no ``d2t``.

    ``tensors``: name -> file, of its tensors. ``said``: the config's ``draft_vocab_size``. Raises WeightsError for a
    map that is not one into the target's vocabulary, or that ``t2d`` or the config contradicts.
    """
    if "d2t" not in tensors:
        if "t2d" in tensors:
            raise WeightsError(f"{tensors['t2d']} holds 't2d' without 'd2t', which says what it guesses")
        return None
    file, offsets = tensors["d2t"], _tensor(tensors["d2t"], "d2t")
    if offsets.dim() != 1 or not len(offsets) or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise WeightsError(f"{file}: 'd2t' must be a list of integers, not {offsets.dtype} {list(offsets.shape)}")
    if said is not None and said != len(offsets):
        raise WeightsError(f"{file}: 'd2t' maps {len(offsets)} ids, but config.json says 'draft_vocab_size' {said}")
    ids = offsets.to(torch.int64) + torch.arange(len(offsets))
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise WeightsError(
            f"{file}: 'd2t' maps to id {low if low < 0 else high}, but the target's vocabulary has {vocab_size} ids; "
            "use the drafter made for this target"
        )
    if (different := len(set(ids.tolist()))) != len(ids):
        raise WeightsError(f"{file}: 'd2t' maps {len(ids)} ids to {different} different ones")
    if "t2d" in tensors:
        _check_mask(tensors["t2d"], ids, vocab_size)
    return tuple(ids.tolist())


def _check_mask(file: Path, ids: Tensor, vocab_size: int) -> None:
    mask = _tensor(file, "t2d")
    if mask.shape != (vocab_size,):
        raise WeightsError(
            f"{file}: 't2d' has shape {list(mask.shape)}, but the target's vocabulary has {vocab_size} ids; use the "
            "drafter made for this target"
        )
    if not torch.equal(mask.bool().nonzero()[:, 0], ids.sort().values):
        raise WeightsError(f"{file}: 't2d' marks other ids than 'd2t' maps to; the checkpoint is damaged")


def _tensor(file: Path, name: str) -> Tensor:
    with open_file(file) as reader:
        found: Tensor = reader.get_tensor(name)
    return found
