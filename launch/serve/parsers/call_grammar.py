"""Grammars of tool calls: what a model must write to call a tool, in its own format.

Knows: how each format writes a call and several. Does not know: how a call is read (the format's own file), requests.

With `tool_choice` required or a named tool an answer is calls and nothing else; with auto, where a tool is `strict`, it
is free text up to a format's first mark, and then a call. Arguments of a strict tool are what its schema allows, or the
tool is refused by path and keyword; of others the same where that is possible, else any object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from launch.api.schema import Tool
from launch.serve.parsers.bare_grammar import BareValues, NotBare
from launch.serve.parsers.reasoning_grammar import HARMONY_FINAL
from runtime.frontend.structured import TEXT, json_rule, upto, written
from runtime.frontend.validation import RequestError


class _Form(NamedTuple):
    """Texts around calls. ``name`` may stand in ``head``, in JSON if it is ``quoted``; ``key`` in ``parameter``: where
    that is set, each argument is written apart, a text as it is, other values as JSON; ``string``: whether it is one.
    ``index``: of the call, counted over the conversation. ``other``: begins an answer that is no call. ``quote``: of
    texts, where keys are bare."""

    head: str
    tail: str
    between: str = ""
    start: str = ""
    end: str = ""
    parameter: str = ""
    value_end: str = ""
    other: str = ""
    quote: str = ""


_HERMES: Final = _Form('<tool_call>\n{"name": {name}, "arguments": ', "}\n</tool_call>", "\n")
_QWEN3_CODER: Final = _Form(
    "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", "\n",
    parameter="<parameter={key}>\n", value_end="\n</parameter>\n",
)  # fmt: skip
_FORMS: Final[Mapping[str, _Form]] = {
    "hermes": _HERMES,
    "llama3_json": _Form('{"name": {name}, "parameters": ', "}", "; "),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "seed_oss": _Form(
        "<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>", "\n",
        parameter="<parameter={key}>", value_end="</parameter>\n",
    ),
    "gemma4": _Form("<|tool_call>call:{name}", "<tool_call|>", quote='<|"|>'),
    "glm45": _Form(
        "<tool_call>{name}\n", "</tool_call>", "\n",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>", value_end="</arg_value>\n",
    ),
    "glm47": _Form(
        "<tool_call>{name}", "</tool_call>", parameter="<arg_key>{key}</arg_key><arg_value>", value_end="</arg_value>"
    ),
    "minimax_m2": _Form(
        '<invoke name="{name}">\n', "</invoke>\n", start="<minimax:tool_call>\n", end="</minimax:tool_call>",
        parameter='<parameter name="{key}">', value_end="</parameter>\n",
    ),
    "mistral": _Form('{"name": {name}, "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"),
    "deepseek_v31": _Form(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        start="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _Form(
        '<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>\n",
        start="<｜DSML｜function_calls>\n", end="</｜DSML｜function_calls>",
        parameter='<｜DSML｜parameter name="{key}" string="{string}">', value_end="</｜DSML｜parameter>\n",
    ),
    "kimi_k2": _Form(
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>", "<|tool_call_end|>",
        start="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>",
    ),
    "openai": _Form(  # <|call|> ends the answer
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "", other=HARMONY_FINAL
    ),
    "deepseek_v3": _Form(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>", "\n",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    ),
}  # fmt: skip
_MISTRAL_V11: Final = _Form("[TOOL_CALLS]{name}[ARGS]", "")
_OF_OBJECTS: Final = {
    "anyOf", "allOf", "oneOf", "$ref", "enum", "const", "patternProperties", "minProperties", "maxProperties",
}  # fmt: skip
_MARK: Final = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")  # with which a call begins


def grammar_of_calls(
    parser: str, tools: Sequence[Tool], added: Mapping[str, int], *, choice: str | None, one: bool
) -> str:
    """Of answers in the format ``parser``. ``choice``: the tool that is called, "" for any, None where none need be.
    ``one``: at most one call. Raises RequestError."""
    form = _MISTRAL_V11 if parser == "mistral" and "[ARGS]" in added else _FORMS[parser]
    calls = _Calls(form, added)
    for at, tool in enumerate(tools):
        if not choice or tool.function.name == choice:
            calls.add(tool, f"tools[{at}].function.parameters")
    if choice is None:
        mark = _MARK.match(form.start or form.head)
        if mark is None:
            raise RequestError(f"tools: calls of the format {parser} have no mark, so none can be strict", "tools")
        return calls.free(mark[0], one=one)
    return calls.alone(one=one or bool(choice) or bool(form.other))


class _Calls:
    """Collects the rules of one grammar. ``calls``: head, rule of the arguments, tail of each tool's."""

    def __init__(self, form: _Form, added: Mapping[str, int]) -> None:
        self._form, self._added = form, added
        self._calls: list[tuple[str, str, str]] = []
        self._rules: list[str] = []
        self._bare = BareValues(self._rules, form.quote, added)

    def add(self, tool: Tool, where: str) -> None:
        form, name = self._form, tool.function.name
        head = form.head.replace("{name}", json.dumps(name) if '"name": {name}' in form.head else name)
        schema: Any = tool.function.parameters or {"type": "object"}
        try:
            arguments = self._arguments(schema, where)
        except RequestError as error:
            if tool.function.strict:
                error.field = "tools"
                raise
            arguments = self._arguments({"type": "object"}, where)
        self._calls.append((head, arguments, form.tail))

    def alone(self, *, one: bool) -> str:
        """Calls and nothing else."""
        return self._grammar("start: calls", f"calls: {self._several(self._form.start, one=one)}", *self._call_rules(0))

    def free(self, mark: str, *, one: bool) -> str:
        """Text, in which ``mark`` begins a call, or several."""
        form, before = self._form, upto("before", mark, self._added)
        if form.other:
            return self._grammar(
                "start: call | other", f"other: {self._written(form.other)} TEXT", *self._call_rules(0)
            )
        times = "?" if one else "*"
        if form.start:
            rest = f"calls: {self._several(form.start[len(mark) :], one=one)}"
            return self._grammar(f"start: (before calls){times} TEXT", before, rest, *self._call_rules(0))
        return self._grammar(f"start: (before call){times} TEXT", before, *self._call_rules(len(mark)))

    def _several(self, start: str, *, one: bool) -> str:
        more = "" if one else f"({self._written(self._form.between)} call)*"
        return f"{self._written(start)} call {more} {self._written(self._form.end)}"

    def _call_rules(self, cut: int) -> list[str]:
        """Of each tool's call without the first ``cut`` characters, and of any of them."""
        each = [f"{self._written(head[cut:])} {rule} {self._written(tail)}" for head, rule, tail in self._calls]
        names = " | ".join(f"call_{at}" for at in range(len(each)))
        return [f"call: {names}", *(f"call_{at}: {rule}" for at, rule in enumerate(each))]

    def _grammar(self, *rules: str) -> str:
        return "\n".join([*rules, *self._rules, f"TEXT: {TEXT}", ""])

    def _written(self, text: str) -> str:
        parts = [written(part, self._added) if part else "" for part in text.split("{index}")]
        return " /[0-9]{1,4}/ ".join(parts)

    def _arguments(self, schema: Any, where: str) -> str:
        form = self._form
        rule = json_rule(schema, where)  # refuses what cannot be enforced
        if form.quote:
            with suppress(NotBare):
                return self._bare.arguments(schema)
        if not form.parameter:
            return rule
        parts, required, properties = [], schema.get("required", []), schema.get("properties", {})
        if other := sorted(_OF_OBJECTS & schema.keys()) or sorted({*required} - properties.keys()):
            raise RequestError(
                f"{where}: {other[0]!r} is not supported in this format, which writes properties one by one"
            )
        for key, one in properties.items():
            text = "true" if isinstance(one, Mapping) and one.get("type") == "string" else "false"
            head = self._written(form.parameter.replace("{string}", text).replace("{key}", key))
            value = self._value(one, schema, where, key)
            parts.append(f"({head} {value}){'' if key in required else '?'}")
        return " ".join(parts)

    def _value(self, schema: Any, root: Mapping[str, Any], where: str, key: str) -> str:
        """With what ends it."""
        form, kind = self._form, schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "string" and isinstance(schema.get("enum"), list):
            return f"({' | '.join(self._written(str(one)) for one in schema['enum'])}) {self._written(form.value_end)}"
        if kind == "string":
            if limits := {"pattern", "format", "minLength", "maxLength", "const"} & schema.keys():
                raise RequestError(
                    f"{where}.properties.{key}: {min(limits)!r} of a text is not supported in this format"
                )
            rule = f"value_{len(self._rules)}"
            self._rules.append(upto(rule, form.value_end, self._added))
            return rule
        if kind not in ("integer", "number", "boolean", "null", "array", "object"):
            raise RequestError(f"{where}.properties.{key}: a type that may be a text is not supported in this format")
        named = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"{json_rule({**schema, **named}, f'{where}.properties.{key}')} {self._written(form.value_end)}"
