"""Chat templates: where they come from, how they render, and what they may not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.frontend.chat_template import ChatTemplate, ChatTemplateError
from runtime.frontend.tokenizer import TokenizerError

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
