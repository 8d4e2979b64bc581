"""Chat templates that write calls and reasoning as each family's does, and little else.

Knows: the form of the template in each checkpoint named. Does not know: parsers.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """``calls`` and ``reasoning``: the formats that are found, None for none."""

    source: str
    template: str
    calls: str | None
    reasoning: str | None


_IM = "<|im_start|>{{ m.role }}\n"
_ARGUMENT = "{{ v if v is string else v | tojson }}"
TEMPLATES = {
    "hermes": Family(
        "Qwen/Qwen3-8B",
        "{% for m in messages %}"
        + _IM
        + "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n"
        "</think>\n\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        "hermes",
        "qwen3",
    ),
    "qwen3_coder": Family(
        "Qwen/Qwen3.5-35B-A3B, nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B",
        "{% for m in messages %}" + _IM + "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
        "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
        + _ARGUMENT
        + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        "qwen3_coder",
        "qwen3",
    ),
    "qwen3-coder, no reasoning": Family(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "{% for m in messages %}" + _IM + "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
        "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
        + _ARGUMENT
        + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "qwen3_coder",
        None,
    ),
    "glm-4.5": Family(
        "zai-org/GLM-4.5",
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think>"
        "{{ m.reasoning_content or '' }}</think>\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}\n"
        "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>" + _ARGUMENT + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "glm45",
        "qwen3",
    ),
    "glm-4.7": Family(
        "zai-org/GLM-4.7",
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
        "<arg_value>" + _ARGUMENT + "</arg_value>{% endfor %}</tool_call>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
        "glm45",
        "qwen3",
    ),
    "minimax-m2": Family(
        "MiniMaxAI/MiniMax-M2",
        "{% for m in messages %}]~b]{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}\n<minimax:tool_call>\n"
        '{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n'
        '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">' + _ARGUMENT + "</parameter>\n"
        "{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n{% endfor %}"
        "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}",
        "minimax_m2",
        "qwen3",
    ),
    "llama-3": Family(
        "meta-llama/Llama-3.1-8B-Instruct",
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}"
        '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
        "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "llama3_json",
        None,
    ),
    "mistral": Family(
        "mistralai/Mistral-7B-Instruct-v0.3",
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}"
        "[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids of nine') }}"
        '{% endif %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
        '"id": "{{ c.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}'
        "{% endfor %}",
        "mistral",
        None,
    ),
    "mistral since version 11": Family(
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
        "{% endfor %}</s>{% endif %}{% endfor %}",
        "mistral",
        None,
    ),
    "seed-oss": Family(
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "{% for m in messages %}{{ bos_token }}{{ m.role }}\n{% if m.reasoning_content %}<seed:think>"
        "{{ m.reasoning_content }}</seed:think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}\n"
        "<seed:tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
        "<parameter={{ k }}>" + _ARGUMENT + "</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}",
        "seed_oss",
        "seed_oss",
    ),
    "gemma-4": Family(
        "google/gemma-4-26B-A4B-it",
        "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ '{' }}"
        "{% for k, v in c.function.arguments | dictsort %}{{ ',' if not loop.first }}{{ k }}:"
        "{{ '<|\"|>' ~ v ~ '<|\"|>' if v is string else v }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}"
        "{{ m.content }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}",
        "gemma4",
        None,  # by its tokens alone
    ),
    "gemma-3": Family(
        "google/gemma-3-27b-it",
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n"
        "{% endif %}",
        None,
        None,
    ),
    "gpt-oss": Family(
        "openai/gpt-oss-20b",
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %} to=functions."
        "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
        "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "openai",
        "openai_gptoss",
    ),
    "deepseek-v3.1": Family(
        "deepseek-ai/DeepSeek-V3.1",
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜></think>"
        "{{ m.content or '' }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
        "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>"
        "{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}",
        "deepseek_v3",
        None,
    ),
    "R1 distilled": Family(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
        None,
        "qwen3",
    ),
    "calls in a form of its own": Family(
        "none",
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} WITH "
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
        None,
        None,
    ),
    "calls are not rendered": Family(
        "none", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None, None
    ),
    "calls are refused": Family(
        "none",
        "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}"
        "{% endfor %}",
        None,
        None,
    ),
}
