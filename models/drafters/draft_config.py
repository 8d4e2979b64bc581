"""Configurations of drafters, read once from a drafter's config.json and checked against the target's.

Knows: how DFlash, MTP and EAGLE-3 checkpoints spell their facts, and which of their options are not implemented.
Does not know: files of weights, how a drafter computes, who asks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from models.block_pattern import BlockKind
from models.config import MTP_KEYS, FamilyConfig, ModelConfig, ModelConfigError, model_config, read_json_object
from models.config_reader import ConfigReader
from models.registry import model_class

DFLASH, MTP = "DFlashDraftModel", "MTPDraftModel"
EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # as SpecForge and SGLang, and as vLLM write it
_OTHER_EAGLE3 = (
    *("norm_before_fc", "fc_norm", "bias", "tie_word_embeddings", "parallel_drafting", "ptd_token_id"),
    *("use_moe", "num_experts", "use_mtp_layernorm"),
)
_ALWAYS = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")  # true where they stand
_STEP = "parallel_draft_step"  # tokens that a head drafts at once; 1 has no parallel heads, whatever their layers
_EAGLE_KEYS = frozenset(
    ["eagle_aux_hidden_state_layer_ids", "next_layer_regular", _STEP, "parallel_draft_heads_num_layers", *_ALWAYS]
)
# What ModelConfig does not read of a drafter, or would refuse in a target.
_OF_DRAFTERS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
OTHER_DRAFTERS = (
    'type "model": the folder of an MTP layer for this target, or "method": "ngram", in --speculative-config'
)
_LATER_VARIANTS = ("conv_", "selector_", "projector_")
_DFLASH_KEYS = frozenset(
    [
        *("target_layer_ids", "mask_token_id", "mask_token", "block_size", "causal", "use_swa", "swa_window_size"),
        *("attention_sink_bias", "attention_value_scale", "use_aux_hidden_state"),
        *("output_multiplier", "final_logit_softcapping"),  # they do not change which token is the best
    ]
)


class _InFolder(ABC):
    """A configuration that stands in a folder's config.json."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """From the parsed content of config.json. Raises ValueError."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read ``folder``/config.json. Raises ModelConfigError naming file and key."""
        path, config = _read(folder)
        try:
            return cls.from_dict(config)
        except ValueError as error:
            raise ModelConfigError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class BlockView:
    """What the rows of a block see in one layer: all context and the whole block; with ``causal`` no row of the block
    after their own; with ``window`` only tokens less than so many positions away."""

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DFlashConfig(_InFolder):
    """A block drafter. ``model``: its layers' sizes. ``target_layer_ids``: layers of the target, from 0, whose output
    it reads, in the order of its checkpoint. ``block_size``: most tokens of a block, the known first one included.
    ``views``: one a layer. ``target_layers``: of the model that it was trained for; None where its config is silent.
    ``draft_vocab_size``: ids that it drafts from, where its config says so (draft_vocabulary.py).
    """

    model: ModelConfig
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    views: tuple[BlockView, ...]
    target_layers: int | None = None
    draft_vocab_size: int | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DFlashConfig:
        """From the parsed content of config.json. Raises ValueError."""
        _require_architecture(config, DFLASH)
        own = config.get("dflash_config") or {}
        if not isinstance(own, dict):
            raise ValueError(f"'dflash_config' must be an object, not {own!r}")
        _refuse_unimplemented(config, own)
        model = _model_config({**config, "is_causal": None})  # which _views reads
        read, read_own = ConfigReader(config), ConfigReader(own)
        target_layers = read.size("num_target_layers") if config.get("num_target_layers") is not None else None
        given = own.get("target_layer_ids", config.get("target_layer_ids"))
        ids = _layer_ids(given) if given is not None else default_layer_ids(target_layers, model.layers)
        block = own.get("block_size", config.get("block_size"))
        if block is None:
            raise ValueError("the key 'block_size' is missing, at the top level and in 'dflash_config'")
        block_size = ConfigReader({"block_size": block}).size("block_size", most=1024)
        if block_size < 2:
            raise ValueError(f"'block_size' is {block_size}, but a block has a known token and at least one to guess")
        mask = own.get("mask_token_id", config.get("mask_token_id"))
        if mask is None:
            named = own.get("mask_token")
            hint = f"; 'mask_token' {named!r} alone does not say it" if named is not None else ""
            raise ValueError(f"the key 'mask_token_id' is missing in 'dflash_config'{hint}")
        if not isinstance(mask, int) or isinstance(mask, bool) or mask < 0:
            raise ValueError(f"'mask_token_id' must be a token id, not {mask!r}")
        read_own.flag("use_aux_hidden_state")
        views = _views(config, own, model.layers)
        return cls(model, ids, mask, block_size, views, target_layers, _draft_vocab_size(config))

    def check_target(self, target: ModelConfig) -> None:
        """ValueError, with both values, where it cannot draft for ``target``."""
        _check_shared(self.model, target, "DFlash drafter")
        if self.mask_token_id >= target.vocab_size:
            raise ValueError(
                f"the DFlash drafter's 'mask_token_id' is {self.mask_token_id}, but the target's vocabulary has "
                f"{target.vocab_size} ids, of which it reads the embedding; use the drafter made for this target"
            )
        missing = [number for number in self.target_layer_ids if number >= target.layers]
        if missing:
            raise ValueError(
                f"the DFlash drafter reads the target's layers {list(self.target_layer_ids)}, but the target has "
                f"{target.layers} layers, 0 to {target.layers - 1}: there is no layer {missing[0]}; "
                f"use the drafter made for this target"
            )
        if self.target_layers is not None and self.target_layers != target.layers:
            raise ValueError(
                f"the DFlash drafter was made for a target of {self.target_layers} layers ('num_target_layers'), but "
                f"the target has {target.layers}; use the drafter made for this target"
            )


@dataclass(frozen=True, slots=True)
class MTPConfig(_InFolder):
    """One multi-token-prediction layer. ``model``: its sizes, those of the target where it is the target's own; with
    experts its MLP is sparse. ``target_layers``, ``draft_vocab_size``: see DFlashConfig.

    ``zero_centred``: the checkpoint has its norms' weights less 1; ``output_gate``: every head's result is gated. Both
    as in Qwen3-Next, whose keys are ``norm_zero_centered`` (ours: there it goes without saying) and
    ``attn_output_gate``. ``layer``: its number under DeepSeek-V3's names, None under Qwen3-Next's. ``blocks``: kinds of
    its blocks, where it is of blocks as Nemotron-H's are. ``qk_norms``: see ModelConfig.
    """

    model: ModelConfig
    target_layers: int | None = None
    zero_centred: bool = False
    output_gate: bool = False
    draft_vocab_size: int | None = None
    layer: int | None = None
    blocks: tuple[BlockKind, ...] = ()
    qk_norms: bool = True

    @classmethod
    def of_target(cls, target: ModelConfig) -> MTPConfig:
        """The layer in the target's own checkpoint, under any of the known names (models/drafters/load.py).

        Raises ValueError where this target's checkpoints have none, or one that is not implemented.
        """
        layout = model_class(target.architecture).mtp_layout
        if layout is None:
            raise ValueError(
                f"an MTP layer of {target.architecture} itself is not implemented, only those of Qwen3-Next, Qwen3.5 "
                "and Nemotron-H are, and of Qwen3, Qwen3-MoE, GLM-4.5 and HY3 under DeepSeek-V3's names; "
                f"{OTHER_DRAFTERS}"
            )
        if target.mtp_layers > 1:
            raise ValueError(
                f"the target has {target.mtp_layers} MTP layers ({' or '.join(map(repr, MTP_KEYS))}), but only MTP of "
                f"one layer is implemented; {OTHER_DRAFTERS}"
            )
        if target.mtp_own_embeddings:
            raise ValueError(
                "'mtp_use_dedicated_embeddings' is true, but only MTP layers that share the target's embedding are "
                f"implemented; {OTHER_DRAFTERS}"
            )
        if layout == "nextn":
            return cls(target, target.layers, layer=target.layers, qk_norms=target.qk_norms)
        if layout == "blocks":
            blocks = target.mtp_blocks or ("attention", "moe")
            _check_blocks(blocks, target)
            return cls(target, target.layers, blocks=blocks)
        return cls(target, target.layers, zero_centred=True, output_gate=True)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> MTPConfig:
        """From the parsed content of config.json. Raises ValueError."""
        _require_architecture(config, MTP)
        read = ConfigReader(config)
        if read.size("num_hidden_layers", 1) != 1:
            raise ValueError(
                f"'num_hidden_layers' is {config['num_hidden_layers']}, but only MTP of one layer is implemented"
            )
        target_layers = read.size("num_target_layers") if config.get("num_target_layers") is not None else None
        model = _model_config({**config, "num_hidden_layers": 1})
        options = read.flag("norm_zero_centered"), read.flag("attn_output_gate")
        return cls(model, target_layers, *options, _draft_vocab_size(config))

    def check_target(self, target: ModelConfig) -> None:
        """ValueError, with both values, where it cannot draft for ``target``."""
        _check_shared(self.model, target, "MTP layer")
        if self.target_layers is not None and self.target_layers != target.layers:
            raise ValueError(
                f"the MTP layer was made for a target of {self.target_layers} layers ('num_target_layers'), but the "
                f"target has {target.layers}; use the MTP layer made for this target"
            )


@dataclass(frozen=True, slots=True)
class Eagle3Config(_InFolder):
    """An EAGLE-3 head. ``model``: its layer's sizes. ``layer_ids``: layers of the target, from 0, whose output it
    reads, ascending; None: those of the paper (``layers_of``). ``norm_before_residual``: the layer adds to the normed
    state. ``draft_vocab_size``: see DFlashConfig.
    """

    model: ModelConfig
    layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    draft_vocab_size: int | None = None

    @property
    def features(self) -> int:
        """Layers of the target that it reads."""
        return 3 if self.layer_ids is None else len(self.layer_ids)

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """Those of a target of so many layers. By default the second, the one before the middle, and the fourth last,
        as in EAGLE, SGLang and vLLM, which name the layers that follow these: 2, L // 2 and L - 3."""
        return self.layer_ids or (1, target_layers // 2 - 1, target_layers - 4)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """From the parsed content of config.json. Raises ValueError."""
        if config.get("architectures") not in [[name] for name in EAGLE3]:
            raise ValueError(
                f"'architectures' must be [{EAGLE3[0]!r}] for an EAGLE-3 head, not {config.get('architectures')!r}"
            )
        eagle = config.get("eagle_config") or {}
        if not isinstance(eagle, dict):
            raise ValueError(f"'eagle_config' must be an object, not {eagle!r}")
        _refuse_other_heads(config, eagle)
        read = ConfigReader(config)
        model = _model_config({**config, "num_hidden_layers": 1})
        ids = _aux_layers(config, eagle)
        return cls(model, ids, read.flag("norm_before_residual"), _draft_vocab_size(config))

    def check_target(self, target: ModelConfig) -> None:
        """ValueError, with both values, where it cannot draft for ``target``."""
        _check_shared(self.model, target, "EAGLE-3 head")
        ids = self.layers_of(target.layers)
        if sorted(set(ids)) != list(ids) or ids[0] < 0 or ids[-1] >= target.layers:
            raise ValueError(
                f"the EAGLE-3 head reads the target's layers {list(ids)}, but the target has {target.layers} layers, 0 "
                f"to {target.layers - 1}; use the EAGLE-3 head made for this target"
            )


def _aux_layers(config: Mapping[str, Any], eagle: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Under two keys that count differently: SGLang's, in ``eagle_config``, names the layers whose output is read; that
    of vLLM's speculators, at the top level, the layers whose input is (so 0 is the embedding)."""
    key = "eagle_aux_hidden_state_layer_ids"
    # An empty list is what exporters write where the layers are the paper's.
    inner, outer = (None if ids == [] else ids for ids in (eagle.get(key), config.get(key)))
    if inner is not None and outer is not None:
        raise ValueError(f"{key!r} stands at the top level ({outer}) and in 'eagle_config' ({inner}): leave one out")
    if inner is not None:
        return _layer_ids(inner, key)
    if outer is None:
        return None
    if 0 in (ids := _layer_ids(outer, key)):
        raise ValueError(f"{key!r} is {outer}, but the embedding (0) as a feature is not implemented")
    return tuple(number - 1 for number in ids)


def _refuse_other_heads(config: Mapping[str, Any], eagle: Mapping[str, Any]) -> None:
    """What an EAGLE-3 config may ask for and is not implemented, by name."""
    layers = ConfigReader(config).size("num_hidden_layers", 1)
    if layers != 1:
        raise ValueError(f"'num_hidden_layers' is {layers}, but only EAGLE-3 heads of one layer are implemented")
    hidden, wanted = config.get("hidden_size"), config.get("target_hidden_size")
    if wanted is not None and wanted != hidden:
        raise ValueError(
            f"'target_hidden_size' is {wanted}, but 'hidden_size' {hidden}: only heads as wide as their target are "
            "implemented"
        )
    for name in _OTHER_EAGLE3:
        if config.get(name) or eagle.get(name):
            raise ValueError(f"{name!r} is {config.get(name) or eagle.get(name)!r}, which is not implemented")
    unknown = sorted(key for key, value in eagle.items() if value and key not in _EAGLE_KEYS)
    if unknown:
        raise ValueError(f"'eagle_config' has keys that are not understood: {', '.join(unknown)}")
    if ConfigReader(eagle).number(_STEP, 1) > 1:
        raise ValueError(
            f"{_STEP!r} is {eagle[_STEP]}, but only EAGLE-3 heads that guess one token at a time are implemented"
        )
    for name in _ALWAYS:
        if eagle.get(name) is False:
            raise ValueError(f"{name!r} is false, but only EAGLE-3 heads with it are implemented")
    types = config.get("layer_types") or []
    if not isinstance(types, list):
        raise ValueError(f"'layer_types' must be a list, not {types!r}")
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    if windowed or any(kind != "full_attention" for kind in types):
        raise ValueError(
            f"'sliding_window' is {config.get('sliding_window')!r}, but EAGLE-3 heads with a window are not implemented"
        )
    if ConfigReader(config).number("logit_scale", 1.0) != 1.0:
        raise ValueError(f"'logit_scale' is {config['logit_scale']}, but only 1 is implemented")


def _check_blocks(blocks: Sequence[BlockKind], target: ModelConfig) -> None:
    """Of an MTP layer: what keeps entries comes first, and nothing keeps state."""
    if blocks[0] != "attention" or {"attention", "mamba"} & set(blocks[1:]):
        raise ValueError(
            f"the blocks of the MTP layer are {', '.join(blocks)} ('mtp_hybrid_override_pattern'), but only attention "
            f"followed by MLPs or experts ('*E', '*-', ...) is implemented; {OTHER_DRAFTERS}"
        )
    if "moe" in blocks and target.experts is None:
        raise ValueError(
            f"the blocks of the MTP layer are {', '.join(blocks)} ('mtp_hybrid_override_pattern'), but config.json "
            f"describes no experts for a block of the model, of which it would have the sizes; {OTHER_DRAFTERS}"
        )


Config = TypeVar("Config", DFlashConfig, MTPConfig, Eagle3Config)


def default_layer_ids(target_layers: int | None, layers: int) -> tuple[int, ...]:
    """The target's layers that a drafter of so many layers reads where its config names none. Raises ValueError.

    The middle one for a single layer; else spread evenly from layer 1 to the third last.
    """
    if target_layers is None:
        raise ValueError("neither 'target_layer_ids' nor 'num_target_layers' says which layers of the target it reads")
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))


def _read(folder: str | Path) -> tuple[Path, dict[str, Any]]:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelConfigError(
            f"{folder} holds no config.json; name a drafter's folder in --speculative-config 'model'"
        )
    return path, read_json_object(path)


def _require_architecture(config: Mapping[str, Any], wanted: str) -> None:
    if config.get("architectures") != [wanted]:
        own = '; for the layer in the target\'s own checkpoint leave "model" out' if wanted == MTP else ""
        raise ValueError(
            f"'architectures' must be [{wanted!r}] for this kind of drafter, not {config.get('architectures')!r}{own}"
        )


def _model_config(config: Mapping[str, Any]) -> ModelConfig:
    plain = {key: value for key, value in config.items() if key not in _OF_DRAFTERS}
    return model_config(plain, FamilyConfig(), of_drafter=True)


def _draft_vocab_size(config: Mapping[str, Any]) -> int | None:
    """None if it drafts from all ids."""
    if config.get("draft_vocab_size") is None:
        return None
    size, whole = ConfigReader(config).size("draft_vocab_size"), ConfigReader(config).size("vocab_size")
    if size > whole:
        raise ValueError(f"'draft_vocab_size' is {size}, but 'vocab_size' {whole}: a draft vocabulary is a part of it")
    return size


def _refuse_unimplemented(config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for key, value in (*config.items(), *own.items()):
        if key.startswith(_LATER_VARIANTS) and value:
            raise ValueError(f"{key!r} is {value!r}: it belongs to a later form of DFlash that is not implemented")
    unknown = sorted(own.keys() - _DFLASH_KEYS - {key for key in own if key.startswith(_LATER_VARIANTS)})
    if unknown:
        raise ValueError(f"'dflash_config' has keys that are not understood: {', '.join(unknown)}")
    if own.get("attention_sink_bias"):
        raise ValueError("'attention_sink_bias' is not implemented")
    if ConfigReader(own).number("attention_value_scale", 1.0) != 1.0:
        raise ValueError(f"'attention_value_scale' is {own['attention_value_scale']}, but only 1 is implemented")
    if own.get("use_aux_hidden_state") is False:
        raise ValueError("'use_aux_hidden_state' is false, but drafters without the target's features are unknown here")
    if ConfigReader(own).number("output_multiplier", 1.0) <= 0:
        raise ValueError(f"'output_multiplier' must be positive, not {own['output_multiplier']!r}")


def _views(config: Mapping[str, Any], own: Mapping[str, Any], layers: int) -> tuple[BlockView, ...]:
    """Of each layer. A sliding layer is causal unless the config says otherwise; one that sees everything is not, nor
    one that slides by ``use_swa`` alone."""
    types = config.get("layer_types")
    if types is None:
        types = ["full_attention"] * layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise ValueError(
            f"'layer_types' must name one of {', '.join(known)} for each of {layers} layers, not {types!r}"
        )
    # As vLLM reads it: exporters write "full_attention" for every layer of such drafters, too.
    all_slide = ConfigReader(own).flag("use_swa") and "sliding_attention" not in types
    if all_slide:
        types = ["sliding_attention"] * layers
    window = None
    if "sliding_attention" in types:
        given = {"sliding_window": own.get("swa_window_size") or config.get("sliding_window")}
        window = ConfigReader(given).size("sliding_window")
    said = config.get("is_causal", own.get("causal"))
    if said is not None and not isinstance(said, bool):
        raise ValueError(f"'is_causal' must be true or false, not {said!r}")
    slides = [kind == "sliding_attention" for kind in types]
    return tuple(
        BlockView(said if said is not None else sliding and not all_slide, window if sliding else None)
        for sliding in slides
    )


def _layer_ids(given: Any, key: str = "target_layer_ids") -> tuple[int, ...]:
    if (
        not isinstance(given, list)
        or not given
        or any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in given)
    ):
        raise ValueError(f"{key!r} must list layer numbers from 0, not {given!r}")
    if sorted(set(given)) != given:
        raise ValueError(f"{key!r} must ascend, which {given!r} does not")
    return tuple(given)


def _check_shared(drafter: ModelConfig, target: ModelConfig, what: str) -> None:
    """Embedding and head are the target's, so their sizes must be the drafter's."""
    for key in ("hidden_size", "vocab_size"):
        own, its = getattr(drafter, key), getattr(target, key)
        if own != its:
            raise ValueError(
                f"the {what} has {key!r} {own}, but the target has {its}, and the two share embedding and head; "
                f"use the {what} made for this target"
            )
    if target.residual_scale != 1.0:  # whose residual stream is held divided by it
        raise ValueError(
            f"the {what} reads embeddings and residual streams, which {target.architecture} scales "
            f'(\'residual_multiplier\' {target.residual_scale:g}); use "method": "ngram"'
        )


def for_lengths(config: Config, max_length: int) -> Config:
    """The same drafter with positions for sequences of the target's length, where its own config has fewer."""
    longest = max(config.model.max_length, max_length)
    return replace(config, model=replace(config.model, max_length=longest))
