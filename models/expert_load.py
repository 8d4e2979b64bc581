"""How many tokens asked for each expert of each layer: counted on the device in every step, read once in a while.

Knows: the counters of a model, the file they are reported in, and the placement that such a file leads to.
Does not know: who asked for a report.

The counters are part of the step (route_top_k adds to them), so they cost no synchronisation; masked and padding
tokens are not counted. In a group with the same tokens on every rank, every rank counts the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.layers.decoder import Decoder
from models.layers.moe import SparseMLP
from parallel.layers.experts import ExpertSplit, held_experts


def balanced_order(tokens: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Expert ids, the first rank's first: equally many experts a rank, their tokens balanced greedily.

    ``tokens[e]`` chose expert e. Experts are assigned in order of falling load, each to the rank with the fewest tokens
    so far that still has room (longest processing time first, Graham 1969). Never worse than the order 0, 1, 2, ...,
    which it returns where it finds nothing better. Raises ValueError where the ranks do not divide the experts.
    """
    experts = len(tokens)
    in_order = tuple(range(experts))
    room = len(held_experts(experts, 0, ranks))
    held: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for expert in sorted(in_order, key=lambda expert: (-tokens[expert], expert)):
        rank = min((r for r in range(ranks) if len(held[r]) < room), key=lambda r: (sums[r], r))
        held[rank].append(expert)
        sums[rank] += tokens[expert]
    if max(sums) >= max(rank_tokens(tokens, in_order, ranks)):
        return in_order
    return tuple(expert for of_rank in held for expert in sorted(of_rank))


def rank_tokens(tokens: Sequence[int], order: Sequence[int], ranks: int) -> list[int]:
    """Tokens that chose each rank's experts, where ``order`` lists the first rank's experts first."""
    share = len(order) // ranks
    return [sum(tokens[expert] for expert in order[r * share : (r + 1) * share]) for r in range(ranks)]


SCHEMA = 1


class ExpertLoadError(ValueError):
    """A report of expert load that cannot be read, or is of another model."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """``tokens``: layer number -> tokens that chose each of its experts. ``architecture`` as in config.json."""

    architecture: str
    tokens: Mapping[int, tuple[int, ...]]

    def orders(self, ranks: int) -> dict[int, tuple[int, ...]]:
        """For ExpertSplit: a balanced placement of every layer."""
        return {layer: balanced_order(counts, ranks) for layer, counts in self.tokens.items()}

    def imbalance(self, ranks: int, split: ExpertSplit) -> dict[int, float]:
        """Layer -> tokens of the fullest rank over those of the mean one, at least 1; 1 where nothing was counted."""
        found = {}
        for layer, counts in self.tokens.items():
            order = split.orders.get(layer, range(len(counts)))
            mean = sum(counts) / ranks
            found[layer] = max(rank_tokens(counts, order, ranks)) / mean if split.whole and mean else 1.0
        return found

    def write(self, path: Path, ranks: int, split: ExpertSplit) -> None:
        """As JSON, with the imbalance that ``split`` has over ``ranks``."""
        imbalance = self.imbalance(ranks, split)
        layers = [
            {"layer": layer, "fullest_rank_over_mean": round(imbalance[layer], 4), "tokens": list(counts)}
            for layer, counts in self.tokens.items()
        ]
        report = {"schema": SCHEMA, "architecture": self.architecture, "ranks": ranks, "layers": layers}
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ExpertLoad:
        """What ``write`` wrote. Raises ExpertLoadError naming the file and what is wrong with it."""
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ExpertLoadError(
                f"{path} cannot be read: {error}; --expert-map takes a file that --expert-load wrote"
            ) from error
        try:
            if report["schema"] != SCHEMA:
                raise ExpertLoadError(f"{path} has schema {report['schema']}, not {SCHEMA}: write it anew")
            tokens = {_count(layer["layer"]): tuple(map(_count, layer["tokens"])) for layer in report["layers"]}
            return cls(str(report["architecture"]), tokens)
        except (KeyError, TypeError) as error:
            raise ExpertLoadError(
                f"{path} is no report of expert load ({error!r}); --expert-map takes a file that --expert-load wrote"
            ) from error


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def start_counting(model: Decoder) -> None:
    """Give every sparse layer a counter, on the device of its weights; before any graph of the model is captured."""
    for _, mlp in _sparse_layers(model):
        experts = mlp.experts
        mlp.load_E = torch.zeros(experts.experts, dtype=torch.int64, device=experts.local_E.device)


def clear_load(model: Decoder) -> None:
    """Counting begins anew, in the memory that captured steps add to: start-up runs are no requests."""
    for _, mlp in _sparse_layers(model):
        if mlp.load_E is not None:
            mlp.load_E.zero_()


def read_load(model: Decoder) -> ExpertLoad:
    """Everything counted since ``start_counting`` or ``clear_load``. Waits for the device: not for the step path."""
    tokens = {}
    for number, mlp in _sparse_layers(model):
        if mlp.load_E is not None:
            tokens[number] = tuple(mlp.load_E.tolist())
    return ExpertLoad(model.config.architecture, tokens)


def _sparse_layers(model: Decoder) -> list[tuple[int, SparseMLP]]:
    return [(number, layer.mlp) for number, layer in enumerate(model.layers) if isinstance(layer.mlp, SparseMLP)]
