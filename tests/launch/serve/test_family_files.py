"""Files of each family, small: where BOS comes from, which tokens end an answer, what a prompt of a chat is.

Knows: special tokens and the form of the template in each checkpoint named. Does not know: weights, real token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
from tokenizers import processors

from models.registry import config_from_folder
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.tokenizer import Tokenizer
from tests.launch.serve.parsers.templates import TEMPLATES
from tests.models.tiny_checkpoint import TINY
from tests.runtime.frontend.small_tokenizers import byte_level_backend

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Files(NamedTuple):
    """``ends``: of generation_config.json, by name; config.json has the last one alone. ``first``: what the tokenizer
    puts before a text, which templates write themselves."""

    source: str
    template: str
    prompt: str
    ends: tuple[str, ...]
    first: str = ""


FAMILIES = {
    "qwen3": Files(
        "Qwen/Qwen3-8B",
        CHATML,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        ("<|im_end|>", "<|endoftext|>"),
    ),
    "glm-4.5": Files(
        "zai-org/GLM-4.5",
        TEMPLATES["glm-4.5"].template,
        "[gMASK]<sop><|user|>\nhi<|assistant|>",
        ("<|observation|>", "<|user|>", "<|endoftext|>"),
        "[gMASK]<sop>",
    ),
    "gpt-oss": Files(
        "openai/gpt-oss-20b",
        TEMPLATES["gpt-oss"].template,
        "<|start|>user<|message|>hi<|end|><|start|>assistant",
        ("<|endoftext|>", "<|call|>", "<|return|>"),
    ),
    "gemma-3": Files(
        "google/gemma-3-27b-it",
        TEMPLATES["gemma-3"].template,
        "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
        ("<end_of_turn>", "<eos>"),
        "<bos>",
    ),
    "gemma-4": Files(
        "google/gemma-4-26B-A4B-it, without thinking",
        "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn>model\n{% if not enable_thinking | default(false) %}"
        "<|channel>thought\n<channel|>{% endif %}{% endif %}",
        "<bos><|turn>user\nhi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
        ("<turn|>", "<eos>"),
        "<bos>",
    ),
    "minimax-m2": Files(
        "MiniMaxAI/MiniMax-M2",
        TEMPLATES["minimax-m2"].template,
        "]~b]user\nhi[e~[\n]~b]ai\n<think>\n",
        ("[e~[",),
    ),
    "mistral": Files(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        "{{ bos_token }}" + TEMPLATES["mistral since version 11"].template,
        "<s>[INST]hi[/INST]",
        ("</s>",),
        "<s>",
    ),
    "phi-4-mini": Files(
        "microsoft/Phi-4-mini-instruct",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|user|>hi<|end|><|assistant|>",
        ("<|end|>", "<|endoftext|>"),
    ),
    "hy3": Files(  # its template makes the marks with str.format
        "tencent/Hy3",
        "{% set of = ':opensource' %}{{ '<｜hy_begin_of_sentence{}｜>'.format(of) }}"
        "{{ '<｜reasoning_mode{}｜>reasoning_effort:'.format(of) }}{{ reasoning_effort | default('no_think') }}"
        "{% for m in messages %}{{ '<｜hy_User{}｜>'.format(of) }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜hy_Assistant{}｜><think{}>'.format(of, of) }}"
        "{% if reasoning_effort | default('no_think') == 'no_think' %}{{ '</think{}>'.format(of) }}{% endif %}"
        "{% endif %}",
        "<｜hy_begin_of_sentence:opensource｜><｜reasoning_mode:opensource｜>reasoning_effort:no_think"
        "<｜hy_User:opensource｜>hi<｜hy_Assistant:opensource｜><think:opensource></think:opensource>",
        ("<｜hy_eos:opensource｜>",),
    ),
    "seed-oss": Files(
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        TEMPLATES["seed-oss"].template,
        "<seed:bos>user\nhi<seed:eos><seed:bos>assistant\n",
        ("<seed:eos>",),
    ),
    "granite-4": Files(
        "ibm-granite/granite-4.0-h-small",
        "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        "<|start_of_role|>user<|end_of_role|>hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        ("<|end_of_text|>",),
    ),
    "smollm3": Files(
        "HuggingFaceTB/SmolLM3-3B",
        CHATML + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n{% endif %}",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        ("<|im_end|>",),
    ),
    "nemotron-3-nano": Files(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        CHATML + "{% if add_generation_prompt %}{{ '<think></think>' if enable_thinking is false else '<think>\\n' }}"
        "{% endif %}",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ("<|endoftext|>", "<|im_end|>"),
    ),
    "olmo-3": Files(
        "allenai/Olmo-3-7B-Think",
        CHATML + "{% if add_generation_prompt %}<think>{% endif %}",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>",
        ("<|endoftext|>", "<|im_end|>"),
    ),
    "glm-4": Files(
        "zai-org/GLM-4-9B-0414",
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "[gMASK]<sop><|user|>\nhi<|assistant|>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "[gMASK]<sop>",
    ),
    "ernie-4.5": Files(
        "baidu/ERNIE-4.5-0.3B-PT",
        "<|begin_of_sentence|>{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n"
        "{% else %}Assistant: {{ m.content }}<|end_of_sentence|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant: {% endif %}",
        "<|begin_of_sentence|>User: hi\nAssistant: ",
        ("</s>",),
    ),
}
BOS = {"seed-oss": "<seed:bos>", "mistral": "<s>", "gemma-3": "<bos>", "gemma-4": "<bos>"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_has_each_special_token_once_and_ends_where_the_family_s_does(name: str, tmp_path: Path) -> None:
    """Marks are one token each; the tokenizer adds none to what a template wrote, and all of them to a plain text."""
    family = FAMILIES[name]
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
    marks = [part for part in ("[gMASK]", "<sop>", "<bos>", "<s>") if part in family.first]
    backend.add_special_tokens([*marks, *family.ends, *([BOS[name]] if name in BOS else [])])
    ids = {mark: backend.get_vocab()[mark] for mark in (*marks, *family.ends)}
    if marks:
        single = " ".join([*marks, "$A"])
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(mark, ids[mark]) for mark in marks]
        )
    backend.save(str(tmp_path / "tokenizer.json"))
    said = {"chat_template": family.template, "eos_token": family.ends[-1]} | (
        {"bos_token": BOS[name]} if name in BOS else {}
    )
    ends = [ids[end] for end in family.ends]
    config = TINY | {"vocab_size": backend.get_vocab_size(), "eos_token_id": ends[-1]}
    for file, content in (
        ("tokenizer_config.json", said),
        ("config.json", config),
        ("generation_config.json", {"eos_token_id": ends}),
    ):
        (tmp_path / file).write_text(json.dumps(content))
    template, tokenizer = ChatTemplate.from_folder(tmp_path), Tokenizer.from_folder(tmp_path)
    assert template is not None
    text = template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == family.prompt
    chat = tokenizer.encode(text, add_special_tokens=False)
    firsts = [ids[mark] for mark in marks]
    assert [token for token in chat if token in firsts] == firsts == chat[: len(firsts)]
    assert [tokenizer.decode_with_special_tokens([token]) for token in ends] == list(family.ends)
    assert tokenizer.encode("hi")[: len(firsts)] == firsts
    assert tokenizer.encode("hi")[len(firsts) :] == tokenizer.encode("hi", add_special_tokens=False)
    assert config_from_folder(tmp_path).eos_token_ids == tuple(ends), "generation_config.json wins"
