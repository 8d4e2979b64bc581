"""Answers as API processes put them together; that streams of any kind equal whole answers is tests/launch/serve's."""

from __future__ import annotations

import pytest

from runtime.frontend.answer import Answer
from runtime.frontend.remote_engine import End, Update
from runtime.frontend.serve_messages import ScoredPrompt
from runtime.schedule.request import FinishReason, SamplingParams
from tests.runtime.frontend import small_tokenizers


@pytest.mark.parametrize("stop", ["the", "never"])
def test_what_comes_with_the_end_is_kept_whatever_ends_the_answer(stop: str) -> None:
    """The scores of a prompt come with its end, which the token that completes a stop string may bring along."""
    ids = small_tokenizers.sentencepiece_backend().get_vocab()
    scores = (ScoredPrompt(1, b"0000", b"0000", b"", b""),)
    answer = Answer(small_tokenizers.sentencepiece(), SamplingParams(max_tokens=1, stop=(stop,)), (), (ids["▁a"],))
    gain = answer.take(Update(0, (ids["▁the"],), (), End(FinishReason.LENGTH, "", 0.5, scores)))
    assert answer.reason is (FinishReason.STOP if stop == "the" else FinishReason.LENGTH)
    assert not gain.found_stop, "the engine has ended it"
    assert answer.end is not None
    assert (answer.end.queued, answer.end.prompt_logprobs) == (0.5, scores)


def test_a_stop_string_that_only_the_end_completes_is_a_stop() -> None:
    """A line break as a byte token: it may be the first of several, so its text is held until no token follows."""
    ids = small_tokenizers.sentencepiece_backend().get_vocab()
    sampling, tokens = SamplingParams(max_tokens=2, stop=("\n",)), (ids["▁the"], ids["<0x0A>"])
    answer = Answer(small_tokenizers.sentencepiece(), sampling, (), (ids["▁a"],))
    gain = answer.take(Update(0, tokens, (), End(FinishReason.LENGTH, "", 0.0, None)))
    assert "".join(piece.text for piece in gain.pieces) == answer.text == " the"
    assert answer.reason is FinishReason.STOP
