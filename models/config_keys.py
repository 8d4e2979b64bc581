"""Keys of config.json by name: those that Lockstride reads, and those that change nothing that it computes.

Knows: the keys of the families that open, of transformers 4 and 5, and of tools that write checkpoints. Does not know:
what a key means (models/config.py and the files that it asks), which values are refused.

A key that is on no list may change what a model computes, so it is refused unless its value is null, false, 0 or
empty. A key of another family counts as unknown: Llama reads no number of experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

_READ: Final = """architectures attention_bias bos_token_id compression_config dtype dual_chunk_attention_config
    eos_token_id head_dim hidden_act hidden_size intermediate_size is_causal layer_types max_position_embeddings
    max_window_layers mlp_bias mtp_num_hidden_layers mtp_use_dedicated_embeddings num_attention_heads
    num_hidden_layers num_key_value_heads num_nextn_predict_layers original_max_position_embeddings
    partial_rotary_factor quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta rotary_dim
    sliding_window tie_word_embeddings torch_dtype use_sliding_window vocab_size"""
_EXPERTS: Final = """decoder_sparse_step mlp_only_layers moe_intermediate_size n_group n_shared_experts norm_topk_prob
    num_experts num_experts_per_tok num_local_experts num_shared_experts routed_scaling_factor scoring_func
    shared_expert_intermediate_size topk_group topk_method use_routing_bias"""
_DELTA: Final = """attn_output_gate full_attention_interval linear_attn_output_gate linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_ssm_dtype"""
_NEMOTRON: Final = """attention_head_dim conv_kernel hybrid_override_pattern layer_norm_epsilon layers_block_type
    mamba_head_dim mamba_hidden_act mamba_num_heads mamba_proj_bias mamba_ssm_cache_dtype mlp_hidden_act moe_latent_size
    moe_shared_expert_intermediate_size mtp_hybrid_override_pattern mtp_layers_block_type n_groups
    n_routed_experts residual_in_fp32 ssm_state_size time_step_limit use_bias use_conv_bias"""
# Part of an architecture's name -> keys of such families.
_OF_FAMILIES: Final[Mapping[str, frozenset[str]]] = {
    "Moe": frozenset(_EXPERTS.split()),
    "Mixtral": frozenset(_EXPERTS.split()),
    "Qwen3Next": frozenset(f"{_EXPERTS} {_DELTA}".split()),
    "Qwen3_5": frozenset(f"{_EXPERTS} {_DELTA}".split()),
    "NemotronH": frozenset(f"{_EXPERTS} {_NEMOTRON}".split()),
}
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


def _is_known(key: str, architecture: str) -> bool:
    """Whether models of ``architecture`` read ``key``, or it changes nothing. transformers' own keys begin with _."""
    if key in _ALWAYS or key.startswith(("_", "transformers.js")):
        return True
    return any(part in architecture and key in keys for part, keys in _OF_FAMILIES.items())


def refuse_unknown(config: Mapping[str, Any], architecture: str, checked: Collection[str]) -> None:
    """Raises ValueError, with name and value, for a key that is on no list and that is set. ``checked``: keys whose
    values have been found to change nothing."""
    for key, value in config.items():
        if _is_set(value) and key not in checked and not _is_known(key, architecture):
            raise ValueError(
                f"{key!r} is {value!r}, a key that {architecture} is not known to have; remove it from config.json if "
                "it does not change what the model computes"
            )
