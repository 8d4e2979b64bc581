"""Input lines: what they become, and that nothing in them can do harm."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.api import body_rules
from launch.api.parser import BadLine, Form, PreparedRequest, RequestParser
from launch.api.response import _apart, answer_row
from launch.api.schema import ChatFields, CompletionFields
from launch.generate.input_file import FinishedRows, count_lines, read_lines, read_requests
from launch.serve.parsers.reasoning_grammar import marks_of
from launch.serve.parsers.table import HARMONY
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.output_processor import drawn_seed
from runtime.frontend.outputs import Completion, RequestOutput, Timing
from runtime.frontend.structured import after_reasoning, structured
from runtime.frontend.tokenizer import Tokenizer, added_tokens
from runtime.frontend.validation import RequestError
from runtime.grammar import Grammars
from runtime.grammar_tables.automaton import automaton_of
from runtime.schedule.request import FinishReason, SamplingParams
from tests.launch.api import bad_lines, line_forms
from tests.launch.api.line_forms import NEUTRAL, NEUTRAL_IN_CHATS
from tests.launch.generate import batches
from tests.launch.generate.fake_engine import FakeModel
from tests.runtime.engine.table_rigs import hold
from tests.runtime.frontend import small_tokenizers

LIMIT = 1 << 20


def read(data: bytes, finished: FinishedRows | None = None, limit: int = LIMIT) -> list[PreparedRequest | BadLine]:
    return list(read_requests(io.BytesIO(data), batches.parser(), finished or FinishedRows(), limit))


def test_a_simple_line() -> None:
    line = b'{"id": "a", "prompt": "the dog", "max_tokens": 5, "temperature": 0, "stop": ["x"], "seed": 3, "n": 2}'
    request = batches.prepared(line)
    ids = tuple(small_tokenizers.byte_level().encode("the dog"))
    assert (request.line, request.id, request.form, request.prompts[0].text) == (1, "a", Form.SIMPLE, "the dog")
    assert request.prompts[0].token_ids == ids
    assert request.sampling == SamplingParams(max_tokens=5, temperature=0.0, stop=("x",), seed=3, n=2)


def test_a_line_of_token_ids_without_an_id_is_named_after_its_number() -> None:
    request = batches.prepared(b'{"prompt_token_ids": [5, 6]}', number=7)
    assert (request.id, request.prompts[0].text, request.prompts[0].token_ids) == ("line-7", None, (5, 6))
    assert request.sampling.max_tokens == 16


def test_a_completions_line() -> None:
    body = {"model": "m", "prompt": [5, 6, 7], "logprobs": 2, "stream": False, "user": "u", "top_p": None}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}).encode()
    request = batches.prepared(line)
    assert (request.form, request.model, request.prompts[0].token_ids) == (Form.COMPLETION, "m", (5, 6, 7))
    assert (request.sampling.logprobs, request.sampling.top_p, request.sampling.max_tokens) == (2, 1.0, 16)


def test_a_chat_line_is_rendered_and_may_use_what_fits() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    body = {"messages": [{"role": "user", "content": parts}], "logprobs": True, "top_logprobs": 4}
    line = json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": body}).encode()
    request = batches.prepared(line)
    assert request.prompts[0].text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert request.sampling.max_tokens == 64 - len(request.prompts[0].token_ids)
    assert request.sampling.logprobs == 4
    assert request.prompts[0].token_ids[0] == 1, "special tokens of the template are single tokens"


@pytest.mark.parametrize("made", [line_forms.batch, line_forms.chat])
def test_fields_at_their_default_change_nothing(made: Callable[..., bytes]) -> None:
    fields = NEUTRAL | (NEUTRAL_IN_CHATS if made is line_forms.chat else {"suffix": "", "echo": False})
    assert batches.prepared(made(**fields)) == batches.prepared(made())
    for name, value in fields.items():
        assert batches.prepared(made(**{name: value})) == batches.prepared(made()), name


def test_every_rule_is_of_a_field() -> None:
    tables = [body_rules.REFUSED, body_rules.SERVED_ONLY_COMPLETIONS, body_rules.SERVED_ONLY_CHATS]
    names = {name for table in [*tables, body_rules.REFUSED_IN_CHATS] for name in table}
    assert names <= {*CompletionFields.__struct_fields__, *ChatFields.__struct_fields__}


def test_tools_that_the_model_may_not_call_are_left_out() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert batches.prepared(line_forms.chat(tools=tools, tool_choice="none")) == batches.prepared(line_forms.chat())


def test_messages_are_those_that_serve_takes() -> None:
    """What an OpenAI client dumps of an answer with a tool call is the next request's message."""
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    dumped = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "annotations": None,
        "tool_calls": [call],
    }
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": "n"},
        dumped,
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    parser = RequestParser(FakeModel(max_model_len=1000), small_tokenizers.byte_level(), template)
    line = line_forms.chat(messages=messages)
    request = parser.parse(1, line, parser.peek(1, line))
    assert isinstance(request, PreparedRequest)
    called = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    rendered = [
        {"role": "user", "content": "ab", "name": "n"},
        {"role": "assistant", "tool_calls": [called], "content": ""},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    assert request.prompts[0].text == "".join(map(json.dumps, rendered))


def test_history_of_any_client_renders() -> None:
    """An empty list of calls is none, reasoning has every name, arguments are an object whatever a model wrote."""
    message = {"role": "assistant", "content": "a"}
    (plain,) = body_rules.plain_messages([{**message, "tool_calls": [], "refusal": None}])
    assert plain == message
    for name in ("reasoning", "reasoning_content", "thinking"):
        (plain,) = body_rules.plain_messages([{**message, name: "why"}], strict=True)
        assert plain == {**message, "reasoning": "why", "reasoning_content": "why", "thinking": "why"}
    broken = [
        '{"a": "hi',
        "no JSON",
        "[1]",
        '"text"',
        "3",
        "null",
        "",
        " ",
        None,
        [1],
        5,
        '{"a": "\\ud83d"}',
        "[" * 10**5,
    ]
    expected = [*({} for _ in broken), {"a": [1, {"é": None}]}, {"a": 1}]
    calls = [
        {"function": {"name": "f", "arguments": written}} for written in (*broken, '{"a": [1, {"é": null}]}', {"a": 1})
    ]
    (plain,) = body_rules.plain_messages([{**message, "tool_calls": calls}])
    assert [call["function"]["arguments"] for call in plain["tool_calls"]] == expected


def test_arguments_of_tool_calls_are_json_that_is_weighed_too() -> None:
    """They come as texts, and become objects for the template."""
    call: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": "[" + "[]," * 40_000 + "1]"}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert body_rules.plain_messages([message])
    with pytest.raises(RequestError, match="arguments of tool calls: it has too many values"):
        body_rules.plain_messages([message] * 2)
    assert body_rules.plain_messages(
        [{"role": "assistant", "tool_calls": [{**call, "function": {"arguments": "{}"}}]}] * 5000
    )
    call["function"]["arguments"] = "[" * 200_000  # no model's, and no reason to refuse a history
    (plain,) = body_rules.plain_messages([message])
    assert plain["tool_calls"][0]["function"]["arguments"] == {}


def test_a_line_of_any_form_may_have_a_cache_salt() -> None:
    for made in (line_forms.simple, line_forms.batch, line_forms.chat):
        assert batches.prepared(made(cache_salt="user 7")).sampling.cache_salt == "user 7"
        lines = batches.parser()
        line = made(cache_salt="")
        bad = lines.parse(1, line, lines.peek(1, line))
        assert isinstance(bad, BadLine)
        assert bad.message == "cache_salt is empty: leave it out, or send a text"


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "max_completion_tokens": 3}
    line = json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": body}).encode()
    assert batches.prepared(line).sampling.max_tokens == 3


def test_the_run_s_defaults_apply_where_a_line_is_silent() -> None:
    defaults = SamplingParams(temperature=0.0, top_k=4)
    request = batches.prepared(b'{"prompt": "a", "top_k": 2}', defaults=defaults, max_tokens=7)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_tokens) == (0.0, 2, 7)


def test_max_tokens_is_cut_to_what_fits_behind_the_prompt() -> None:
    request = batches.prepared(b'{"prompt_token_ids": [5, 6, 7, 8], "max_tokens": 1000000, "min_tokens": 500}')
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (60, 60)


def test_drawn_seeds_depend_on_the_run_s_seed_and_the_id_alone() -> None:
    seeds = {batches.prepared(b'{"id": "a", "prompt": "x"}', number=n).sampling.seed for n in (1, 2)}
    assert seeds == {drawn_seed(0, "a")}
    others = {drawn_seed(base, key) for base in range(20) for key in ("a", "b", 1, "1")}
    assert len(others) == 80
    assert all(0 <= seed < 2**63 for seed in others)


@pytest.mark.parametrize(("line", "words"), bad_lines.HAND_WRITTEN, ids=range(len(bad_lines.HAND_WRITTEN)))
def test_a_bad_line_is_one_bad_line_that_says_why(line: bytes, words: str) -> None:
    found = read(b'{"id": "before", "prompt": "a"}\n' + line + b'\n{"id": "after", "prompt": "a"}\n')
    assert [type(item) for item in found] == [PreparedRequest, BadLine, PreparedRequest]
    bad = found[1]
    assert isinstance(bad, BadLine)
    assert bad.line == 2
    assert words in bad.message
    assert "\n" not in bad.message
    assert len(bad.message) < 1000


def test_generated_bad_lines_are_all_bad() -> None:
    """Each by itself: together they would be bad for their common id."""
    parser = batches.parser()
    parsed = [(line, parser.parse(1, line, parser.peek(1, line))) for line in bad_lines.generated(2000)]
    assert [line for line, found in parsed if not isinstance(found, BadLine)] == []


@given(st.binary(max_size=60))
@settings(derandomize=True, max_examples=300, deadline=None, database=None)
def test_no_bytes_can_raise(data: bytes) -> None:
    for item in read(data):
        assert isinstance(item, BadLine)


@pytest.mark.slow
@given(
    fields=st.dictionaries(
        st.sampled_from(["prompt", "prompt_token_ids", "max_tokens", "temperature", "stop", "seed", "n", "id"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=4,
        ),
    )
)
@settings(derandomize=True, max_examples=150, deadline=None, database=None)
def test_whatever_the_fields_hold_a_request_that_passes_is_legal(fields: dict[str, Any]) -> None:
    for item in read(json.dumps(fields).encode()):
        if isinstance(item, PreparedRequest):
            assert 1 <= len(item.prompts[0].token_ids) < 64
            assert all(0 <= token < 360 for token in item.prompts[0].token_ids)
            assert 1 <= item.sampling.max_tokens <= 64 - len(item.prompts[0].token_ids)
            assert item.sampling.seed is not None


def test_a_duplicate_id_names_the_first_line_even_if_that_one_was_bad() -> None:
    found = read(b'{"id": "a", "prompt": "x", "n": 0}\n\n{"id": "a", "prompt": "x"}\n{"id": 1, "prompt": "x"}\n')
    assert [(item.line, isinstance(item, BadLine)) for item in found] == [(1, True), (3, True), (4, False)]
    duplicate = found[1]
    assert isinstance(duplicate, BadLine)
    assert (duplicate.code, duplicate.id) == ("duplicate_id", "a")
    assert "line 1" in duplicate.message


def test_a_line_that_is_too_long_is_passed_over_without_being_held() -> None:
    class Endless(io.RawIOBase):
        """A line of 100 MB that is made while it is read, between two good ones."""

        def __init__(self) -> None:
            self.parts = [b'{"prompt": "a"}\n{"prompt": "', *[b"x" * (1 << 20)] * 100, b'"}\n{"prompt": "b"}\n']
            self.rest = b""

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            if not self.rest and self.parts:
                self.rest = self.parts.pop(0)
            piece, self.rest = self.rest[: len(buffer)], self.rest[len(buffer) :]
            buffer[: len(piece)] = piece
            return len(piece)

    stream, parser = io.BufferedReader(Endless()), batches.parser()
    tracemalloc.start()
    try:
        found = list(read_requests(stream, parser, FinishedRows(), LIMIT))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(item.line, type(item)) for item in found] == [(1, PreparedRequest), (2, BadLine), (3, PreparedRequest)]
    bad = found[1]
    assert isinstance(bad, BadLine)
    assert bad.code == "line_too_long"
    assert str(LIMIT) in bad.message
    assert peak < 8 * LIMIT


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_line_ends_blank_lines_and_a_byte_order_mark(ending: bytes) -> None:
    data = b"\xef\xbb\xbf" + ending.join((b'{"prompt": "a"}', b"  ", b"", b'{"prompt": "b"}'))
    assert [line.number for line in read_lines(io.BytesIO(data), LIMIT)] == [1, 4]
    assert [type(item) for item in read(data)] == [PreparedRequest] * 2


@pytest.mark.parametrize("length", [9, 10, 11, 12])
def test_the_limit_is_exact_and_does_not_count_the_line_end(length: int) -> None:
    for end in (b"\n", b"\r\n", b""):
        lines = list(read_lines(io.BytesIO(b"x" * length + end), 10))
        assert [line.data is None for line in lines] == [length > 10]
        if end:
            assert [line.number for line in read_lines(io.BytesIO(b"x" * length + end + b"y"), 10)] == [1, 2]


def test_lines_that_are_finished_are_passed_over() -> None:
    data = b'{"id": "a", "prompt": "x"}\n{\n{"id": "b", "n": 0, "prompt": "x"}\n{"id": "b", "prompt": "x"}\n'
    finished = FinishedRows(ids={"a"}, errors={2: None, 3: "b"})
    assert [item.line for item in read(data, finished)] == [4]
    assert [type(item) for item in read(data, finished)] == [BadLine], "line 3 has used the id, though it is finished"


def test_count_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\n\n  \nb\n" + b"c" * 100)
    assert count_lines(path) == 3


def test_a_model_without_a_tokenizer_takes_token_ids_only() -> None:
    bare = RequestParser(FakeModel(), None)
    outcomes = {}
    for line in (
        b'{"prompt": "a"}',
        b'{"prompt_token_ids": [5]}',
        b'{"prompt_token_ids": [5], "stop": "x"}',
        b'{"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "a"}]}}',
    ):
        found = bare.parse(1, line, bare.peek(1, line))
        outcomes[line] = found.message if isinstance(found, BadLine) else ""
    reasons = list(outcomes.values())
    assert "no tokenizer.json" in reasons[0]
    assert reasons[1] == ""
    assert "stop strings need a tokenizer" in reasons[2]
    assert "no chat template" in reasons[3]


FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # fields of a line, arguments of structured()
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}},
        {"json": {"type": "null"}},
    ),
    *(
        ({"structured_outputs": form}, form)
        for form in ({"json": {"type": "null"}}, {"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": 'root ::= "a"'})
    ),
]


@pytest.mark.parametrize("line", [line_forms.simple, line_forms.batch, line_forms.chat])
@pytest.mark.parametrize(("fields", "form"), FORMS, ids=lambda value: str(value)[:30])
def test_lines_of_each_form_may_ask_for_a_form_of_answers(
    line: Callable[..., bytes], fields: dict[str, Any], form: dict[str, Any]
) -> None:
    pytest.importorskip("llguidance")
    tokenizer, template = small_tokenizers.byte_level(), ChatTemplate("{{ messages[0].content }}")
    parser = RequestParser(FakeModel(vocab_size=400, max_model_len=400), tokenizer, template)
    text = line(**fields, max_tokens=50)
    request = parser.parse(1, text, parser.peek(1, text))
    assert isinstance(request, PreparedRequest), request
    assert request.sampling.grammar == structured(**form)


THINK = "<think>", "</think>"


@pytest.mark.parametrize("opened", [False, True])
def test_a_chat_with_a_form_may_think_first(opened: bool) -> None:
    """Its grammar constrains what follows the reasoning, which the row has apart; other lines are as they were."""
    pytest.importorskip("llguidance")
    asked: dict[str, Any] = {"response_format": {"type": "json_object"}, "max_tokens": 50}
    template = ChatTemplate("{{ messages[0].content }}" + opened * "<think>\n")
    model, tokenizer = FakeModel(vocab_size=400, max_model_len=400), small_tokenizers.byte_level()
    parser = RequestParser(model, tokenizer, template, reasoning=THINK)

    def parsed(line: bytes) -> PreparedRequest:
        request = parser.parse(1, line, parser.peek(1, line))
        assert isinstance(request, PreparedRequest), request
        return request

    alone = parsed(line_forms.batch(**asked)).sampling.grammar
    request, free = parsed(line_forms.chat(**asked)), parsed(line_forms.chat(max_tokens=50))
    prompt = request.prompts[0].text or ""
    assert request.sampling.grammar == after_reasoning(alone, THINK, prompt, added_tokens(tokenizer)) != alone
    assert (free.sampling.grammar, free.reasoning) == ("", None)

    def message(request: PreparedRequest, text: str) -> Any:
        ended = Completion(0, text, tuple(tokenizer.encode(text)), FinishReason.STOP, 0)
        output = RequestOutput(request.id, prompt, (1,), (ended,), Timing(0.0, 0.0, 0.0, 0.0))
        row = json.loads(answer_row(request, [output], tokenizer, 0))
        return row["response"]["body"]["choices"][0]["message"]

    said = "" if opened else "<think>"
    apart = {"role": "assistant", "reasoning": "hm", "content": '{"a": 1}'}
    assert message(request, f'{said}\nhm\n</think>\n\n{{"a": 1}}') == apart
    assert message(request, '{"a": 1}')["content"] == '{"a": 1}'
    assert message(free, "hm</think>so")["content"] == "hm</think>so"


def test_a_batch_of_gpt_oss_thinks_first() -> None:
    """In one message of analysis; its answer is in one of the final channel."""
    pytest.importorskip("llguidance")
    names = "<|channel|>", "<|message|>", "<|start|>", "<|return|>"
    backend = small_tokenizers.byte_level_backend().__class__.from_str(small_tokenizers.byte_level().to_json())
    backend.add_tokens(list(names))
    tokenizer = Tokenizer(backend)
    added = added_tokens(tokenizer)
    marks = marks_of(HARMONY)
    assert marks is not None
    grammars = Grammars(tokenizer.to_json, 400, (added["<|return|>"],))
    grammar = after_reasoning("start: %json {}\n", marks, "hi<|start|>assistant", added)
    said = '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{"a": 1}'
    hold(grammars, grammar)
    matcher = grammars.matcher(SamplingParams(grammar=grammar), (), ())
    matcher.accept(ids := tokenizer.encode(said))
    assert matcher.usable
    assert matcher.compiled.is_accepting()
    assert automaton_of(after_reasoning(structured(choice=["a"]), marks, "", added)) is not None
    ended = Completion(0, tokenizer.decode(ids), tuple(ids), FinishReason.STOP, 0)
    assert _apart(ended, *marks, tokenizer) == {"reasoning": "hm", "content": '{"a": 1}'}
    grammars.close()
