"""What a model, its drafter and its kernels allow of a configuration; else ConfigError says what to type.

Knows: lengths, vocabularies, draft windows, which parts keep the promise of docs/determinism.md.
Does not know: memory, devices, the order of a start.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from models.config import ModelConfig
from models.kernels.traits import FLOAT8_CAPABILITY, DeviceTraits
from models.kv_group import FP8, keys_and_values
from models.layers.decoder import Decoder, DecoderLayer
from models.ops.contract import Ops
from runtime.config import ConfigError, EngineConfig
from runtime.engine import ServedModel
from runtime.frontend.tokenizer_files import TokenizerFiles
from runtime.schedule.config import StepLimits
from runtime.speculate.methods import check_drafter
from runtime.speculative_config import SpeculativeConfig

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


def served_model(config: EngineConfig, model: ModelConfig) -> ServedModel:
    """What requests are checked against. Raises ConfigError for a configuration that the model's cannot have."""
    ends = TokenizerFiles(config.model).end_token_ids(model.vocab_size)
    ends = tuple(dict.fromkeys((*model.eos_token_ids, *ends)))
    stored = None if model.quantization is None else model.quantization.label
    served = ServedModel(model.vocab_size, _max_model_len(config, model), ends, quantization=stored)
    if config.speculation is not None:
        if (config.speculation.tree_top_k or 0) > served.vocab_size:
            raise ConfigError(
                f"tree_top_k is {config.speculation.tree_top_k}, but the vocabulary of {config.model} has "
                f'{served.vocab_size} ids: type "tree_top_k": {served.vocab_size} or less'
            )
        check_drafter(config.speculation, model, target_folder=Path(config.model), load_format=config.load_format)
    return served


def check_model(config: EngineConfig, model: Decoder, limits: StepLimits) -> None:
    """Raises ConfigError for a model without batch invariance, or with which speculation is impossible."""
    if config.deterministic:
        require_invariance(model)
    if config.speculation is not None:
        _require_windows(config.speculation, model, limits)


def require_invariance(model: Decoder) -> None:
    """Raises ConfigError if a part of the model gives other bits in another batch."""
    if missing := missing_invariance(model):
        raise ConfigError(
            f"deterministic is on, but these are not batch-invariant: {', '.join(missing)}: leave out --deterministic"
        )


def _require_windows(config: SpeculativeConfig, model: Decoder, limits: StepLimits) -> None:
    """Raises ConfigError if the model's sequences have no room for a draft window, or cannot take one back."""
    if model.irrevocable:
        raise ConfigError(
            f"speculative_config is {config}, but {', '.join(model.irrevocable)} of {model.config.architecture} keeps "
            "state of fixed size that cannot be taken back where a proposal is refused: leave out --speculative-config"
        )
    if limits.window >= limits.max_model_len and config.tree_size is not None:
        raise ConfigError(
            f"tree_size is {config.tree_size}, so that a step has as many tokens a request, but max_model_len is "
            f"{limits.max_model_len}: type a longer --max-model-len, or a smaller tree_size"
        )
    if config.width >= limits.max_model_len:
        raise ConfigError(
            f"num_speculative_tokens is {config.num_speculative_tokens}, so that a step has {config.width} tokens a "
            f"request, but max_model_len is {limits.max_model_len}: type a longer --max-model-len, or "
            f'"num_speculative_tokens": {max(1, limits.max_model_len - 2)} or less'
        )


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_length
    if wanted > model.max_length:
        raise ConfigError(
            f"max_model_len is {wanted}, but the positions of {config.model} end at {model.max_length}: type "
            f"--max-model-len {model.max_length}"
        )
    return wanted


def check_windows(limits: StepLimits, model: ModelConfig, ranks: int, kernels: Ops, kv_dtype: torch.dtype) -> None:
    """Raises ConfigError if attention has no room for the tokens of a row."""
    heads, kv_heads = -(-model.heads // ranks), max(1, model.kv_heads // ranks)
    tokens, most = limits.window, kernels.longest_window(heads, keys_and_values(kv_heads, model.head_dim, kv_dtype))
    if most is not None and tokens > max(most, 1):
        asked, fits = ("tree_size", most) if limits.tree else ("num_speculative_tokens", most - 1)
        raise ConfigError(
            f"rows bring {tokens} tokens to be verified, but attention of {model.heads} query heads over "
            f"{model.kv_heads} key heads of {model.head_dim} takes {most} at once: type "
            f'"{asked}": {fits} or less in --speculative-config'
        )


def kv_dtype(config: EngineConfig, dtype: torch.dtype, traits: DeviceTraits | None) -> torch.dtype:
    """Of the KV cache, where activations are ``dtype``. Raises ConfigError for what the GPU (``traits``; None: a CPU)
    has no kernels for."""
    wanted = {"auto": dtype, "bfloat16": torch.bfloat16}.get(config.kv_cache_dtype, FP8)
    if traits is None or wanted == dtype:
        return wanted
    flag = f"--kv-cache-dtype {config.kv_cache_dtype}"
    if wanted != FP8 or dtype == torch.float32:
        raise ConfigError(f"{flag} on GPUs needs another --dtype than {dtype}: type --dtype bfloat16")
    if traits.capability < FLOAT8_CAPABILITY:
        found = ".".join(map(str, traits.capability))
        raise ConfigError(f"{flag} needs compute capability 8.9 (Ada, Hopper) or later, not {found}: leave it out")
    if config.prefill_attention == "flashinfer":
        raise ConfigError(f"{flag} has no prefill attention in FlashInfer: type --prefill-attention triton")
    return wanted


def check_prefill(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError where FlashInfer is asked for, which cannot attend as some layer does."""
    if model.attention and config.prefill_attention == "flashinfer":
        raise ConfigError(
            f"{model.architecture} attends with windows, sinks, soft caps or a scale of its own, which prefill "
            "attention in FlashInfer does not take here: type --prefill-attention triton"
        )


def check_fp8(config: EngineConfig, traits: DeviceTraits | None) -> None:
    """Raises ConfigError where activations shall be FP8 codes, which the GPU (``traits``; None: a CPU) cannot
    multiply."""
    if config.fp8_activations == "always" and traits is not None and traits.capability < FLOAT8_CAPABILITY:
        found = ".".join(map(str, traits.capability))
        raise ConfigError(
            f"--fp8-activations always needs compute capability 8.9 (Ada, Hopper) or later, not {found}: leave it out"
        )
