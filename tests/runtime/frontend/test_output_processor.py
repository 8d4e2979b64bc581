"""Answers put together from the columns of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import numpy as np
import pytest

from runtime.execute.result_reader import StepLogprobs
from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.outputs import RequestOutput
from runtime.frontend.validation import RequestError
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, SamplingParams
from tests.runtime.execute.sampling.sampling_fields import SamplingFields
from tests.runtime.frontend import small_tokenizers

EOS = 0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def tokens_of(text: str) -> list[int]:
    return small_tokenizers.byte_level().encode(text)


def letters(text: str) -> list[int]:
    """One token a letter."""
    return [tokens_of(letter)[0] for letter in text]


def one_row(request_id: int, *tokens: int, finished: Finished | None = None) -> StepOutput:
    return StepOutput(
        0, [request_id], list(tokens), [len(tokens)], len(tokens), () if finished is None else (finished,)
    )


def feed(assembler: OutputProcessor, request_id: int, tokens: list[int], reason: FinishReason) -> RequestOutput:
    for token in tokens[:-1]:
        assert assembler.route(one_row(request_id, token)) == ([], [], [])
    routed = assembler.route(one_row(request_id, tokens[-1], finished=Finished(request_id, reason, tuple(tokens))))
    assert routed.stop == []
    (output,) = routed.finished
    return output


def params(**fields: Unpack[SamplingFields]) -> SamplingParams:
    given: SamplingFields = {"seed": 5, "max_tokens": 20, **fields}
    return SamplingParams(**given)


def test_text_without_the_stop_id_and_tokens_with_it() -> None:
    assembler = OutputProcessor(small_tokenizers.byte_level())
    request = assembler.open("k", (9, 8), params(), prompt="p", eos_token_ids=(EOS, 2))
    assert (request.stop_token_ids, *request.prompt_token_ids) == ((EOS, 2), 9, 8)
    output = feed(assembler, request.request_id, [*tokens_of("the dog"), EOS], FinishReason.STOP)
    (completion,) = output.completions
    assert (output.key, output.prompt, completion.text) == ("k", "p", "the dog")
    assert completion.token_ids == (*tokens_of("the dog"), EOS)
    assert assembler.live == 0
    assert output.failed is None


def test_a_length_finish_shows_the_last_token_even_if_it_is_a_stop_id() -> None:
    assembler = OutputProcessor(small_tokenizers.byte_level())
    dot = tokens_of(".")[0]
    request = assembler.open("k", (9,), params(stop_token_ids=(dot,), ignore_eos=True), eos_token_ids=(EOS,))
    assert request.stop_token_ids == (dot,)
    output = feed(assembler, request.request_id, letters("ab."), FinishReason.LENGTH)
    assert output.completions[0].text == "ab."


def test_a_stop_string_is_reported_once_and_trims_what_came_after() -> None:
    assembler = OutputProcessor(small_tokenizers.byte_level())
    request = assembler.open("k", (9,), params(stop=("ND",)))
    ids, stops = letters("aEND of it"), []
    for token in ids:
        stops += assembler.route(one_row(request.request_id, token)).stop
    assert stops == [request.request_id]
    end = StepOutput(0, finished=(Finished(request.request_id, FinishReason.STOP, tuple(ids)),))
    (output,) = assembler.route(end).finished
    (completion,) = output.completions
    assert (completion.text, completion.finish_reason) == ("aE", FinishReason.STOP)
    assert completion.token_ids == tuple(letters("aEND"))


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED])
def test_a_stop_string_wins_over_an_end_that_came_later(reason: FinishReason) -> None:
    """At depth 0 the request would have ended at the stop string, so at any depth it has."""
    assembler = OutputProcessor(small_tokenizers.byte_level())
    request = assembler.open("k", (9,), params(stop=("b",)), eos_token_ids=(EOS,))
    ids = [*letters("abc"), EOS]
    finished = Finished(request.request_id, reason, tuple(ids))
    routed = assembler.route(one_row(request.request_id, *ids, finished=finished))
    assert routed.stop == [], "it has ended: there is nothing left to cancel"
    (completion,) = routed.finished[0].completions
    assert (completion.text, completion.finish_reason) == ("a", FinishReason.STOP)
    assert completion.token_ids == tuple(letters("ab"))


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_half_a_character_of_an_answer_that_was_cut_short_is_no_stop_string(reason: FinishReason) -> None:
    """Its next byte might have completed it: only an answer that has ended knows that none comes."""
    half = tokens_of("\U00013000")[0]
    for ending in (reason, FinishReason.LENGTH):
        assembler = OutputProcessor(small_tokenizers.byte_level())
        request = assembler.open("k", (9,), params(stop=("\ufffd",)))
        output = feed(assembler, request.request_id, [*letters("ab"), half], ending)
        (completion,) = output.completions
        expected = FinishReason.STOP if ending is FinishReason.LENGTH else reason
        assert (completion.text, completion.finish_reason) == ("ab", expected)


def test_what_came_after_a_stop_string_is_not_told() -> None:
    assembler = OutputProcessor(small_tokenizers.byte_level())
    request = assembler.open("k", (9,), params(stop=("b",)))
    assert assembler.route(one_row(request.request_id, *letters("ab"))).stop == [request.request_id]
    broken = Finished(request.request_id, FinishReason.ERROR, tuple(letters("ab")), "the logits are not finite")
    (output,) = assembler.route(StepOutput(0, finished=(broken,))).finished
    assert (output.failed, output.completions[0].detail) == (None, "")


def test_an_eos_before_the_stop_string_is_no_text() -> None:
    assembler = OutputProcessor(small_tokenizers.byte_level())
    dot = tokens_of(".")[0]
    request = assembler.open("k", (9,), params(stop=(".x",), stop_token_ids=(dot,)))
    output = feed(assembler, request.request_id, letters("ab."), FinishReason.STOP)
    assert (output.completions[0].text, len(output.completions[0].token_ids)) == ("ab", 3)


def test_several_answers_have_their_own_seeds_and_come_out_together() -> None:
    assembler = OutputProcessor(small_tokenizers.byte_level())
    requests = assembler.open("k", (9,), params(n=3, seed=2**63 - 2)).answers()
    assert [r.sampling.seed for r in requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [r.sampling.n for r in requests] == [1, 1, 1]
    finished = [
        assembler.route(one_row(r.request_id, *letters(text), finished=_length(r.request_id, text))).finished
        for r, text in zip(reversed(requests), ("ab", "cd", "ef"), strict=True)
    ]
    assert [len(outputs) for outputs in finished] == [0, 0, 1]
    assert [c.text for c in finished[-1][0].completions] == ["ef", "cd", "ab"]
    assert [c.index for c in finished[-1][0].completions] == [0, 1, 2]


def _length(request_id: int, text: str) -> Finished:
    return Finished(request_id, FinishReason.LENGTH, tuple(letters(text)))


def test_times() -> None:
    clock = Clock(10.0)
    assembler = OutputProcessor(small_tokenizers.byte_level(), clock)
    request = assembler.open("k", (9,), params(stop=("!",)), arrived_at=8.0)
    ids = letters("ab!c")
    for now, token in zip((13.0, 14.0, 17.0, 19.0), ids, strict=True):
        clock.now = now
        assembler.route(one_row(request.request_id, token))
    clock.now = 20.0
    end = Finished(request.request_id, FinishReason.STOP, tuple(ids))
    (output,) = assembler.route(StepOutput(0, finished=(end,))).finished
    assert output.timing.queued == 2.0
    assert output.timing.ttft == 3.0
    assert output.timing.tpot == 2.0, "from the first token to the one that completed the stop string"
    assert output.timing.e2e == 12.0


def test_a_request_without_a_token_has_no_token_times() -> None:
    assembler = OutputProcessor(None, Clock(0.0))
    request = assembler.open("k", (9,), params())
    assert assembler.not_begun() == [request.request_id]
    end = Finished(request.request_id, FinishReason.REJECTED, (), "queue full")
    (output,) = assembler.route(StepOutput(0, finished=(end,))).finished
    assert (output.timing.ttft, output.timing.tpot) == (None, None)
    assert output.failed is not None
    assert output.failed.detail == "queue full"


def test_log_probabilities_are_cut_to_what_was_asked_and_to_the_tokens_kept() -> None:
    assembler = OutputProcessor(small_tokenizers.byte_level())
    curious = assembler.open("a", (9,), params(logprobs=1, stop=("b",)))
    silent = assembler.open("b", (9,), params())
    ids = letters("abc")
    columns = StepLogprobs(
        chosen_BW=np.array([[0, 0, 0], [-1.0, -2.0, -3.0]], np.float32),
        rank_BW=np.array([[0, 0, 0], [1, 2, 3]], np.int32),
        top_ids_BWN=np.array([[[0, 0]] * 3, [[7, 8], [9, -1], [-1, -1]]], np.int32),
        top_BWN=np.array([[[0, 0]] * 3, [[-1.0, -4.0], [-0.5, -9.0], [-9.0, -9.0]]], np.float32),
    )
    ended = tuple(Finished(r.request_id, FinishReason.LENGTH, tuple(ids)) for r in (curious, silent))
    step = StepOutput(0, [silent.request_id, curious.request_id], ids + ids, [3, 3], 3, ended, columns)
    first, second = (output.completions[0] for output in assembler.route(step).finished)
    assert first.logprobs is not None
    assert [(e.token_id, e.logprob, e.rank, e.top) for e in first.logprobs] == [
        (ids[0], -1.0, 1, ((7, -1.0),)),
        (ids[1], -2.0, 2, ((9, -0.5),)),
    ]
    assert second.logprobs is None


def test_rows_that_belong_to_nobody_are_passed_over() -> None:
    assembler = OutputProcessor(small_tokenizers.byte_level())
    assert assembler.route(StepOutput(0, [-1, 77], [1, 2], [1, 1], 1, (_length(78, "a"),))) == ([], [], [])


def test_what_cannot_be_opened_is_refused_by_name() -> None:
    assembler = OutputProcessor(None)
    with pytest.raises(RequestError, match="need a tokenizer"):
        assembler.open("k", (9,), params(stop=("x",)))
    with pytest.raises(RequestError, match="drawn_seed"):
        assembler.open("k", (9,), params(seed=None))
    with pytest.raises(RequestError, match="17 stop token ids"):
        assembler.open("k", (9,), params(stop_token_ids=tuple(range(1, 17))), eos_token_ids=(EOS,))
    assert assembler.live == 0
