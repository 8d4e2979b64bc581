"""ModelContext: what every layer of a model is built with, besides the sizes in its config.

Knows: the group, the kernels, dtypes of parameters and cache, how experts lie on the group. Does not know: any layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from models.ops.contract import Ops
from parallel.layers.experts import ExpertSplit
from parallel.layers.shard import ShardContext


@dataclass(frozen=True, slots=True)
class ModelContext(ShardContext):
    """As ShardContext, with all kernels of a model. ``experts``: by default every rank has a share of each expert.
    ``kv_dtype``: of keys and values in the cache; None: ``dtype``.
    """

    kernels: Ops
    experts: ExpertSplit = field(default_factory=ExpertSplit)
    kv_dtype: torch.dtype | None = None
