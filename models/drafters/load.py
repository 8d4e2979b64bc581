"""From a drafter's folder to a drafter with every parameter filled, beside the target that it was made for.

Knows: which class serves which kind of drafter. Does not know: how files are read (models/weights.py), who asks it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from models.checkpoint import WeightsError, locate_tensors
from models.config import ModelConfig
from models.drafters.dflash import DFlashDraft
from models.drafters.draft_config import OTHER_DRAFTERS, DFlashConfig, MTPConfig, for_lengths
from models.drafters.mtp import MTPDraft
from models.layers.checkpoint_parts import CheckpointParts
from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from models.weights import fill

MTP_PREFIX = "mtp."  # of an MTP layer's tensors among those of its target

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


def load_own_mtp(
    target: Decoder, folder: str | Path | None, *, load_format: str = "safetensors", seed: int = 0
) -> MTPDraft:
    """This rank's share of the MTP layer in the target's own checkpoint, whose folder is ``folder``.

    Raises as ``check_own_mtp``, and WeightsError.
    """
    config = check_own_mtp(target.config, folder, load_format=load_format)
    return _filled(target, lambda context: MTPDraft(config, context), folder, load_format, seed, prefix=MTP_PREFIX)


def check_own_mtp(target: ModelConfig, folder: str | Path | None, *, load_format: str = "safetensors") -> MTPConfig:
    """What a target's own MTP layer looks like. Reads no tensors, only their names.

    Raises ValueError where there is none in ``folder`` (for dummy weights: in the config), or one that is not
    implemented; WeightsError where the folder is no checkpoint.
    """
    config = MTPConfig.of_target(target)
    if load_format == "dummy":
        if not target.mtp_layers:
            raise ValueError(
                'config.json names no MTP layer to make dummy weights for: put "mtp_num_hidden_layers": 1 there; or '
                f"{OTHER_DRAFTERS}"
            )
        return config
    if folder is None:
        raise ValueError("load format 'safetensors' needs a model folder; without one use 'dummy'")
    names = [name for name in locate_tensors(Path(folder)) if name.startswith(MTP_PREFIX)]
    if not names:
        raise WeightsError(
            f"{folder} holds no MTP layer: none of its tensors is named {MTP_PREFIX}*; use a checkpoint that has them, "
            f"or {OTHER_DRAFTERS}"
        )
    numbers = {name.split(".")[2] for name in names if name.startswith(f"{MTP_PREFIX}layers.")}
    if len(numbers) > 1:
        raise WeightsError(
            f"{folder} holds {len(numbers)} MTP layers ({MTP_PREFIX}layers.{', '.join(sorted(numbers))}), but only MTP "
            f"of one layer is implemented; {OTHER_DRAFTERS}"
        )
    return config


def _filled(
    target: Decoder,
    make: Callable[[ModelContext], Draft],
    folder: str | Path | None,
    load_format: str,
    seed: int,
    prefix: str = "",
) -> Draft:
    context = ModelContext(target.collectives, target.kernels, target.dtype, target.expert_split)
    device = target.final_norm.weight.device
    return fill(lambda: make(context), folder, load_format=load_format, device=device, seed=seed, prefix=prefix)
