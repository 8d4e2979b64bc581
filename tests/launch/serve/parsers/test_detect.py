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
    calls = calls_of(chat, {})
    assert (calls, reasoning_of(chat, {}, (), calls)) == (family.calls, family.reasoning)


def test_tokens_of_both_marks_are_enough_for_reasoning() -> None:
    """Of a template that shows none of it, and opens none, as that of R1's distillation of Qwen3."""
    chat = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert reasoning_of(chat, {}, ("<think>", "</think>"), None) == "qwen3"
    assert reasoning_of(chat, {}, ("[THINK]", "[/THINK]"), None) == "mistral"
    assert reasoning_of(chat, {}, ("<think>",), None) is None


def test_variables_of_the_server_are_those_of_the_sample() -> None:
    chat = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt and thinking %}<think>{% endif %}"
    )
    assert reasoning_of(chat, {}, (), None) is None
    assert reasoning_of(chat, {"thinking": True}, (), None) == "qwen3"
