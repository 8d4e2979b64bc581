"""Answers as API processes put them together; that streams of any kind equal whole answers is tests/launch/serve's."""

from __future__ import annotations

from runtime.frontend.answer import Answer
from runtime.frontend.remote_engine import End, Update
from runtime.schedule.request import FinishReason, SamplingParams
from tests.runtime.frontend import small_tokenizers


def test_a_stop_string_that_only_the_end_completes_is_a_stop() -> None:
    """A line break as a byte token: it may be the first of several, so its text is held until no token follows."""
    ids = small_tokenizers.sentencepiece_backend().get_vocab()
    sampling, tokens = SamplingParams(max_tokens=2, stop=("\n",)), (ids["▁the"], ids["<0x0A>"])
    answer = Answer(small_tokenizers.sentencepiece(), sampling, (), (ids["▁a"],))
    gain = answer.take(Update(0, tokens, (), End(FinishReason.LENGTH, "", 0.0, None)))
    assert "".join(piece.text for piece in gain.pieces) == answer.text == " the"
    assert answer.reason is FinishReason.STOP
