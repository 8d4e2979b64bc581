"""Whether a model's parts keep the promise of the deterministic mode, and which do not.

Knows: who declares what. Does not know: how a kernel or a sum keeps its promise; docs/determinism.md says what is
promised.
"""

from __future__ import annotations

from typing import cast

from models.layers.decoder import Decoder, DecoderLayer
from models.ops.contract import Ops

_OF_EXPERTS = ("route_top_k", "router_logits", "route_sigmoid", "expert_mlp")
_OF_SLOT_STATE = ("causal_conv", "gated_delta", "mamba2", "sigmoid_mul", "gated_add")  # and of what comes with it


def missing_invariance(model: Decoder) -> list[str]:
    """What of ``model`` gives other bits in another batch, by name; nothing where a token's bits are its own."""
    sparse = model.config.experts is not None
    recurrent = model.cache_layout.has_slot_state
    missing = missing_operations(model.kernels, sparse=sparse, recurrent=recurrent)
    found = [f"{name} of the {model.kernels.name} kernels" for name in missing]
    if not model.collectives.batch_invariant:
        found.append(f"sums between ranks by {type(model.collectives).__name__}")
    mixers = {
        type(mixer).__name__
        for layer in model.layers
        if (mixer := cast(DecoderLayer, layer).mixer) is not None and not mixer.batch_invariant
    }
    return found + [f"layers of {name}" for name in sorted(mixers)]


def missing_operations(kernels: Ops, *, sparse: bool = True, recurrent: bool = True) -> list[str]:
    """Operations that ``kernels`` do not declare batch-invariant; those of experts only of a ``sparse`` model, those
    over slot state only of a ``recurrent`` one.
    """
    declared = kernels.batch_invariant
    unused = (() if sparse else _OF_EXPERTS) + (() if recurrent else _OF_SLOT_STATE)
    return [name for name in kernels.operations if name not in unused and not declared.get(name, False)]
