"""Faults that users reported of other servers' parsers: each text is read right here, in pieces of any size.

Tests elsewhere: ends of answers (vllm#25054, #53269: test_app.py, test_answers.py), texts that are sent as they grow
(vllm#32829, #45701: test_formats.py), fields of reasoning (vllm#27752, #33402, #42664, #33616: test_answers.py and
tests/launch/api/test_requests.py).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from launch.serve.parsers.answer_parser import AnswerParser
from launch.serve.parsers.deltas import Delta, merged
from launch.serve.parsers.detect import calls_of, reasoning_of
from runtime.frontend.chat_template import ChatTemplate
from tests.launch.serve.parsers.samples import SCHEMAS
from tests.launch.serve.parsers.templates import TEMPLATES

CODER = "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
HERMES = '<tool_call>\n{{"name": "weather", "arguments": {}}}\n</tool_call>'
HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
LLAMA = '{"name": "now", "parameters": {}}'


class Case(NamedTuple):
    """``calls`` and ``reasoning``: names of formats. ``found``: name and arguments of each call."""

    text: str
    calls: str | None
    reasoning: str | None = None
    content: str | None = None
    thought: str | None = None
    found: tuple[tuple[str, dict[str, Any]], ...] = ()


NOW: tuple[tuple[str, dict[str, Any]], ...] = (("now", {}),)
CASES = {  # by vllm's issue
    "#44060, a mark in a value": Case(
        CODER.format("a </parameter> b"), "qwen3_coder", found=(("weather", {"city": "a </parameter> b"}),)
    ),
    "#35615, #43221, #38579, #30204, all in one step": Case(
        f"<think>hm</think>{HERMES.format('{}')}{HERMES.format('{}')}",
        "hermes",
        "qwen3",
        None,
        "hm",
        (("weather", {}), ("weather", {})),
    ),
    "#22515, an unknown tool": Case(HARMONY.format("other", '{"a": 1}'), "openai", "openai_gptoss", '{"a": 1}'),
    "#46464, #51977, arguments that are no JSON": Case(
        HARMONY.format("now", '{"a": '), "openai", "openai_gptoss", found=NOW
    ),
    "#44326, #32213, no arguments": Case(
        "<tool_call>\n<function=now>\n</function>\n</tool_call>", "qwen3_coder", found=NOW
    ),
    "#44326, #32213, no arguments in GLM's": Case("<tool_call>now</tool_call>", "glm47", "glm45", found=NOW),
    "#33965, one name twice": Case(f"{LLAMA}; {LLAMA}", "llama3_json", found=NOW * 2),
    "#49923, no blank after a separator": Case(f"{LLAMA};{LLAMA}", "llama3_json", found=NOW * 2),
    "#27701, nested braces": Case(
        HERMES.format('{"where": {"at": [1, {"x": "}"}]}}'),
        "hermes",
        found=(("weather", {"where": {"at": [1, {"x": "}"}]}}),),
    ),
    "#22885, the last brace": Case(
        '{"name": "weather", "parameters": {"where": {"at": 1}}}',
        "llama3_json",
        found=(("weather", {"where": {"at": 1}}),),
    ),
    "#21360, a list that is no call": Case('[{"a": 1}] is a list', "llama3_json", content='[{"a": 1}] is a list'),
    "#21360, a list of calls": Case('[TOOL_CALLS][{"name": "now", "arguments": {}}]', "mistral", found=NOW),
    "#47027, a call ends the reasoning": Case(
        "<think>hm\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "qwen3_coder", "qwen3", None, "hm", NOW
    ),
}


def read(parser: AnswerParser, text: str, size: int) -> Delta:
    deltas = [delta for at in range(0, len(text), size) for delta in parser.push(text[at : at + size])]
    return merged(deltas + parser.finish())


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", CASES)
def test_what_other_parsers_got_wrong(name: str, size: int) -> None:
    case = CASES[name]
    message = read(AnswerParser(case.calls, case.reasoning, SCHEMAS), case.text, size)
    assert (message["content"], message.get("reasoning")) == (case.content, case.thought)
    functions = [call["function"] for call in message.get("tool_calls", ())]
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [*case.found]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("begun", [False, True])
def test_where_the_prompt_opens_the_reasoning_and_where_it_does_not(begun: bool, size: int) -> None:
    """vllm#22507, #12999 and #53284, LocalAI#11791: the prompt decides, and content is never empty for it."""
    message = read(AnswerParser(None, "qwen3", begun=begun), "hm</think>\n\nso" if begun else "so", size)
    assert message == ({"content": "so", "reasoning": "hm"} if begun else {"content": "so"})


def test_a_template_is_found_by_what_it_renders_and_not_by_its_text() -> None:
    """sglang#38297: GLM-5.3's joins with ~ and has no switch, and all its calls were missed."""
    glm = TEMPLATES["glm-4.7"]
    template = glm.template.replace("<tool_call>", "{{ '<tool' ~ '_call>' }}").replace(
        "<think>", "{{ '<thi' ~ 'nk>' }}"
    )
    assert "<tool_call>" not in template
    chat = ChatTemplate(template)
    assert (calls_of(chat, {}, ()), reasoning_of(chat, {}, (), glm.calls)) == (glm.calls, glm.reasoning)
