"""Over how many tensor-parallel ranks a model can be split, and what to type where it cannot.

Knows: which numbers of a model a group's size must divide. Does not know: how anything is split (parallel/).
"""

from __future__ import annotations

from models.config import ModelConfig
from parallel.layers.shard import HeadShard, divisors


def require_legal_size(config: ModelConfig, size: int, *, whole_experts: bool = False, groups: int = 1) -> None:
    """Raise ValueError, naming the legal sizes, where the model cannot be split over ``size`` ranks.

    ``groups`` of that size share the experts, which are whole then.
    """
    if groups > 1 and config.experts is not None and config.experts.count % (groups * size):
        raise ValueError(
            f"{config.experts.count} experts cannot be split evenly over {groups} groups of {size} ranks; use a number "
            f"of ranks, in all, out of {divisors(config.experts.count)}"
        )
    legal = legal_sizes(config, whole_experts)
    if size in legal:
        return
    hint = ""
    if size in legal_sizes(config, not whole_experts):
        hint = ", or leave out --expert-parallel" if whole_experts else ", or type --expert-parallel"
    split = [f"{name} {number}" for name, number in _divided(config, whole_experts).items()]
    raise ValueError(
        f"{config.architecture} with {config.heads} heads, {config.kv_heads} key/value heads and {' and '.join(split)} "
        f"cannot be split over {size} tensor-parallel ranks; use a tensor-parallel size out of {legal}{hint}"
    )


def legal_sizes(config: ModelConfig, whole_experts: bool) -> list[int]:
    """Every group size that splits the model, ascending."""
    numbers = _divided(config, whole_experts).values()
    others = {spec.kv_heads for spec in config.attention} - {config.kv_heads}
    return [
        size
        for size in HeadShard.legal_sizes(config.heads, config.kv_heads)
        if all(size in HeadShard.legal_sizes(config.heads, kv_heads) for kv_heads in others)
        and all(number % size == 0 for number in numbers)
        and _splits_delta(config, size)
        and _splits_mamba(config, size)
    ]


def _splits_delta(config: ModelConfig, size: int) -> bool:
    """Value heads of gated delta nets are split; their key heads are split or replicated, as those of attention."""
    return config.delta is None or size in HeadShard.legal_sizes(config.delta.v_heads, config.delta.k_heads)


def _splits_mamba(config: ModelConfig, size: int) -> bool:
    """Ranks have whole heads of Mamba-2, and either whole groups or a part of one group's heads."""
    mamba = config.mamba
    return mamba is None or (mamba.heads % size == 0 and (mamba.groups % size == 0 or size % mamba.groups == 0))


def _divided(config: ModelConfig, whole_experts: bool) -> dict[str, int]:
    """What the group's size must divide, heads aside: name -> number."""
    experts = config.experts
    found = {}
    if config.delta is not None:
        found["linear-attention value heads"] = config.delta.v_heads
    dense = "mlp" in config.blocks if config.blocks else experts is None or len(experts.layers) < config.layers
    dense = dense or (experts is not None and experts.beside_mlp)
    if dense:
        found["intermediate size"] = config.intermediate_size
    if config.mamba is not None:
        found["Mamba-2 heads"] = config.mamba.heads
    if experts is not None and experts.shared_size:
        found["intermediate size of the shared expert"] = experts.shared_size
    if experts is not None and experts.layers and whole_experts:
        found["number of experts"] = experts.count
    elif experts is not None and experts.layers:
        found["intermediate size of an expert"] = experts.intermediate_size
    return found
