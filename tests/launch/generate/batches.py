"""A folder, input lines and a whole `generate` run around the fake engine, and what each row should say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from launch.api.parser import BadLine, PreparedRequest, RequestParser
from launch.generate.command import run
from launch.generate.options import Command
from launch.ranks.rendezvous import Rendezvous
from runtime.config import EngineConfig
from runtime.frontend.answer_text import TextStream
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.validation import stop_ids_of
from runtime.schedule.request import Request
from tests.launch.api.parsed import parsed
from tests.launch.generate.fake_engine import FakeEngine, FakeModel, serial_answer
from tests.runtime.frontend import small_tokenizers

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
Row = dict[str, Any]


def model_folder(parent: Path) -> Path:
    folder = parent / "model"
    folder.mkdir(exist_ok=True)
    small_tokenizers.save(small_tokenizers.byte_level_backend(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def parser(model: FakeModel | None = None, **options: Any) -> RequestParser:
    return RequestParser(model or FakeModel(), small_tokenizers.byte_level(), ChatTemplate(TEMPLATE), **options)


def good_lines(how_many: int, prefix: str = "r") -> list[bytes]:
    """Lines of all three forms, with stops, several answers and different lengths among them."""
    lines = []
    for i in range(how_many):
        name = f"{prefix}{i}"
        sampling: Row = {"max_tokens": 1 + i * 7 % 40, "n": 1 + (i % 5 == 4)}
        if i % 4 == 1:
            sampling["stop"] = ["e", "the"] if i % 8 == 1 else "o"
        if i % 3 == 0:
            line: Row = {"id": name, "prompt": f"the dog {i}", **sampling}
        elif i % 3 == 1:
            prompt = [f"fox {i}", "the"] if i % 6 == 4 else f"fox {i}"
            line = {"custom_id": name, "url": "/v1/completions", "body": {"prompt": prompt, **sampling}}
        else:
            body = {"messages": [{"role": "user", "content": f"{i}"}], **sampling}
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line).encode())
    return lines


def write_input(folder: Path, lines: Iterable[bytes]) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def answers_of(path: Path) -> dict[str, Any]:
    """Each row's content by id (or line number, for error rows without one), without times; ids must not repeat."""
    found: dict[str, Any] = {}
    for row in rows_of(path):
        key = str(row.get("custom_id", row["id"]))
        if row.get("error"):
            key = f"error at line {row['error']['line']}"
        assert key not in found, f"two rows for {key}"
        found[key] = _timeless(row)
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if k not in ("timing", "created")}
    return [_timeless(v) for v in value] if isinstance(value, list) else value


def generate(
    folder: Path, *options: str, engine: Callable[[EngineConfig, Rendezvous], FakeEngine] | None = None
) -> tuple[int, Path]:
    """Run the command on in.jsonl of ``folder``; returns the exit code and the output's path."""
    output = folder / "out.jsonl"
    arguments = ["generate", "--model", str(model_folder(folder)), "--input", str(folder / "in.jsonl")]
    arguments += ["--output", str(output), "--device", "cpu", *options]
    return run(parsed(Command, arguments), {}, engine or (lambda config, rendezvous: FakeEngine(config))), output


def expected_choices(prepared: PreparedRequest, model: FakeModel, tokenizer: Tokenizer) -> list[tuple[str, int, str]]:
    """(text, tokens, reason) of each answer, from a serial engine that looks at every token."""
    choices = []
    for prompt, i in product(prepared.prompts, range(prepared.sampling.n)):
        sampling = replace(prepared.sampling, seed=(prepared.sampling.seed or 0) + i)
        stop_ids = stop_ids_of(sampling, model.eos_token_ids)
        tokens, reason = serial_answer(Request(0, prompt.token_ids, sampling, stop_ids), model)
        shown = tokens[:-1] if reason.label == "stop" else tokens
        stream = TextStream(tokenizer, sampling.stop)
        for token in shown:
            stream.push(token)
        stream.finish()
        kept = stream.kept if stream.stopped else len(tokens)
        choices.append((stream.text, kept, "stop" if stream.stopped else reason.label))
    return choices


def choices_in(row: Row) -> list[tuple[str, int, str]]:
    """(text, tokens, reason) of each answer of a row of any form."""
    body = row["response"]["body"] if "response" in row else row
    choices = body.get("choices", [body])
    texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
    return [(t, len(c["token_ids"]), c["finish_reason"]) for t, c in zip(texts, choices, strict=True)]


def prepared(line: bytes, number: int = 1, **options: Any) -> PreparedRequest:
    lines = parser(**options)
    request = lines.parse(number, line, lines.peek(number, line))
    assert not isinstance(request, BadLine), request.message
    return request
