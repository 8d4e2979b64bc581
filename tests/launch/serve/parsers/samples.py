"""Answers as the models of each family write them, and what a client gets.

Knows: the form of each family's chat template, whose checkpoint is named. Does not know: parsers.

``{open}`` and the like are no placeholders: texts are as the models write them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}
ARGUMENTS = {"city": 'Bern "b" 12', "days": 3, "exact": True, "where": {"at": [1, {"x": "}"}]}}
JSON = '{"city": "Bern \\"b\\" 12", "days": 3, "exact": true, "where": {"at": [1, {"x": "}"}]}}'
CALLS = [("weather", ARGUMENTS), ("now", {})]


@dataclass(frozen=True)
class Sample:
    """``calls`` and ``reasoning``: names of formats. ``begun``: the prompt ends with the beginning of the reasoning.
    ``spelled``: what of the format's marks are pieces of ordinary words in that family's tokenizer."""

    source: str
    calls: str | None
    reasoning: str | None
    text: str
    content: str | None = None
    thought: str | None = None
    begun: bool = False
    found: list[tuple[str, Any]] = field(default_factory=lambda: CALLS)


SAMPLES = {
    "qwen3": Sample(
        "Qwen/Qwen3-8B",
        "hermes",
        "qwen3",
        f'<think>\nIs it far?\n\nNo.\n</think>\n\nLet me see.\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}'
        '\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        content="Let me see.\n",
        thought="Is it far?\n\nNo.",
    ),
    "qwen3 without words": Sample(
        "Qwen/Qwen3-4B-Thinking-2507",
        "hermes",
        "qwen3",
        f'Hm.\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call>',
        thought="Hm.",
        begun=True,
    ),
    "qwen3.5, the call ends the reasoning": Sample(
        "Qwen/Qwen3.5-27B",
        "qwen3_coder",
        "qwen3",
        'Hm.\n<tool_call>\n<function=weather>\n<parameter=city>\nBern "b" 12\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n<parameter=exact>\ntrue\n</parameter>\n<parameter=where>\n"
        '{"at": [1, {"x": "}"}]}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n'
        "</tool_call>",
        thought="Hm.",
        begun=True,
    ),
    "nemotron": Sample(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B",
        "qwen3_coder",
        "nemotron_v3",
        'Hm.</think>\nLet me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nBern "b" 12\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=where>\n"
        '{"at": [1, {"x": "}"}]}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n'
        "</tool_call>\n",
        content="Let me see.\n",
        thought="Hm.",
        begun=True,
    ),
    "glm-4.5": Sample(
        "zai-org/GLM-4.5-Air",
        "glm45",
        "glm45",
        '\n<think>Hm.</think>\nLet me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern "b" 12'
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true"
        '</arg_value>\n<arg_key>where</arg_key>\n<arg_value>{"at": [1, {"x": "}"}]}</arg_value>\n</tool_call>\n'
        "<tool_call>now\n</tool_call>",
        content="Let me see.\n",
        thought="Hm.",
    ),
    "glm-4.7": Sample(
        "zai-org/GLM-4.7",
        "glm47",
        "glm45",
        'Hm.</think><tool_call>weather<arg_key>city</arg_key><arg_value>Bern "b" 12</arg_value><arg_key>days</arg_key>'
        "<arg_value>3</arg_value><arg_key>exact</arg_key><arg_value>true</arg_value><arg_key>where</arg_key>"
        '<arg_value>{"at": [1, {"x": "}"}]}</arg_value></tool_call><tool_call>now</tool_call>',
        thought="Hm.",
        begun=True,
    ),
    "minimax-m2": Sample(
        "MiniMaxAI/MiniMax-M2",
        "minimax_m2",
        "minimax_m2",
        'Hm.\n</think>\n\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bern "b" 12</parameter>'
        '\n<parameter name="days">3</parameter>\n<parameter name="exact">true</parameter>\n<parameter name="where">'
        '{"at": [1, {"x": "}"}]}</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        thought="Hm.",
        begun=True,
    ),
    "minimax-m2, reasoning kept": Sample(
        "MiniMaxAI/MiniMax-M2",
        "minimax_m2",
        "minimax_m2_append_think",
        'Hm.\n</think>\n\n<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        content="<think>Hm.\n</think>\n\n",
        begun=True,
        found=[("now", {})],
    ),
    "llama-3": Sample(
        "meta-llama/Llama-3.1-8B-Instruct",
        "llama3_json",
        None,
        f'{{"name": "weather", "parameters": {JSON}}};{{"name": "now", "parameters": {{}}}}',
    ),
    "llama-3, with its tag": Sample(
        "meta-llama/Llama-3.3-70B-Instruct",
        "llama3_json",
        None,
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {JSON}}}; '
        '{"name": "now", "parameters": {}}',
    ),
    "mistral before version 11": Sample(
        "mistralai/Mistral-7B-Instruct-v0.3",
        "mistral",
        None,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    "mistral since version 11": Sample(
        "mistralai/Magistral-Small-2509",
        "mistral",
        "mistral",
        f"[THINK]Hm.[/THINK]Let me see.[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}",
        content="Let me see.",
        thought="Hm.",
    ),
    "gpt-oss": Sample(
        "openai/gpt-oss-20b",
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
        content="Let me see.",
        thought="Hm.",
    ),
    "gpt-oss, an answer": Sample(
        "openai/gpt-oss-20b",
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It rains.",
        content="It rains.",
        thought="Hm.",
        found=[],
    ),
    "deepseek-v3": Sample(
        "deepseek-ai/DeepSeek-V3-0324",
        "deepseek_v3",
        None,
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        content="Let me see.",
    ),
    "deepseek-v3.1": Sample(
        "deepseek-ai/DeepSeek-V3.1",
        "deepseek_v31",
        "deepseek_v3",
        f"<think>Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        thought="Hm.",
    ),
    "deepseek-v3.2": Sample(
        "deepseek-ai/DeepSeek-V3.2",
        "deepseek_v32",
        "deepseek_v3",
        '<think>Hm.</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter '
        'name="city" string="true">Bern "b" 12</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="where" string="false">{"at": [1, {"x": "}"}]}</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        thought="Hm.",
    ),
    "kimi-k2": Sample(
        "moonshotai/Kimi-K2-Thinking",
        "kimi_k2",
        "kimi_k2",
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        thought="Hm.",
        begun=True,
    ),
    "seed-oss": Sample(
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "seed_oss",
        "seed_oss",
        "<seed:think>\nHm.</seed:think>Let me see.\n<seed:tool_call>\n<function=weather>\n<parameter=city>"
        'Bern "b" 12</parameter>\n<parameter=days>3</parameter>\n<parameter=exact>true</parameter>\n<parameter=where>'
        '{"at": [1, {"x": "}"}]}</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n'
        "</function>\n</seed:tool_call>",
        content="Let me see.\n",
        thought="Hm.",
    ),
    "gemma-4": Sample(
        "google/gemma-4-26B-A4B-it",
        "gemma4",
        "gemma4",
        "<|channel>thought\nIs it far?\nNo.\n<channel|>Let me see."
        '<|tool_call>call:weather{city:<|"|>Bern "b" 12<|"|>,'
        'days:3,exact:true,where:{at:[1,{x:<|"|>}<|"|>}]}}<tool_call|><|tool_call>call:now{}<tool_call|>',
        content="Let me see.",
        thought="Is it far?\nNo.",
    ),
    "gemma-4, in JSON": Sample(
        "google/gemma-4-26B-A4B-it",
        "gemma4",
        "gemma4",
        f"<|tool_call>call:weather{JSON}<tool_call|><|tool_call>call:now{{}}<tool_call|>",
    ),
    "no call": Sample(
        "Qwen/Qwen3-8B", "hermes", "qwen3", "<think>\n\n</think>\n\nIt rains.\n", "It rains.\n", found=[]
    ),
}
