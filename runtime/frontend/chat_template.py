"""Chat templates: a list of messages to the text of a prompt.

Knows: how templates written for transformers expect to be rendered, and what a template reads of a message.
Does not know: token ids (tokenizer.py), where templates are kept (tokenizer_files.py) or where messages come from.

A template is a program that came with the weights: it runs in jinja2's immutable sandbox, without access to attributes
of Python objects, files or the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.frontend.tokenizer_files import SPECIAL_TOKENS, TokenizerError, TokenizerFiles, read_text

_RESERVED: Final = ("messages", "add_generation_prompt", *SPECIAL_TOKENS)
_MOST_ROLES: Final = 16  # of one request; for each that is new the template is rendered twice
_MOST_KNOWN_ROLES: Final = 256
_LONGEST_ROLE: Final = 64  # characters
_PROBE: Final = "some words of a message"
_PROBE_FUNCTION: Final = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
_PROBE_CALL: Final = {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": {"a": _PROBE}}}

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """These messages cannot be rendered with this template. ``field``: of the request, the one to blame."""

    def __init__(self, text: str, field: str = "messages") -> None:
        super().__init__(text)
        self.field = field


class ChatTemplate:
    """A model's templates, compiled: one, or several by name. Chats with tools get that named ``tool_use``, others
    ``default``. Trailing newlines and blank-line handling are transformers' (trim and lstrip blocks)."""

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        sources = {"default": source} if isinstance(source, str) else source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._programs = {name: _Program(text, name == "tool_use") for name, text in sources.items()}
        except TemplateError as error:
            raise TokenizerError(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """The templates of a model's folder; None when it has none. Raises TokenizerError."""
        files = TokenizerFiles(folder)
        templates = files.chat_templates()
        return cls(templates, files.special_tokens) if templates else None

    @classmethod
    def from_file(cls, file: str | Path, folder: str | Path) -> ChatTemplate:
        """Another template than the folder's, with the folder's special tokens. Raises TokenizerError."""
        return cls(read_text(Path(file)), TokenizerFiles(folder).special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt up to where the assistant answers; without ``add_generation_prompt`` up to the last message's end.
        A message's content is a text or a list of text parts; the template gets the form that it reads.
        ``variables`` are the template's own, such as enable_thinking, and ``tools``.

        Raises ChatTemplateError when the template refuses the messages or fails on them.
        """
        taken = [name for name in variables or {} if name in _RESERVED]
        if taken:
            raise ChatTemplateError(
                f"chat_template_kwargs sets {taken[0]!r}, which the template gets from the request",
                "chat_template_kwargs",
            )
        values: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        program = (self._programs.get("tool_use") if values["tools"] else None) or self._programs.get("default")
        if program is None:
            raise ChatTemplateError(f"the model has chat templates named {sorted(self._programs)}, but no default one")
        roles = {message["role"] for message in messages}
        if len(roles) > _MOST_ROLES or any(len(role) > _LONGEST_ROLE for role in roles):
            raise ChatTemplateError(
                f"messages have {len(roles)} roles, the longest of {max(map(len, roles))} characters, but may have "
                f"{_MOST_ROLES} of up to {_LONGEST_ROLE}: send those that the chat template knows"
            )
        fitted = [program.fitted(message, self._special_tokens) for message in messages]
        try:
            text = program.template.render(messages=fitted, add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # a template can fail in any way on messages that it did not foresee
            raise ChatTemplateError(f"the chat template fails on these messages: {error}") from error
        for message, given in zip(fitted, messages, strict=True):
            if message["role"] != given["role"] and _in_form(given["content"], False).strip() not in text:
                raise ChatTemplateError(f"the chat template has no place for this message of role {given['role']!r}")
        return text


class _Program:
    """One template, and what it reads: the developer's messages, and content as a text or as parts."""

    def __init__(self, source: str, with_tools: bool) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.template = environment.from_string(source)
        self._tools = [{"type": "function", "function": _PROBE_FUNCTION}] if with_tools else None
        self._knows_developer = any(n.value == "developer" for n in environment.parse(source).find_all(nodes.Const))
        self._reads_parts: dict[str, bool] = {}
        self._of_calls: tuple[str | None, bool] | None = None

    def fitted(self, message: Message, special_tokens: Mapping[str, str]) -> Message:
        """``message`` in the form that the template reads."""
        role = message["role"]
        if role == "developer" and not self._knows_developer:
            role = "system"
        reads_parts = self._reads_parts.get(role)
        if reads_parts is None:
            reads_parts = self._probed(role, special_tokens)
            if len(self._reads_parts) >= _MOST_KNOWN_ROLES:
                self._reads_parts.clear()
            self._reads_parts[role] = reads_parts
        fitted = {**message, "role": role, "content": _in_form(message["content"], reads_parts)}
        if not message.get("tool_calls"):
            return fitted
        if self._of_calls is None:
            self._of_calls = self._probed_calls(special_tokens)
        no_words, as_text = self._of_calls
        return _with_calls(fitted if message["content"] else {**fitted, "content": no_words}, as_text)

    def _probed_calls(self, special_tokens: Mapping[str, str]) -> tuple[str | None, bool]:
        """What the template reads as the content of a message that has calls alone, as DeepSeek's, which writes them
        only next to a null; and whether arguments are a text."""
        user = self.fitted({"role": "user", "content": "hello"}, special_tokens)
        for no_words, as_text in product(("", None), (False, True)):
            called = {"role": "assistant", "content": no_words, "tool_calls": [_PROBE_CALL]}
            with suppress(Exception):
                values = {"tools": self._tools, "documents": None, "add_generation_prompt": False, **special_tokens}
                if _PROBE in self.template.render(messages=[user, _with_calls(called, as_text)], **values):
                    return no_words, as_text
        return "", False

    def _probed(self, role: str, special_tokens: Mapping[str, str]) -> bool:
        """Whether content of ``role`` is in the prompt only where it is parts. Where parts are written out as objects,
        the template takes a piece of a text, such as ``content[:9]``."""
        for as_parts in (False, True):
            probe = {"role": role, "content": _in_form(_PROBE, as_parts)}
            with suppress(Exception):  # this form, or this role, is refused
                messages = self._around(probe, special_tokens) if role != "user" else [probe]
                values = {"tools": self._tools, "documents": None, "add_generation_prompt": True, **special_tokens}
                text = self.template.render(messages=messages, **values)
                if _PROBE in text and not any(written in text for written in _WRITTEN_PARTS):
                    return as_parts
        return False

    def _around(self, probe: Message, special_tokens: Mapping[str, str]) -> list[Message]:
        """A conversation in which a message of that role may stand."""
        user = self.fitted({"role": "user", "content": "hello"}, special_tokens)
        if probe["role"] == "assistant":
            return [user, probe, user]
        if probe["role"] == "tool":
            called = self.fitted({"role": "assistant", "content": ""}, special_tokens)
            return [user, {**called, "tool_calls": [_PROBE_CALL]}, {**probe, "tool_call_id": _PROBE_CALL["id"]}]
        return [probe, user]


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; for a prompt it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _in_form(content: str | list[dict[str, str]], as_parts: bool) -> Any:
    if as_parts:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


_WRITTEN_PARTS: Final = tuple(write(part) for part in _in_form(_PROBE, True) for write in (str, json.dumps))


def _with_calls(message: Message, as_text: bool) -> Message:
    if not as_text:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _tojson(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
