"""Chat templates: a list of messages to the text of a prompt.

Knows: where a model folder keeps its template, and how templates written for transformers expect to be rendered.
Does not know: token ids (tokenizer.py) or where messages come from.

A template is a program that came with the weights: it runs in jinja2's immutable sandbox, without access to attributes
of Python objects, files or the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.frontend.tokenizer import TokenizerError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RESERVED = ("messages", "add_generation_prompt", *_SPECIAL_TOKENS)


class ChatTemplateError(ValueError):
    """These messages cannot be rendered with this template. ``field``: of the request, the one to blame."""

    def __init__(self, text: str, field: str = "messages") -> None:
        super().__init__(text)
        self.field = field


class ChatTemplate:
    """One compiled template. Trailing newlines and blank-line handling are transformers' (trim and lstrip blocks)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TokenizerError(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """chat_template.jinja, else tokenizer_config.json's ``chat_template``; None when the folder has neither."""
        folder = Path(folder)
        config = _read_object(folder / "tokenizer_config.json")
        names = _read_object(folder / "special_tokens_map.json") | config
        file = folder / "chat_template.jinja"
        source = _read_text(file) if file.is_file() else _default_template(config.get("chat_template"))
        if source is None:
            return None
        return cls(source, {key: text for key in _SPECIAL_TOKENS if (text := _token_text(names.get(key))) is not None})

    @classmethod
    def from_file(cls, file: str | Path, folder: str | Path) -> ChatTemplate:
        """Another template than the folder's, with the folder's special tokens. Raises TokenizerError."""
        names = _read_object(Path(folder) / "special_tokens_map.json")
        names |= _read_object(Path(folder) / "tokenizer_config.json")
        texts = {key: text for key in _SPECIAL_TOKENS if (text := _token_text(names.get(key))) is not None}
        return cls(_read_text(Path(file)), texts)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt up to where the assistant answers; without ``add_generation_prompt`` up to the last message's end.
        ``variables`` are the template's own, such as enable_thinking.

        Raises ChatTemplateError when the template refuses the messages or fails on them.
        """
        taken = [name for name in variables or {} if name in _RESERVED]
        if taken:
            raise ChatTemplateError(
                f"chat_template_kwargs sets {taken[0]!r}, which the template gets from the request",
                "chat_template_kwargs",
            )
        values: dict[str, Any] = {**self._special_tokens, **(variables or {})}
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # a template can fail in any way on messages that it did not foresee
            raise ChatTemplateError(f"the chat template fails on these messages: {error}") from error


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; for a prompt it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Plain JSON: jinja2's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _default_template(entry: object) -> str | None:
    """``chat_template`` is a text, or a list of named ones of which "default" is taken."""
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


def _token_text(entry: object) -> str | None:
    """A special token is written as text or as an object with ``content``."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None
