"""Reasoning before what a grammar allows: a chat's answer may think first, as its format of reasoning says.

Knows: where reasoning begins and ends in each format. Does not know: what follows it (structured.py, call_grammar.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from launch.serve.parsers.reader import named
from launch.serve.parsers.table import HARMONY, REASONING
from runtime.frontend.structured import TEXT, after_reasoning, upto, written

HARMONY_FINAL: Final = "<|channel|>final<|message|>"
_HARMONY_MARKS: Final = "<|channel|>analysis<|message|>", f"<|end|><|start|>assistant{HARMONY_FINAL}"


def with_reasoning(grammar: str, form: str, prompt: str, added: Mapping[str, int], *, calls: bool = False) -> str:
    """``grammar`` for what follows the reasoning of format ``form``, of which ``prompt`` (as rendered) has the
    beginning, or all, or nothing. ``added``: ids of the tokenizer's added tokens. ``calls``: it is one of tool calls.
    """
    if form == HARMONY:
        return _harmony(grammar, "" if calls else written(HARMONY_FINAL, added), added)
    marks = marks_of(form)
    return grammar if marks is None else after_reasoning(grammar, marks, prompt, added)


def marks_of(form: str | None) -> tuple[str, str] | None:
    """What stands around reasoning in the format ``form``; of gpt-oss around one message before the answer."""
    if form == HARMONY:
        return _HARMONY_MARKS
    marks = REASONING.get(form or "", "")
    return (named(marks[0]), named(marks[1])) if marks else None


def _harmony(grammar: str, before: str, added: Mapping[str, int]) -> str:
    """Messages to the user or of reasoning, then ``before`` and an answer."""
    rules = [
        f"start: message* {before} @answer",
        f'message: {written("<|channel|>", added)} ("analysis" | "commentary") {written("<|message|>", added)} '
        f"said {written('<|start|>assistant', added)}",
        upto("said", "<|end|>", added),
        f"TEXT: {TEXT}",
    ]
    grammars = [{"lark_grammar": "\n".join([*rules, ""])}, {"name": "answer", "lark_grammar": grammar}]
    return json.dumps({"grammars": grammars})
