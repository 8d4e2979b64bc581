"""From --speculative-config to a proposer: which class serves which method.

Knows: the methods there are, and which of them read a drafter's folder. Does not know: legal values
(runtime/speculative_config.py), how a proposer works, what a drafter computes (models/drafters).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from models.config import ModelConfig, ModelConfigError
from models.drafters.dflash import DFlashDraft
from models.drafters.draft_config import DFlashConfig, MTPConfig
from models.drafters.load import load_dflash, load_mtp
from models.drafters.mtp import MTPDraft
from models.layers.decoder import Decoder
from runtime.execute.proposer import MakeProposer, Proposer, ProposerParts
from runtime.speculate.dflash import DFlashProposer, require_blocks
from runtime.speculate.mtp import MTPProposer
from runtime.speculate.ngram import NgramProposer
from runtime.speculate.synthetic import AnyTokens, scripted
from runtime.speculative_config import SpeculativeConfig, SpeculativeConfigError


def check_drafter(config: SpeculativeConfig, target: ModelConfig) -> None:
    """Before anything is loaded: ModelConfigError where the drafter's config.json is not one, or is of another target;
    SpeculativeConfigError where it cannot guess as many tokens.
    """
    if config.method not in _CONFIGS:
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


def proposer_for(config: SpeculativeConfig, *, load_format: str = "safetensors", seed: int = 0) -> MakeProposer:
    """What makes the proposer of a checked ``config``, over caches that an executor has.

    A drafter's weights are loaded when a proposer is first made, in ``load_format`` as the target's, with ``seed`` for
    dummy ones; it raises as ``check_drafter`` then, and WeightsError.
    """
    make = _MAKERS[config.method](config, load_format, seed)
    rates = config.synthetic_acceptance_rates
    return scripted(make, rates) if config.synthetic and rates is not None else make


def _folder(config: SpeculativeConfig) -> Path:
    assert config.model is not None  # a checked config of a method with weights has one
    return Path(config.model)


def _ngram(config: SpeculativeConfig, load_format: str, seed: int) -> MakeProposer:
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    assert low is not None  # a checked config has both
    assert high is not None

    def make(parts: ProposerParts) -> Proposer:
        return NgramProposer(parts, low, high)

    return make


def _mtp(config: SpeculativeConfig, load_format: str, seed: int) -> MakeProposer:
    folder = _folder(config)

    @cache
    def load(target: Decoder) -> MTPDraft:
        return load_mtp(target, MTPConfig.from_folder(folder), folder, load_format=load_format, seed=seed)

    return lambda parts: MTPProposer(parts, load(parts.model))


def _dflash(config: SpeculativeConfig, load_format: str, seed: int) -> MakeProposer:
    folder = _folder(config)

    @cache
    def load(target: Decoder) -> DFlashDraft:
        return load_dflash(target, DFlashConfig.from_folder(folder), folder, load_format=load_format, seed=seed)

    return lambda parts: DFlashProposer(parts, load(parts.model))


def _any_tokens(config: SpeculativeConfig, load_format: str, seed: int) -> MakeProposer:
    return AnyTokens


_CONFIGS: dict[str, type[MTPConfig] | type[DFlashConfig]] = {"mtp": MTPConfig, "dflash": DFlashConfig}
_MAKERS = {"ngram": _ngram, "mtp": _mtp, "dflash": _dflash, "synthetic": _any_tokens}
