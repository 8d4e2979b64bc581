"""From --speculative-config to a proposer: which class serves which method.

Knows: the methods there are. Does not know: legal values (runtime/speculative_config.py), how a proposer works.
"""

from __future__ import annotations

from runtime.execute.proposer import MakeProposer, Proposer, ProposerParts
from runtime.speculate.ngram import NgramProposer
from runtime.speculate.synthetic import AnyTokens, scripted
from runtime.speculative_config import SpeculativeConfig


def proposer_for(config: SpeculativeConfig) -> MakeProposer:
    """What makes the proposer of a checked ``config``, over caches that an executor has."""
    make = _METHODS[config.method](config)
    rates = config.synthetic_acceptance_rates
    return scripted(make, rates) if config.synthetic and rates is not None else make


def _ngram(config: SpeculativeConfig) -> MakeProposer:
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    assert low is not None  # a checked config has both
    assert high is not None

    def make(parts: ProposerParts) -> Proposer:
        return NgramProposer(parts, low, high)

    return make


def _any_tokens(config: SpeculativeConfig) -> MakeProposer:
    return AnyTokens


_METHODS = {"ngram": _ngram, "synthetic": _any_tokens}
