"""The files of a Hugging Face model folder, as transformers 4.57 and later read them.

Knows: which keys go in which file, and how the demo model's chat turns are written.
Does not know: how the weights came to be.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from models.demo.network import Qwen3, Shape
from models.demo.tokens import END_OF_TEXT, PAD, TURN_END, TURN_START

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_weights(network: Qwen3, out: Path) -> None:
    """model.safetensors in bfloat16, replaced in one step so that a run that is cut short leaves a whole file."""
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in network.state_dict().items()}
    partial = out / "model.safetensors.tmp"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, out / "model.safetensors")


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_configuration(tokenizer: Tokenizer, shape: Shape, out: Path) -> None:
    """tokenizer.json, tokenizer_config.json, config.json and generation_config.json, as transformers reads them."""
    tokenizer.save(str(out / "tokenizer.json"))
    end, pad, turn_end = (tokenizer.token_to_id(text) for text in (END_OF_TEXT, PAD, TURN_END))
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.max_position_embeddings,
            "bos_token": None,
            "eos_token": END_OF_TEXT,
            "pad_token": PAD,
            "additional_special_tokens": [TURN_START, TURN_END],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(
        out / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(shape),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rope_scaling": None,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": shape.num_hidden_layers,
            "tie_word_embeddings": True,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": pad,
        },
    )
    write_json(
        out / "generation_config.json", {"eos_token_id": [end, turn_end], "pad_token_id": pad, "do_sample": False}
    )
