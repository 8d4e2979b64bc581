"""The format of a model's answers is found by rendering a sample, and not guessed."""

from __future__ import annotations

import pytest

from launch.serve.parsers.detect import calls_of, reasoning_of
from runtime.frontend.chat_template import ChatTemplate
from tests.launch.serve.parsers.templates import TEMPLATES


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_found_by_what_a_template_renders(name: str) -> None:
    family = TEMPLATES[name]
    chat = ChatTemplate(family.template)
    calls = calls_of(chat, {}, ())
    assert (calls, reasoning_of(chat, {}, (), calls)) == (family.calls, family.reasoning)


def test_tokens_of_both_marks_are_enough_for_reasoning() -> None:
    """Of a template that shows none of it, and opens none, as that of R1's distillation of Qwen3."""
    chat = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert reasoning_of(chat, {}, ("<think>", "</think>"), None) == "qwen3"
    assert reasoning_of(chat, {}, ("[THINK]", "[/THINK]"), None) == "mistral"
    assert reasoning_of(chat, {}, ("<|channel>", "<channel|>"), None) == "gemma4"
    assert reasoning_of(chat, {}, ("<think>",), None) is None


@pytest.mark.parametrize("name", ["calls are not rendered", "calls are refused"])
@pytest.mark.parametrize(
    ("tokens", "calls"),
    [
        (("<tool_call>", "</tool_call>"), "hermes"),
        (("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), "glm45"),
        (("<tool_call>", "<think>"), None),
    ],
)
def test_of_a_template_that_leaves_calls_out_the_tokens_decide(
    name: str, tokens: tuple[str, ...], calls: str | None
) -> None:
    assert calls_of(ChatTemplate(TEMPLATES[name].template), {}, tokens) == calls


def test_a_form_of_its_own_is_not_guessed() -> None:
    chat = ChatTemplate(TEMPLATES["calls in a form of its own"].template)
    assert calls_of(chat, {}, ("<tool_call>", "</tool_call>")) is None


def test_variables_of_the_server_are_those_of_the_sample() -> None:
    chat = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt and thinking %}<think>{% endif %}"
    )
    assert reasoning_of(chat, {}, (), None) is None
    assert reasoning_of(chat, {"thinking": True}, (), None) == "qwen3"
