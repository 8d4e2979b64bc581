"""Typed reads of a parsed config.json.

Knows: that a null counts as absent, how a wrong value is refused, where the text part of a model for images stands;
keys of transformers 4 and 5 and of tools that write checkpoints, which are read of every family or change nothing.
Does not know: keys of one family (FamilyConfig.reads).

A key that is on no list may change what a model computes, so it is refused unless its value is null, false, 0 or
empty. A key of another family counts as unknown: Llama reads no number of experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

_READ: Final = """architectures attention_bias bos_token_id compression_config dtype dual_chunk_attention_config
    eos_token_id head_dim hidden_act hidden_size intermediate_size is_causal layer_types max_position_embeddings
    max_window_layers mlp_bias mtp_num_hidden_layers mtp_use_dedicated_embeddings num_attention_heads
    num_hidden_layers num_key_value_heads num_nextn_predict_layers original_max_position_embeddings
    partial_rotary_factor quantization_config rms_norm_eps rope_interleave rope_interleaved rope_parameters rope_scaling
    rope_theta rotary_dim sliding_window tie_word_embeddings torch_dtype use_sliding_window vocab_size"""
# Training, dropout, tokens and texts, sampling defaults that transformers 4 kept here, how kernels are called, derived
# sizes of Mamba-2, and the vision part of models whose text part opens.
_IDLE: Final = """attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map
    bad_words_ids base_model begin_suppress_tokens bos_token chunk_size chunk_size_feed_forward classifier_dropout
    decoder_start_token_id diversity_penalty do_sample early_stopping embd_pdrop encoder_no_repeat_ngram_size
    eos_token expand exponential_decay_length_penalty finetuned finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing hidden_dropout hidden_dropout_prob id2label image_token_id
    initializer_range is_decoder keys_to_ignore_at_inference label2id language_model_only length_penalty
    mamba_chunk_size max_length max_sequence_length min_length model_max_length model_name model_type
    moe_shared_expert_overlap no_repeat_ngram_size num_beam_groups num_beams num_logits_to_keep num_return_sequences
    output_attentions output_hidden_states output_router_logits output_scores pad_token pad_token_id prefix
    pretraining_tp problem_type remove_invalid_values repetition_penalty rescale_prenorm_residual resid_pdrop
    return_dict return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id seq_length
    suppress_tokens task_specific_params temperature time_step_floor time_step_max time_step_min time_step_rank
    tokenizer_class tokenizer_model_max_length top_k top_p torchscript transformers_version typical_p unsloth_fixed
    unsloth_version use_bfloat16 use_cache use_flash_attention_2 use_flash_attn use_mamba_kernels video_token_id
    vision_config vision_end_token_id vision_start_token_id vision_token_id"""
_ALWAYS: Final = frozenset(f"{_READ} {_IDLE}".split())


def _is_set(value: object) -> bool:
    return any(map(_is_set, value.values())) if isinstance(value, Mapping) else bool(value)


def unlisted(config: Mapping[str, Any], more: Collection[str]) -> list[str]:
    """Names of the set keys that are neither here nor in ``more``. transformers' own begin with _."""
    known = {*_ALWAYS, *more}
    return [
        key
        for key, value in config.items()
        if _is_set(value) and key not in known and not key.startswith(("_", "transformers.js"))
    ]


# Option -> the values under which it changes nothing here, and what it would ask for otherwise.
Neutral = Mapping[str, tuple[tuple[object, ...], str]]
_HUGE = 1e30  # no number of a model is larger; NaN and infinity, which Python's JSON accepts, are not smaller


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Typed reads of a parsed JSON object; a null counts as absent. Every read raises ValueError naming the key."""

    config: Mapping[str, Any]

    def size(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A number of things: from 1 to ``most``."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise ValueError(f"the key {key!r} is missing")
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key!r} must be a positive integer, not {value!r}")
        if value > most:
            raise ValueError(f"{key!r} must be at most {most}, not {value}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not -_HUGE < value < _HUGE:
            raise ValueError(f"{key!r} must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{key!r} must be true or false, not {value!r}")
        return value


def refuse_others(config: Mapping[str, Any], neutral: Neutral) -> None:
    """Raises ValueError, with name and value, for an option that is not absent, null or neutral."""
    for key, (values, meaning) in neutral.items():
        if (value := config.get(key)) is not None and value not in values:
            only = f"only {values[0]!r} is implemented" if values else "this is not implemented"
            raise ValueError(f"{key!r} is {value!r}, which asks for {meaning}; {only}")


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model in one that reads images, too. Raises ValueError."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"'text_config' must be an object, not {text!r}")
    for key in ("rope_parameters", "rope_scaling"):
        of_text = [text.get("rope_parameters"), text.get("rope_scaling")]
        if config.get(key) and config[key] not in of_text:
            raise ValueError(
                f"{key!r} {config[key]!r} stands beside 'text_config', which says {of_text[0] or of_text[1]!r}; "
                "put what you mean into its 'rope_parameters' and remove the outer one"
            )
    found = {**text, **{key: config[key] for key in ("architectures", "quantization_config") if key in config}}
    if config.get("tie_word_embeddings") is not None:
        found["tie_word_embeddings"] = config["tie_word_embeddings"]
    for key in ("dtype", "torch_dtype", "eos_token_id", "bos_token_id"):
        if found.get(key) is None and config.get(key) is not None:
            found[key] = config[key]
    return found
