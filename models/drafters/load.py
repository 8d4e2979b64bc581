"""From a drafter's folder to a drafter with every parameter filled, beside the target that it was made for.

Knows: which class serves which kind of drafter. Does not know: how files are read (models/weights.py), who asks it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from models.drafters.dflash import DFlashDraft
from models.drafters.draft_config import DFlashConfig, MTPConfig, for_lengths
from models.drafters.mtp import MTPDraft
from models.layers.checkpoint_parts import CheckpointParts
from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from models.weights import fill

Draft = TypeVar("Draft", bound=CheckpointParts)


def load_dflash(
    target: Decoder, config: DFlashConfig, folder: str | Path | None, *, load_format: str = "safetensors", seed: int = 0
) -> DFlashDraft:
    """This rank's share of a DFlash drafter for ``target``, on its device, in its dtype.

    ``load_format`` "dummy" makes values from ``seed`` and needs no folder. Raises ValueError where drafter and target
    do not fit or cannot be split over the target's ranks, and WeightsError for a checkpoint that is not the drafter's.
    """
    config.check_target(target.config)
    lengths = for_lengths(config, target.config.max_length)
    return _filled(target, lambda context: DFlashDraft(lengths, context), folder, load_format, seed)


def load_mtp(
    target: Decoder, config: MTPConfig, folder: str | Path | None, *, load_format: str = "safetensors", seed: int = 0
) -> MTPDraft:
    """This rank's share of an MTP layer for ``target``; everything else as in ``load_dflash``."""
    config.check_target(target.config)
    lengths = for_lengths(config, target.config.max_length)
    return _filled(target, lambda context: MTPDraft(lengths, context), folder, load_format, seed)


def _filled(
    target: Decoder, make: Callable[[ModelContext], Draft], folder: str | Path | None, load_format: str, seed: int
) -> Draft:
    context = ModelContext(target.collectives, target.kernels, target.dtype)
    device = target.final_norm.weight.device
    return fill(lambda: make(context), folder, load_format=load_format, device=device, seed=seed)
