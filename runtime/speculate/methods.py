"""From --speculative-config to a proposer: which class serves which method.

Knows: the methods there are, and which of them read a drafter's folder. Does not know: legal values
(runtime/speculative_config.py), how a proposer works, what a drafter computes (models/drafters).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypedDict

from models.config import ModelConfig, ModelConfigError
from models.drafters.dflash import DFlashDraft
from models.drafters.draft_config import DFlashConfig, Eagle3Config, MTPConfig
from models.drafters.draft_head import DraftHead
from models.drafters.draft_vocabulary import TargetIds, chosen_ids
from models.drafters.eagle3 import Eagle3Draft
from models.drafters.load import (
    check_own_mtp,
    load_dflash,
    load_eagle3,
    load_head,
    load_mtp,
    load_own_mtp,
    own_draft_ids,
)
from models.drafters.mtp import MTPDraft
from models.layers.decoder import Decoder
from runtime.execute.proposer import BranchingProposer, MakeProposer, Proposer, ProposerParts
from runtime.speculate.dflash import DFlashProposer, require_blocks
from runtime.speculate.guesses import Drafter, drawing
from runtime.speculate.mtp import Eagle3Proposer, MTPProposer
from runtime.speculate.ngram import NgramProposer
from runtime.speculate.synthetic import AnyTokens, scripted
from runtime.speculate.tree import branching
from runtime.speculative_config import SpeculativeConfig, SpeculativeConfigError


def check_drafter(
    config: SpeculativeConfig,
    target: ModelConfig,
    *,
    target_folder: Path | None = None,
    load_format: str = "safetensors",
) -> None:
    """Before anything is loaded: ModelConfigError where the drafter's config.json is not one, or is of another target;
    SpeculativeConfigError if it cannot draft as many tokens, or not among the ids that it shall, or among fewer than
    a place of a tree has, or where ``config`` names no drafter and the target's folder holds none. WeightsError where
    it has a tree and its map of draft ids is not one.
    """
    if config.method not in _CONFIGS:
        return
    chosen = _chosen(config, target.vocab_size)
    if config.model is None:
        _check_top_k(config, chosen)
        try:
            check_own_mtp(target, target_folder, load_format=load_format)
        except ValueError as error:
            raise SpeculativeConfigError(
                f"--speculative-config: method 'mtp' without \"model\" asks for the target's own layer: {error}"
            ) from error
        return
    folder = _folder(config)
    drafter = _CONFIGS[config.method].from_folder(folder)
    try:
        drafter.check_target(target)
    except ValueError as error:
        raise ModelConfigError(f"{folder / 'config.json'}: {error}") from error
    if isinstance(drafter, DFlashConfig):
        try:
            require_blocks(drafter, config.width)
        except ValueError as error:
            raise SpeculativeConfigError(str(error)) from error
    if config.tree_size is not None and chosen is None:
        chosen = own_draft_ids(drafter, folder, target.vocab_size, load_format=load_format)
    _check_top_k(config, chosen)


def proposer_for(
    config: SpeculativeConfig, *, target_folder: Path | None = None, load_format: str = "safetensors", seed: int = 0
) -> MakeProposer:
    """What makes the proposer of a checked ``config``, over caches that an executor has.

    A drafter's weights are loaded when a proposer is first made, from its own folder or, where ``config`` names none,
    from ``target_folder``; in ``load_format`` as the target's, with ``seed`` for dummy ones. It raises as
    ``check_drafter`` then, and WeightsError.
    """
    weights = _Weights(target_folder, load_format, seed)
    make: MakeProposer
    if config.tree_size is not None:
        assert config.tree_top_k is not None  # a checked config has both
        make = branching(_BRANCHING[config.method](config, weights), config.tree_top_k)
    elif config.probabilistic:
        make = drawing(_DRAFTERS[config.method](config, weights))
    else:
        make = _MAKERS[config.method](config, weights)
    rates = config.synthetic_acceptance_rates
    return scripted(make, rates) if config.synthetic and rates is not None else make


_MakeBranching = Callable[[ProposerParts], BranchingProposer]
_MakeDrafter = Callable[[ProposerParts], Drafter]


class _How(TypedDict):
    load_format: str
    seed: int


class _Weights(NamedTuple):
    """As the arguments of ``proposer_for``."""

    target_folder: Path | None
    load_format: str
    seed: int


def _folder(config: SpeculativeConfig) -> Path:
    assert config.model is not None  # a checked config has one, but for a layer of the target's own
    return Path(config.model)


def _chosen(config: SpeculativeConfig, vocab_size: int) -> TargetIds | None:
    """The ids that a drafter shall draft from; None where all, or where its folder says."""
    if config.token_map is None:
        return None
    try:
        return chosen_ids(config.token_map, vocab_size)
    except ValueError as error:
        raise SpeculativeConfigError(f"--speculative-config: {error}") from error


def _check_top_k(config: SpeculativeConfig, ids: TargetIds | None) -> None:
    """``ids``: those that the drafter drafts from; None: all the target's, with which runtime/build.py compares."""
    if ids is not None and config.tree_top_k is not None and config.tree_top_k > len(ids):
        raise SpeculativeConfigError(
            f"--speculative-config: tree_top_k is {config.tree_top_k}, but the drafter guesses among {len(ids)} ids: "
            f'type "tree_top_k": {len(ids)} or less'
        )


def _ngram(config: SpeculativeConfig, weights: _Weights) -> MakeProposer:
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    assert low is not None  # a checked config has both
    assert high is not None

    def make(parts: ProposerParts) -> Proposer:
        return NgramProposer(parts, low, high)

    return make


def _mtp(config: SpeculativeConfig, weights: _Weights) -> _MakeDrafter:
    how: _How = {"load_format": weights.load_format, "seed": weights.seed}

    @cache
    def load(target: Decoder) -> tuple[MTPDraft, DraftHead]:
        chosen = _chosen(config, target.config.vocab_size)
        if config.model is None:
            own = load_own_mtp(target, weights.target_folder, **how)
            return own, load_head(target, own.config, None, chosen, **how)
        folder = _folder(config)
        drafter = MTPConfig.from_folder(folder)
        return load_mtp(target, drafter, folder, **how), load_head(target, drafter, folder, chosen, **how)

    return lambda parts: MTPProposer(parts, *load(parts.model))


def _dflash(config: SpeculativeConfig, weights: _Weights) -> _MakeDrafter:
    folder = _folder(config)
    how: _How = {"load_format": weights.load_format, "seed": weights.seed}

    @cache
    def load(target: Decoder) -> tuple[DFlashDraft, DraftHead]:
        drafter, chosen = DFlashConfig.from_folder(folder), _chosen(config, target.config.vocab_size)
        return load_dflash(target, drafter, folder, **how), load_head(target, drafter, folder, chosen, **how)

    return lambda parts: DFlashProposer(parts, *load(parts.model))


def _eagle3(config: SpeculativeConfig, weights: _Weights) -> _MakeDrafter:
    folder = _folder(config)
    how: _How = {"load_format": weights.load_format, "seed": weights.seed}

    @cache
    def load(target: Decoder) -> tuple[Eagle3Draft, DraftHead]:
        drafter, chosen = Eagle3Config.from_folder(folder), _chosen(config, target.config.vocab_size)
        return load_eagle3(target, drafter, folder, **how), load_head(target, drafter, folder, chosen, **how)

    return lambda parts: Eagle3Proposer(parts, *load(parts.model))


def _any_tokens(config: SpeculativeConfig, weights: _Weights) -> _MakeBranching:
    return AnyTokens


_CONFIGS: dict[str, type[MTPConfig] | type[DFlashConfig] | type[Eagle3Config]] = {
    "mtp": MTPConfig,
    "dflash": DFlashConfig,
    "eagle3": Eagle3Config,
}
_DRAFTERS: dict[str, Callable[[SpeculativeConfig, _Weights], _MakeDrafter]] = {
    "mtp": _mtp,
    "dflash": _dflash,
    "eagle3": _eagle3,
}
_BRANCHING: dict[str, Callable[[SpeculativeConfig, _Weights], _MakeBranching]] = {**_DRAFTERS, "synthetic": _any_tokens}
_MAKERS: dict[str, Callable[[SpeculativeConfig, _Weights], MakeProposer]] = {
    "ngram": _ngram,
    **_DRAFTERS,
    "synthetic": _any_tokens,
}
