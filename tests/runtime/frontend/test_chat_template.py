"""Chat templates: where they come from, how they render, and what they may not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.frontend.chat_template import ChatTemplate, ChatTemplateError
from runtime.frontend.tokenizer_files import TokenizerError

CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def test_a_chat_renders_up_to_the_assistant_s_turn() -> None:
    text = ChatTemplate(CHATML).render([{"role": "system", "content": "be brief"}, *HELLO])
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_variables_filters_and_loop_controls() -> None:
    source = (
        "{{ bos_token }}{{ note | tojson }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([*HELLO, *HELLO], {"note": "<é>"}) == '<s>"<é>"hello'


def test_a_folder_s_jinja_file_wins_over_its_config(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    config = {"chat_template": "{{ bos_token }}config", "bos_token": {"content": "<s>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "<s>config"
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "file hello"


def test_the_default_of_several_named_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "yes"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "fails on these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 10 / (messages | length - 1) }}", "division by zero"),
        ("{% for i in range(10 ** 9) %}{{ i }}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_named_error(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(source).render(HELLO)


def test_a_request_cannot_replace_what_the_template_gets_from_it() -> None:
    with pytest.raises(ChatTemplateError, match="'messages'"):
        ChatTemplate(CHATML).render(HELLO, {"messages": []})


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_broken_tokenizer_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_file_that_is_no_text_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe{}")
    with pytest.raises(TokenizerError, match=f"{name} cannot be read"):
        ChatTemplate.from_folder(tmp_path)


def test_a_template_that_does_not_compile_is_named() -> None:
    with pytest.raises(TokenizerError, match="cannot be compiled"):
        ChatTemplate("{% for %}")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"


def each(body: str, condition: str = "") -> str:
    """A template that says ``body`` of each message."""
    return "{% for m in messages " + condition + " %}" + body + "{% endfor %}"


def test_the_template_for_tools_is_chosen_where_there_are_tools() -> None:
    template = ChatTemplate({"default": "plain {{ tools is none }}", "tool_use": "{{ tools[0].function.name }}"})
    assert template.render(HELLO) == "plain True"
    assert template.render(HELLO, {"tools": [TOOL]}) == "f"
    with pytest.raises(ChatTemplateError, match="no default one"):
        ChatTemplate({"tool_use": ""}).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        each(PARTS),
        each("{{ m.content[0]['text'] }}"),
        each("{{ (m.content | selectattr('type', 'equalto', 'text') | first).text }}"),
        each("{{ raise_exception('parts') if m.content is string }}{{ m.content | map(attribute='text') | join }}"),
        "{% macro text(m) %}" + PARTS + "{% endmacro %}" + each("{{ text(m) }}"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool", "other"])
def test_a_template_that_reads_parts_gets_parts(source: str, role: str) -> None:
    for content in ("hello", [{"type": "text", "text": "hello"}]):
        assert ChatTemplate(source).render([{"role": role, "content": content}]) == "hello"


def test_each_role_gets_the_form_that_the_template_reads() -> None:
    source = each("{% if m.role == 'user' %}" + PARTS + "{% else %}{{ m.content }}{% endif %}")
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    for content in ("hello", parts):
        messages = [{"role": role, "content": content} for role in ("system", "user", "assistant", "user")]
        assert ChatTemplate(source).render(messages) == "hello" * 4


DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "[{{ c.function.name + c.function.arguments }}]{% endfor %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
USUAL = DEEPSEEK.replace("m.content is none", "m.tool_calls").replace("arguments }}", "arguments|tojson }}")


@pytest.mark.parametrize("source", [DEEPSEEK, USUAL])
def test_calls_without_words_have_the_form_that_the_template_writes(source: str) -> None:
    """A null and a text next to it, or an empty text and an object."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    user = {"role": "user", "content": "hi"}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert ChatTemplate(source).render([user, called, user]) == '<user>hi[f{"a": "é"}]<user>hi'
    assert ChatTemplate(DEEPSEEK).render([user, {**called, "content": "so"}]) == "<user>hi<assistant>so"


def test_a_template_that_reads_both_forms_gets_texts() -> None:
    source = each("{% if m.content is string %}s{{ m.content }}{% else %}" + PARTS + "{% endif %}")
    assert ChatTemplate(source).render([{"role": "user", "content": [{"type": "text", "text": "a"}]}]) == "sa"


@pytest.mark.parametrize("piece", ["[:4]", "[0] | upper", "[:1] | tojson", ".split('l')[-1]", " | replace(' ', '_')"])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_a_template_that_takes_a_piece_of_a_text_gets_texts(piece: str, role: str) -> None:
    expected = {"[:4]": "hell", "[0] | upper": "H", "[:1] | tojson": '"h"', ".split('l')[-1]": "o"}.get(piece, "hello")
    for content in ("hello", [{"type": "text", "text": "hello"}]):
        assert (
            ChatTemplate(each("{{ m.content" + piece + " }}")).render([{"role": role, "content": content}]) == expected
        )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (each("S{{ m.content | trim }}", "if m.role == 'system'"), "Sbe brief"),
        (each("{{ m.role }}:{{ m.content }};", "if m.role in ['system', 'user']"), "system: be brief ;user:hello;"),
        (each("{{ m.role }}:{{ m.content }};"), "system: be brief ;user:hello;"),
        (each("D{{ m.content }}", "if m.role == 'developer'"), "D be brief "),
        ("{# developer #}" + each(PARTS, "if m.role == 'system'"), " be brief "),
    ],
)
def test_a_developer_s_message_is_a_system_message_where_the_template_has_no_such_role(
    source: str, expected: str
) -> None:
    messages = [{"role": "developer", "content": " be brief "}, *HELLO]
    assert ChatTemplate(source).render(messages) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (each("{{ m.content }}", "if m.role == 'user'"), "no place for this message of role 'developer'"),
        (each("{{ raise_exception('no system') if m.role == 'system' }}"), "no system"),
        ("{{ messages[0].content if messages[0].role == 'system' }}", "no place for this message"),
    ],
)
def test_no_prompt_goes_without_the_developer_s_message(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(source).render([*HELLO, {"role": "developer", "content": "be brief"}])


def test_roles_of_clients_cost_bounded_work_and_memory() -> None:
    template = ChatTemplate(CHATML)
    for roles in ([f"role {at}" for at in range(17)], ["x" * 65]):
        with pytest.raises(ChatTemplateError, match=r"but may have 16 of up to 64: send those"):
            template.render([{"role": role, "content": "hello"} for role in roles])
    for at in range(600):
        assert f"role {at}\nhello" in template.render([{"role": f"role {at}", "content": "hello"}])
    assert len(template._programs["default"]._reads_parts) <= 256


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", '{"b": "é<", "a": [1]}'),
        ("ensure_ascii=True", '{"b": "\\u00e9<", "a": [1]}'),
        ("separators=(',', ':'), sort_keys=True", '{"a":[1],"b":"é<"}'),
        ("indent=1", '{\n "b": "é<",\n "a": [\n  1\n ]\n}'),
        ("false, 1, none, true", '{\n "a": [\n  1\n ],\n "b": "é<"\n}'),
    ],
)
def test_tojson_has_the_arguments_of_transformers(arguments: str, expected: str) -> None:
    source = "{{ value | tojson(" + arguments + ") }}"
    assert ChatTemplate(source).render(HELLO, {"value": {"b": "é<", "a": [1]}}) == expected
