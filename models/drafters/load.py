"""From a drafter's folder to a drafter with every parameter filled, for the target it was made for.

Knows: which class serves which kind of drafter, and which head it uses. Does not know: how files are read
(models/weights.py), who asks it.

MTP layers under other names than Qwen3-Next's:
    DeepSeek-V3   model.layers.L.{enorm, hnorm, eh_proj, shared_head.norm} with a decoder layer's own, L behind the
                  target's last; embed_tokens and shared_head.head repeat the target's
    Nemotron-H    mtp.layers.0.{enorm, hnorm, eh_proj}, mtp.layers.i.{norm, mixer.*} of block i, final_layernorm of the
                  last; the blocks' kinds stand in mtp_hybrid_override_pattern, or mtp_layers_block_type
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from models.checkpoint import WeightsError, locate_tensors
from models.config import ModelConfig
from models.drafters.dflash import DFlashDraft
from models.drafters.draft_config import OTHER_DRAFTERS, DFlashConfig, Eagle3Config, MTPConfig, for_lengths
from models.drafters.draft_head import DraftAttention, DraftHead
from models.drafters.draft_vocabulary import MAPS, TargetIds, mapped_ids
from models.drafters.eagle3 import Eagle3Draft
from models.drafters.mtp import MakeNorm, MTPDraft
from models.families.nemotron_h import BLOCK_NAMES
from models.layers.checkpoint_parts import CheckpointParts, checkpoint_names_of
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer
from models.layers.mlp import Relu2MLP
from models.layers.moe import SparseMLP
from models.layers.rope import unrotated_cache
from models.quantization import Quantization
from models.registry import ARCHITECTURES
from models.weights import fill
from parallel.layers.embedding import LMHead
from parallel.layers.weight import WeightPlan

LATENT_ATTENTION = "self_attn.kv_a_proj_with_mqa.weight"  # of DeepSeek's own layers


def nextn_prefix(layer: int) -> str:
    """Of the tensors of an MTP layer under DeepSeek-V3's names."""
    return f"model.layers.{layer}."


def repeated_tensors(layer: int) -> tuple[str, ...]:
    """Those of them that repeat the target's embedding and head; HY3 has no ``.head``."""
    return tuple(f"{nextn_prefix(layer)}{name}.weight" for name in ("embed_tokens", "shared_head.head", "shared_head"))


class NextNDraft(MTPDraft):
    """A layer of the target's kind under DeepSeek-V3's names."""

    def checkpoint_names_of(self, path: str) -> tuple[str, ...]:
        """A layer of a known family is named as the family's others."""
        of_layer, prefix = "mtp.layers.0.", nextn_prefix(self.config.layer or 0)
        if path.startswith("layers.0.") and self.config.model.architecture in ARCHITECTURES:
            names = ARCHITECTURES[self.config.model.architecture].checkpoint_names
            return checkpoint_names_of(names, path.replace("layers.0.", f"layers.{self.config.layer}.", 1))
        others = {
            "mtp.fc.weight": ("eh_proj.weight",),
            "mtp.pre_fc_norm_embedding.weight": ("enorm.weight",),
            "mtp.pre_fc_norm_hidden.weight": ("hnorm.weight",),
            "mtp.norm.weight": ("shared_head.norm.weight", "final_layernorm.weight"),  # the latter in HY3
        }
        return tuple(
            prefix + spelling
            for name in super().checkpoint_names_of(path)
            for spelling in others.get(name, (name.removeprefix(of_layer),))
        )


class BlocksDraft(MTPDraft):
    """Blocks of one mixer or one MLP each, as Nemotron-H's: attention without positions, then MLPs and experts."""

    checkpoint_names: ClassVar = {
        "fc": "mtp.layers.0.eh_proj",
        "embedding_norm": "mtp.layers.0.enorm",
        "hidden_norm": "mtp.layers.0.hnorm",
        **{f"layers.{{}}.{part}": f"mtp.layers.{{}}.{name}" for part, name in BLOCK_NAMES.items()},
        "layers.{}.mixer.output": "mtp.layers.{}.mixer.o_proj",
    }

    def checkpoint_names_of(self, path: str) -> tuple[str, ...]:
        if path == "norm.weight":
            return (f"mtp.layers.{len(self.layers) - 1}.final_layernorm.weight",)
        return super().checkpoint_names_of(path)

    def _positions(self, config: MTPConfig) -> Tensor:
        return unrotated_cache(config.model.max_length)

    def _layers(self, config: MTPConfig, context: ModelContext, norm: MakeNorm) -> list[DecoderLayer]:
        sizes = config.model
        layers = [DecoderLayer(DraftAttention(sizes, context, self.cos_sin_LR, norm(sizes.hidden_size)), None)]
        for kind in config.blocks[1:]:
            mlp: SparseMLP | Relu2MLP
            if kind == "moe":  # its number is none of the target's layers, whose maps of experts are not for it
                mlp = SparseMLP(sizes, context, norm(sizes.hidden_size), layer=sizes.layers)
            else:
                mlp = Relu2MLP(sizes.hidden_size, sizes.intermediate_size, context, norm(sizes.hidden_size))
            layers.append(DecoderLayer(None, mlp))
        return layers


_NEXTN = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")
MTP_PREFIX = "mtp."  # of an MTP layer's tensors among those of its target
HEAD = "lm_head.weight"  # of a head over the draft vocabulary, in a drafter's folder

AnyConfig = DFlashConfig | MTPConfig | Eagle3Config
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
    draft = _filled(target, lengths, lambda context: DFlashDraft(lengths, context), folder, load_format, seed)
    draft.gather_entry_rows()
    return draft


def load_mtp(
    target: Decoder, config: MTPConfig, folder: str | Path | None, *, load_format: str = "safetensors", seed: int = 0
) -> MTPDraft:
    """This rank's share of an MTP layer for ``target``, also under DeepSeek-V3's names; everything else as in
    ``load_dflash``."""
    config.check_target(target.config)
    lengths = for_lengths(config, target.config.max_length)
    if load_format != "dummy" and folder is not None:
        lengths = replace(lengths, layer=_nextn_layer(locate_tensors(Path(folder)), folder))
    return _mtp(target, lengths, folder, load_format, seed)


def load_eagle3(
    target: Decoder, config: Eagle3Config, folder: str | Path | None, *, load_format: str = "safetensors", seed: int = 0
) -> Eagle3Draft:
    """This rank's share of an EAGLE-3 head's layer for ``target``, with an embedding where the folder holds one;
    everything else as in ``load_dflash``."""
    config.check_target(target.config)
    lengths, own, but = for_lengths(config, target.config.max_length), False, (*MAPS, HEAD)
    if load_format != "dummy" and folder is not None:
        own = not {"embed_tokens.weight", "model.embed_tokens.weight"}.isdisjoint(locate_tensors(Path(folder)))
    return fill(
        lambda plan: Eagle3Draft(lengths, _context(target, plan), own_embedding=own),
        folder,
        load_format=load_format,
        quantization=_quantization(target, lengths.model),
        device=target.final_norm.weight.device,
        seed=seed,
        but=but,
    )


def load_own_mtp(
    target: Decoder, folder: str | Path | None, *, load_format: str = "safetensors", seed: int = 0
) -> MTPDraft:
    """This rank's share of the MTP layer in the target's own checkpoint, whose folder is ``folder``.

    Raises as ``check_own_mtp``, and WeightsError.
    """
    config = check_own_mtp(target.config, folder, load_format=load_format)
    return _mtp(target, config, folder, load_format, seed, prefix=_prefix(config))


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
    stored, prefix = locate_tensors(Path(folder)), _prefix(config)
    if not any(name.startswith(prefix) for name in stored):
        raise WeightsError(
            f"{folder} holds no MTP layer: none of its tensors is named {prefix}*; use a checkpoint that has them, "
            f"or {OTHER_DRAFTERS}"
        )
    if config.layer is not None:
        _nextn_layer(stored, folder, config.layer)
        return config
    numbers = sorted({name.split(".")[2] for name in stored if name.startswith(f"{MTP_PREFIX}layers.")})
    if config.blocks and len(numbers) != len(config.blocks):
        raise WeightsError(
            f"{folder} holds {len(numbers)} blocks of an MTP layer ({MTP_PREFIX}layers.{', '.join(numbers)}), but "
            f"'mtp_hybrid_override_pattern' names {len(config.blocks)}: {', '.join(config.blocks)}"
        )
    if not config.blocks and len(numbers) > 1:
        raise WeightsError(
            f"{folder} holds {len(numbers)} MTP layers ({MTP_PREFIX}layers.{', '.join(numbers)}), but only MTP "
            f"of one layer is implemented; {OTHER_DRAFTERS}"
        )
    return config


def _prefix(config: MTPConfig) -> str:
    return MTP_PREFIX if config.layer is None else nextn_prefix(config.layer)


def _nextn_layer(stored: Collection[str], folder: str | Path, first: int = 0) -> int | None:
    """The number of a layer under DeepSeek-V3's names, from ``first`` on; None where there is none. WeightsError for
    several, and for one whose attention is of another kind."""
    found = sorted(int(match[1]) for name in stored if (match := _NEXTN.fullmatch(name)) and int(match[1]) >= first)
    if len(found) > 1:
        raise WeightsError(
            f"{folder} holds {len(found)} MTP layers (model.layers.{', '.join(map(str, found))}), but only MTP of one "
            f"layer is implemented; {OTHER_DRAFTERS}"
        )
    if found and (latent := f"{nextn_prefix(found[0])}{LATENT_ATTENTION}") in stored:
        raise WeightsError(
            f"{folder} holds an MTP layer with multi-head latent attention ({latent}), which is not implemented; "
            f"{OTHER_DRAFTERS}"
        )
    return found[0] if found else None


def _mtp(
    target: Decoder, config: MTPConfig, folder: str | Path | None, load_format: str, seed: int, prefix: str = ""
) -> MTPDraft:
    made = BlocksDraft if config.blocks else MTPDraft if config.layer is None else NextNDraft
    but = () if config.layer is None else repeated_tensors(config.layer)
    return _filled(target, config, lambda context: made(config, context), folder, load_format, seed, prefix, but)


def own_draft_ids(
    config: AnyConfig, folder: str | Path | None, vocab_size: int, *, load_format: str = "safetensors"
) -> TargetIds | None:
    """The target's ids that a drafter's own folder maps its draft ids to; None if it drafts from all.

    Dummy drafters have the first ``draft_vocab_size`` of their config. Raises WeightsError.
    """
    said = config.draft_vocab_size
    if load_format == "dummy" or folder is None:
        return None if said is None else tuple(range(said))
    ids = mapped_ids(locate_tensors(Path(folder)), vocab_size, said)
    if ids is None and said is not None and said != vocab_size:
        raise WeightsError(
            f"{folder}: 'draft_vocab_size' is {said} of {vocab_size}, but no tensor 'd2t' says which ids these are"
        )
    return ids


def load_head(
    target: Decoder,
    config: AnyConfig,
    folder: str | Path | None,
    chosen: Sequence[int] | None = None,
    *,
    load_format: str = "safetensors",
    seed: int = 0,
) -> DraftHead:
    """The head of a drafter of the loaders here (of ``load_own_mtp``: ``folder`` None).

    With ``chosen`` these rows of the target's head; else what the drafter's folder says: its own ids, by a head of
    its own or by the target's; else the target's head, whole. Called by all ranks together. Raises WeightsError.
    """
    ids = own_draft_ids(config, folder, target.config.vocab_size, load_format=load_format)
    if ids is not None and chosen is not None:
        raise WeightsError(
            f"token_map names {len(chosen)} ids, but the drafter in {folder} guesses among {len(ids)} of its own "
            f"('d2t', 'draft_vocab_size'): leave token_map out"
        )
    ids = ids if chosen is None else tuple(chosen)
    if load_format == "dummy" or folder is None or HEAD not in locate_tensors(Path(folder)):
        return DraftHead.of_target(target) if ids is None else DraftHead.rows_of(target, ids)
    if chosen is not None:
        raise WeightsError(
            f"token_map names {len(chosen)} ids, but the drafter in {folder} has a head of its own ({HEAD!r}): leave "
            "token_map out"
        )
    hidden, device = target.config.hidden_size, target.final_norm.weight.device
    size = target.config.vocab_size if ids is None else len(ids)
    parts = fill(
        lambda plan: _OwnHead(size, hidden, _context(target, plan)),
        folder,
        load_format=load_format,
        device=device,
        seed=seed,
        prefix=HEAD,
    )
    ids_V = None if ids is None else torch.tensor(ids, dtype=torch.int64, device=device)
    return DraftHead.of_head(parts.lm_head, ids_V, target)


class _OwnHead(CheckpointParts):
    """The head that a drafter's folder holds over its draft vocabulary."""

    checkpoint_names: ClassVar = {"lm_head": "lm_head"}

    def __init__(self, size: int, hidden: int, context: ModelContext) -> None:
        super().__init__()
        self.dtype = context.dtype
        self.lm_head = LMHead(size, hidden, context)


def _context(target: Decoder, plan: WeightPlan) -> ModelContext:
    """Experts of a drafter are spread over the ranks of a group, also where groups share those of the target: a group
    then drafts at any time, and the others need not take part."""
    experts = replace(target.expert_split, exchange=None)
    return ModelContext(target.collectives, target.kernels, target.dtype, experts, target.kv_dtype, plan=plan)


def _filled(
    target: Decoder,
    config: AnyConfig,
    make: Callable[[ModelContext], Draft],
    folder: str | Path | None,
    load_format: str,
    seed: int,
    prefix: str = "",
    but: tuple[str, ...] = (),
) -> Draft:
    return fill(
        lambda plan: make(_context(target, plan)),
        folder,
        load_format=load_format,
        quantization=_quantization(target, config.model),
        device=target.final_norm.weight.device,
        seed=seed,
        prefix=prefix,
        but=(*but, *MAPS, HEAD) if _maps_ids(folder, load_format) else but,
    )


def _quantization(target: Decoder, drafter: ModelConfig) -> Quantization | None:
    """The drafter's own; without one it is quantised at load where its target is."""
    own, target_has = drafter.quantization, target.config.quantization
    return target_has if own is None and target_has is not None and target_has.at_load else own


def _maps_ids(folder: str | Path | None, load_format: str) -> bool:
    """Whether a drafter's folder has tensors of a draft vocabulary (``load_head``) besides the drafter's."""
    return load_format != "dummy" and folder is not None and MAPS[0] in locate_tensors(Path(folder))
