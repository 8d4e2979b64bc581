"""From an engine's options to how experts lie on its ranks, and to the report of how much each was asked for.

Knows: --expert-parallel, --data-parallel-size, --expert-map and --expert-load, and when they make sense for a model.
Does not know: shards (parallel/layers/experts.py), counters or the file (models/expert_load.py).
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import torch

from models.config import ModelConfig
from models.expert_load import ExpertLoad, ExpertLoadError, read_load
from models.layers.decoder import Decoder
from parallel.comm.symmetric_exchange import TokenExchange
from parallel.layers.experts import ExpertSplit
from runtime.config import ConfigError, EngineConfig, flag_of


def expert_split(
    config: EngineConfig, model: ModelConfig, agree_min: Callable[[int], int], exchange: TokenExchange | None = None
) -> ExpertSplit:
    """How the experts of ``model`` lie on all ranks. Raises ConfigError, on every rank if on one.

    ``agree_min`` gives the least of a number over all ranks: they must have read the same map. ``exchange``: with the
    other groups, where there are some.
    """
    if config.data_parallel > 1 and model.experts is None:
        raise ConfigError(
            f"data_parallel is {config.data_parallel}, but {model.architecture} has no experts that groups could "
            f"share: leave out {flag_of('data_parallel')} and start one job a replica"
        )
    given = [name for name in ("expert_parallel", "expert_map", "expert_load") if getattr(config, name)]
    if given and model.experts is None:
        raise ConfigError(
            f"{given[0]} is {getattr(config, given[0])}, but {model.architecture} has no experts: leave out "
            f"{flag_of(given[0])}"
        )
    if config.expert_map is None:
        return ExpertSplit(whole=config.expert_parallel, exchange=exchange)
    path = Path(config.expert_map)
    _require_same_file(path, agree_min)
    try:
        load = ExpertLoad.read(path)
    except ExpertLoadError as error:
        raise ConfigError(str(error)) from error
    found = {layer: len(counts) for layer, counts in load.tokens.items()}
    wanted = dict.fromkeys(model.experts.layers, model.experts.count) if model.experts else {}
    if load.architecture != model.architecture or found != wanted:
        raise ConfigError(
            f"{path} counts {_experts(found)} of {load.architecture}, but {config.model} is {model.architecture} with "
            f"{_experts(wanted)}: type --expert-map with a file that --expert-load wrote for this model"
        )
    return ExpertSplit(whole=True, orders=load.orders(config.ranks), exchange=exchange)


def load_report(config: EngineConfig, model: Decoder, split: ExpertSplit) -> Callable[[], None] | None:
    """What to call when the last step has landed: writes the report. None where this rank has nothing to do for it.

    Every rank of a group counts the same; of several groups, each counts its own tokens, and the first ranks meet to
    add them up.
    """
    if config.expert_load is None or model.collectives.rank != 0:
        return None
    path, exchange = Path(config.expert_load), split.exchange

    def report() -> None:
        load = read_load(model)
        if exchange is not None:
            load = _summed(load, exchange)
        if exchange is None or exchange.index == 0:
            load.write(path, config.ranks, split)

    return report


def _summed(load: ExpertLoad, exchange: TokenExchange) -> ExpertLoad:
    """Over all groups; each calls it once."""
    counts_LE = torch.tensor(list(load.tokens.values()))
    total_LE = exchange.all_gather(counts_LE).view(exchange.groups, *counts_LE.shape).sum(0)
    return ExpertLoad(load.architecture, dict(zip(load.tokens, map(tuple, total_LE.tolist()), strict=True)))


def _require_same_file(path: Path, agree_min: Callable[[int], int]) -> None:
    """A rank that reads another file places other experts, and every answer would be wrong."""
    content = path.read_bytes() if path.is_file() else b""
    print_of = int.from_bytes(blake2b(content, digest_size=6).digest(), "little")
    least, most = agree_min(print_of), -agree_min(-print_of)  # each rank asks both, whatever it finds
    if least != most:
        raise ConfigError(f"expert_map {path} is not the same file on every rank: copy it to every node, unchanged")


def _experts(of_layers: dict[int, int]) -> str:
    counts = sorted(set(of_layers.values()))
    return f"{' or '.join(map(str, counts)) or 'no'} experts in {len(of_layers)} layers"
