"""CheckpointParts: a model that says which checkpoint tensors fill it, by a table of names.

Knows: how module paths become checkpoint names, and that checkpoints may spell them differently.
Does not know: any model, files (models/weights.py), or shard arithmetic (parallel/layers).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from parallel.layers.shard import ScatteredShard, Shard, ShardedModule, stacked


class CheckpointParts(nn.Module):
    """``checkpoint_names``: module part -> checkpoint tensor without what follows the last dot (``weight``, ``bias``),
    ``{}`` standing for the numbers of layer and expert in both; several names where checkpoints differ. A key that ends
    in what follows the last dot names that whole tensor. Parts of a module with one name lie one after another in it.
    """

    dtype: torch.dtype  # of parameters and activations
    checkpoint_names: ClassVar[Mapping[str, str | tuple[str, ...]]]

    def checkpoint_shards(self, stored: Container[str] = ()) -> dict[str, Shard | ScatteredShard]:
        """Checkpoint tensor name -> what this rank holds of it. Covers every parameter exactly once.

        Where a module may be filled from differently named or cut tensors, those that are in ``stored`` are meant.
        """
        found: dict[str, Shard | ScatteredShard] = {}
        for path, module in self.named_modules():
            if isinstance(module, ShardedModule):
                spelled = [names for layout in module.layouts() for names in self._spellings(path, layout)]
                found |= max(spelled, key=partial(_share, stored))
        return found

    def checkpoint_copies(self) -> dict[str, Shard]:
        """Checkpoint tensors that may be there but only repeat another one."""
        return {}

    def leaves_unread(self, name: str) -> bool:
        """Whether a checkpoint tensor is another model's, which is loaded apart."""
        return False

    def _spellings(
        self, path: str, layout: Mapping[str, Shard | ScatteredShard]
    ) -> list[dict[str, Shard | ScatteredShard]]:
        """Every way in which checkpoints name the parts of ``layout``."""
        names = {part: self.checkpoint_names_of(f"{path}.{part}") for part in layout}
        count = max(map(len, names.values()), default=1)
        found: list[dict[str, Shard | ScatteredShard]] = [{} for _ in range(count)]
        for n, spelled in enumerate(found):
            for part, shard in layout.items():
                name = names[part][n % len(names[part])]
                spelled[name] = stacked(spelled[name], shard) if name in spelled else shard
        return found

    def checkpoint_names_of(self, path: str) -> tuple[str, ...]:
        """``layers.3.mlp.down.weight`` -> (``model.layers.3.mlp.down_proj.weight``,)."""
        return checkpoint_names_of(self.checkpoint_names, path)


def checkpoint_names_of(table: Mapping[str, str | tuple[str, ...]], path: str) -> tuple[str, ...]:
    """``layers.3.mlp.down.weight`` -> (``model.layers.3.mlp.down_proj.weight``,), by ``table``."""
    pieces = path.split(".")
    numbers = [piece for piece in pieces if piece.isdigit()]
    pattern = ".".join("{}" if piece.isdigit() else piece for piece in pieces)
    part, kind = pattern.rsplit(".", 1)
    found, end = (table[pattern], "") if pattern in table else (table[part], f".{kind}")
    return tuple(f"{name.format(*numbers)}{end}" for name in ((found,) if isinstance(found, str) else found))


def _share(stored: Container[str], names: Mapping[str, object]) -> float:
    """Of ``names``, those that are in ``stored``."""
    return sum(name in stored for name in names) / max(1, len(names))
