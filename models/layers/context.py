"""ModelContext: what every layer of a model is built with, beside the sizes in its config.

Knows: the group, the kernels, the dtype of parameters, how experts lie on the group. Does not know: any layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from models.ops.contract import Ops
from parallel.layers.experts import ExpertSplit
from parallel.layers.shard import ShardContext


@dataclass(frozen=True, slots=True)
class ModelContext(ShardContext):
    """As ShardContext, with all kernels of a model. ``experts``: by default every rank has a share of each expert."""

    kernels: Ops
    experts: ExpertSplit = field(default_factory=ExpertSplit)
