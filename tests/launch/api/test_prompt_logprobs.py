"""Prompt log-probabilities and echo: what a line asks for, how parts of a prompt come together, and what a row says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from launch.api.response import answer_row
from runtime.execute.sampling.logprobs import PromptLogprobs
from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.outputs import Completion, RequestOutput, Timing, TokenLogprob
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, SamplingParams
from tests.launch.generate import batches
from tests.runtime.frontend import small_tokenizers

TOKENIZER = small_tokenizers.byte_level()
THE, DOG = TOKENIZER.encode("the"), TOKENIZER.encode(" dog")
PROMPT = tuple(TOKENIZER.encode("ab"))
SAID = tuple(TOKENIZER.encode("c"))
LINE: dict[str, Any] = {"custom_id": "x", "url": "/v1/completions"}


def completion_line(**body: Any) -> bytes:
    return json.dumps({**LINE, "body": {"prompt": "ab", **body}}).encode()


# ---- what a line asks for ----


@pytest.mark.parametrize(
    ("body", "echo", "logprobs", "prompt_logprobs"),
    [
        ({}, False, None, None),
        ({"echo": False, "logprobs": 2}, False, 2, None),
        ({"echo": True}, True, None, None),
        ({"echo": True, "logprobs": 0}, True, 0, 0),
        ({"echo": True, "logprobs": 3}, True, 3, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, True, 3, 1),
        ({"prompt_logprobs": 4}, False, None, 4),
    ],
)
def test_echo_asks_for_as_much_of_the_prompt_as_of_the_answer(
    body: dict[str, Any], echo: bool, logprobs: int | None, prompt_logprobs: int | None
) -> None:
    request = batches.prepared(completion_line(**body))
    assert (request.echo, request.sampling.logprobs) == (echo, logprobs)
    assert request.sampling.prompt_logprobs == prompt_logprobs


def test_every_form_may_ask_for_the_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 2}
    chat = json.dumps({"custom_id": "x", "url": "/v1/chat/completions", "body": body}).encode()
    for line in (chat, b'{"id": "x", "prompt": "ab", "prompt_logprobs": 2}'):
        assert batches.prepared(line).sampling.prompt_logprobs == 2


# ---- how parts come together ----


def part(start: int, *chosen: float) -> PromptLogprobs:
    count = len(chosen)
    return PromptLogprobs(
        start,
        np.array(chosen, np.float32),
        np.arange(start, start + count, dtype=np.int32),
        np.array([[7, -1]] * count, np.int32),
        np.array([[-0.5, -np.inf]] * count, np.float32),
    )


def scored(request_ids: list[int], *parts: PromptLogprobs | None, finished: tuple[Finished, ...] = ()) -> StepOutput:
    rows = len(request_ids)
    return StepOutput(0, request_ids, [0] * rows, [0] * rows, finished=finished, prompt_logprobs=parts)


def test_parts_of_a_prompt_come_together_once_for_all_answers() -> None:
    assembler = OutputProcessor(None)
    sampling = SamplingParams(seed=1, n=3, prompt_logprobs=2)
    requests = assembler.open("k", (10, 11, 12, 13), sampling).answers()
    assert [r.sampling.prompt_logprobs for r in requests] == [2, None, None], "the prompt is scored once"
    ids = [r.request_id for r in requests]
    assert assembler.route(scored([ids[0], ids[1]], part(1, -1.0, -2.0), None)) == ([], [], [])
    ended = tuple(Finished(i, FinishReason.LENGTH, (5,)) for i in ids)
    (output,) = assembler.route(scored([ids[0]], part(3, -3.0), finished=ended)).finished
    assert output.prompt_logprobs == (
        None,
        TokenLogprob(11, -1.0, 1, ((7, -0.5),)),
        TokenLogprob(12, -2.0, 2, ((7, -0.5),)),
        TokenLogprob(13, -3.0, 3, ((7, -0.5),)),
    )


def test_ghosts_and_strangers_are_passed_over_and_what_was_not_computed_is_none() -> None:
    assembler = OutputProcessor(None)
    curious = assembler.open("a", (10, 11, 12), SamplingParams(seed=1, prompt_logprobs=0))
    silent = assembler.open("b", (10, 11, 12), SamplingParams(seed=1))
    assembler.route(scored([-1, 99, curious.request_id], part(1, -9.0), part(1, -9.0), part(1, -1.0)))
    ended = tuple(Finished(r.request_id, FinishReason.CANCELLED, ()) for r in (curious, silent))
    first, second = assembler.route(StepOutput(1, finished=ended)).finished
    assert first.prompt_logprobs is not None
    assert [entry and entry.logprob for entry in first.prompt_logprobs] == [None, -1.0, None]
    assert second.prompt_logprobs is None


# ---- what a row says ----


def row(line: bytes, *, prompt: bool = True, logprobs: bool = True) -> Any:
    """The row of the answer "c" to the prompt "ab"."""
    request = batches.prepared(line)
    second, said = PROMPT[1], SAID[0]
    completion = Completion(
        0,
        "c",
        SAID,
        FinishReason.LENGTH,
        7,
        (TokenLogprob(said, -1.5, 2, ((THE[0], -0.25),)),) if logprobs else None,
    )
    scores = (None, TokenLogprob(second, -3.0, 4, ((THE[0], -0.5), (DOG[0], -1.0)))) if prompt else None
    output = RequestOutput("x", "ab", PROMPT, (completion,), Timing(0.0, 0.0, None, 0.0), scores)
    return json.loads(answer_row(request, [output], TOKENIZER, 0))


def test_echo_puts_the_prompt_before_the_answer_in_text_and_columns() -> None:
    (choice,) = row(completion_line(echo=True, logprobs=2))["response"]["body"]["choices"]
    the, dog = (TOKENIZER.decode([ids[0]]) for ids in (THE, DOG))
    assert choice["text"] == "abc"
    assert choice["token_ids"] == list(SAID)
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -3.0, -1.5],
        "top_logprobs": [None, {the: -0.5, dog: -1.0, "b": -3.0}, {the: -0.25, "c": -1.5}],
        "text_offset": [0, 1, 2],
    }


def test_echo_without_log_probabilities_is_text_alone() -> None:
    (choice,) = row(completion_line(echo=True), prompt=False, logprobs=False)["response"]["body"]["choices"]
    assert (choice["text"], choice["logprobs"]) == ("abc", None)
    assert "prompt_logprobs" not in choice


def test_echo_of_token_ids_is_their_text() -> None:
    line = json.dumps({**LINE, "body": {"prompt": list(PROMPT), "echo": True}}).encode()
    request = batches.prepared(line)
    completion = Completion(0, "c", SAID, FinishReason.LENGTH, 7)
    output = RequestOutput("x", None, PROMPT, (completion,), Timing(0.0, 0.0, None, 0.0))
    for tokenizer, text in ((TOKENIZER, "abc"), (None, "c")):
        (choice,) = json.loads(answer_row(request, [output], tokenizer, 0))["response"]["body"]["choices"]
        assert choice["text"] == text


def test_prompt_log_probabilities_of_a_completion_are_v_llm_s() -> None:
    (choice,) = row(completion_line(prompt_logprobs=2), logprobs=False)["response"]["body"]["choices"]
    the, dog = (TOKENIZER.decode([ids[0]]) for ids in (THE, DOG))
    assert (choice["text"], choice["logprobs"]) == ("c", None)
    assert choice["prompt_logprobs"] == [
        None,
        {
            str(THE[0]): {"logprob": -0.5, "rank": 1, "decoded_token": the},
            str(DOG[0]): {"logprob": -1.0, "rank": 2, "decoded_token": dog},
            str(PROMPT[1]): {"logprob": -3.0, "rank": 4, "decoded_token": "b"},
        },
    ]


def test_prompt_log_probabilities_of_the_other_forms() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 2}
    chat = row(json.dumps({"custom_id": "x", "url": "/v1/chat/completions", "body": body}).encode())
    assert chat["response"]["body"]["prompt_logprobs"][0] is None
    assert chat["response"]["body"]["prompt_logprobs"][1][str(PROMPT[1])]["rank"] == 4
    simple = row(b'{"id": "x", "prompt": "ab", "prompt_logprobs": 2}')
    assert simple["prompt_logprobs"] == [
        None,
        {"token_id": PROMPT[1], "logprob": -3.0, "rank": 4, "top": [[THE[0], -0.5], [DOG[0], -1.0]]},
    ]
    for line in (completion_line(), b'{"id": "x", "prompt": "ab"}'):
        assert "prompt_logprobs" not in json.dumps(row(line, prompt=False, logprobs=False))
