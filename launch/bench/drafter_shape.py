"""What a drafter reads and computes, from its configuration: the shape that the floor of a round is made from.

Knows: which parts of an MTP layer, a DFlash or an EAGLE-3 drafter a guess meets, and which it needs to be shown tokens.
Does not know: floors (roofline.py), weights. Norms, biases and gates of shared experts are left out.
"""

from __future__ import annotations

from launch.bench.roofline import DrafterShape
from models.config import ModelConfig
from models.drafters.draft_config import DFlashConfig, Eagle3Config, MTPConfig
from models.drafters.draft_vocabulary import chosen_ids
from runtime.speculative_config import SpeculativeConfig


def drafter_shape(config: SpeculativeConfig, target: ModelConfig) -> DrafterShape | None:
    """Of what guesses for ``target``; None for methods without weights. Raises ModelConfigError and ValueError."""
    draft: MTPConfig | DFlashConfig | Eagle3Config
    if config.method == "mtp":
        draft = MTPConfig.of_target(target) if config.model is None else MTPConfig.from_folder(config.model)
    elif config.method == "dflash" and config.model is not None:
        draft = DFlashConfig.from_folder(config.model)
    elif config.method == "eagle3" and config.model is not None:
        draft = Eagle3Config.from_folder(config.model)
    else:
        return None
    ids = target.vocab_size
    if config.token_map is not None:
        ids = len(chosen_ids(config.token_map, target.vocab_size))
    return shape_of(draft, draft.draft_vocab_size or ids)


def shape_of(draft: MTPConfig | DFlashConfig | Eagle3Config, ids: int) -> DrafterShape:
    """``ids``: those that it guesses among."""
    if isinstance(draft, DFlashConfig):
        return _of_dflash(draft, ids)
    return _of_eagle3(draft, ids) if isinstance(draft, Eagle3Config) else _of_mtp(draft, ids)


def _of_mtp(draft: MTPConfig, ids: int) -> DrafterShape:
    sizes = draft.model
    hidden, experts = sizes.hidden_size, sizes.experts
    kinds = draft.blocks[1:] if draft.blocks else ("mlp" if experts is None else "moe",)
    gated = 2 if draft.blocks else 3  # matrices of an MLP: of blocks it has no gate
    fc = 2 * hidden * hidden
    dense = fc + _attention(sizes, hidden, gates=int(draft.output_gate))
    dense += kinds.count("mlp") * gated * hidden * sizes.intermediate_size
    expert = 0
    sparse = kinds.count("moe")
    if sparse:
        assert experts is not None
        gated = 3 if experts.activation == "swiglu" else 2
        dense += sparse * hidden * (experts.count + gated * experts.shared_size)
        expert = sparse * gated * hidden * experts.intermediate_size
    return DrafterShape(
        dense=dense,
        head=ids * hidden,
        shown=fc + hidden * _entry(sizes),
        kv_heads=sizes.kv_heads,
        kv_per_head=2 * sizes.head_dim,
        query_values=sizes.heads * sizes.head_dim,
        expert=expert,
        experts=experts.count if experts is not None and sparse else 0,
        experts_per_token=experts.per_token if experts is not None and sparse else 0,
    )


def _of_dflash(draft: DFlashConfig, ids: int) -> DrafterShape:
    sizes = draft.model
    hidden = sizes.hidden_size
    return DrafterShape(
        dense=sizes.layers * (_attention(sizes, hidden) + 3 * hidden * sizes.intermediate_size),
        head=ids * hidden,
        shown=hidden * (len(draft.target_layer_ids) * hidden + sizes.layers * _entry(sizes)),
        kv_heads=sizes.kv_heads,
        kv_per_head=2 * sizes.head_dim,
        query_values=sizes.heads * sizes.head_dim,
        views=tuple(view.window for view in draft.views),
        block=True,
    )


def _of_eagle3(draft: Eagle3Config, ids: int) -> DrafterShape:
    """Attention reads an embedding and a state side by side."""
    sizes = draft.model
    hidden = sizes.hidden_size
    return DrafterShape(
        dense=_attention(sizes, 2 * hidden) + 3 * hidden * sizes.intermediate_size,
        head=ids * hidden,
        shown=2 * hidden * _entry(sizes),
        kv_heads=sizes.kv_heads,
        kv_per_head=2 * sizes.head_dim,
        query_values=sizes.heads * sizes.head_dim,
        shown_whole=draft.features * hidden * hidden,
    )


def _attention(sizes: ModelConfig, inputs: int, gates: int = 0) -> int:
    """Weights of a layer's projections; ``gates``: a gate a query value."""
    queries = sizes.heads * sizes.head_dim
    return inputs * ((1 + gates) * queries + _entry(sizes)) + queries * sizes.hidden_size


def _entry(sizes: ModelConfig) -> int:
    """Values of one token's keys and values in one layer."""
    return 2 * sizes.kv_heads * sizes.head_dim
